"""Families of image models against diffusers' own pipelines; older ones are in
test_folder_families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment.build import Session, read
from mmrl.zoo.models.diffusion.flux import pack
from rewards.card import card
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion.test_folder_families import PROMPTS, trainer_of

load_built_in()


@dataclass
class Case:
    """A tiny model, the policy for it, and how its pipeline is called."""

    policy: str
    own: dict[str, Any]  # options of the policy
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of the pipeline
    layout: Callable = lambda x: x  # our latents as the pipeline takes them
    finished: Callable = lambda policy, x: x  # and as it returns them
    guide: Callable = lambda scale: {"guidance_scale": scale}
    prompts: list = field(default_factory=lambda: PROMPTS)


def picture(red, green, width=32, height=16):
    image = Image.new("RGB", (width, height), (red, green, 40))
    image.putpixel((3, 5), (255, 255, 255))
    return image


def asked(**size):
    return [
        prompt | {"image": picture(200 - 150 * i, 150 * i, **size)}
        for i, prompt in enumerate(PROMPTS)
    ]


def true_cfg(scale):
    return {"true_cfg_scale": scale} | ({"negative_prompt": [""] * 4} if scale > 1 else {})


SANA = {"call": {"use_resolution_binning": False, "max_sequence_length": 16}}
CASES = {
    "sana": Case("sana", {"size": [32, 64], "text_length": 16}, **SANA),
    "sana-variance": Case("sana", {"size": 32, "text_length": 16}, **SANA),
    "qwen_image": Case(
        "qwen_image",
        {"size": [16, 32], "text_length": 12},
        {"max_sequence_length": 12},
        pack,
        lambda policy, x: pack(x),
        true_cfg,
    ),
    "z_image": Case(
        "z_image",
        {"size": [16, 32], "text_length": 12},
        {"max_sequence_length": 12},
        guide=lambda scale: {"guidance_scale": scale - 1},
    ),
    "lcm": Case("lcm", {"size": [16, 32]}, guide=lambda scale: {"guidance_scale": 8.5}),
    "flux2": Case(
        "flux2",
        {"size": [16, 32], "text_length": 12, "text_layers": [1, 2, 3]},
        {"max_sequence_length": 12, "text_encoder_out_layers": (1, 2, 3)},
        finished=lambda policy, x: policy.unpatched(policy.vae, x),
    ),
}
EDIT = {"layout": pack, "finished": lambda policy, x: pack(x), "guide": true_cfg}
CASES |= {
    "flux_kontext": Case(
        "flux_kontext",
        {"size": [16, 32], "text_length": 16, "embedded_guidance": 2.5},
        {
            "max_sequence_length": 16,
            "max_area": 16 * 32,
            "_auto_resize": False,
            "guidance_scale": 2.5,
        },
        prompts=asked(),
        **EDIT,
    ),
    "qwen_edit": Case(
        "qwen_edit",
        {"size": [16, 32], "text_length": 64},
        prompts=asked(width=50, height=30),
        **EDIT,
    ),
}
# The same family and folder with other options, where only parity with the pipeline is of interest.
MORE = {
    "lcm": Case(
        "lcm", {"size": 16, "embedded_guidance": 3.0}, guide=lambda scale: {"guidance_scale": 3.0}
    ),
    "z_image": Case(
        "z_image",
        {"size": 16, "text_length": 12, "normalise": 0.9},
        {"max_sequence_length": 12, "cfg_normalization": 0.9},
        guide=lambda scale: {"guidance_scale": scale - 1},
    ),
    "flux_kontext": Case(
        "flux_kontext",
        {"size": 16, "image_size": [16, 32], "text_length": 16, "embedded_guidance": 2.5},
        {"max_sequence_length": 16, "max_area": 256, "_auto_resize": False, "guidance_scale": 2.5},
        prompts=asked(),
        **EDIT,
    ),
}
PARITY = [(name, case) for cases in (CASES, MORE) for name, case in cases.items()]


def make(name, case=None, **options):
    case = case or CASES[name]
    torch.manual_seed(0)
    chosen = {"steps": 3, "fixed_batch_rows": 4} | case.own | options
    return POLICIES.build(case.policy, path=str(tiny_diffusers.folder(name)), **chosen)


def pipeline(name, policy):
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(str(tiny_diffusers.folder(name)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe, policy, case, rollout, guidance, output):
    """The pipeline's own samples from the same first latents."""
    height, width = policy.size
    pictures = [p["image"] for p in rollout.prompt_per_row() if "image" in p]
    more = {"image": pictures} if pictures else {}
    return pipe(
        prompt=[p["text"] for p in rollout.prompt_per_row()],
        latents=case.layout(rollout.latents.states[:, 0]),
        height=height,
        width=width,
        num_inference_steps=policy.steps,
        output_type=output,
        **case.call,
        **case.guide(guidance),
        **more,
    )[0]


@pytest.fixture
def lcm_noise(monkeypatch):
    """The pipeline of a consistency model draws what our sampler drew."""
    from diffusers.schedulers import scheduling_lcm

    steps = iter(range(1, 1000))

    def ours(shape, **_):
        step = (next(steps) - 1) % 2 + 1  # 3 steps: noise after the first two
        return Rng.of("same").normal(torch.arange(shape[0]), shape[1:], step)

    monkeypatch.setattr(scheduling_lcm, "randn_tensor", ours)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Qwen-Image-Edit's pipeline brings every image to a megapixel."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio: (32, 16, None))


@pytest.mark.usefixtures("lcm_noise")
@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize(("name", "case"), PARITY, ids=[name for name, _ in PARITY])
def test_without_noise_we_are_the_diffusers_pipeline(name, case, guidance):
    if name == "lcm" and guidance != 1:
        pytest.skip("its pipeline has no guidance but what the network takes as an input")
    policy = make(name, case, fixed_batch_rows=None)
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(case.prompts, 2, Rng.of("same"))
        ours = policy.decode(rollout)
    pipe = pipeline(name, policy)
    latents = call(pipe, policy, case, rollout, guidance, "latent")
    images = call(pipe, policy, case, rollout, guidance, "pt")
    torch.testing.assert_close(case.finished(policy, rollout.sample), latents, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours, images, atol=1e-4, rtol=0)
    prompted = call(
        pipe, policy, case, rollout.replace(prompts=case.prompts[::-1]), guidance, "latent"
    )
    assert (prompted - latents).abs().max() > 1e-4  # the prompt has an effect


@pytest.mark.parametrize(
    "options", [{}, {"guidance_scale": 2.5, "lora": 2}], ids=["full", "guided lora"]
)
@pytest.mark.parametrize("name", CASES)
def test_the_first_step_is_exactly_on_policy(name, options):
    trainer = trainer_of(make(name, **options))
    trainer.prompts = CASES[name].prompts
    metrics = trainer.iterate()
    assert (
        metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0 and metrics["step"] == 1
    )


@pytest.mark.usefixtures("lcm_noise")
@pytest.mark.parametrize("name", CASES)
def test_an_exported_adapter_gives_the_plain_pipeline_our_images(name, tmp_path):
    policy = make(name, lora=2, fixed_batch_rows=None)
    case = CASES[name]
    trainer = trainer_of(policy)
    trainer.prompts = case.prompts
    trainer.iterate(), trainer.iterate()
    policy.export(tmp_path)
    pipe = pipeline(name, policy)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(case.prompts, 2, Rng.of("same"))
        ours = policy.decode(rollout)
    before = call(pipe, policy, case, rollout, 1.0, "pt")
    pipe.load_lora_weights(tmp_path)
    after = call(pipe, policy, case, rollout, 1.0, "pt")
    torch.testing.assert_close(ours, after, atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 1e-4  # the training is seen


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_resumes_to_the_bit(name, tmp_path):
    def fresh():
        trainer = trainer_of(make(name, lora=2, guidance_scale=2.5, steps=2))
        trainer.prompts = CASES[name].prompts
        return trainer

    resumes(fresh, tmp_path)


@pytest.mark.parametrize("name", ["flux_kontext", "qwen_edit"])
def test_an_image_is_a_file_or_in_memory_and_must_be_there(name, tmp_path):
    policy = make(name)
    prompts = CASES[name].prompts
    files = []
    for i, prompt in enumerate(prompts):
        prompt["image"].save(tmp_path / f"{i}.png")
        files.append(prompt | {"image": str(tmp_path / f"{i}.png")})
    one = policy.encode(prompts)
    two = policy.encode(files)
    assert one["image"].shape[0] == 2 and all(
        torch.equal(one[key], two[key]) for key in ("image", "text")
    )
    assert not torch.equal(one["image"][0], one["image"][1])
    with pytest.raises(
        UserError, match="'a red seven': this model edits the one image under 'image', and got 0"
    ):
        policy.encode([{"text": "a red seven"}])
    with pytest.raises(UserError, match="cannot read the image"):
        policy.encode([{"text": "a red seven", "image": str(tmp_path / "none.png")}])
    with pytest.raises(UserError, match="image_size 33 is not a multiple of 4"):
        make(name, image_size=33)


@card(differentiable=True)
def bright(media, prompts):
    return media.flatten(1).mean(1)


def test_rocm_follows_the_reward_through_the_steps_of_a_real_consistency_model():
    """configs/lcm/rocm on a small LatentConsistencyModelPipeline. The steps that the objective
    takes again are those of a rollout with the same noise under the current weights, also when
    these have moved since."""
    small = [
        "size=16",
        "steps=3",
        "lora={rank: 2, alpha: 4}",
        f"path={tiny_diffusers.folder('lcm')}",
    ]
    recipe = read(
        find_config("lcm/rocm"),
        [
            *(f"policy.lcm.{override}" for override in small),
            "reward={tests.policies.diffusion.test_image_families:bright: 1.0}",
            "train.prompts_per_iteration=4",
            "policy.lcm.fixed_batch_rows=4",
            "train.train_batch_size=4",
            "train.micro_batch_size=4",
            "optimizer.adamw.lr=1e-2",
        ],
    )
    assert recipe["objective"] == {"draft": {"last": None, "kl": 0.1, "divergence": "kl"}}
    session = Session.of(recipe)
    trainer = session.trainer()
    policy = session.policy
    objective = trainer.objective
    trainer.iterate()
    prompts = list(session.source.train[:4])
    with torch.no_grad():
        before = policy.rollout(prompts, 1, Rng.of("same"))
        reward = bright(policy.decode(before), None)
    trainer.iterate()
    trainer.iterate()
    (point,) = objective.points(policy, before, Rng.of(0))
    assert point.state.shape[1] == 4 and (before.latents.noise_level[0] > 0).tolist() == [
        True,
        True,
        False,
    ]
    with torch.no_grad():
        now = policy.rollout(prompts, 1, Rng.of("same"))
        assert (now.sample - before.sample).abs().max() > 1e-3
        wanted = bright(policy.decode(now), None)
    objective.kl = 0.0
    torch.testing.assert_close(-objective.loss(policy, point)[:, 0], wanted, atol=1e-5, rtol=0)
    objective.kl = 0.1
    with torch.no_grad():
        assert (objective.loss(policy, point)[:, 0] > -wanted).all(), (
            "the divergence to the base counts"
        )
    assert wanted.mean() > reward.mean() + 1e-4, (
        "two iterations raised the reward of the same noise"
    )
