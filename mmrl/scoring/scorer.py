"""Scores a batch with all rewards of a run: in parallel threads, at once or in parts as they
arrive."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mmrl.core.distributed import all_gather_json
from mmrl.core.errors import UserError, suggest
from mmrl.core.handling import Handling
from mmrl.core.types import Media, Prompt, Reward, Rewards
from mmrl.scoring.attempt import Attempt, Budget, as_values, brief
from mmrl.scoring.handling import Handled
from mmrl.scoring.returned import left_out
from mmrl.scoring.worker import Worker
from rewards.base.groups import alike
from rewards.card import card_of, method_of

log = logging.getLogger(__name__)
Value = TypeVar("Value")
Part = tuple[Media, list[Prompt], Sequence[int]]  # samples, their prompts and groups


@dataclass
class Failures:
    """Counts what one reward could not score since the run began."""

    count: int = 0  # samples
    cause: str = ""  # of the last one: exception, message, file:line
    prompt: str = ""  # of the last one
    kinds: set[str] = field(default_factory=set)  # causes that have been logged


class Scorer:
    """Maps ``(media, prompts) -> Rewards``, with NaN where a sample could not be scored.

    Several rewards are computed in parallel, each in its own thread, so that a slow server does not
    wait for a network; each sees its samples in order, so that the values are the same as in
    sequence.

    Args:
        rewards: by name, each ``(media, prompts) -> [B]``; lists and numpy arrays of numbers are
            accepted too. A reward judges each sample by itself unless its card says otherwise:
            after a failure it sees parts of the batch.
        weights: by name; 1 where none is given.
        max_failures: the largest share of a batch that a reward may fail to score, 0 to 1. One of
            weight 0 is only watched: it may fail for all.
        handling: by name: device, precision, batch size, offloading and cache of a reward.

    Attributes:
        failures: name -> ``Failures``, over all calls so far; empty while all is well.
        seconds: name -> seconds spent in that reward, over all calls so far.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float] | None = None,
        max_failures: float = 0.5,
        handling: Mapping[str, Handling] = {},
    ):
        if not rewards:
            raise UserError(
                "no reward is given; name at least one, such as `reward: {clip_score: 1.0}`"
            )
        for name in weights or {}:
            if name not in rewards:
                raise UserError(
                    f"a weight is given for reward {name!r}, which is not used; "
                    f"{suggest(name, rewards)}"
                )
        if not 0 <= max_failures <= 1:
            raise UserError(
                f"max_failures is a share of the batch between 0 and 1, got {max_failures}"
            )
        self.rewards = {
            name: Handled.of(reward, handling.get(name), name) for name, reward in rewards.items()
        }
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}
        self.max_failures = max_failures
        self.failures: dict[str, Failures] = {}
        self.seconds = dict.fromkeys(rewards, 0.0)
        for name, reward in self.rewards.items():
            check_handling(name, reward)
        self.workers = {name: Worker(f"reward {name}") for name in rewards}
        self._remembered: dict[str, dict[str, list[float]]] = {}

    @classmethod
    def nothing(cls) -> Scorer:
        """Make a scorer without rewards, for training without any: it is never called."""
        scorer = cls.__new__(cls)
        scorer.rewards, scorer.weights, scorer.workers = {}, {}, {}
        scorer.failures, scorer.seconds, scorer.max_failures = {}, {}, 0.0
        scorer._remembered = {}
        return scorer

    def __call__(
        self, media: Media, prompts: Sequence[Prompt], groups: Sequence[int] | Tensor | None = None
    ) -> Rewards:
        """Score B samples; the values are float32 [B] (of a step reward [B, K]) on the CPU.

        ``groups`` [B]: equal numbers are answers to one prompt; without it, neighbours with one
        prompt are a group.

        Raises:
            UserError: more than ``max_failures`` of the batch cannot be scored, or a reward does
                not keep its contract.
        """
        stream = self.stream(len(prompts), beside=len(self.rewards) > 1)
        stream.put(media, prompts, groups)
        return stream.result()

    def differentiable(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Return the weighted sum [B] of the rewards with its gradient to ``media``: no sample left
        out, nothing cached.

        Raises:
            UserError: a reward with a weight does not declare that it is differentiable.
        """
        total = media.new_zeros(len(media))
        for name, weight in self.weights.items():
            if not weight:
                continue
            reward = self.rewards[name].reward
            if not card_of(reward).differentiable:
                raise UserError(
                    f"reward {name!r} has no gradient, which this objective follows; use "
                    f"a differentiable one "
                    "(docs/rewards.md), or declare your own with @card(differentiable=True)"
                )
            total = total + weight * reward(media, prompts).to(media)
        return total

    def stream(self, rows: int, beside: bool = True) -> Stream:
        """Score a batch of ``rows`` samples in parts, as they arrive; ``beside``: in background
        threads."""
        return Stream(self, rows, beside)

    def score(
        self, name: str, media: Media, prompts: list[Prompt], groups: Sequence[int], budget: Budget
    ) -> Tensor:
        """Score one part with one reward, counted and timed."""
        attempt = Attempt(name, self.rewards[name], media, prompts, groups, budget)
        start = time.perf_counter()
        try:
            with torch.no_grad():
                return attempt.score()
        finally:
            self.seconds[name] += time.perf_counter() - start
            self._report(name, attempt)

    def at_once(self, name: str, parts: Sequence[Part]) -> Tensor:
        """Return [B] of a reward that sees all parts in one call; a collective call."""
        media = together([part[0] for part in parts])
        prompts = [
            {**prompt, "group": group}
            for _, some, groups in parts
            for prompt, group in zip(some, groups)
        ]
        start = time.perf_counter()
        try:
            with torch.no_grad():
                values = self.rewards[name].placed(media, prompts, all_gather_json)
                return as_values(values, len(prompts), name, "batch")
        finally:
            self.seconds[name] += time.perf_counter() - start

    def remember(self) -> None:
        """Let rewards with memory keep what they saw in their last call, a call of training."""
        self._remembered = {name: r.sub_scores.taken() for name, r in self.rewards.items()}
        for reward in self.rewards.values():
            if remember := method_of(reward, "remember"):
                remember()

    def validated(self) -> None:
        """Let rewards that are guided by evaluations keep what they saw in their last call, an
        evaluation."""
        for reward in self.rewards.values():
            if validated := method_of(reward, "validated"):
                validated()

    def validates(self) -> bool:
        """Tell whether a reward is guided by evaluations."""
        return any(
            getattr(reward, "measured", "") == "validation" for reward in self.rewards.values()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every reward that has one, by name, as values that JSON can hold."""
        states = {
            name: cast(Any, reward.reward).state_dict()
            for name, reward in self.rewards.items()
            if keeps_state(reward.reward)
        }
        for name, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"reward {name!r}: its state_dict() returns what a checkpoint cannot hold "
                    f"({error}); return numbers, texts, lists and dicts of them"
                ) from error
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, reward in self.rewards.items():
            if keeps_state(reward.reward) and name in state:
                cast(Any, reward.reward).load_state_dict(state[name])

    def sub_scores(self) -> dict[str, list[float]]:
        """Return sum and count of the sub-scores ``<reward>/<name>`` of the last samples of
        training."""
        return {
            f"{name}/{part}": sums
            for name, parts in self._remembered.items()
            for part, sums in parts.items()
        }

    def counters(self) -> dict[str, float]:
        """Return what rewards count themselves (requests, tokens, costs), ``<reward>/<counter>``
        since the run began."""
        methods = {
            name: method_of(handled.reward, "counters") for name, handled in self.rewards.items()
        }
        numbers = {name: counts() for name, counts in methods.items() if counts}
        return {
            f"{name}/{key}": number
            for name, counts in numbers.items()
            for key, number in counts.items()
        }

    def _report(self, name: str, attempt: Attempt) -> None:
        for row, cause in attempt.causes.items():
            failures = self.failures.setdefault(name, Failures())
            failures.count += 1
            failures.cause = cause.text
            failures.prompt = brief(attempt.prompts[row])
            if cause.kind not in failures.kinds:
                failures.kinds.add(cause.kind)
                log.warning(
                    "reward %r could not score a sample, which is left out: %s; prompt: "
                    "%s (shown once for this cause)",
                    name,
                    failures.cause,
                    failures.prompt,
                )


class Stream:
    """Scores a batch that arrives in parts. Every part holds whole groups; the parts of a reward
    are scored in order."""

    def __init__(self, scorer: Scorer, rows: int, beside: bool):
        self.scorer = scorer
        self.beside = beside
        share = {
            name: scorer.max_failures if weight else 1.0 for name, weight in scorer.weights.items()
        }
        self.budgets = {name: Budget(rows, share[name] * rows) for name in scorer.rewards}
        cards = {name: reward.card for name, reward in scorer.rewards.items()}
        self.parts: dict[str, list[Future[Tensor]]] = {
            name: [] for name in cards if cards[name].of != "batch"
        }
        self.whole: dict[str, list[Part]] = {
            name: [] for name in cards if cards[name].of == "batch"
        }
        self.groups: list[int] = []
        self._resident = ExitStack()
        for reward in scorer.rewards.values():
            reward.sub_scores.taken()  # of another batch
        for reward in scorer.rewards.values():
            self._resident.enter_context(reward.resident())

    def put(
        self, media: Media, prompts: Sequence[Prompt], groups: Sequence[int] | Tensor | None = None
    ) -> None:
        """Hand over the next samples. Without threads they are scored before it returns."""
        prompts = list(prompts)
        if len(media) != len(prompts):
            raise ValueError(f"{len(media)} samples but {len(prompts)} prompts")
        numbers = neighbours(prompts) if groups is None else torch.as_tensor(groups).tolist()
        self.groups += numbers
        for held in self.whole.values():
            held.append((media, prompts, numbers))
        for name, done in self.parts.items():
            job = self.scorer.score, name, media, prompts, numbers, self.budgets[name]
            done.append(self.scorer.workers[name].submit(*job) if self.beside else now(*job))

    def result(self) -> Rewards:
        """Return the values of all parts in the order of arrival; raise what a reward raised, the
        first by name."""
        known = {name: left_out(row, self.groups) for name, row in self.values().items()}
        return Rewards(known, self.scorer.weights)

    def values(self) -> dict[str, Tensor]:
        """Return the values by reward; entries to which one does not apply are marked
        (``does_not_apply``)."""
        with self._resident:
            # collective calls first, in the same order on all processes
            whole = {name: [self.scorer.at_once(name, held)] for name, held in self.whole.items()}
            for future in itertools.chain(*self.parts.values()):
                # all finish, so that no call of this batch runs into the next
                future.exception()
            scores = {
                name: [future.result() for future in done] for name, done in self.parts.items()
            }
        scores |= whole
        return {name: joined(name, scores[name]) for name in self.scorer.rewards}


def check_handling(name: str, reward: Handled) -> None:
    """Raise UserError for handling that a reward of whole iterations, or with a state, cannot
    have."""
    plain = Handling(device=reward.handling.device, dtype=reward.handling.dtype)
    if reward.card.of == "batch" and reward.handling != plain:
        raise UserError(
            f"reward {name!r} sees a whole iteration at once, on all processes: batch_size, "
            f"offload, timeout and cache cannot be set for it"
        )
    if keeps_state(reward.reward) and reward.handling.cache:
        raise UserError(
            f"reward {name!r} has a state (state_dict), so its values change: leave its `cache` out"
        )


def keeps_state(reward: Any) -> bool:
    """Tell whether a reward has a state to save; weights of a network do not count."""
    method = getattr(type(reward), "state_dict", None)
    return method is not None and method is not torch.nn.Module.state_dict


def together(media: Sequence[Media]) -> Media:
    """Join the samples of all parts, in order."""
    pictures = [part for part in media if isinstance(part, Tensor)]
    if pictures and len(pictures) == len(media):
        return torch.cat(pictures)
    return [item for part in media for item in part]


def now(call: Callable[..., Value], *args: Any) -> Future[Value]:
    """Call immediately and return the outcome as a future."""
    future: Future[Value] = Future()
    try:
        future.set_result(call(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def joined(name: str, parts: list[Tensor]) -> Tensor:
    """Join parts to [B] or [B, K]; a part that a step reward could not score has no K."""
    steps = {part.shape[1] for part in parts if part.ndim == 2}
    if len(steps) > 1:
        raise UserError(
            f"reward {name!r} returned different numbers of steps in one batch: {sorted(steps)}"
        )
    if steps:
        parts = [part if part.ndim == 2 else part[:, None].expand(-1, *steps) for part in parts]
    return torch.cat(parts) if parts else torch.zeros(0)


def neighbours(prompts: Sequence[Prompt]) -> list[int]:
    """Number the groups [B]: equal for neighbours with the same prompt."""
    groups = [0] * len(prompts)
    for row in range(1, len(prompts)):
        groups[row] = groups[row - 1] + (not alike(prompts[row - 1], prompts[row]))
    return groups
