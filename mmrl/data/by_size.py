"""Draws iterations of images of one size, if those of the data have several."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mmrl.core.types import Prompt
from mmrl.data.base import Curriculum, place


class BySize(Curriculum):
    """Draws every iteration from the prompts of one size: an epoch goes through those of each size
    in a random order, in as many iterations as they fill, and the sizes alternate at random.

    What an epoch's last iteration of a size lacks are the epoch's first prompts of that size.
    """

    def __init__(self, prompts: Sequence[Prompt], size_of: Callable[[Prompt], Hashable]):
        self.prompts = list(prompts)
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
        number = len(self.drawn)
        epoch = iteration // len(turns) * number
        positions = (epoch + slot % number for slot in range(turn * count, (turn + 1) * count))
        return [self.drawn[place(position, number, seed, str(size))] for position in positions]

    def pick(self, u: float, iteration: int) -> Prompt:
        return self.drawn[int(u * len(self.drawn))]

    def restricted(self, prompts: Sequence[Prompt]) -> BySize:
        return BySize(prompts, self.size_of)
