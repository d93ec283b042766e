"""Estimates an iteration's device memory by a formula that is written out in docs/speed.md.

Numbers are bytes. Rough on purpose: activations are counted by layers, tokens and width, which is
right within a factor of two for transformers; the autoencoder's own activations and the models of
rewards are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mmrl.config.options import TrainOptions
from mmrl.policies.quantization import Blocks, Quantization, bytes_of

# bytes a token and channel of a layer keeps in half precision (Korthikanti et al. 2022, without the
# scores)
KEPT = 34
# of a layer, what a second attention to the image alone adds (Stable Diffusion 3.5 medium: tracked)
DUAL = 0.6
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "float64": 8}


@dataclass(frozen=True)
class Layers:
    """Describes ``count`` transformer layers of ``width`` channels on ``tokens`` tokens each."""

    count: float
    tokens: int
    width: int


@dataclass(frozen=True)
class Model:
    """Holds the sizes of a model. None: unknown."""

    parameters: int | None
    trained: int | None
    layers: tuple[Layers, ...]
    decoder: int | None = None  # parameters of the autoencoder
    encoders: int | None = None  # of text and image encoders
    dtype: str = "float32"  # of frozen weights
    adapters: bool = False
    placement: str = "offload"  # of the encoders, after use
    quantization: Quantization | None = None  # of the blocks' frozen weights
    blocks: Blocks = Blocks()
    tracked: int | None = None  # bytes of a pass's activations, where they were measured


def layers_of(policy: Any) -> tuple[Layers, ...]:
    """Find the layers of a diffusion policy's network, from its config and the shape of its
    latents."""
    config = policy.config
    if getattr(config, "block_out_channels", None):
        return _unet(policy)
    heads = getattr(config, "num_attention_heads", None)
    width = config.dim if heads is None else heads * config.attention_head_dim
    names = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
    count = sum(getattr(config, name, None) or 0 for name in names)
    image, text = tokens_of(policy)
    layers = (Layers(count, image + text, width),)
    dual = getattr(config, "dual_attention_layers", None) or ()
    return (*layers, Layers(DUAL * len(dual), image, width)) if dual else layers


def tokens_of(policy: Any) -> tuple[int, int]:
    """Count tokens: of the latents and of images beside them, and of text in the same sequence."""
    config = policy.config
    shape = policy.shape
    frames = 1 if len(shape) == 3 else shape[1]  # channels, frames, height, width
    if policy.pipeline.startswith("CogVideoX"):  # frames come first
        frames = shape[0] // (config.patch_size_t or 1)
    image = frames * shape[-2] * shape[-1] // _patch(policy) ** 2
    images = 2 if hasattr(policy, "image_size") else 1
    joint = getattr(config, "joint_attention_dim", None) or policy.pipeline.startswith(
        ("CogVideoX", "Hunyuan", "ZImage")
    )
    text = getattr(policy, "text_length", 333) if joint else 0  # SD3: 77 of CLIP, 256 of T5
    return images * image, text


def _patch(policy: Any) -> int:
    """Return how many latents one side of a token covers."""
    if policy.pipeline.startswith(("FluxPipeline", "FluxKontext", "QwenImage", "ZImage")):
        return 2
    patch = policy.config.patch_size
    return patch if isinstance(patch, int) else patch[-1]


def _unet(policy: Any) -> tuple[Layers, ...]:
    """Describe the levels of a UNet: a residual block counts as a third of a transformer layer, an
    attention block as its number of transformer layers."""
    config = policy.config
    pixels = policy.shape[-2] * policy.shape[-1]
    channels = config.block_out_channels
    levels = []
    each = config.transformer_layers_per_block
    for i, (width, kind) in enumerate(zip(channels, config.down_block_types)):
        attention = (each if isinstance(each, int) else each[i]) * ("CrossAttn" in kind)
        blocks = 2 * config.layers_per_block + 1  # down, and up with one more
        levels.append(Layers(blocks * (attention + 0.35), pixels // 4**i, width))
    deepest = (each if isinstance(each, int) else each[-1]) + 0.7
    return (*levels, Layers(deepest, pixels // 4 ** (len(channels) - 1), channels[-1]))


def activations(model: Model, rows: int, half: bool, checkpointing: bool) -> int:
    """Estimate what the layers keep of a pass with gradients; with checkpointing the entry of each
    and one whole layer."""
    if model.tracked is not None:
        return int(model.tracked)
    size = 1 if half else 2
    whole = [KEPT * size * layers.tokens * layers.width * rows for layers in model.layers]
    if not checkpointing:
        return int(sum(each * layers.count for each, layers in zip(whole, model.layers)))
    entries = sum(
        2 * size * layers.tokens * layers.width * rows * layers.count for layers in model.layers
    )
    return int(entries + max(whole, default=0))


def memory(
    model: Model,
    train: TrainOptions,
    rows: int,
    snapshots: int,
    stored: int,
    optimizer: float = 8,
    offload: bool = False,
) -> dict[str, float | None]:
    """Estimate bytes on one device by what they are for; None where a size is unknown.

    rows: of a pass, guided ones twice. snapshots: copies of the trained weights. stored: bytes of
    the rollout's latents. optimizer: bytes it keeps a parameter.
    """
    half = train.precision != "fp32"
    frozen = BYTES[model.dtype]
    copied = half and frozen == 4
    few = 0 if model.quantization is None else model.blocks.weights
    whole = None if model.parameters is None else model.parameters - few
    sizes: dict[str, float | None] = {
        "network": _bytes(whole, frozen),
        "adapters": _bytes(model.trained, 4) if model.adapters else 0.0,
        "snapshots": _bytes(model.trained, 4 * snapshots if model.adapters else frozen * snapshots),
        "gradients": _bytes(model.trained, 4 if model.adapters else frozen),
        "optimizer": _bytes(model.trained, optimizer),
        "half-precision copies": _bytes(whole, 2) if copied and model.tracked is None else 0.0,
        "activations": float(
            activations(model, rows, half or frozen == 2, train.gradient_checkpointing)
        ),
        "rollout": 0.0 if offload else float(stored),
        "autoencoder": _bytes(model.decoder, 4),
        "encoders": _bytes(model.encoders, frozen) if model.placement == "keep" else 0.0,
    }
    if not model.layers and model.tracked is None:
        sizes["activations"] = None
    if model.quantization is not None:
        sizes["network in few bits"] = float(bytes_of(few, model.quantization))
        # one layer at a time, and what it is converted to
        sizes["restored weights"] = float(model.blocks.largest * (frozen + 2 * copied))
    return sizes


def _bytes(count: int | None, size: float) -> float | None:
    return None if count is None else float(count * size)


def peak(parts: dict[str, float | None], model: Model, shards: int = 1) -> float | None:
    """Estimate bytes at the fullest moment of an update; with ``shards`` > 1 weights, gradients and
    optimizer are shared out (FSDP2). None if the network's size is unknown."""
    if parts["network"] is None:
        return None
    shared = ("network", "network in few bits", "adapters", "snapshots", "gradients", "optimizer")
    whole = sum(value or 0.0 for name, value in parts.items() if name not in shared)
    weights = sum(parts.get(name) or 0.0 for name in shared) / shards
    update = whole + weights
    encoding = 0.0
    if model.placement in ("offload", "release") and model.encoders:
        resident = weights + (parts["autoencoder"] or 0.0)
        encoding = resident + model.encoders * BYTES[model.dtype]
    return math.ceil(max(update, encoding))
