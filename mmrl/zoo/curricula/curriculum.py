"""Makes data sources of others: mixtures, hints that fade, hard prompts that come again.

Each draws by iteration and seed, the same on any number of processes; held-out prompts are those of
what is inside.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

from annotated_types import Ge, Le, Lt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural
from mmrl.core.registry import DATA
from mmrl.core.types import Copies, Prompt
from mmrl.data.base import Curriculum, Outcome, batch, pick, place

Weight = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Source = Annotated[Any, DATA]
PIECE = re.compile(r"[^\s>]*[\s>]+|[^\s>]+")  # words, and tags of a table


class Mixed(Curriculum):
    """Holds prompts of several sources, each with its name in ``source``, and the weights in force
    from an iteration on."""

    def __init__(
        self, prompts: Sequence[Prompt], stages: Sequence[tuple[int, Mapping[str, float]]]
    ):
        super().__init__(prompts)
        self.stages = stages
        self.members: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            self.members.setdefault(prompt["source"], []).append(prompt)
        for start, chosen in stages:
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
        """Draw from every source by its own epochs, however little of an iteration it has."""
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

    def over(self, prompts: Sequence[Prompt]) -> Mixed:
        return Mixed(prompts, self.stages)

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


@DATA.register("mixture")
class Mixture:
    """Mix several data sources, with weights that may change on the way (MoDoMoDo, LMM-R1).

    sources: by name; every prompt gets its source's name as ``source``, which rewards can be routed
    by. weights: how much of every iteration each has; by default as many as it has prompts. stages:
    [iteration, weights] pairs: from that iteration on these. Sources without a weight there are not
    drawn.
    """

    train: Mixed
    held_out: list[Prompt]

    def __init__(
        self,
        sources: dict[str, Source],
        weights: dict[str, Weight] | None = None,
        stages: tuple[tuple[Natural, dict[str, Weight]], ...] = (),
    ):
        if not sources:
            raise UserError("sources is empty; name at least one, {name: {vision: {path: ...}}}")
        for chosen in [weights or {}, *(stage_weights for _, stage_weights in stages)]:
            if unknown := set(chosen) - set(sources):
                raise UserError(
                    f"weights are given for {', '.join(sorted(unknown))}; sources: "
                    f"{', '.join(sources)}"
                )
        starts = [start for start, _ in stages]
        if starts != sorted(set(starts)):
            raise UserError(f"stages begin at iterations {starts}; they must rise")
        if weights is None:
            weights = {name: float(len(source.train)) for name, source in sources.items()}
        stages = stages if starts[:1] == [0] else ((0, weights), *stages)
        self.train = Mixed(_named(sources, "train"), stages)
        self.held_out = _named(sources, "held_out")


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


class Around(Curriculum):
    """Wraps ``inner``, a list or another curriculum of the same prompts."""

    def __init__(self, inner: Sequence[Prompt]):
        super().__init__(inner)
        self.inner = inner

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        return batch(self.inner, count, iteration, seed)

    def pick(self, u: float, iteration: int) -> Prompt:
        return pick(self.inner, u, iteration)

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        if isinstance(self.inner, Curriculum):
            return self.inner.copies(prompts, group_size, iteration)
        return group_size

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        if isinstance(self.inner, Curriculum):
            return self.inner.presented(prompt, iteration)
        return prompt

    def reserved(self, count: int, iteration: int) -> list[Prompt]:
        return self.inner.reserved(count, iteration) if isinstance(self.inner, Curriculum) else []

    @property
    def together(self) -> int:
        return self.inner.together if isinstance(self.inner, Curriculum) else 1

    @property
    def measures(self) -> frozenset[str]:
        return self.inner.measures if isinstance(self.inner, Curriculum) else frozenset()

    def see_update(self, metrics: Mapping[str, float]) -> None:
        if isinstance(self.inner, Curriculum):
            self.inner.see_update(metrics)

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        if isinstance(self.inner, Curriculum):
            self.inner.see(name, values)

    def predict_by(self, predict: Callable[[Sequence[Prompt]], list[float]]) -> None:
        if isinstance(self.inner, Curriculum):
            self.inner.predict_by(predict)

    def rescoring(self, iteration: int) -> int:
        return self.inner.rescoring(iteration) if isinstance(self.inner, Curriculum) else 0

    def renew(self, outcomes: Sequence[Outcome], diversity: Mapping[int, float]) -> None:
        if isinstance(self.inner, Curriculum):
            self.inner.renew(outcomes, diversity)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        if isinstance(self.inner, Curriculum):
            self.inner.learn(outcomes)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if isinstance(self.inner, Curriculum) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.inner, Curriculum):
            self.inner.load_state_dict(state)


def over(inner: Sequence[Prompt], prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return ``inner`` with these of its prompts alone, still a curriculum if it is one."""
    return inner.over(prompts) if isinstance(inner, Curriculum) else list(prompts)


def with_entries(inner: Sequence[Prompt]) -> Sequence[Prompt]:
    """Number the prompts: ``entry`` is their place in the data, by which outcomes are told."""
    if all("entry" in prompt for prompt in inner):
        return inner
    return over(inner, [{**prompt, "entry": number} for number, prompt in enumerate(inner)])


class Hinted(Around):
    """Draws prompts with the beginning of their ground truth already written, which the model
    completes."""

    def __init__(self, inner: Sequence[Prompt], hints: Hints):
        super().__init__(inner)
        self.hints = hints

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        return [
            self.hints.on(prompt, iteration) for prompt in super().batch(count, iteration, seed)
        ]

    def pick(self, u: float, iteration: int) -> Prompt:
        return self.hints.on(super().pick(u, iteration), iteration)

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        return self.hints.on(super().presented(prompt, iteration), iteration)

    def over(self, prompts: Sequence[Prompt]) -> Hinted:
        return Hinted(over(self.inner, prompts), self.hints)


@DATA.register("hints")
class Hints:
    """Begin the answer of training prompts for the model: hint completion (Table-R1).

    of: the data source. field: of the prompt, a text or a list of steps. share: how much of it is
    given, in whole steps, lines or words, never all. over: iterations in which that falls to 0, on
    a line; 0: it stays. before: is written before it, such as "<answer>".
    """

    train: Hinted
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        field: str = "answer",
        share: Annotated[float, Ge(0), Lt(1)] = 0.5,
        over: Natural = 0,
        before: str = "",
    ):
        self.field = field
        self.share = share
        self.period = over
        self.before = before
        self.train = Hinted(of.train, self)
        self.held_out = list(of.held_out)
        if bare := sum(prompt.get(field) is None for prompt in self.train):
            warnings.warn(
                f"hints: {bare} of {len(self.train)} prompts have no {field!r} and get none",
                stacklevel=2,
            )

    def on(self, prompt: Prompt, iteration: int) -> Prompt:
        """Return the prompt with ``prefill``, what its answer begins with."""
        left = 1.0 if not self.period else max(0.0, 1 - iteration / self.period)
        whole = pieces(prompt.get(self.field))
        hints = (
            whole[: min(int(self.share * left * len(whole) + 1e-9), len(whole) - 1)]
            if whole
            else []
        )
        return {**prompt, "prefill": self.before + "".join(hints)} if hints else prompt


def pieces(value: Any) -> list[str]:
    """Split a list into steps, else a text into lines or words and tags; joined they are the
    whole."""
    if isinstance(value, (list, tuple)):
        return [f"{step[0] if isinstance(step, (list, tuple)) else step}\n" for step in value]
    text = "" if value is None else str(value)
    lines = text.splitlines(keepends=True)
    return lines if len(lines) > 1 else PIECE.findall(text)


class Replayed(Around):
    """Draws a share of every iteration from prompts that were hard when last sampled, the longest
    ago first."""

    def __init__(self, inner: Sequence[Prompt], replay: Replay):
        super().__init__(inner)
        self.replay = replay
        self.named = {prompt["entry"]: prompt for prompt in inner}
        self.waiting: list[int] = []  # entries of hard prompts
        self.again: list[int] = []  # those of them that this iteration samples again

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Replace the last of the iteration's prompts by those that wait. Repeatable until
        ``learn``."""
        fresh = super().batch(count, iteration, seed)
        again = [self.presented(prompt, iteration) for prompt in self.reserved(count, iteration)]
        return [*fresh[: count - len(again)], *again]

    def reserved(self, count: int, iteration: int) -> list[Prompt]:
        self.again = self.waiting[: int(self.replay.share * count)]
        return [self.named[entry] for entry in self.again]

    def over(self, prompts: Sequence[Prompt]) -> Replayed:
        return Replayed(over(self.inner, prompts), self.replay)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        queued = {*self.again, *(outcome.entry for outcome in outcomes)}
        hard = [outcome.entry for outcome in outcomes if self.replay.hard(outcome)]
        left = [entry for entry in self.waiting if entry not in queued]
        self.waiting = [*left, *dict.fromkeys(hard)][-self.replay.size :]
        self.again = []

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": self.waiting, "inner": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = [entry for entry in state.get("waiting", ()) if entry in self.named]
        self.again = []
        super().load_state_dict(state.get("inner", {}))


@DATA.register("replay")
class Replay:
    """Repeat prompts that were hard, with new answers: AVATAR's replay (Kulkarni et al.
    2025).

    of: the data source. share: of every iteration's prompts that are repeated, at most. below: a
    group with a lower mean reward was hard. solved: and one whose rewards are all equal, and lower
    than this. size: of the memory; the oldest leave it. It is saved in checkpoints.
    """

    train: Replayed
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        share: Share = 0.25,
        below: float = 0.5,
        solved: float = 1.0,
        size: Count = 1000,
    ):
        self.share = share
        self.below = below
        self.solved = solved
        self.size = size
        self.train = Replayed(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def hard(self, outcome: Outcome) -> bool:
        return outcome.mean < self.below or (outcome.flat and outcome.mean < self.solved)
