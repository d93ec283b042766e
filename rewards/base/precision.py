"""Sets the precision of rewards: float32, whatever the policy trains in, unless lowered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_lowered: ContextVar[bool] = ContextVar("lowered", default=False)


def is_lowered() -> bool:
    """Tell whether a lower precision is set."""
    return _lowered.get()


@contextmanager
def own_precision(device_type: str) -> Iterator[None]:
    """Disable the policy's autocast inside; inside ``lowered``, that autocast stays."""
    if _lowered.get():
        yield
    else:
        with torch.autocast(device_type, enabled=False):
            yield


@contextmanager
def lowered(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast rewards to ``dtype`` inside."""
    token = _lowered.set(True)
    try:
        with torch.autocast(device_type, dtype):
            yield
    finally:
        _lowered.reset(token)
