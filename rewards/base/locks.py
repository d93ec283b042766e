"""Lets one caller at a time use a model that several rewards share, as they run in threads.

Generation keeps state in some models (the positions of Qwen2-VL's pictures), and fast tokenizers
refuse a second caller while they pad.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of this model: the same one for everybody who holds it."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())
