"""Computes the position ids of prompts, with several axes where the family has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

# inputs of positions with several axes: argument names of get_rope_index, and names of inputs
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


def axes(hf: Any) -> int:
    """Return how many axes the positions of a family have: time, height and width, or as many as
    its rotary embedding has sections; 0: positions are numbers."""
    if not hasattr(hf.base_model, "get_rope_index"):
        return 0
    rope = getattr(hf.config.get_text_config(), "rope_parameters", None) or {}
    return len(rope.get("mrope_section") or (1, 1, 1))


def following(inputs: dict[str, Tensor]) -> Tensor:
    """Return the position of the token that follows every prompt, [P] long: the one after that of
    its last token, as in one pass over prompt and answer. Positions inside a clip may be later:
    they count seconds, while the text after it continues from the width of a frame."""
    last = inputs["position_ids"][..., -1]
    return (last if last.ndim == 1 else last.amax(0)) + 1


@contextmanager
def following_the_prompt(hf: Any) -> Iterator[None]:
    """Make transformers' own ``generate`` position answers as ``following`` does within the block;
    by default it starts after the highest position of any token."""
    base = hf.base_model
    if not axes(hf):
        yield
        return
    plain = base.get_rope_index

    def index(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        places, latest = plain(*arguments, **options)
        mask = options.get("attention_mask")
        length = places.shape[-1] if mask is None else mask.sum(-1, keepdim=True)
        last = following({"position_ids": places})[:, None]
        return places, (last - length).to(latest)

    base.__dict__["get_rope_index"] = index
    try:
        yield
    finally:
        del base.__dict__["get_rope_index"]


def positions(hf: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the position of every token, not counting the padding on the left: [P, S], or [A, P,
    S] in families with A axes."""
    mask = inputs["attention_mask"].long()
    plain = (mask.cumsum(1) - 1).clamp_min(0)
    if not axes(hf):
        return plain
    if not any(name in inputs for name in SIZES):
        return plain.expand(axes(hf), -1, -1)
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
