"""Rewards of a batch, in a way that no failure of a reward can pass for a low score.

A reward that raises, or returns NaN or infinity for a sample, is asked once more; a batch that keeps raising is halved
until only the guilty samples are left. Those become NaN, which takes them out of their group's statistics and out of
training, and they are counted and shown. Too many of them stop the run with the cause.
"""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.registry import UserError, suggest
from mmrl.types import Media, Prompt, Reward, Rewards

STDLIB = os.path.dirname(os.__file__)
log = logging.getLogger(__name__)


@dataclass
class Failures:
    """What one reward could not score since the run began."""

    count: int = 0  # samples
    cause: str = ""  # of the last one: exception, message, file:line
    prompt: str = ""  # of the last one
    kinds: set[str] = field(default_factory=set)  # causes that have been logged


class Scorer:
    """``(media, prompts) -> Rewards`` with NaN where a sample could not be scored.

    Args:
        rewards: by name, each ``(media, prompts) -> [B]``; lists and numpy arrays of numbers are taken too. A
            reward judges each sample by itself: after a failure it sees parts of the batch.
        weights: by name; 1 where none is given.
        max_failures: the largest share of a batch that a reward may fail to score, 0 to 1.

    Attributes:
        failures: name -> ``Failures``, over all calls so far; empty while all is well.
        seconds: name -> seconds spent in that reward, over all calls so far.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], weights: Mapping[str, float] | None = None, max_failures: float = 0.5
    ):
        if not rewards:
            raise UserError("no reward is given; name at least one, such as `reward: {clip_score: 1.0}`")
        for name in weights or {}:
            if name not in rewards:
                raise UserError(f"a weight is given for reward {name!r}, which is not used; {suggest(name, rewards)}")
        if not 0 <= max_failures <= 1:
            raise UserError(f"max_failures is a share of the batch between 0 and 1, got {max_failures}")
        self.rewards = dict(rewards)
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}
        self.max_failures = max_failures
        self.failures: dict[str, Failures] = {}
        self.seconds = dict.fromkeys(rewards, 0.0)

    @torch.no_grad()
    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Rewards:
        """Score B samples; the values are float32 [B] on the CPU.

        Raises:
            UserError: more than ``max_failures`` of the batch cannot be scored, or a reward does not keep its contract.
        """
        prompts = list(prompts)
        if len(media) != len(prompts):
            raise ValueError(f"{len(media)} samples but {len(prompts)} prompts")
        return Rewards({name: self._score(name, media, prompts) for name in self.rewards}, self.weights)

    def _score(self, name: str, media: Media, prompts: list[Prompt]) -> Tensor:
        attempt = _Attempt(name, self.rewards[name], media, prompts, allowed=self.max_failures * len(prompts))
        start = time.perf_counter()
        try:
            return attempt.score()
        finally:
            self.seconds[name] += time.perf_counter() - start
            self._report(name, attempt)

    def _report(self, name: str, attempt: _Attempt) -> None:
        for row, cause in attempt.causes.items():
            seen = self.failures.setdefault(name, Failures())
            seen.count += 1
            seen.cause, seen.prompt = cause.text, brief(attempt.prompts[row])
            if cause.kind not in seen.kinds:
                seen.kinds.add(cause.kind)
                log.warning(
                    "reward %r could not score a sample, which is left out: %s; prompt: %s (shown once for this cause)",
                    name, seen.cause, seen.prompt,
                )  # fmt: skip


@dataclass(frozen=True)
class _Cause:
    kind: str  # equal for failures of the same sort
    text: str


class _Attempt:
    """One reward on one batch: who has a value, who has failed and why."""

    def __init__(self, name: str, reward: Reward, media: Media, prompts: list[Prompt], allowed: float):
        self.name, self.reward, self.media, self.prompts, self.allowed = name, reward, media, prompts, allowed
        self.values = torch.full((len(prompts),), torch.nan)  # [B]
        self.causes: dict[int, _Cause] = {}

    def score(self) -> Tensor:
        """[B] values; the rows in ``causes`` are NaN."""
        rows = list(range(len(self.prompts)))
        if rows:
            self.ask(rows, tries=2)
        again = [row for row in rows if row not in self.causes and not math.isfinite(self.values[row])]
        if again:
            self.ask(again, tries=1)
        for row in again:
            value = float(self.values[row])
            if row not in self.causes and not math.isfinite(value):
                self.fail(row, _Cause(kind=f"returned {value}", text=f"it returned {value} twice"))
        return self.values

    def ask(self, rows: list[int], tries: int) -> None:
        """Fill in the values of these rows; on exceptions halve, so that only the guilty rows fail."""
        for _ in range(tries):
            try:
                self.values[rows] = self.call(rows)
                return
            except UserError:
                raise
            except Exception as error:  # whatever a user's reward may raise
                cause = describe(error)  # not the exception itself, whose traceback holds the samples
        if len(rows) == 1:
            return self.fail(rows[0], cause)
        middle = len(rows) // 2
        self.ask(rows[:middle], tries=1)
        self.ask(rows[middle:], tries=1)

    def call(self, rows: list[int]) -> Tensor:
        """[n] what the reward says of these rows, checked."""
        media, prompts = self.media, self.prompts
        if len(rows) < len(prompts):
            media = media[rows] if isinstance(media, Tensor) else [media[row] for row in rows]
            prompts = [prompts[row] for row in rows]
        version = media._version if isinstance(media, Tensor) and not media.is_inference() else 0
        values = as_values(self.reward(media, prompts), len(rows), self.name)
        if isinstance(media, Tensor) and not media.is_inference() and media._version != version:
            raise UserError(f"reward {self.name!r} changed the samples it was given in place; let it work on a copy")
        return values

    def fail(self, row: int, cause: _Cause) -> None:
        self.causes[row] = cause
        self.values[row] = torch.nan
        if len(self.causes) > self.allowed:
            raise UserError(
                f"reward {self.name!r} could not score {len(self.causes)} of {len(self.prompts)} samples, more than "
                f"max_failures allows ({self.allowed:g}); the last cause: {cause.text}; prompt: "
                f"{brief(self.prompts[row])}. Repair the reward or what it depends on (a service, a file, memory), or "
                "raise max_failures to go on without such samples"
            )


def as_values(values: object, count: int, name: str) -> Tensor:
    """[count] float32 on the CPU from a tensor, array or list of numbers.

    Raises:
        UserError: another shape, or something that is not real numbers.
    """
    try:
        found = values.detach() if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"reward {name!r} returned {type(values).__name__} that is not numbers ({error}); "
            f"expected a tensor, array or list of {count} floats, NaN where a sample cannot be scored"
        ) from error
    if found.shape != (count,) or found.is_complex():
        raise UserError(
            f"reward {name!r} returned {found.dtype} of shape {list(found.shape)} for {count} samples; "
            f"expected [B] = [{count}] real numbers, one per sample"
        )
    return found.to("cpu", torch.float32)


def describe(error: Exception) -> _Cause:
    """Type, message and place of an exception; the place is the innermost line outside installed packages."""
    found = traceback.extract_tb(error.__traceback__)
    own = [f for f in found if "site-packages" not in f.filename and not f.filename.startswith((STDLIB, __file__, "<"))]
    place = (own or list(found))[-1]
    where = f"{place.filename}:{place.lineno}"
    return _Cause(kind=f"{type(error).__name__} at {where}", text=f"{type(error).__name__}: {error} ({where})")


def brief(prompt: Prompt, width: int = 120) -> str:
    """The text of a prompt, shortened."""
    text = str(prompt.get("text", prompt))
    return repr(text if len(text) <= width else text[: width - 3] + "...")
