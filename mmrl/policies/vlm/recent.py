"""A bounded memory of what was made lately."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class Recent:
    """What was made from objects that are still the same ones, up to ``size`` bytes; the longest
    unused goes first.

    Objects are known by identity and kept alive, so that none can take another's place.
    """

    def __init__(self, size: int):
        self.size = size
        self.used = 0
        self.entries: OrderedDict[int, tuple[Any, Any, int]] = OrderedDict()

    def get(self, key: Any) -> Any:
        """None where nothing is kept."""
        if id(key) not in self.entries:
            return None
        self.entries.move_to_end(id(key))
        return self.entries[id(key)][1]

    def put(self, key: Any, value: Any, cost: int) -> None:
        """``cost``: bytes of ``value``."""
        if cost > self.size:
            return
        self.entries[id(key)] = (key, value, cost)
        self.used += cost
        while self.used > self.size:
            self.used -= self.entries.popitem(last=False)[1][2]
