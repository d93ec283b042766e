"""Computes the positions of prompts' tokens, with three axes where the family has them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

# what positions with three axes are computed from: names of get_rope_index, and of inputs
ROPE_INPUTS = {
    "input_ids": "input_ids",
    "mm_token_type_ids": "mm_token_type_ids",
    "image_grid_thw": "image_grid_thw",
    "video_grid_thw": "video_grid_thw",
    "second_per_grid_ts": "second_per_grid_ts",
    "second_per_grids": "video_second_per_grid",
    "target_sizes": "target_sizes",
    "target_sizes_videos": "target_sizes_videos",
}
SIZES = ("image_grid_thw", "video_grid_thw", "target_sizes", "target_sizes_videos")


def rotary3(hf: Any) -> bool:
    """Tell whether positions have three axes (time, height, width) in this family."""
    return hasattr(hf.base_model, "get_rope_index")


def following(inputs: dict[str, Tensor]) -> Tensor:
    """Return the position after the last of every prompt, [P] long."""
    places = inputs["position_ids"]
    return (places if places.ndim == 2 else places.amax(0)).amax(1) + 1


def positions(hf: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the position of every token, not counting the padding on the left: [P, S], or [3, P,
    S] in families with three axes."""
    mask = inputs["attention_mask"].long()
    plain = (mask.cumsum(1) - 1).clamp_min(0)
    if not rotary3(hf):
        return plain
    if not any(name in inputs for name in SIZES):
        return plain.expand(3, -1, -1)
    parameters = inspect.signature(hf.base_model.get_rope_index).parameters
    rope_inputs = {
        name: inputs[key]
        for name, key in ROPE_INPUTS.items()
        if key in inputs and name in parameters
    }
    if "audio_seqlens" in parameters and "feature_attention_mask" in inputs:
        rope_inputs["audio_seqlens"] = inputs["feature_attention_mask"].sum(-1)
    places: Tensor = hf.base_model.get_rope_index(**rope_inputs, attention_mask=mask)[0]
    return places
