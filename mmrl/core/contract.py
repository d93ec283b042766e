"""Checks what a plug-in's function returns, at the call: a tensor of another shape would broadcast
silently, or fail far away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.errors import called as named

SPILL = 0.1  # by how much decoders overshoot black and white
FEW = 0.01  # share of values that may lie further out
SAME_ROW = 0.05  # relative: forward passes of other batch sizes round differently


def returned(value: object, by: str, **shapes: tuple[int, ...]) -> Tensor:
    """Return ``value``, a tensor of one of the ``shapes``; UserError in one sentence otherwise.

    by: the function, in words. shapes: by the names of their axes, ``B_L=(80, 4)`` is [B, L].
    """
    if isinstance(value, Tensor) and value.shape in shapes.values():
        return value
    gave = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    contract = " or ".join(
        f"[{name.replace('_', ', ')}] = {list(shape)}" for name, shape in shapes.items()
    )
    raise UserError(f"{by} must return a tensor {contract}; it returned {gave}")


def called(function: object) -> str:
    """Return the name of a function, or of an object's class, without bound options."""
    return named(function.func if isinstance(function, partial) else function)


def unpacked(output: Any, field: str = "sample") -> Any:
    """Unpack a network's tensor from a tuple of one, or an object or dict with ``field``, as
    diffusers and transformers return it; anything else is unchanged."""
    if isinstance(output, tuple | list) and len(output) == 1:
        output = output[0]
    known = output.get(field) if isinstance(output, Mapping) else getattr(output, field, None)
    return known if isinstance(known, Tensor) else output


def check_memory(net: nn.Module, by: str) -> None:
    """Raise UserError if a layer of a network was left on the meta device, without weights."""
    empty = [
        name
        for tensors in (net.named_parameters(), net.named_buffers())
        for name, tensor in tensors
        if tensor.is_meta
    ]
    if empty:
        raise UserError(
            f"{by}: {empty[0]} has no numbers (device meta), as have {len(empty) - 1} other "
            f"tensors; load weights into it, or make the layer outside torch.device('meta')"
        )


class Pictures:
    """Converts a decoder's output to pictures [B, 3, H, W] in 0..1, or refuses it.

    Bytes, one channel, channels last and diffusers' output objects are understood. The first call
    also checks the range, NaN, and whether a row decodes the same by itself.
    """

    def __init__(self, by: str, known: bool = False):
        """by: the decoder, in words. known: it is a library's, whose output range is not
        checked."""
        self.by = by
        self.unseen = not known

    def __call__(self, decode: Callable[[Tensor], Any], latents: Tensor) -> Tensor:
        """Decode latents or codes [B, *], ``decode`` gets a copy that it may modify."""
        pictures = self._rgb(decode(latents.clone()), len(latents))
        if self.unseen:
            self.unseen = False
            self._check_range(pictures)
            self._check_rows(pictures[:1], self._rgb(decode(latents[:1].clone()), 1))
        return pictures.clamp(0, 1)

    def _rgb(self, output: Any, rows: int) -> Tensor:
        value = unpacked(output)
        fits = isinstance(value, Tensor) and value.ndim == 4 and len(value) == rows
        if fits and value.shape[1] not in (1, 3) and value.shape[3] in (1, 3):
            value = value.permute(0, 3, 1, 2)
        if not fits or value.shape[1] not in (1, 3):
            gave = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"{self.by} must return pictures, a tensor [B, 3, H, W] for B = {rows} rows; "
                f"it returned {gave}"
            )
        if value.dtype != torch.uint8 and not value.is_floating_point():
            raise UserError(
                f"{self.by} must return floats in 0..1, or bytes (uint8, 0..255), not {value.dtype}"
            )
        scaled: Tensor = value.float() / 255 if value.dtype == torch.uint8 else value.float()
        return scaled.expand(-1, 3, -1, -1)

    def _check_range(self, pictures: Tensor) -> None:
        if not bool(pictures.isfinite().all()):
            raise UserError(f"{self.by} returned NaN or infinity among its first pictures")
        outside = ((pictures - 0.5).abs() > 0.5 + SPILL).float().mean()
        if outside > FEW:
            raise UserError(
                f"{self.by} must return pictures in 0..1, or bytes (uint8, 0..255); "
                f"{outside:.0%} of its first values lie outside, from {pictures.min():.3g} to "
                f"{pictures.max():.3g}. Return (x + 1) / 2 of values in -1..1, x / 255 of values "
                f"up to 255"
            )

    def _check_rows(self, beside: Tensor, alone: Tensor) -> None:
        far = (returned(alone, self.by, B_3_H_W=tuple(beside.shape)) - beside).abs().max()
        if far > SAME_ROW:
            raise UserError(
                f"{self.by} must treat rows independently; a picture beside others comes out "
                f"{far:.2g} different from the same one decoded alone"
            )
