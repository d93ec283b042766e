"""Exports after full training: the base's types, its bytes where nothing was trained, its files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core import whole_export
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import tiny_diffusers, tiny_vlms


def bf16_base(folder: Path) -> Path:
    from transformers import AutoModelForImageTextToText

    shutil.copytree(tiny_vlms.folder("qwen2_5_vl"), folder)
    net = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    net.save_pretrained(folder)
    (folder / "LICENSE").write_text("free")
    return folder


def test_a_vision_language_model_is_exported_as_its_base_is_stored(tmp_path):
    base = bf16_base(tmp_path / "base")
    policy = VLM(str(base), max_new_tokens=4)
    trained = "lm_head.weight"
    with torch.no_grad():
        policy.net.hf.lm_head.weight.add_(0.5)
    policy.export(tmp_path / "out")
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name for name, value in after.items() if not torch.equal(value, before[name])} == {
        trained
    }
    assert all(value.dtype == before[name].dtype for name, value in after.items())
    kinds = [json.loads((place / "config.json").read_text()) for place in (base, tmp_path / "out")]
    assert kinds[0]["dtype"] == kinds[1]["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    whole_export.cast(tmp_path / "out", torch.float32)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, after[name].float()) for name, value in again.items())


def test_a_pipeline_is_exported_as_its_base_is_stored(tmp_path):
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    base = tmp_path / "base"
    pipe = StableDiffusionPipeline.from_pretrained(tiny_diffusers.folder("sd")).to(torch.float16)
    pipe.save_pretrained(base)
    (base / "LICENSE.md").write_text("free")
    (base / "whole.safetensors").write_bytes(b"another form of the weights")
    net = diffusers_folder.load_part(UNet2DConditionModel, str(base), "unet")
    assert net.dtype == torch.float32
    diffusers_folder.save_full(StableDiffusionPipeline, str(base), net, tmp_path / "out", "unet")
    files = {file.relative_to(base) for file in base.rglob("*") if file.is_file()} - {
        Path("whole.safetensors")
    }
    copied = {file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*.*")}
    assert files <= copied
    for file in files:
        if file.parts[0] != "unet":
            assert (base / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    weights = Path("unet/diffusion_pytorch_model.safetensors")
    before, after = load_file(base / weights), load_file(tmp_path / "out" / weights)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    StableDiffusionPipeline.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_shards_are_counted_again(kind, tmp_path):
    net = tiny_diffusers.pipeline("sd").unet
    net.save_pretrained(tmp_path, max_shard_size="100KB")
    index = next(tmp_path.glob("*.index.json"))
    before = json.loads(index.read_text())["metadata"]["total_size"]
    whole_export.cast(tmp_path, kind)
    after = json.loads(index.read_text())["metadata"]["total_size"]
    assert after == before // 2
    again = type(net).from_pretrained(tmp_path, dtype=kind)
    assert again.dtype == kind
