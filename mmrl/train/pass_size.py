"""Chooses the number of rows per pass by timing a few sizes, for ``train.micro_batch_size: auto``.

What counts is the time of an iteration: passes of sampling and of training, in the proportion of an
iteration, padded to full width as the run's own passes are. The choice depends on the clock, and
rounding may depend on the width of a pass, so it is made once, logged and saved in the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from mmrl.config.plan import Plan
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.policies.base import Policy, unwrapped
from mmrl.policies.contracts import Trial

SIZES = 4  # to try: the largest, and its halves
REPEATS = 2  # timed passes of a kind, after one for warm-up
TIE = 0.02  # a smaller size may be slower by this share, since it needs less memory


@dataclass(frozen=True)
class Measured:
    """Holds the seconds that one pass of ``rows`` rows took; infinite if it did not fit."""

    rows: int
    sampling: float
    training: float


def fastest(policy: Policy, trial: Trial, plan: Plan, epochs: int) -> tuple[int, str]:
    """Measure passes of several sizes and return the best with a sentence for the log; a collective
    call, after which all processes have the same.

    Raises UserError where no size fits the device's memory.
    """
    widths = policy.pass_sizes.rows, policy.report.forwards
    try:
        with unwrapped(policy):  # which would send gradients around
            measured = [_measured(policy, trial, rows) for rows in candidates(plan.micro_batch)]
    finally:
        policy.pass_sizes.rows, policy.report.forwards = widths
    costs = {each.rows: _iteration(each, trial, plan, epochs) for each in _agreed(measured, policy)}
    least = min(costs.values())
    if not math.isfinite(least):
        raise UserError(
            f"out of memory: not even passes of {min(costs)} rows fit; set train.micro_batch_size "
            f"to fewer, or train.gradient_checkpointing=true"
        )
    best = min(rows for rows, cost in costs.items() if cost <= least * (1 + TIE))
    return best, _sentence(best, costs, plan)


def candidates(most: int) -> list[int]:
    """Return the sizes to try, largest first."""
    sizes = (math.ceil(most / 2**halving) for halving in range(SIZES))
    return sorted(set(sizes), reverse=True)


def _measured(policy: Policy, trial: Trial, rows: int) -> Measured:
    """Time passes of one size, filled up to it as the run's would be."""
    policy.pass_sizes.rows = rows
    try:
        training = timed(partial(_trained, policy, trial, rows), policy.device)
        sampling = timed(partial(_sampled, trial, rows), policy.device)
    except torch.OutOfMemoryError:
        sampling = training = math.inf
    finally:
        policy.net.zero_grad()
    if math.isinf(training) and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Measured(rows, sampling, training)


def _trained(policy: Policy, trial: Trial, rows: int) -> None:
    with torch.enable_grad():
        trial.train(rows).sum().backward()
    policy.net.zero_grad()


def _sampled(trial: Trial, rows: int) -> None:
    with torch.no_grad():
        trial.sample(rows)


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of ``work``, the shortest of several runs after a warm-up."""
    work()
    return min(_seconds(work, device) for _ in range(REPEATS))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(measured: list[Measured], policy: Policy) -> Iterator[Measured]:
    """Yield the slowest process's measurement of every size."""
    table = torch.tensor(
        [[each.sampling, each.training] for each in measured],
        dtype=torch.float64,
        device=policy.device,
    )
    slowest = distributed.all_max(table).tolist()
    for each, (sampling, training) in zip(measured, slowest, strict=True):
        yield Measured(each.rows, sampling, training)


def _iteration(each: Measured, trial: Trial, plan: Plan, epochs: int) -> float:
    """Predict the seconds that the passes of an iteration take at this size."""
    sampling = sum(-(-states // each.rows) for states in trial.sampled)
    per_step = -(-trial.trained // plan.steps)
    training = -(-per_step // each.rows) * plan.steps * epochs
    return sampling * each.sampling + training * each.training


def _sentence(best: int, costs: dict[int, float], plan: Plan) -> str:
    """Describe what was measured, and how to reproduce it."""
    speeds = ", ".join(
        f"{rows} rows {plan.rows_per_process / cost:.3g}"
        if math.isfinite(cost)
        else f"{rows} rows do not fit"
        for rows, cost in costs.items()
    )
    return (
        f"passes have {best} rows from now on; samples a second and process, by the passes of the "
        f"network alone: {speeds}. The choice is kept in the checkpoint; "
        f"train.micro_batch_size={best} makes it without measuring"
    )
