"""Whether FSDP2 holds a module or tensor. Asking does not import it, which takes a second: before, it holds nothing."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Is it a DTensor?"""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def shards(module: nn.Module) -> bool:
    """Does FSDP2 gather and free this module's parameters?"""
    return _is(module, "torch.distributed.fsdp", "FSDPModule")


def _is(thing: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)
