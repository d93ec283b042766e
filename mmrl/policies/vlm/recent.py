"""Keeps recently computed values within a bounded memory."""

from __future__ import annotations

from typing import Any

from cachetools import LRUCache


class Recent:
    """Caches what was computed from objects, up to ``size`` bytes; the least recently used goes
    first.

    Objects are known by identity and kept alive, so that none can take another's place.
    """

    def __init__(self, size: int):
        self.entries: LRUCache[int, tuple[Any, Any, int]] = LRUCache(
            size, getsizeof=lambda entry: entry[2]
        )

    def get(self, key: Any) -> Any:
        """Return what was computed from ``key``, None where that was dropped."""
        return self.entries.get(id(key), (key, None))[1]

    def put(self, key: Any, value: Any, cost: int) -> None:
        """Store ``value``, which takes ``cost`` bytes, unless it alone would be too large."""
        if cost <= self.entries.maxsize:
            self.entries[id(key)] = (key, value, cost)
