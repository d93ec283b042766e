"""A data source whose prompts the policy writes itself during training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.drawing import Around, Share, Source
from samplers.noise import Rng

# of a row that a new instruction is written after: what its pictures are, and how it is asked
CARRIED = ("system", "images", "image", "video", "view", "fps")


def pairs(saved: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Read waiting instructions: JSON turns tuples into lists."""
    return [(text, entry) for text, entry in saved]


@DATA.register("self_instruct")
class SelfInstruct(Around):
    """Train also on instructions that the policy writes itself, in every iteration (SeRL).

    Fang et al. 2025: in every iteration the current policy writes ``count`` instructions, each from
    ``shots`` examples of ``of``; those too short or too long, about missing media, or similar to
    others are dropped, and the rest are asked in the next iterations, once each. They have no
    reference answer: ``majority_vote`` rewards them, and its ``share`` and ``most`` are the paper's
    filter of what is too hard or too easy. An example with pictures gives a question about them.
    For policies that write text; it wraps other data sources, and must be the outermost. Prompts
    and memory are the same on all processes and saved in checkpoints.

    of: the data source. share: of an iteration's prompts, at most. count: written in an iteration.
    shots: examples for each. least_words, most_words: of an instruction. similarity: the largest
    ROUGE-L with an existing instruction. forbidden: words that refer to media that are not there.
    size: of the memory of instructions.
    """

    memory = {"waiting": pairs, "past": list}

    def __init__(
        self,
        of: Source,
        share: Share = 0.5,
        count: Count = 16,
        shots: Count = 3,
        least_words: Count = 3,
        most_words: Count = 150,
        similarity: Annotated[float, Ge(0), Le(1)] = 0.7,
        forbidden: list[str] = [],  # noqa: B006
        size: Count = 1000,
    ):
        self.share = share
        self.written = count
        self.shots = shots
        self.least_words = least_words
        self.most_words = most_words
        self.similarity = similarity
        self.forbidden = tuple(forbidden)
        self.size = size
        super().__init__(of)

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        # text, and the entry of its example; those asked already stay for `pool`
        self.waiting: list[tuple[str, int]] = []
        self.past: list[str] = []
        self.taken: list[tuple[str, int]] = []

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Replace the iteration's last prompts by waiting instructions. Gives the same until
        ``learn``."""
        plain = super().batch(count, iteration, seed)
        self.taken = self.waiting[: int(self.share * count)]
        return [*plain[: count - len(self.taken)], *(self._prompt(*each) for each in self.taken)]

    def _prompt(self, text: str, entry: int) -> Prompt:
        seed = self.by_entry[entry]
        carried = {key: seed[key] for key in CARRIED if key in seed}
        return {"text": text, **carried, "origin": "self_instruct"}

    def examples(self, iteration: int, seed: int) -> list[list[Prompt]]:
        """Draw the examples for each of the ``count`` new instructions."""
        rng = Rng.of(seed, "self_instruct", iteration)
        entries = list(self.by_entry)
        shots = min(self.shots, len(entries))
        return [
            [self.by_entry[entries[i]] for i in order[:shots].tolist()]
            for order in (rng.fold(n).permutation(len(entries)) for n in range(self.written))
        ]

    def pool(self) -> list[str]:
        """Return all existing instructions, which a new one must not repeat."""
        return [str(p.get("text", "")) for p in self.by_entry.values()] + [
            *self.past,
            *(text for text, _ in self.waiting),
        ]

    def add(self, text: str, entry: int) -> None:
        """Queue a new instruction; beyond ``size`` the oldest are dropped."""
        self.waiting = [*self.waiting, (text, entry)][-self.size :]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        done = set(self.taken)
        self.past = [*self.past, *(text for text, _ in self.taken)][-self.size :]
        self.waiting = [each for each in self.waiting if each not in done]
        self.taken = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waiting = [each for each in self.waiting if each[1] in self.by_entry]
