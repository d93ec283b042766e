"""Locks models that several rewards share, since rewards run in threads.

Some models keep state during generation (Qwen2-VL's picture positions), and fast tokenizers are not
re-entrant while they pad.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of this model, one per model object."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())
