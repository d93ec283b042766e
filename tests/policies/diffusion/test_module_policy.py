"""A user's own network as a policy, and diffusers' class-conditional DiT as one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from samplers.kernels import ddim, flow_sde
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers, tiny_module
from tests.policies.diffusion.test_folder_families import trainer_of

load_built_in()

HERE = Path(tiny_module.__file__)
PROMPTS = [
    {"text": "a red seven", "label": 3, "place": [0.1, 0.9]},
    {"text": "a two", "label": 1, "place": [1.0, 0.0]},
]
DIT = {
    "net": f"{HERE}:dit",
    "shape": [4, 4, 4],
    "sde_type": ddim,
    "steps": 4,
    "noise_level": 1.0,
    "empty": 1000,
    "vae": str(tiny_diffusers.folder("sd") / "vae"),
}


def make(**options):
    torch.manual_seed(0)
    chosen = {"net": f"{HERE}:Tiny", "shape": [3, 4, 4], "steps": 3, "fixed_batch_rows": 4}
    return POLICIES.build("module", **chosen | options)


def of_the_pipeline(net, rollout, guidance, monkeypatch):
    """Images of diffusers' own DiTPipeline around this network, from the rollout's first noise."""
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline
    from diffusers.pipelines.dit import pipeline_dit

    monkeypatch.setattr(pipeline_dit, "randn_tensor", lambda *_, **__: rollout.latents.states[:, 0])
    pipe = DiTPipeline(
        net, AutoencoderKL.from_pretrained(DIT["vae"]), DDIMScheduler(**tiny_module.SCHEDULE)
    )
    pipe.set_progress_bar_config(disable=True)
    labels = [prompt["label"] for prompt in rollout.prompt_per_row()]
    return pipe(labels, guidance_scale=guidance, num_inference_steps=4, output_type="pt").images


def sampled(policy):
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        return rollout, policy.decode(rollout)


def test_a_trained_dit_gives_the_plain_pipeline_our_images(tmp_path, monkeypatch):
    """An export is a state dict of the network as it was written, and all of it."""
    guidance = 2.5
    whole = trainer(**DIT, lora=2, guidance_scale=guidance, fixed_batch_rows=None)
    whole.iterate(), whole.iterate()
    whole.policy.export(tmp_path)
    rollout, ours = sampled(whole.policy)
    plain = tiny_module.dit().eval()  # in training it drops labels
    before = of_the_pipeline(plain.net, rollout, guidance, monkeypatch)
    plain.load_state_dict(load_file(tmp_path / "net.safetensors"), strict=True)
    after = of_the_pipeline(plain.net, rollout, guidance, monkeypatch)
    torch.testing.assert_close(ours, after, atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 1e-4  # the training is seen


CASES = {
    "embedding": {"net": f"{HERE}:Embedded", "field": "place"},
    "nothing": {"net": f"{HERE}:Embedded", "field": None},
    "dit-lora": DIT | {"lora": 2, "guidance_scale": 2.5},
}


def trainer(**options):
    return trainer_of(make(**options), PROMPTS)


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_exactly_on_policy_and_a_checkpoint_resumes_to_the_bit(case, tmp_path):
    metrics = trainer(**CASES[case]).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    if case == "dit-lora":
        resumes(lambda: trainer(**CASES[case]), tmp_path)


def test_mistakes_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="prompt 1 has no 'label'.*it has: text"):
        make().encode([{"label": 1}, {"text": "a"}])
    with pytest.raises(UserError, match="must be a number, or numbers of one count"):
        make(field="place").encode([{"place": [1.0]}, {"place": [1.0, 2.0]}])
    with pytest.raises(UserError, match="guidance_scale needs empty"):
        make(guidance_scale=2.0)
    with pytest.raises(UserError, match="must return an nn.Module, not list"):
        (tmp_path / "mine.py").write_text("build = list")
        make(net=f"{tmp_path}/mine.py:build")
    with pytest.raises(UserError, match="policy option vae: .* cannot load it"):
        make(vae=str(tmp_path))
    with pytest.raises(UserError, match="sde_type: flow_sde is not for this .* consistency, ddim"):
        make(**DIT | {"sde_type": flow_sde})
