"""Converts LlamaGen's VQ to the classes of transformers (JanusVQVAE) and diffusers (VQModel): one
network under three names."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ

Names = tuple[tuple[str, str], ...]
JANUS: Names = (
    (r"encoder\.conv_blocks\.(\d+)\.res\.", r"encoder.down.\1.block."),
    (r"encoder\.conv_blocks\.", "encoder.down."),
    (r"decoder\.conv_blocks\.(\d+)\.res\.", r"decoder.up.\1.block."),
    (r"decoder\.conv_blocks\.", "decoder.up."),
    (r"\.mid\.0\.", ".mid.block_1."),
    (r"\.mid\.1\.", ".mid.attn_1."),
    (r"\.mid\.2\.", ".mid.block_2."),
)
DIFFUSERS: Names = (
    (r"\.mid\.0\.", ".mid_block.resnets.0."),
    (r"\.mid\.1\.", ".mid_block.attentions.0."),
    (r"\.mid\.2\.", ".mid_block.resnets.1."),
    (r"encoder\.conv_blocks\.", "encoder.down_blocks."),
    (r"decoder\.conv_blocks\.", "decoder.up_blocks."),
    (r"\.res\.", ".resnets."),
    (r"\.attn\.", ".attentions."),
    (r"\.(down|up)sample\.", r".\1samplers.0."),
    (r"attentions\.(\d+)\.norm\.", r"attentions.\1.group_norm."),
    (r"attentions\.(\d+)\.([qkv])\.", r"attentions.\1.to_\2."),
    (r"attentions\.(\d+)\.proj_out\.", r"attentions.\1.to_out.0."),
    (r"nin_shortcut", "conv_shortcut"),
    (r"norm_out", "conv_norm_out"),
)


def renamed(weights: dict[str, Tensor], names: Names) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in weights.items():
        for pattern, to in names:
            name = re.sub(pattern, to, name)
        tensors[name] = tensor
    return tensors


def shape(vq: LlamaGenVQ) -> dict[str, Any]:
    """Return the sizes that the other classes ask for."""
    first = vq.encoder.conv_in.out_channels
    levels = [list(level.get_submodule("res").children()) for level in vq.encoder.conv_blocks]
    return {
        "channels": [len(blocks[-1].get_parameter("conv2.weight")) for blocks in levels],
        "first": first,
        "depth": len(levels[0]),
        "z": vq.post_quant_conv.out_channels,
        "vocab": vq.quantize.embedding.num_embeddings,
        "dim": vq.quantize.embedding.embedding_dim,
    }


def janus_config(vq: LlamaGenVQ) -> dict[str, Any]:
    """Return the options of a JanusVQVAEConfig."""
    size = shape(vq)
    return {
        "embed_dim": size["dim"],
        "num_embeddings": size["vocab"],
        "latent_channels": size["z"],
        "base_channels": size["first"],
        "channel_multiplier": [c // size["first"] for c in size["channels"]],
        "num_res_blocks": size["depth"],
    }


def into_janus(vq: LlamaGenVQ, model: Any) -> None:
    """Copy the weights into a JanusVQVAE."""
    model.load_state_dict(renamed(_unit(vq), JANUS), strict=True)


@torch.no_grad()
def diffusers_vq(vq: LlamaGenVQ, pixels: int) -> Any:
    """Make a VQModel as aMUSEd has it: pictures in 0..1, where LlamaGen's are in -1..1, so both
    ends are rescaled.

    Padding is black here and grey there, which changes a few ids at the border; decoding is the
    same.
    """
    from diffusers import VQModel

    size = shape(vq)
    plain = len(size["channels"]) - 1
    like = vq.quantize.embedding.weight
    model = VQModel(
        down_block_types=["DownEncoderBlock2D"] * plain + ["AttnDownEncoderBlock2D"],
        up_block_types=["AttnUpDecoderBlock2D"] + ["UpDecoderBlock2D"] * plain,
        block_out_channels=size["channels"],
        layers_per_block=size["depth"],
        latent_channels=size["dim"],
        vq_embed_dim=size["dim"],
        sample_size=pixels,
        num_vq_embeddings=size["vocab"],
        lookup_from_codebook=True,
        scaling_factor=1.0,
    )
    weights = renamed(folded(vq), DIFFUSERS)
    for name in ("quant_conv", "post_quant_conv"):
        weights[f"{name}.weight"] = torch.eye(size["dim"], device=like.device)[..., None, None]
        weights[f"{name}.bias"] = torch.zeros_like(like[0])
    weights["quantize.embedding.weight"] = vq.quantize.codebook()
    for name, tensor in weights.items():
        if re.search(r"\.to_(q|k|v|out\.0)\.weight$", name):
            weights[name] = tensor[:, :, 0, 0]
    model.load_state_dict(weights | _rescaled(weights), strict=True)
    return model.eval()


def _rescaled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first and last layer for pictures in 0..1 from those for -1..1."""
    first, last = "encoder.conv_in", "decoder.conv_out"
    return {
        f"{first}.weight": 2 * weights[f"{first}.weight"],
        f"{first}.bias": weights[f"{first}.bias"] - weights[f"{first}.weight"].sum((1, 2, 3)),
        f"{last}.weight": weights[f"{last}.weight"] / 2,
        f"{last}.bias": weights[f"{last}.bias"] / 2 + 0.5,
    }


@torch.no_grad()
def folded(vq: LlamaGenVQ) -> dict[str, Tensor]:
    """Multiply the 1x1 convolutions around the codebook into encoder and decoder, since VAR has
    none and aMUSEd's pipeline wants latents as wide as entries. The convolution after the codebook
    must have no bias."""
    tensors = {
        name: tensor
        for name, tensor in vq.state_dict().items()
        if name.startswith(("encoder.", "decoder."))
    }
    after = vq.quant_conv.weight[:, :, 0, 0]
    before = vq.post_quant_conv.weight[:, :, 0, 0]
    return tensors | {
        "encoder.conv_out.bias": after @ tensors["encoder.conv_out.bias"] + vq.quant_conv.bias,
        "encoder.conv_out.weight": torch.einsum(
            "dz,zchw->dchw", after, tensors["encoder.conv_out.weight"]
        ),
        "decoder.conv_in.weight": torch.einsum(
            "czhw,zd->cdhw", tensors["decoder.conv_in.weight"], before
        ),
    }


def _unit(vq: LlamaGenVQ) -> dict[str, Tensor]:
    """Return the weights with entries of length 1, as LlamaGen compares and decodes them."""
    tensors = {
        name: tensor for name, tensor in vq.state_dict().items() if name != "quantize.codebook_used"
    }
    return tensors | {"quantize.embedding.weight": vq.quantize.codebook()}
