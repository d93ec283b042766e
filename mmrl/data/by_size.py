"""Draws iterations of pictures that have one size, where those of the data have several."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mmrl.core.types import Prompt
from mmrl.data.prompts import Curriculum, place


class BySize(Curriculum):
    """Draws every iteration from the prompts of one size: an epoch goes through those of each size
    in a random order, in as many iterations as they fill, and the sizes take turns at random.

    What an epoch's last iteration of a size lacks is drawn from its next epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], size_of: Callable[[Prompt], Hashable]):
        super().__init__(prompts)
        self.size_of = size_of
        self.buckets: dict[Hashable, list[Prompt]] = {}
        for prompt in prompts:
            self.buckets.setdefault(size_of(prompt), []).append(prompt)
        self.drawn = self.prompts  # of the size of the last iteration

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        turns = [
            (size, turn)
            for size, bucket in self.buckets.items()
            for turn in range(-(-len(bucket) // count))
        ]
        size, turn = turns[place(iteration, len(turns), seed, "sizes")]
        self.drawn = self.buckets[size]
        epoch = iteration // len(turns)
        whole = count * -(-len(self.drawn) // count)  # of an epoch
        first = epoch * whole + turn * count
        positions = range(first, first + count)
        return [self.drawn[place(p, len(self.drawn), seed, str(size))] for p in positions]

    def pick(self, u: float, iteration: int) -> Prompt:
        return self.drawn[int(u * len(self.drawn))]

    def over(self, prompts: Sequence[Prompt]) -> BySize:
        return BySize(prompts, self.size_of)
