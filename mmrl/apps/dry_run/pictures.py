"""Builds the pictures of a pass for vision-language models with known inputs, to rehearse their
vision tower."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmrl.apps.dry_run.fakes import Fakes
from mmrl.policies.vlm.prefix_sharing import SharedPrefix

SHARE = 7 / 8  # share of a question's tokens that are its picture
TILE_TOKENS = 256  # of InternVL: a tile of 448 pixels


def looker(
    net: SharedPrefix, prompts: int, question: int, fakes: Fakes
) -> Callable[[], Tensor] | None:
    """Return a function that computes the features of one picture per prompt, as large as
    ``question`` tokens allow; None if the tower's inputs are unknown."""
    hf: Any = net.hf
    vision = getattr(hf.config, "vision_config", None)
    if vision is None or not hasattr(hf.base_model, "get_image_features"):
        return None
    tokens = max(4, int(question * SHARE))
    if hasattr(vision, "spatial_merge_size"):
        inputs = _patches(vision, prompts, tokens, fakes)
    elif hasattr(hf.config, "downsample_ratio"):
        height, width = vision.image_size
        tiles = prompts * max(1, round(tokens / TILE_TOKENS))
        inputs = {"pixel_values": fakes.empty(tiles, 3, height, width, dtype=hf.dtype)}
    else:
        return None
    return partial(_features, hf, inputs)


def _patches(vision: Any, prompts: int, tokens: int, fakes: Fakes) -> dict[str, Tensor]:
    """Build the patches [P, C] of Qwen-VL's towers, for nearly square pictures."""
    merge = vision.spatial_merge_size
    side = max(1, int(tokens**0.5))
    grid = torch.tensor([[1, side * merge, tokens // side * merge]]).expand(prompts, -1)
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": fakes.empty(int(grid.prod(1).sum()), width),
        "image_grid_thw": grid.contiguous(),
    }


def _features(hf: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Sum the features, so that all of them have a gradient."""
    output = hf.base_model.get_image_features(**inputs, return_dict=True)
    features = [x for x in tree_leaves(dict(output)) if isinstance(x, Tensor)]
    return torch.stack([x.float().sum() for x in features if x.is_floating_point()]).sum()
