"""Compares the latents that a pipeline prepares with the size that its call asked for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from mmrl.core.errors import UserError

# attributes by which pipelines say how many pixels a latent has along a side
FACTORS = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
PATCHES = (1, 2)  # latents along a side that prepared ones may join


def check_size(pipe: Any, shape: tuple[int, ...], size: tuple[int, int]) -> None:
    """Raise UserError where latents of this shape of a row are of another size than the [height,
    width] asked for, up to what patches round off."""
    factor = next((getattr(pipe, name) for name in FACTORS if hasattr(pipe, name)), None)
    if not isinstance(factor, int) or len(shape) < 3:  # unknown, or packed to tokens
        return
    known = [
        (h * factor * patch, w * factor * patch) for patch in PATCHES for h, w in pairwise(shape)
    ]
    slack = max(PATCHES) * factor
    if any(abs(h - size[0]) < slack and abs(w - size[1]) < slack for h, w in known):
        return
    height, width = (side * factor for side in shape[-2:])
    raise UserError(
        f"policy option call: {type(pipe).__name__} is asked for {size[0]} x {size[1]} pixels and "
        f"samples {height} x {width} (latents {' x '.join(map(str, shape))}); set "
        "use_resolution_binning to false, or ask for a size that the pipeline keeps"
    )
