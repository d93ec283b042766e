"""The base of the curricula here, each of which wraps another data source.

Each may change how a prompt is asked (``asked``) and remember what it needs (``begin`` and
``memory``); ``Counted`` remembers how prompts were rewarded, ``Chosen`` picks those of the highest
``score``. A draw is a function of iteration, seed and memory: the same on all processes, and after
a resume.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Copies, Prompt
from mmrl.data.base import Curriculum, Outcome, as_curriculum, batch
from mmrl.zoo.curricula.statistics import PromptStatistics
from samplers.noise import Rng

Source = Annotated[Any, DATA]
Share = Annotated[float, Ge(0), Le(1)]
Portion = Annotated[float, Gt(0), Le(1)]


@dataclass(eq=False)
class Around(Curriculum):
    """Draws like another data source; its options are fields.

    of: the data source.
    """

    of: InitVar[Source]

    # attributes that checkpoints keep, and what reads them from JSON
    memory: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def __post_init__(self, of: Source) -> None:
        self.held_out: list[Prompt] = list(of.held_out)
        self.begin(with_entries(of.train))

    @property
    def train(self) -> Sequence[Prompt]:
        return self

    def begin(self, inner: Sequence[Prompt]) -> None:
        """Start with prompts, each with its ``entry``, without history."""
        self.inner = as_curriculum(inner)
        self.prompts = list(inner)
        self.by_entry = {prompt["entry"]: prompt for prompt in self.prompts}

    def restricted(self, prompts: Sequence[Prompt]) -> Curriculum:
        part = copy.copy(self)
        part.begin(self.inner.restricted(prompts))
        return part

    def asked(self, prompt: Prompt, iteration: int) -> Prompt:
        """Modify how this iteration asks a prompt; earlier modifications stay."""
        return prompt

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        return [self.asked(p, iteration) for p in batch(self.inner, count, iteration, seed)]

    def pick(self, u: float, iteration: int) -> Prompt:
        return self.asked(self.inner.pick(u, iteration), iteration)

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        return self.asked(self.inner.presented(prompt, iteration), iteration)

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        return self.inner.copies(prompts, group_size, iteration)

    def reserved(self, count: int, iteration: int) -> list[Prompt]:
        return self.inner.reserved(count, iteration)

    @property
    def prompts_per_question(self) -> int:
        return self.inner.prompts_per_question

    @property
    def measures(self) -> frozenset[str]:
        return self.inner.measures

    def see_update(self, metrics: Mapping[str, float]) -> None:
        self.inner.see_update(metrics)

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        self.inner.see(name, values)

    def predict_by(self, predict: Callable[[Sequence[Prompt]], list[float]]) -> None:
        self.inner.predict_by(predict)

    def rescoring(self, iteration: int) -> int:
        return self.inner.rescoring(iteration)

    def renew(self, outcomes: Sequence[Outcome], diversity: Mapping[int, float]) -> None:
        self.inner.renew(outcomes, diversity)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self.inner.learn(outcomes)

    def state_dict(self) -> dict[str, Any]:
        memory = {name: copy.copy(vars(self)[name]) for name in self.memory}
        return memory | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory; an empty state, of a run without this curriculum, leaves it empty.
        UserError for a state of other parts."""
        if not state:
            return
        if changed := state.keys() ^ self.state_dict().keys():
            raise UserError(
                f"the checkpoint is of an earlier version, which kept the memory of the data "
                f"({', '.join(sorted(changed))}) elsewhere: export its weights and begin a new run "
                f"with start: FOLDER"
            )
        for name, read in self.memory.items():
            setattr(self, name, read(state[name]))
        self.inner.load_state_dict(state["inner"])


class Counted(Around):
    """Remembers how every prompt was rewarded."""

    decay: float = 1.0  # of earlier answers at a visit
    drift: float = 1.0  # of all answers at an iteration without a visit

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.statistics = PromptStatistics(self.decay, drift=self.drift)

    def graded(self, rewards: Sequence[float]) -> tuple[float, ...]:
        """Turn rewards into what the statistics count."""
        return tuple(rewards)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        self.statistics.learn(self._graded(outcomes))

    def _graded(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        return [outcome._replace(rewards=self.graded(outcome.rewards)) for outcome in outcomes]

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self.statistics.state_dict()} | super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.statistics.load_state_dict(state.get("statistics", {}))
        super().load_state_dict(state)


class Chosen(Counted):
    """Draws the prompts of the highest ``score`` among those that compete (``pool``)."""

    name: ClassVar[str]  # of its random numbers
    # candidates per prompt asked, drawn as ``of`` does; None: all prompts compete
    candidates: float | None = None

    def score(self, prompts: Sequence[Prompt], rng: Rng) -> Sequence[float]:
        """Score how much each prompt is worth asking. ``rng`` belongs to the iteration."""
        return [0.0] * len(prompts)

    def pool(self, count: int, iteration: int, seed: int) -> Sequence[Prompt]:
        if self.candidates is None:
            return self.prompts
        return self.drawn(int(self.candidates * count), iteration, seed)

    def choose(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        prompts = self.pool(count, iteration, seed)
        return best(prompts, self.score(prompts, self.rng(iteration, seed)), count)

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        chosen = self.choose(count, iteration, seed)
        if held := self.reserved(count, iteration):
            entries = {prompt["entry"] for prompt in held}
            rest = sorted(chosen, key=lambda prompt: prompt["entry"] in entries)
            chosen = [*rest[: count - len(held)], *held]
        return [self.presented(prompt, iteration) for prompt in chosen]

    def drawn(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Draw ``count`` prompts as ``of`` does, each once."""
        prompts = batch(self.inner, count, iteration, seed)
        return list({prompt["entry"]: prompt for prompt in prompts}.values())

    def rng(self, iteration: int, seed: int) -> Rng:
        return Rng.of(seed, self.name, iteration)

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        super().see(name, values)
        if name == "diversity":
            self.statistics.see_diversity(values)

    def renew(self, outcomes: Sequence[Outcome], diversity: Mapping[int, float]) -> None:
        super().renew(outcomes, diversity)
        self.statistics.renew(self._graded(outcomes))
        self.statistics.see_diversity(diversity)


def best(prompts: Sequence[Prompt], scores: Sequence[float], count: int) -> list[Prompt]:
    """Take the prompts of the highest scores, the first of equals first; repeat them all where
    there are fewer than ``count``."""
    order = sorted(range(len(prompts)), key=lambda i: -scores[i])
    return [prompts[order[i % len(order)]] for i in range(count)]


def uniform(prompts: Sequence[Prompt], rng: Rng) -> Tensor:
    """Draw a number in (0, 1) for every prompt, by its entry: [n] float64."""
    return rng.uniform(torch.tensor([prompt["entry"] for prompt in prompts]))


def by_weight(prompts: Sequence[Prompt], weights: Tensor, rng: Rng) -> list[float]:
    """Score prompts by u^(1 / w), so that the highest are a weighted sample without replacement
    (Efraimidis and Spirakis)."""
    keys: list[float] = (uniform(prompts, rng).log() / weights.clamp_min(1e-9)).tolist()
    return keys


def keyed_by_entry(saved: Mapping[Any, Any]) -> dict[int, Any]:
    """Read what was saved by prompt: JSON turns their entries into strings."""
    return {int(entry): value for entry, value in saved.items()}


def subset(inner: Sequence[Prompt], prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return ``inner`` with only these of its prompts, still a curriculum if it is one."""
    return inner.restricted(prompts) if isinstance(inner, Curriculum) else list(prompts)


def with_entries(inner: Sequence[Prompt]) -> Sequence[Prompt]:
    """Number the prompts: ``entry`` is their index in the data, which identifies outcomes."""
    if all("entry" in prompt for prompt in inner):
        return inner
    return subset(inner, [{**prompt, "entry": number} for number, prompt in enumerate(inner)])
