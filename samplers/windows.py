"""Defines where a sampler adds noise: ``(steps, iteration, rng, *, ...) -> [steps]`` bool, True
where the step is a decision.

``iteration`` counts rollouts from 0 and ``rng`` belongs to it; all samples and processes get the
same window. An impossible request is a ValueError that says what is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from samplers.noise import Rng

FIXED = Rng.of("window")


def all_steps(steps: int, iteration: int = 0, rng: Rng = FIXED) -> Tensor:
    """Makes every step stochastic."""
    return window(steps)


def all_but_last(steps: int, iteration: int = 0, rng: Rng = FIXED) -> Tensor:
    """Makes every step but the last stochastic, since no later step would remove its noise."""
    if steps < 2:
        raise ValueError(
            f"all_but_last leaves no stochastic step of {steps}: use at least 2 steps, or "
            f"the window 'all'"
        )
    return window(steps, stop=-1)


def between_steps(steps: int, iteration: int = 0, rng: Rng = FIXED) -> Tensor:
    """Makes every step but the last stochastic; of one step none (consistency models)."""
    return _between(steps, 0, steps - 1)


def window(
    steps: int, iteration: int = 0, rng: Rng = FIXED, *, start: int = 0, stop: int | None = None
) -> Tensor:
    """Makes the steps start to stop - 1 stochastic, always; negative numbers count from the end.

    start, stop: the first step, and the one after the last; null: the end.
    """
    first, last = _bounds(steps, start, stop)
    return _between(steps, first, last)


def random_window(
    steps: int,
    iteration: int = 0,
    rng: Rng = FIXED,
    *,
    size: int = 2,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Picks ``size`` adjacent steps inside start to stop - 1 at a new random place every iteration.

    Flow-GRPO-Fast (2 inside the first 10) and MixGRPO's random strategy. The published code of the
    former draws another window on every process; here all agree, so that the number of processes
    has no effect.

    size: number of steps. start, stop: the first step, and the one after the last; null: the end.
    """
    first, last = _room(steps, size, start, stop)
    place = int(rng.uniform(torch.zeros(1)) * (last - first - size + 1))
    return _between(steps, first + place, first + place + size)


def random_steps(
    steps: int,
    iteration: int = 0,
    rng: Rng = FIXED,
    *,
    size: int = 1,
    start: int = 0,
    stop: int | None = -1,
) -> Tensor:
    """Picks ``size`` random steps, not adjacent, inside start to stop - 1 (Flow-Factory, UniRL).

    size: number of steps. start, stop: the first step, and the one after the last; negative: from
    the end.
    """
    first, last = _room(steps, size, start, stop)
    chosen = torch.zeros(steps, dtype=torch.bool)
    chosen[first + rng.permutation(last - first)[:size]] = True
    return chosen


def progressive(
    steps: int,
    iteration: int = 0,
    rng: Rng = FIXED,
    *,
    size: int = 4,
    every: int = 25,
    stride: int = 1,
    stop: int | None = -2,
    again: bool = True,
) -> Tensor:
    """Moves a window from noise to data by ``stride`` steps every ``every`` iterations (MixGRPO).

    Li et al. 2025, "MixGRPO", section 3.2. ``again``: start over after the last place; otherwise
    stay there. The published code lets the window shrink at the end and stay empty, untrained, for
    ``every`` iterations; this one keeps its size. ``stride`` equal to ``size`` is the variant
    without overlap.

    size: steps of the window. every: iterations at a place. stride: steps that it moves by. stop:
    its end at the last place.
    """
    return _sliding(steps, iteration, size, stride, stop, again, lambda place, last: every)


def decay(
    steps: int,
    iteration: int = 0,
    rng: Rng = FIXED,
    *,
    size: int = 4,
    longest: int = 10,
    shortest: int = 1,
    stride: int = 1,
    stop: int | None = -2,
    again: bool = True,
) -> Tensor:
    """Moves a window that stays ``longest`` iterations at the first place, ``shortest`` at the
    last.

    size: steps of the window. longest, shortest: iterations at the first and at the last place.
    stride: steps that it moves by. stop: its end at the last place. again: start from noise again
    after it.
    """

    def stay(place: int, last: int) -> int:
        share = place / last
        return max(shortest, int(longest * (1 - share) + shortest * share))

    return _sliding(steps, iteration, size, stride, stop, again, stay)


def exp_decay(
    steps: int,
    iteration: int = 0,
    rng: Rng = FIXED,
    *,
    size: int = 4,
    every: int = 25,
    rate: float = 0.1,
    after: int = 13,
    stride: int = 1,
    stop: int | None = -2,
    again: bool = True,
) -> Tensor:
    """Moves a window that stays every * exp(-rate (place - after)) iterations beyond place
    ``after``.

    size: steps of the window. every: iterations at a place. rate: of the decay. after: the place
    from which on it stays shorter. stride: steps that it moves by. stop: its end at the last place.
    again: start from noise again after it.
    """

    def stay(place: int, last: int) -> int:
        return math.ceil(every * math.exp(-rate * max(0, place - after)))

    return _sliding(steps, iteration, size, stride, stop, again, stay)


def _sliding(
    steps: int,
    iteration: int,
    size: int,
    stride: int,
    stop: int | None,
    again: bool,
    stay: Callable[[int, int], int],
) -> Tensor:
    """Place the window for this iteration; ``stay(place, last)`` is the number of iterations it
    keeps a place."""
    first, last = _room(steps, size, 0, stop)
    if stride < 1:
        raise ValueError(f"the stride of a sliding noise window must be at least 1, not {stride}")
    place = first
    left = iteration
    while left >= (stay_here := max(1, stay(place, last))):
        left -= stay_here
        place += stride
        if place + size > last:
            place = first if again else last - size
            if not again:
                break
    return _between(steps, place, place + size)


def _between(steps: int, first: int, last: int) -> Tensor:
    index = torch.arange(steps)
    return (index >= first) & (index < last)


def _bounds(steps: int, start: int, stop: int | None) -> tuple[int, int]:
    if steps < 1:
        raise ValueError(f"a noise window needs at least 1 step, not {steps}")
    first = start + steps if start < 0 else start
    last = steps if stop is None else stop + steps if stop < 0 else stop
    if not 0 <= first < last <= steps:
        raise ValueError(
            f"the noise window from {start} to {stop} is not inside {steps} steps: need 0 "
            f"<= start < stop <= {steps}"
        )
    return first, last


def _room(steps: int, size: int, start: int, stop: int | None) -> tuple[int, int]:
    """Check bounds that hold ``size`` steps, and return them."""
    first, last = _bounds(steps, start, stop)
    if not 1 <= size <= last - first:
        raise ValueError(
            f"{size} noisy steps do not fit between {first} and {last} of {steps}: size 1 "
            f"to {last - first}"
        )
    return first, last
