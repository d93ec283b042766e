"""Compares the latents that a pipeline prepares with the size that its call asked for."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

from mmrl.core.errors import UserError

# attributes by which pipelines say how many pixels a latent has along a side; a pipeline may have
# several that differ by its patches (Z-Image's modular form: 16 and 8)
FACTORS = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
PATCHES = (1, 2)  # latents along a side that prepared ones may join


def check_size(pipe: Any, shape: tuple[int, ...], size: tuple[int, int]) -> None:
    """Raise UserError where latents of this shape of a row are of another size than the [height,
    width] asked for, up to what patches round off."""
    factors = [f for f in (getattr(pipe, name, None) for name in FACTORS) if isinstance(f, int)]
    if not factors or len(shape) < 3:  # unknown, or packed to tokens
        return
    for factor in factors:
        slack = max(PATCHES) * factor
        for (h, w), patch in product(pairwise(shape), PATCHES):
            pixels = (h * factor * patch, w * factor * patch)
            if all(abs(a - b) < slack for a, b in zip(pixels, size, strict=True)):
                return
    height, width = (side * factors[-1] for side in shape[-2:])
    raise UserError(
        f"policy option call: {type(pipe).__name__} is asked for {size[0]} x {size[1]} pixels and "
        f"samples {height} x {width} (latents {' x '.join(map(str, shape))}); set "
        "use_resolution_binning to false, or ask for a size that the pipeline keeps"
    )
