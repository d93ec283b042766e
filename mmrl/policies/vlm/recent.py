"""A bounded memory of what was made lately."""

from __future__ import annotations

from typing import Any

from cachetools import LRUCache


class Recent:
    """What was made from objects that are still the same ones, up to ``size`` bytes; the longest
    unused goes first.

    Objects are known by identity and kept alive, so that none can take another's place.
    """

    def __init__(self, size: int):
        self.entries = LRUCache(size, getsizeof=lambda entry: entry[2])

    def get(self, key: Any) -> Any:
        """Return what was made of ``key``, None where that is forgotten."""
        return self.entries.get(id(key), (key, None))[1]

    def put(self, key: Any, value: Any, cost: int) -> None:
        """Remember ``value``, which takes ``cost`` bytes; not what alone would be too large."""
        if cost <= self.entries.maxsize:
            self.entries[id(key)] = (key, value, cost)
