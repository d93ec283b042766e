"""Data sources made of others: mixtures, hints that fade, hard prompts that are repeated.

Each draws by iteration and seed, the same on any number of processes; held-out prompts are those of
the wrapped sources.
"""

from __future__ import annotations

import copy
import re
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from itertools import accumulate
from typing import Annotated, Any

from annotated_types import Ge, Lt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Curriculum, Outcome, place
from mmrl.zoo.curricula.drawing import Around, Share, Source

Weight = Annotated[float, Ge(0)]
PIECE = re.compile(r"[^\s>]*[\s>]+|[^\s>]+")  # words, and tags of a table


@DATA.register("mixture")
@dataclass(eq=False)
class Mixture(Curriculum):
    """Mix several data sources, with weights that may change during training (MoDoMoDo, LMM-R1).

    sources: by name; every prompt gets its source's name as ``source``, by which rewards can be
    routed. weights: relative shares of every iteration; by default the number of prompts. stages:
    [iteration, weights] pairs: the weights from that iteration on. Sources without a weight there
    are not drawn.
    """

    sources: InitVar[dict[str, Source]]
    weights: dict[str, Weight] | None = None
    stages: tuple[tuple[Natural, dict[str, Weight]], ...] = ()

    def __post_init__(self, sources: dict[str, Source]) -> None:
        if not sources:
            raise UserError("sources is empty; name at least one, {name: {vision: {path: ...}}}")
        for chosen in [self.weights or {}, *(weights for _, weights in self.stages)]:
            if unknown := set(chosen) - set(sources):
                raise UserError(
                    f"weights are given for {', '.join(sorted(unknown))}; sources: "
                    f"{', '.join(sources)}"
                )
        starts = [start for start, _ in self.stages]
        if starts != sorted(set(starts)):
            raise UserError(f"stages begin at iterations {starts}; they must rise")
        weights = self.weights
        if weights is None:
            weights = {name: float(len(source.train)) for name, source in sources.items()}
        if starts[:1] != [0]:
            self.stages = ((0, weights), *self.stages)
        self.begin(_named(sources, "train"))
        self.held_out = _named(sources, "held_out")

    @property
    def train(self) -> Sequence[Prompt]:
        return self

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Take the prompts of all sources, each with its ``source``."""
        self.prompts = list(prompts)
        self.members: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            self.members.setdefault(prompt["source"], []).append(prompt)
        for start, chosen in self.stages:
            if not any(chosen.get(name, 0) > 0 for name in self.members):
                raise UserError(
                    f"mixture: from iteration {start} on no source with prompts has a "
                    f"weight above 0"
                )
        self.known: dict[tuple[int, int], tuple[dict[str, float], dict[str, int]]] = {}

    def shares(self, iteration: int) -> dict[str, float]:
        """Return the shares, sum 1, of sources with prompts in the stage of ``iteration``."""
        chosen = [weights for start, weights in self.stages if start <= iteration][-1]
        positive = {
            name: chosen.get(name, 0.0) for name in self.members if chosen.get(name, 0.0) > 0
        }
        return {name: weight / sum(positive.values()) for name, weight in positive.items()}

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Draw from every source by its own epochs, however small its share."""
        _, taken = self._before(count, iteration)
        prompts = []
        taken = dict(taken)
        for name in self._turns(count, iteration):
            member = self.members[name]
            prompts.append(member[place(taken.get(name, 0), len(member), seed, name)])
            taken[name] = taken.get(name, 0) + 1
        return prompts

    def pick(self, u: float, iteration: int) -> Prompt:
        shares = self.shares(iteration)
        names = list(shares)
        ends = list(accumulate(shares.values()))
        at = min(bisect_right(ends, u), len(names) - 1)
        member = self.members[names[at]]
        inside = (u - (ends[at] - shares[names[at]])) / shares[names[at]]
        return member[min(max(int(inside * len(member)), 0), len(member) - 1)]

    def restricted(self, prompts: Sequence[Prompt]) -> Mixture:
        part = copy.copy(self)
        part.begin(prompts)
        return part

    def _turns(self, count: int, iteration: int) -> list[str]:
        """Name the source of each of ``count`` draws: always the one furthest behind its share."""
        credit = dict(self._before(count, iteration)[0])
        return _advance(credit, self.shares(iteration), count)

    def _before(self, count: int, iteration: int) -> tuple[dict[str, float], dict[str, int]]:
        """Return credits and numbers of prompts taken before an iteration, counted from the first
        one on."""
        start = iteration
        while start and (count, start) not in self.known:
            start -= 1
        credit, taken = self.known.get((count, start), ({}, {}))
        for step in range(start, iteration):
            credit = dict(credit)
            taken = dict(taken)
            for name in _advance(credit, self.shares(step), count):
                taken[name] = taken.get(name, 0) + 1
            self.known = {(count, step + 1): (credit, taken)}
        return credit, taken


def _advance(credit: dict[str, float], shares: Mapping[str, float], count: int) -> list[str]:
    """Name the sources of ``count`` draws, and update the credits."""
    names = []
    for _ in range(count):
        for name, share in shares.items():
            credit[name] = credit.get(name, 0.0) + share
        name = max(shares, key=lambda one: credit[one])
        credit[name] -= 1
        names.append(name)
    return names


def _named(sources: Mapping[str, Any], part: str) -> list[Prompt]:
    for name, source in sources.items():
        if isinstance(getattr(source, part), Curriculum):
            raise UserError(
                f"sources.{name}: a mixture is made of plain sources; put replay or hints around it"
            )
    return [
        {**prompt, "source": name}
        for name, source in sources.items()
        for prompt in getattr(source, part)
    ]


@DATA.register("hints")
@dataclass(eq=False)
class Hints(Around):
    """Prefill the answers to training prompts with a part of the solution: hints (Table-R1).

    of: the data source. field: the prompt's field with the solution, a text or a list of steps.
    share: how much of it is given, in whole steps, lines or words, never all. over: iterations over
    which the share falls linearly to 0; 0: it stays. before: a text put before it, such as
    "<answer>".
    """

    field: str = "answer"
    share: Annotated[float, Ge(0), Lt(1)] = 0.5
    over: Natural = 0
    before: str = ""

    def __post_init__(self, of: Source) -> None:
        super().__post_init__(of)
        if bare := sum(prompt.get(self.field) is None for prompt in self.prompts):
            warnings.warn(
                f"hints: {bare} of {len(self)} prompts have no {self.field!r} and get none",
                stacklevel=2,
            )

    def asked(self, prompt: Prompt, iteration: int) -> Prompt:
        """Return the prompt with ``prefill``, the beginning of its answer."""
        left = 1.0 if not self.over else max(0.0, 1 - iteration / self.over)
        whole = pieces(prompt.get(self.field))
        if not whole:
            return prompt
        hints = whole[: min(int(self.share * left * len(whole) + 1e-9), len(whole) - 1)]
        return {**prompt, "prefill": self.before + "".join(hints)} if hints else prompt


def pieces(value: Any) -> list[str]:
    """Split a list into steps, or a text into lines or words and tags, which join to the whole."""
    if isinstance(value, (list, tuple)):
        return [f"{step[0] if isinstance(step, (list, tuple)) else step}\n" for step in value]
    text = "" if value is None else str(value)
    lines = text.splitlines(keepends=True)
    return lines if len(lines) > 1 else PIECE.findall(text)


@DATA.register("replay")
@dataclass(eq=False)
class Replay(Around):
    """Repeat hard prompts, with new answers: AVATAR's replay (Kulkarni et al. 2025).

    of: the data source. share: at most this share of an iteration's prompts are repeated ones.
    below: a group with a lower mean reward was hard. solved: so was one whose rewards are all equal
    and lower than this. size: of the memory, which drops the oldest and is saved in checkpoints.
    """

    share: Share = 0.25
    below: float = 0.5
    solved: float = 1.0
    size: Count = 1000

    memory = {"waiting": list}

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.waiting: list[int] = []  # entries of hard prompts, the oldest first
        self.again: list[int] = []  # those repeated in this iteration

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Replace the iteration's last prompts by waiting ones. Gives the same until ``learn``."""
        fresh = super().batch(count, iteration, seed)
        again = [self.presented(prompt, iteration) for prompt in self.reserved(count, iteration)]
        return [*fresh[: count - len(again)], *again]

    def reserved(self, count: int, iteration: int) -> list[Prompt]:
        waiting = [entry for entry in self.waiting if entry in self.by_entry]
        self.again = waiting[: int(self.share * count)]
        return [self.by_entry[entry] for entry in self.again]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        queued = {*self.again, *(outcome.entry for outcome in outcomes)}
        hard = [outcome.entry for outcome in outcomes if self.hard(outcome)]
        left = [entry for entry in self.waiting if entry not in queued]
        self.waiting = [*left, *dict.fromkeys(hard)][-self.size :]
        self.again = []

    def hard(self, outcome: Outcome) -> bool:
        return outcome.mean < self.below or (outcome.flat and outcome.mean < self.solved)
