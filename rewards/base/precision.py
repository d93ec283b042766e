"""Sets what a reward computes in: float32, whatever its caller trains in, unless a lower precision
is set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_lowered: ContextVar[bool] = ContextVar("lowered", default=False)


def is_lowered() -> bool:
    """Tell whether a lower precision is set here."""
    return _lowered.get()


@contextmanager
def own_precision(device_type: str) -> Iterator[None]:
    """Disable autocast inside, so that a score does not depend on the policy's; inside ``lowered``
    its autocast stays."""
    if _lowered.get():
        yield
    else:
        with torch.autocast(device_type, enabled=False):
            yield


@contextmanager
def lowered(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast to ``dtype`` for whatever rewards compute inside."""
    token = _lowered.set(True)
    try:
        with torch.autocast(device_type, dtype):
            yield
    finally:
        _lowered.reset(token)
