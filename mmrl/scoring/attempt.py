"""Scores one batch with one reward such that no failure of the reward can pass for a low score.

A reward that raises, or returns NaN or infinity for a sample, is called again once; a batch that
keeps raising is halved until only the failing samples are left. Those become NaN, which takes them
out of their group's statistics and out of training, and they are counted and shown. Too many of
them stop the run with the cause. One that does not answer in time is not called again for these
samples. A reward that compares the samples of a prompt sees whole groups throughout, also when a
batch is halved.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt, Reward
from mmrl.scoring.returned import does_not_apply, with_marks
from rewards.card import Of, card_of, method_of

STDLIB = os.path.dirname(os.__file__)
LONGEST = 2000  # characters of what an exception says
OURS = os.path.dirname(__file__)


class TimedOut(Exception):
    """Signals that a reward has not answered in time: calling it again would only wait longer."""


@dataclass(frozen=True)
class Cause:
    kind: str  # equal for failures of the same kind
    text: str


@dataclass
class Budget:
    """Counts how many samples of a batch one reward may fail to score, over all its parts."""

    rows: int  # of the whole batch
    allowed: float
    failed: int = 0


class Attempt:
    """Tracks one reward on one batch: which rows have a value, which have failed and why.

    ``groups`` [B]: equal numbers belong together; used only for a reward of whole groups.
    """

    def __init__(
        self,
        name: str,
        reward: Reward,
        media: Media,
        prompts: list[Prompt],
        groups: Sequence[int],
        budget: Budget,
    ):
        self.name = name
        self.reward = reward
        self.media = media
        self.budget = budget
        self.of: Of = card_of(reward).of
        self.units = [[row] for row in range(len(prompts))]  # rows that are scored together
        self.prompts = prompts
        if self.of == "group":
            self.units, self.prompts = whole(prompts, groups)
        # [B], or [B, K] once a step reward has answered
        self.values = torch.full((len(prompts),), torch.nan)
        self.causes: dict[int, Cause] = {}

    def score(self) -> Tensor:
        """Return values [B], or [B, K] of a step reward; the rows in ``causes`` are NaN."""
        if self.units:
            self.ask(self.units, tries=2)
        again = [
            unit
            for unit in self.units
            if any(row not in self.causes and self.missing(row) for row in unit)
        ]
        if again:
            self.ask(again, tries=1)
        for row in (row for unit in again for row in unit):
            if row not in self.causes and self.missing(row):
                value = (
                    self.values[row].flatten()[0].item() if self.values[row].numel() else "nothing"
                )
                shown = str(value).replace("nan", "NaN")
                text = f"it returned {shown}, also when called again{self.why()}"
                self.fail(row, Cause(kind=f"returned {value}", text=text))
        return self.values

    def why(self) -> str:
        """Return the reward's own explanation of missing values, such as which server is down."""
        says = method_of(self.reward, "causes")
        return f" ({cause})" if says and (cause := str(says())) else ""

    def missing(self, row: int) -> bool:
        """Tell whether a row has no value: some decisions of a step reward may be NaN, not all;
        none may be infinite."""
        values = self.values[row]
        if values.ndim == 0 and does_not_apply(values):
            return False
        return bool(values.isinf().any() or values.isnan().all())

    def ask(self, units: list[list[int]], tries: int) -> None:
        """Fill in the values of these rows; on exceptions halve, so that only the failing units are
        left out."""
        rows = [row for unit in units for row in unit]
        for _ in range(tries):
            try:
                self.keep(rows, self.call(rows))
                return
            except UserError:
                raise
            except TimedOut as error:
                for row in rows:
                    self.fail(row, Cause(kind="time-out", text=str(error)))
                return
            except (Exception, SystemExit) as error:  # whatever a user's reward may raise
                # not the exception itself, whose traceback holds the samples
                cause = describe(error)
        if len(units) == 1:
            for row in rows:
                self.fail(row, cause)
            return
        middle = len(units) // 2
        self.ask(units[:middle], tries=1)
        self.ask(units[middle:], tries=1)

    def keep(self, rows: list[int], values: Tensor) -> None:
        if values.ndim == 2 and self.values.ndim == 1:
            self.values = torch.full((len(self.prompts), values.shape[1]), torch.nan)
        if values.shape[1:] != self.values.shape[1:]:
            shape = list(self.values.shape[1:])
            raise UserError(
                f"reward {self.name!r} returned {list(values.shape[1:])} steps after {shape} before"
            )
        self.values[rows] = values

    def call(self, rows: list[int]) -> Tensor:
        """Return the reward's values for these rows, checked, [n] or [n, K]."""
        media = self.media
        prompts = self.prompts
        if rows != list(range(len(prompts))):
            media = media[rows] if isinstance(media, Tensor) else [media[row] for row in rows]
            prompts = [prompts[row] for row in rows]
        version = media._version if isinstance(media, Tensor) and not media.is_inference() else 0
        values = as_values(self.reward(media, prompts), len(rows), self.name, self.of)
        if isinstance(media, Tensor) and not media.is_inference() and media._version != version:
            raise UserError(
                f"reward {self.name!r} changed the samples it was given in place; let "
                f"it work on a copy"
            )
        return values

    def fail(self, row: int, cause: Cause) -> None:
        self.causes[row] = cause
        self.values[row] = torch.nan
        self.budget.failed += 1
        if self.budget.failed > self.budget.allowed:
            raise UserError(
                f"reward {self.name!r} could not score {self.budget.failed} of "
                f"{self.budget.rows} samples, more than "
                f"train.max_reward_failure_rate allows ({self.budget.allowed:g}); the last cause: "
                f"{cause.text}; prompt: "
                f"{brief(self.prompts[row])}. Repair the reward or what it depends on (a "
                f"service, a file, memory), or "
                "raise train.max_reward_failure_rate to go on without such samples"
            )


def whole(prompts: Sequence[Prompt], groups: Sequence[int]) -> tuple[list[list[int]], list[Prompt]]:
    """Return the rows of every group, and prompts that name their group in ``group``.

    Rows of a group need not be neighbours here; they are when the reward sees them.
    """
    units: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        units.setdefault(int(group), []).append(row)
    grouped = list(prompts)
    for group, rows in units.items():
        for row in rows:
            grouped[row] = {**prompts[row], "group": group}
    return list(units.values()), grouped


def as_values(values: object, count: int, name: str, of: Of = "sample") -> Tensor:
    """Convert a tensor, array or list of numbers to [count] float32 on the CPU; [count, K] of a
    step reward.

    Raises:
        UserError: another shape, or something that is not real numbers.
    """
    values = with_marks(values)
    try:
        scores = values.detach() if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"reward {name!r} returned {type(values).__name__} that is not numbers ({error}); "
            f"expected a tensor, array or list of {count} floats, NaN where a sample "
            f"cannot be scored, None where the reward does not apply"
        ) from error
    fits = scores.ndim == 2 and len(scores) == count if of == "step" else scores.shape == (count,)
    if not fits or scores.is_complex():
        expected = (
            f"[B, K] = [{count}, K] real numbers"
            if of == "step"
            else (f"[B] = [{count}] real numbers")
        )
        each = "a row for each sample" if of == "step" else "one per sample"
        raise UserError(
            f"reward {name!r} returned {scores.dtype} of shape {list(scores.shape)} for "
            f"{count} samples; "
            f"expected {expected}, {each}"
        )
    return scores.to("cpu", torch.float32)


def describe(error: BaseException) -> Cause:
    """Return type, message and place of an exception; the place is the innermost line outside
    installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f
        for f in frames
        if "site-packages" not in f.filename and not f.filename.startswith((STDLIB, OURS, "<"))
    ]
    place = (user_frames or list(frames))[-1]
    where = f"{place.filename}:{place.lineno}"
    words = str(error)
    words = words if len(words) <= LONGEST else words[:LONGEST] + " ..."
    return Cause(
        kind=f"{type(error).__name__} at {where}", text=f"{type(error).__name__}: {words} ({where})"
    )


def brief(prompt: Prompt, width: int = 120) -> str:
    """Return the text of a prompt, or its keys, shortened."""
    text = str(prompt["text"]) if "text" in prompt else ", ".join(map(str, islice(prompt, 20)))
    return repr(text if len(text) <= width else text[: width - 3] + "...")
