"""Exports after full training: the base's types, its bytes where nothing was trained, its files."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmrl.core import whole_export
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import tiny_diffusers, tiny_vlms


def test_a_vision_language_model_is_exported_as_its_base_is_stored(tmp_path):
    from transformers import AutoModelForImageTextToText

    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(tiny_vlms.folder("qwen2_5_vl"), base)
    net = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16)
    net.save_pretrained(base)
    (base / "LICENSE").write_text("free")
    policy = VLM(str(base), max_new_tokens=4)
    with torch.no_grad():
        policy.net.hf.lm_head.weight.add_(0.5)
    policy.export(out)
    before, after = (load_file(place / "model.safetensors") for place in (base, out))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert before.keys() == after.keys() and changed == {"lm_head.weight"}
    assert all(value.dtype == before[name].dtype for name, value in after.items())
    kinds = [json.loads((place / "config.json").read_text())["dtype"] for place in (base, out)]
    assert kinds == ["bfloat16"] * 2 and (out / "LICENSE").read_text() == "free"
    whole_export.cast(out, torch.float32)
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(value, after[name].float()) for name, value in again.items())


def test_a_pipeline_is_exported_as_its_base_is_stored(tmp_path):
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    base = tmp_path / "base"
    pipe = StableDiffusionPipeline.from_pretrained(tiny_diffusers.folder("sd")).to(torch.float16)
    pipe.save_pretrained(base)
    (base / "LICENSE.md").write_text("free")
    (base / "whole.safetensors").write_bytes(b"another form of the weights")
    net = diffusers_folder.load_part(UNet2DConditionModel, str(base), "unet")
    diffusers_folder.save_full(StableDiffusionPipeline, str(base), net, tmp_path / "out", "unet")
    (base / "whole.safetensors").unlink()
    for file in [path.relative_to(base) for path in base.rglob("*") if path.is_file()]:
        if file.parts[0] != "unet":
            assert (base / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    assert not (tmp_path / "out" / "whole.safetensors").exists()
    weights = Path("unet/diffusion_pytorch_model.safetensors")
    before, after = load_file(base / weights), load_file(tmp_path / "out" / weights)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
