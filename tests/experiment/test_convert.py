"""`mmrl convert` and `mmrl export --format` as commands, and adapters of transformers' models."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mmrl.cli import commands
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment import convert
from mmrl.policies.lora import Lora
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import command, tiny_diffusers, tiny_vlms, vllm_models
from tests.policies.diffusion.test_lora_files import randomise

load_built_in()


def test_an_export_in_a_form_converted_and_merged_by_commands(tmp_path, monkeypatch):
    policy = POLICIES.build("z_image", path=str(tiny_diffusers.folder("z_image")), size=16, lora=2)
    randomise(policy.net)
    monkeypatch.setattr(commands.build, "trained", lambda run, at: SimpleNamespace(policy=policy))
    folder = commands.export(tmp_path, tmp_path / "lora", form="kohya")
    assert [file.name for file in folder.iterdir()] == ["lora_kohya.safetensors"]
    base = ["--base", policy.place]
    to = ["--format", "comfyui", "-o", "c.safetensors"]
    command.mmrl("convert", folder, *base, *to, cwd=tmp_path)
    assert all(key.startswith("diffusion_model.") for key in load_file(tmp_path / "c.safetensors"))
    said = command.refused("convert", "a", "b", "--format", "kohya", "-o", "c", cwd=tmp_path)
    assert "converts one adapter" in " ".join(said.split())
    done = command.mmrl("convert", "c.safetensors", *base, "--into", "whole", cwd=tmp_path)
    assert done.stdout.strip() == "whole"
    plain = POLICIES.build("z_image", path=str(tmp_path / "whole"), size=16)
    with torch.no_grad():
        cond = policy.encode([{"text": "a red seven"}])
        cond.pop("uncond")
        x = torch.randn(1, *policy.shape, generator=torch.Generator().manual_seed(0))
        outputs = [p.velocity(x, torch.full((1,), 0.5), cond) for p in (policy, plain)]
    torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)


def test_adapters_of_a_vision_language_model_are_merged(tmp_path):
    """Two adapters, weighted: the plain model that transformers loads answers as W + sum w BA."""
    place = tiny_vlms.folder("qwen2_vl")
    layers = []
    for seed, name in enumerate("ab"):
        vlm = VLM(str(place), lora=2)
        randomise(vlm.net, seed)
        vlm.export(tmp_path / name)
        layers.append(dict(vlm.net.hf.named_modules()))
    merged = convert.merge(
        [tmp_path / "a", tmp_path / "b"], str(place), [0.5, -1.5], tmp_path / "whole"
    )
    assert not list(merged.glob("adapter*"))
    before, after = (VLM(str(at)).net.hf.state_dict() for at in (place, merged))
    changed = 0
    for name, weight in before.items():
        parts = [of.get(name.removesuffix(".weight")) for of in layers]
        if hasattr(parts[0], "get_delta_weight"):
            deltas = [part.get_delta_weight("default").detach() for part in parts]
            weight = weight + 0.5 * deltas[0] - 1.5 * deltas[1]
            changed += 1
        torch.testing.assert_close(after[name], weight, atol=1e-5, rtol=1e-5)
    assert changed > 3
    with pytest.raises(UserError, match="can only be merged"):
        convert.convert(tmp_path / "a", None, "kohya", tmp_path / "a.safetensors")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        convert.merge([tmp_path / "a"], str(place), [], tmp_path / "other")


def test_an_adapter_of_tied_weights_is_refused_and_nothing_is_written(tmp_path):
    place = vllm_models.folder("tied_qwen2_5_vl")
    vlm = VLM(str(place), lora=Lora(2, None, ["q_proj", "lm_head"]))
    randomise(vlm.net, 0)
    vlm.export(tmp_path / "a")
    with pytest.raises(UserError, match="lm_head cannot be merged: its weight is also that of"):
        convert.merge([tmp_path / "a"], str(place), [], tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
