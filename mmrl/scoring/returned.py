"""Parses what custom rewards return: numbers, with sub-scores, None where a reward does not apply,
and coroutines of all of these."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from rewards.card import Sums

MAIN = "score"  # the sub-score that is the reward
# bits of the NaN that stands for "does not apply": it never leaves this package
_MARK = 0x7FC0A11D


def awaited(answers: Sequence[Any], concurrency: int) -> list[Any]:
    """Return the values of answers; awaitable ones run concurrently, at most ``concurrency`` at
    once."""
    if not any(map(inspect.isawaitable, answers)):
        return list(answers)

    async def gathered() -> list[Any]:
        room = asyncio.Semaphore(concurrency)

        async def one_of(answer: Awaitable[Any]) -> Any:
            async with room:
                return await answer

        jobs = [one_of(each) for each in answers if inspect.isawaitable(each)]
        done = iter(await asyncio.gather(*jobs))
        return [next(done) if inspect.isawaitable(each) else each for each in answers]

    return asyncio.run(gathered())


def parted(answer: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Split what a reward returned into its values and its sub-scores by name.

    A dict, or a list of a dict for each sample, has the values under ``score`` or as its only
    entry; a tuple has them first and the dict second. Raises UserError.
    """
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        return answer[0], dict(answer[1])
    if isinstance(answer, (list, tuple)) and answer and isinstance(answer[0], Mapping):
        keys = dict.fromkeys(key for part in answer if isinstance(part, Mapping) for key in part)
        answer = {key: [(part or {}).get(key) for part in answer] for key in keys}
    if not isinstance(answer, Mapping):
        return answer, {}
    main = MAIN if MAIN in answer else next(iter(answer)) if len(answer) == 1 else None
    if main is None:
        raise UserError(
            f"reward {name!r} returned the sub-scores {', '.join(map(str, answer)) or 'none'} and "
            f"does not say which is the reward: add {MAIN!r}, or return (values, sub-scores)"
        )
    return answer[main], {key: value for key, value in answer.items() if key != main}


def with_marks(values: Any) -> Any:
    """Return a list with None in it as a tensor [B], float32, whose marked entries do not apply."""
    if not isinstance(values, (list, tuple)) or not any(value is None for value in values):
        return values
    try:
        numbers = torch.tensor([float("nan") if v is None else float(v) for v in values])
    except (TypeError, ValueError):
        return values  # refused later, by its type
    bits = numbers.view(torch.int32)
    bits[torch.tensor([value is None for value in values])] = _MARK
    return numbers


def does_not_apply(values: Tensor) -> Tensor:
    """Mark the entries of float32 values on the CPU that stand for "does not apply"."""
    return values.contiguous().view(torch.int32) == _MARK


def left_out(values: Tensor, groups: Sequence[int]) -> Tensor:
    """Fill the entries [B] to which a reward does not apply with the mean of the others in their
    group, else of all others: they count neither for nor against a sample, and no mean changes."""
    marked = does_not_apply(values)
    if values.ndim != 1 or not marked.any():
        return values
    values = values.clone()
    numbers = torch.as_tensor(groups)
    known = ~marked & values.isfinite()
    overall = values[known].mean() if known.any() else values.new_tensor(0.0)
    for number in numbers[marked].unique():
        rows = numbers == number
        inside = values[rows & known]
        values[rows & marked] = inside.mean() if len(inside) else overall
    return values


class SubScores:
    """Adds up sub-scores by name, so that their means can be logged."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # name -> sum and count

    def add(self, scores: Mapping[str, Any]) -> None:
        for name, values in scores.items():
            if isinstance(values, Sums):
                total = self.sums.setdefault(str(name), [0.0, 0.0])
                total[:] = Sums(*total).plus(values)
                continue
            try:
                numbers = torch.as_tensor(with_marks(values), dtype=torch.float64).flatten()
            except (TypeError, ValueError, RuntimeError):
                continue  # a text among the numbers, such as a reason
            numbers = numbers[numbers.isfinite()]
            total = self.sums.setdefault(str(name), [0.0, 0.0])
            total[0] += float(numbers.sum())
            total[1] += len(numbers)

    def taken(self) -> dict[str, list[float]]:
        """Return sums and counts since the last time."""
        sums, self.sums = self.sums, {}
        return sums
