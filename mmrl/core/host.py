"""Caches values of device tensors on the host, since every read is a device sync."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = "_mmrl_values"  # attribute of a tensor on a device: its copy on the host
INDICES = "_mmrl_indices"  # attribute of a mask: the indices where it is true


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU. The copy is cached with the tensor until it is modified in place,
    so the device is read once."""
    if tensor.device.type == "cpu":
        return tensor
    copy = _cached(tensor, VALUES)
    return _cache(tensor, VALUES, tensor.cpu()) if copy is None else copy


def remember(tensor: Tensor, copy: Tensor) -> None:
    """Cache a CPU copy as the values of the tensor's current version; ``on_host`` returns it."""
    _cache(tensor, VALUES, copy)


def _cache(tensor: Tensor, name: str, value: Tensor) -> Tensor:
    vars(tensor)[name] = _version(tensor), value
    return value


def _cached(tensor: Tensor, name: str) -> Tensor | None:
    """Return the value cached for the tensor's current version."""
    cached: tuple[int, Tensor] | None = vars(tensor).get(name)
    return cached[1] if cached and cached[0] == _version(tensor) else None


def _version(tensor: Tensor) -> int:
    """Count the tensor's in-place changes; 0 for inference tensors, which have no counter and are
    never modified here."""
    return 0 if tensor.is_inference() else tensor._version


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor, to an accelerator without blocking the host."""
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def placed(copy: Tensor, device: torch.device | str) -> Tensor:
    """Send a CPU tensor to the device, and cache it as the device tensor's values."""
    tensor = sent(copy, device)
    if tensor is not copy:
        remember(tensor, copy)
    return tensor


def indices(mask: Tensor) -> Tensor:
    """Return the indices where a mask is true, [N] long in the flattened mask, on its device. The
    device is read once per mask."""
    places = _cached(mask, INDICES)
    if places is not None:
        return places
    return _cache(mask, INDICES, sent(on_host(mask).flatten().nonzero()[:, 0], mask.device))


def selected(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values[mask]``, [N, *] of values [*mask, *], reading the device only through
    ``indices``."""
    return values.flatten(0, mask.ndim - 1)[indices(mask)]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Scatter values [N] to where a mask is true, 0 elsewhere: [*mask]; the inverse of
    ``selected``, with its gradient."""
    return values.new_zeros(mask.numel()).index_copy(0, indices(mask), values).view(mask.shape)
