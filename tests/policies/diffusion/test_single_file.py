"""Models in one file, as Civitai and ComfyUI publish them, become folders; GGUF, fp8 and pickles
are refused with what to do."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cli.converting import converted
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment.build import begin_with_lora
from mmrl.policies.diffusion import single_file
from tests.fixtures import command, tiny_diffusers

load_built_in()

# the original names of Stable Diffusion's parts, by those of diffusers (the tiny U-Net's blocks)
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "down_blocks.0.resnets.0": "input_blocks.1.0",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
    "down_blocks.1.resnets.0": "input_blocks.3.0",
    "down_blocks.1.attentions.0": "input_blocks.3.1",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "up_blocks.0.resnets.0": "output_blocks.0.0",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.resnets.1": "output_blocks.1.0",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.1.2.conv",
    "up_blocks.1.resnets.0": "output_blocks.2.0",
    "up_blocks.1.resnets.1": "output_blocks.3.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def original(state, part):
    """Name the tensors of a part as the first code of Stable Diffusion does."""
    names = {}
    for name, tensor in state.items():
        text = name
        if part == "unet":
            start = next(key for key in UNET if name.startswith(key + "."))
            rest = name.removeprefix(start + ".")
            if "resnets" in start:
                layer, _, kind = rest.rpartition(".")
                rest = f"{RESNET[layer]}.{kind}"
            text = f"model.diffusion_model.{UNET[start]}.{rest}"
        else:
            text = f"cond_stage_model.transformer.{name}"
            text = text if "text_model." in text else text.replace("former.", "former.text_model.")
        names[text] = tensor.contiguous()
    return names


def shaken(pipe, parts):
    """Give the parts of a pipeline other weights, which are those of the file."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in parts:
            for parameter in getattr(pipe, part).parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return pipe


def test_a_checkpoint_of_a_whole_pipeline_becomes_its_folder(tmp_path):
    """Network and text encoder are the file's; the tokenizer and what it lacks are the base's."""
    parts = ("unet", "text_encoder")
    pipe = shaken(tiny_diffusers.sd(), parts)
    tensors = {}
    for part in parts:
        tensors |= original(getattr(pipe, part).state_dict(), part)
    file = tmp_path / "dream.safetensors"
    save_file(tensors, file)
    place = str(tiny_diffusers.folder("sd"))
    done = command.mmrl("convert", file, "--base", place, "--into", "whole", cwd=tmp_path)
    assert done.stdout.strip() == "whole"
    policy = POLICIES.build("sd", path=str(tmp_path / "whole"), size=16, steps=2)
    read = {"unet": policy.net, "text_encoder": policy.load_texts().text_encoder}
    read |= {"vae": policy.vae}
    for part, net in read.items():
        for name, tensor in getattr(pipe, part).state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], tensor, atol=0, rtol=0)
    with pytest.raises(UserError, match="holds a model, no adapter: mmrl convert"):
        begin_with_lora(policy, file, Here())


class Here:
    def say(self, text):
        return text


WAN = [("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_out.0", "o"), ("to_q", "q")]
WAN += [("to_k", "k"), ("to_v", "v"), ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2")]
WAN += [("norm2", "norm3"), ("condition_embedder.text_embedder.linear_1", "text_embedding.0")]
WAN += [("condition_embedder.text_embedder.linear_2", "text_embedding.2")]
WAN += [("condition_embedder.time_embedder.linear_1", "time_embedding.0")]
WAN += [("condition_embedder.time_embedder.linear_2", "time_embedding.2")]
WAN += [("condition_embedder.time_proj", "time_projection.1")]
WAN += [("proj_out", "head.head")]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_network_in_its_original_names_is_read_by_diffusers_converter(prefix, tmp_path):
    pipe = shaken(tiny_diffusers.wan(), ["transformer"])
    tensors = {}
    for name, tensor in pipe.transformer.state_dict().items():
        text = name
        for ours, theirs in WAN:
            text = text.replace(ours, theirs)
        text = text.replace("blocks.0.scale_shift_table", "blocks.0.modulation")
        text = "head.modulation" if text == "scale_shift_table" else text
        tensors[prefix + text] = tensor.bfloat16()
    file = tmp_path / "wan.safetensors"
    save_file(tensors, file)
    folder = converted([file], str(tiny_diffusers.folder("wan")), None, None, tmp_path / "new", [])
    stored = load_file(next((folder / "transformer").glob("*.safetensors")))
    for name, tensor in pipe.transformer.state_dict().items():
        assert stored[name].dtype == torch.bfloat16
        torch.testing.assert_close(stored[name], tensor.bfloat16(), atol=0, rtol=0)


def test_a_file_that_does_not_fit_or_lacks_weights_is_refused(tmp_path):
    place = str(tiny_diffusers.folder("qwen_image"))
    state = dict(
        load_file(next((tiny_diffusers.folder("qwen_image") / "transformer").glob("*.s*")))
    )
    state.pop("proj_out.weight")
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors does not fit .*qwen_image"):
        converted([tmp_path / "a.safetensors"], place, None, None, tmp_path / "new", [])
    assert not (tmp_path / "new").exists()


def test_gguf_pickles_and_files_as_path_are_refused_with_what_to_do(tmp_path):
    for name, words in {
        "q4.gguf": "is GGUF, weights quantised for inference: take the model's original folder",
        "model.ckpt": "is a pickle, which could run code",
        "model.safetensors": "mmrl convert .*model.safetensors --base FOLDER --into NEW",
    }.items():
        (tmp_path / name).write_bytes(b"x")
        for policy in ("sd", "pipeline", "vlm"):
            with pytest.raises(UserError, match=words):
                POLICIES.build(policy, path=str(tmp_path / name))
    folder = shutil.copytree(tiny_diffusers.folder("sd"), tmp_path / "sd")
    for file in (folder / "unet").glob("*.safetensors"):
        file.rename(file.with_suffix(".gguf"))
    with pytest.raises(UserError, match=r"\.gguf is GGUF"):
        POLICIES.build("sd", path=str(folder), size=16)


@pytest.mark.parametrize("policy", ["sd", "pipeline"])
def test_floats_of_eight_bits_are_refused(policy, tmp_path):
    folder = shutil.copytree(tiny_diffusers.folder("sd"), tmp_path / "sd")
    (file,) = (folder / "unet").glob("*.safetensors")
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"floats of 8 bits \(fp8\).* take the same model in bf"):
        POLICIES.build(policy, path=str(folder))
    assert single_file.is_checkpoint(file)
