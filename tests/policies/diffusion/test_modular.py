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
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from tests.fixtures import tiny_diffusers, tiny_modular
from tests.fixtures.replay_cases import CASES, MODULAR
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RNG,
    assert_same_policies,
    evaluated,
)

load_built_in()
# models without another form
ALONE = {name: {"call": MODULAR[name].call} | MODULAR[name].options for name in ("flux3", "anima")}


def make(name, place=None, **options):
    torch.manual_seed(0)  # of adapters
    chosen = ALONE.get(name) or {"call": CASES[name].call}
    place = place or str(tiny_modular.folder(name))
    sizes = {"path": place, "steps": 3, "fixed_batch_rows": 4}
    return POLICIES.build("pipeline", **(sizes | chosen | options))


@pytest.mark.parametrize("name", ["qwen_image", "sdxl"])
def test_samples_and_gradients_are_those_of_the_other_form(name):
    ours = {"guidance_scale": 2.5}
    classic = ours | {"place": str(tiny_diffusers.folder(name))}
    if name == "qwen_image":  # its blocks make one of None, however many prompts there are
        ours["call"] = CASES[name].call | {"negative_prompt": ""}
    forms = [make(name, check=False, **options) for options in (ours, classic)]
    assert_same_policies(*forms, atol=0)


@pytest.mark.parametrize("name", ALONE)
def test_pictures_are_those_of_its_own_blocks(name):
    policy = make(name, fixed_batch_rows=None, guidance_scale=2.5)
    policy.prepare(PROMPTS)
    _, ours = evaluated(policy, PROMPTS[:1])
    kind = {"flux3": "Flux3", "anima": "Anima"}[name]
    blocks = getattr(diffusers, f"{kind}AutoBlocks")()
    for block in ALONE[name].get("skip_blocks", ()):
        blocks.sub_blocks.pop(block)
    pipeline = getattr(diffusers, f"{kind}ModularPipeline")
    pipe = pipeline(blocks=blocks, pretrained_model_name_or_path=policy.place)
    pipe.load_components()
    pipe.guider.guidance_scale = 2.5
    call = ALONE[name]["call"] | {"output_type": "pt", "num_inference_steps": 3}
    with Draws(RNG.normal(torch.arange(1), policy.shape, 0, torch.float32)):
        theirs = pipe(
            prompt=PROMPTS[0]["text"],
            output="images",
            generator=torch.Generator().manual_seed(0),
            **call,
        )
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=0)


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
