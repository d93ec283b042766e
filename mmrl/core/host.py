"""What the host knows of the device's tensors: a value is asked for once, since every question
waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> Tensor:
    """Read a tensor. The copy is remembered with it until it is changed, so the device is asked
    once."""
    if tensor.device.type == "cpu":
        return tensor
    known = getattr(tensor, "_mmrl_known", None)
    if known is None or known[0] != _version(tensor):
        known = remember(tensor, tensor.cpu())
    return known[1]


def remember(tensor: Tensor, copy: Tensor) -> tuple[int, Tensor]:
    """Note a tensor's values, a CPU tensor, as those of its present version, which come first."""
    tensor._mmrl_known = _version(tensor), copy
    return tensor._mmrl_known


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; tensors of inference mode, which do not count, are never
    changed here."""
    return 0 if tensor.is_inference() else tensor._version


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor. On the way to an accelerator the host does not wait for what that is still
    computing."""
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def indices(mask: Tensor) -> Tensor:
    """Find where a mask holds: [N] long, places in the flattened mask, on its device. Asks the
    device once a mask."""
    known = getattr(mask, "_mmrl_indices", None)
    if known is None or known[0] != _version(mask):
        known = _version(mask), sent(on_host(mask).flatten().nonzero()[:, 0], mask.device)
        mask._mmrl_indices = known
    return known[1]


def selected(values: Tensor, mask: Tensor) -> Tensor:
    """Take ``values[mask]``, [N, *] of values [*mask, *], without a question to the device of its
    own."""
    return values.flatten(0, mask.ndim - 1)[indices(mask)]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Put values [N] where a mask holds: [*mask], 0 elsewhere; the inverse of ``selected``, with
    its gradient."""
    return values.new_zeros(mask.numel()).index_copy(0, indices(mask), values).view(mask.shape)
