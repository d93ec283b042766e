"""Loads models and processors of transformers, by hub id or folder: frozen, in eval mode, shared
among rewards.

A processor comes in two forms: ``tensor`` works on floats (torchvision, antialiased,
differentiable), ``pil`` rounds to 8 bits and resizes with PIL, as the published scores were
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.hub import check_repository
from mmrl.core.pretrained import load_model as load_network
from mmrl.core.pretrained import load_processor as load_without_weights
from mmrl.core.registry import locate
from rewards.base.clip import pick_device
from rewards.base.media import to_uint8

Precision = Literal["float32", "bfloat16", "float16"]
Preprocess = Literal["tensor", "pil"]
DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
POOLER = ("pooler.",)  # a layer missing from many published encoders
_shared: WeakValueDictionary[tuple[Any, ...], torch.nn.Module] = WeakValueDictionary()


def load_model(
    kind: str,
    path: str,
    device: str | torch.device = "auto",
    dtype: Precision = "float32",
    unread: Sequence[str] = (),
) -> Any:
    """Load ``transformers.<kind>.from_pretrained(path)``, frozen; the global random state is
    unchanged. ``unread``: name parts of weights that the reward does not use.

    Raises:
        UserError: no such folder, no network, a folder of another kind of model.
    """
    import transformers

    return load_class(getattr(transformers, kind), path, device, dtype, unread)


def load_class(
    entry: Any,
    path: str,
    device: str | torch.device = "auto",
    dtype: Precision = "float32",
    unread: Sequence[str] = (),
) -> Any:
    """Load as ``load_model``, for a class with ``from_pretrained``."""
    place = place_of(path)
    where = pick_device(device)
    key = (entry.__name__, place, where, dtype)
    model = _shared.get(key)
    if model is None:
        try:
            with torch.random.fork_rng(devices=[]):  # missing weights are drawn at random
                model = load_network(entry, place, dtype=DTYPES[dtype], unread=unread)
        except UserError as error:
            raise UserError(missing(entry.__name__, place, error)) from error
        model = model.eval().requires_grad_(False).to(where)
        _shared[key] = model
    return model


def load_processor(kind: str, path: str, **options: Any) -> Any:
    """Load ``transformers.<kind>.from_pretrained(path)``: a tokenizer, an image processor or both
    in one."""
    import transformers

    place = place_of(path)
    try:
        return load_without_weights(getattr(transformers, kind), place, **options)
    except UserError as error:
        raise UserError(missing(kind, place, error)) from error


def place_of(path: str) -> str:
    """Resolve a ``world:`` artifact, a folder that exists, or a hub id. Raises UserError within
    seconds for a model that is not on the hub."""
    place = locate(path)
    folder = Path(place).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.is_absolute() or place[:1] in ("~", "."):
        raise UserError(f"no such folder: {folder} (looked for a model of transformers)")
    check_repository(place)
    return place


def missing(kind: str, place: str, error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
    return (
        f"cannot load {place!r} as a {kind} of transformers: {type(error).__name__}: "
        f"{first}. Download it once where "
        f"there is a network, `hf download {place}`, and copy the hub cache (HF_HOME) "
        f"here, or give a local folder"
    )


class Eyes:
    """Applies the image processor of a model: pictures -> model inputs."""

    def __init__(self, path: str, preprocess: Preprocess = "tensor"):
        self.exact = preprocess == "pil"
        self.processor = load_processor(
            "AutoImageProcessor", path, backend="pil" if self.exact else "torchvision"
        )

    def __call__(self, pictures: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Prepare [N, 3, H, W] in 0..1 -> [N, 3, h, w] float32 on ``device``."""
        if self.exact:
            inputs = self.processor(images=to_pil(pictures), return_tensors="pt")
        else:
            floats = list(pictures.to(device).float())
            inputs = self.processor(images=floats, do_rescale=False, return_tensors="pt")
        pixels: Tensor = inputs["pixel_values"]
        return pixels.to(device)


def to_pil(pictures: Tensor) -> list[Any]:
    """Convert [N, 3, H, W] floats in 0..1 -> N PIL images, rounded to 8 bits."""
    from PIL import Image

    return [Image.fromarray(p.numpy()) for p in to_uint8(pictures).permute(0, 2, 3, 1).contiguous()]
