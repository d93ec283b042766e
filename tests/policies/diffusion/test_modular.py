"""Modular pipelines of diffusers by the policy ``pipeline``: those that have another form give what
it gives, those that have none what their own blocks give."""

from __future__ import annotations

import json
import shutil

import diffusers
import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.train.minibatches import passes
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers, tiny_modular
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_any_pipeline import PROMPTS, trainer_of

load_built_in()
FLUX3 = {
    "call": {
        "height": 16,
        "width": 16,
        "max_sequence_length": 64,
        "text_encoder_out_layers": [1, 2],
    },
    "skip_blocks": ["prompt_upsampler"],
}
ANIMA = {"call": {"height": 16, "width": 16, "max_sequence_length": 32}}
ALONE = {"flux3": FLUX3, "anima": ANIMA}  # models without another form


def make(name, place=None, **options):
    torch.manual_seed(0)  # of adapters
    chosen = ALONE.get(name) or {"call": CASES[name].call}
    place = place or str(tiny_modular.folder(name))
    sizes = {"path": place, "steps": 3, "fixed_batch_rows": 4}
    return POLICIES.build("pipeline", **(sizes | chosen | options))


@pytest.mark.parametrize("name", ["flux2", "qwen_image", "sdxl", "z_image"])
def test_samples_and_gradients_are_those_of_the_other_form(name):
    guidance = 2.5
    classic = {"place": str(tiny_diffusers.folder(name)), "guidance_scale": guidance}
    classic |= {"guidance_argument": "guidance_scale"} if name == "flux2" else {}
    if name == "z_image":  # whose pipeline adds 1
        classic["guidance_scale"] = guidance - 1
    outcomes = []
    ours = {"guidance_scale": guidance}
    if name == "qwen_image":  # its blocks make one of None, however many prompts there are
        ours["call"] = CASES[name].call | {"negative_prompt": ""}
    for options in (ours, classic):
        policy = make(name, check=False, **options)
        with torch.no_grad():
            rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        signs = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
        for point in passes(policy.path(rollout.replace(advantage=signs)), 4):
            (PolicyGradient().loss(policy, point) * point.mask).sum().backward()
        gradients = [p.grad for p in policy.net.parameters() if p.grad is not None]
        gradient = torch.cat([g.flatten() for g in gradients])
        outcomes.append((rollout.sample, policy.decode(rollout), gradient))
    (ours, pictures, gradient), (theirs, others, expected) = outcomes
    assert torch.equal(ours, theirs) and torch.equal(pictures, others)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 0


def loaded(name, place, **options):
    """The modular pipeline by diffusers alone."""
    kind = {"flux3": "Flux3", "anima": "Anima"}[name]
    blocks = getattr(diffusers, f"{kind}AutoBlocks")()
    for block in ALONE[name].get("skip_blocks", ()):
        blocks.sub_blocks.pop(block)
    pipeline = getattr(diffusers, f"{kind}ModularPipeline")
    pipe = pipeline(blocks=blocks, pretrained_model_name_or_path=place)
    pipe.load_components(**options)
    return pipe


def by_diffusers(name, place, guidance, noise):
    """Its pictures."""
    pipe = loaded(name, place)
    pipe.guider.guidance_scale = guidance
    seeded = torch.Generator().manual_seed(0)
    call = ALONE[name]["call"] | {
        "generator": seeded,
        "output_type": "pt",
        "num_inference_steps": 3,
    }
    with Draws(noise):
        return pipe(prompt=PROMPTS[0]["text"], output="images", **call)


@pytest.mark.parametrize(("name", "options"), [("flux3", {}), ("anima", {"lora": 2})])
def test_it_trains_on_policy_and_its_export_gives_our_pictures(name, options, tmp_path):
    policy = make(name, fixed_batch_rows=None, guidance_scale=2.5, **options)
    policy.prepare(PROMPTS)
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    with torch.no_grad(), policy.evaluating():
        rollout = policy.rollout(PROMPTS[:1], 1, Rng.of("same"))
        ours = policy.decode(rollout)
    noise = Rng.of("same").normal(rollout.row_id, policy.shape, 0, torch.float32)
    policy.export(tmp_path / "export")
    place = str(tiny_modular.folder(name))
    before = by_diffusers(name, place, 2.5, noise)
    if options:
        pipe = loaded(name, place, names=["transformer"])
        pipe.load_lora_weights(tmp_path / "export")
        pipe.transformer.fuse_lora()
        pipe.transformer.unload_lora()
        shutil.copytree(place, tmp_path / "fused")
        pipe.transformer.save_pretrained(tmp_path / "fused" / "transformer")
    else:  # and it may lie elsewhere than where it was written
        shutil.move(tmp_path / "export", tmp_path / "fused")
    theirs = by_diffusers(name, str(tmp_path / "fused"), 2.5, noise)
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=0)
    assert (theirs - before).abs().max() > 1e-4  # the training is seen


def test_folders_that_cannot_be_loaded_are_told_in_a_sentence(tmp_path):
    place = tiny_modular.folder("flux3")
    with pytest.raises(UserError, match="skip_blocks: .* no block 'upsampler'; it has: prompt_ups"):
        make("flux3", skip_blocks=["upsampler"])
    with pytest.raises(UserError, match="is no modular pipeline, and has no blocks"):
        make("flux", place=str(tiny_diffusers.folder("flux")), skip_blocks=["decode"])
    with pytest.raises(UserError, match="cannot be called with .*negative_prompt_embeds"):
        make("wan")  # diffusers' own blocks, without guidance
    spoilt = {
        "of no such class": ("_class_name", "Flux9ModularPipeline", "no modular pipeline Flux9"),
        "of own blocks": ("_blocks_class_name", "MyBlocks", "no modular pipeline MyBlocks"),
        "of own code": ("vae", ["mine", "VAE", {"type_hint": ["mine", "VAE"]}], "is of 'mine'"),
    }
    for name, (key, value, says) in spoilt.items():
        shutil.copytree(place, tmp_path / name)
        file = tmp_path / name / "modular_model_index.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        with pytest.raises(UserError, match=says):
            make("flux3", place=str(tmp_path / name))
    shutil.copytree(place, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "vae")
    file = tmp_path / "parts" / "modular_model_index.json"
    index = json.loads(file.read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(tmp_path / "nowhere")
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match="nowhere/vae: .* cannot load it: .* skip_blocks, of: "):
        make("flux3", place=str(tmp_path / "parts"))
