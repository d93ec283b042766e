"""Keeps recently computed values within a bounded memory."""

from __future__ import annotations

from typing import Any

from cachetools import LRUCache


class Recent:
    """LRU cache of values computed from objects, up to ``size`` bytes.

    Objects are compared by identity and kept alive, so that no id is reused.
    """

    def __init__(self, size: int):
        self.entries: LRUCache[int, tuple[Any, Any, int]] = LRUCache(
            size, getsizeof=lambda entry: entry[2]
        )

    def get(self, key: Any) -> Any:
        """Return the value computed from ``key``; None if it was evicted."""
        return self.entries.get(id(key), (key, None))[1]

    def put(self, key: Any, value: Any, cost: int) -> None:
        """Store ``value``, which takes ``cost`` bytes, unless it alone would be too large."""
        if cost <= self.entries.maxsize:
            self.entries[id(key)] = (key, value, cost)
