"""Collates encoded prompts: sequences are padded on the left, vision tensors are joined as the
family's network reads them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.policies.vlm.families import Family

Encoded = dict[str, Tensor]
SEQUENCES = (
    "input_ids",
    "attention_mask",
    "cross_attention_mask",
)
# indices into the patches of all images of a batch, and where these are
POOLED = {"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"}
# audio masks, which separate the prompts
SOUNDS = ("feature_attention_mask", "audio_attention_mask")


def is_pixels(name: str) -> bool:
    """Tell whether an input of that name holds the pixels of images or videos."""
    return "pixel_values" in name


def is_sequence(name: str) -> bool:
    """Tell whether an input of that name has a value for every token; type ids that choose experts
    have a separate name."""
    return name in SEQUENCES or name.endswith("token_type_ids")


def collated(name: str, encoded: list[Encoded], length: int, family: Family, pad: int) -> Tensor:
    """Join the inputs ``name`` of n prompts: sequences to [n, length], padded on the left; vision
    tensors by the family's rule. Raises UserError where a prompt lacks what its family needs."""
    if is_sequence(name):
        like = next(prompt[name] for prompt in encoded if name in prompt)
        rows = [_row(name, prompt, like, family) for prompt in encoded]
        fill = pad if name == "input_ids" else 0
        return torch.cat(same_shape([_pad_left(row, length, fill) for row in rows]))
    present = [prompt for prompt in encoded if name in prompt]
    parts = [prompt[name] for prompt in present]
    if family.joins == "last" and is_pixels(name):  # all patches form one row
        return torch.cat(parts, -1)
    if family.joins == "tiles" and is_pixels(name):  # tiles of all images form one row
        return torch.cat([part.flatten(0, 1) for part in parts])[None]
    if name in POOLED:
        patches = [prompt[POOLED[name]] for prompt in present]
        starts = torch.tensor([p.shape[0] * p.shape[1] for p in patches]).cumsum(0).tolist()
        parts = [_moved(part, start) for part, start in zip(parts, [0, *starts], strict=False)]
    return torch.cat(same_shape(parts))


def kinds_of(encoded: list[Encoded], family: Family) -> list[list[int]]:
    """Group the positions of prompts that can be in one batch without changing each other; nearly
    always all of them.

    Five properties of networks prevent it: Mllama's cross-attention gives tokens before an image
    the mean of all image slots, empty ones included; LLaVA-OneVision reshapes videos to one number
    of frames; Molmo2 and GLM take images or videos; audio towers read the padding after shorter
    sounds (and Phi-4 projects sounds differently in a batch with images); and Phi-4 reads an image
    that fills its tiles causally unless another image in the batch has a mask.
    """
    positions: dict[object, list[int]] = {}
    if family.alone:  # only with copies of itself
        for i, prompt in enumerate(encoded):
            positions.setdefault(id(prompt["input_ids"]), []).append(i)
        return list(positions.values())
    for i, prompt in enumerate(encoded):
        positions.setdefault(_shape(prompt, family), []).append(i)
    shapes = [shape for shape in positions if shape is not None]
    if not family.by_row and len(shapes) <= 1:  # rows without a video fit any batch
        return [list(range(len(encoded)))]
    if None in positions and not family.by_row:
        positions[shapes[0]] = sorted(positions[shapes[0]] + positions.pop(None))
    return sorted(positions.values())


def _shape(prompt: Encoded, family: Family) -> object:
    if family.hears:
        sounds = [prompt[name] for name in SOUNDS if name in prompt]
        lengths = tuple((tuple(x.shape[1:]), tuple(x.sum(-1).tolist())) for x in sounds)
        pictures = family.hears == "apart" and any(map(is_pixels, prompt))
        return (pictures and _full(prompt), lengths) if pictures or sounds else None
    if family.apart:
        return next((name for name in prompt if is_pixels(name)), None)
    if family.joins != "rows":
        return None
    name = "pixel_values" if family.by_row else "pixel_values_videos"
    return prompt[name].shape[1] if name in prompt and prompt[name].dim() >= 5 else None


def _full(prompt: Encoded) -> object:
    """Tell how images are masked: ``masked`` somewhere, or nowhere, in tiles of one shape. Phi-4's
    tower gets a mask only where something is masked; without one it attends causally."""
    mask = prompt.get("image_attention_mask")
    return tuple(mask.shape[1:]) if mask is not None and bool(mask.all()) else "masked"


def _row(name: str, prompt: Encoded, like: Tensor, family: Family) -> Tensor:
    if name in prompt:
        return prompt[name]
    if name in family.needs:
        raise UserError(f"a prompt was encoded without {name}, which {family.name} needs")
    return like.new_zeros(1, prompt["input_ids"].shape[1], *like.shape[2:])


def _moved(indices: Tensor, by: int) -> Tensor:
    """Move indices to later patches; -1 points nowhere."""
    return torch.where(indices < 0, indices, indices + by)


def _pad_left(row: Tensor, length: int, fill: int) -> Tensor:
    missing = length - row.shape[1]
    return torch.cat([row.new_full((1, missing, *row.shape[2:]), fill), row], 1) if missing else row


def same_shape(parts: list[Tensor]) -> list[Tensor]:
    """Pad with zeros at the end of every dimension but the first, up to the largest."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    if all(list(part.shape[1:]) == largest for part in parts):
        return parts
    padded = []
    for part in parts:
        pad = [
            amount
            for size, want in zip(reversed(part.shape[1:]), reversed(largest))
            for amount in (0, want - size)
        ]
        padded.append(F.pad(part, pad))
    return padded


def blank_image() -> Prompt:
    """Make a prompt of one image without text."""
    from PIL import Image

    return {"text": "", "images": [Image.new("RGB", (64, 64))]}


def blank_clip() -> Prompt:
    """Make a prompt of one clip without text."""
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    return {"text": "", "video": frames, "fps": 2.0}


def images_in(encoded: Encoded) -> int:
    """Count a prompt's images, tiles or videos that pass through the tower."""
    grids = [encoded[name] for name in ("image_grid_thw", "video_grid_thw") if name in encoded]
    return (
        sum(map(len, grids))
        if grids
        else sum(len(x) for name, x in encoded.items() if is_pixels(name))
    )
