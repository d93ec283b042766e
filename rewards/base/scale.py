"""Names published scalings of a score: a reward's option ``scale`` is one of them or a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from mmrl.core.errors import UserError, suggest

Scaling = Callable[[Tensor], Tensor]


def scaling(scale: float | str, known: Mapping[str, Scaling], reward: str) -> Scaling:
    """Return the function that a name stands for; a number is a factor on the raw score.

    Raises:
        UserError: a name that this reward does not know.
    """
    if not isinstance(scale, str):
        return lambda raw: scale * raw
    if scale not in known:
        raise UserError(
            f"reward {reward!r} has no scale {scale!r}; {suggest(scale, known)}; a "
            f"number is a factor"
        )
    return known[scale]


def factor(value: float) -> Scaling:
    return lambda raw: value * raw


def raw(score: Tensor) -> Tensor:
    return score
