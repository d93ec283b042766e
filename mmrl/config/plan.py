"""Divides the sizes of an iteration over processes, steps and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError

MOST_ROWS = 10**8  # samples of an iteration whose bookkeeping alone would fill a machine


@dataclass(frozen=True)
class Plan:
    """Holds the sizes of one iteration. ``warnings`` are sentences for the user."""

    rows: int  # samples of an iteration: prompts_per_iteration * group_size
    steps: int  # optimizer steps of an epoch over them
    total_steps: int  # optimizer steps of the whole run
    processes: int
    prompts_per_process: int
    rows_per_process: int
    rows_per_step: int  # rows of an optimizer step on one process
    # rows of a forward pass on one process; the maximum if measured
    micro_batch: int
    accumulation: int  # forward passes of an optimizer step; the last may be smaller
    warnings: tuple[str, ...] = ()


def arithmetic(train: TrainOptions, processes: int = 1, supervised: bool = False) -> Plan:
    """Compute how the sizes divide over processes, steps and micro-batches. ``supervised``: answers
    come from the data or are not compared, so that groups of one are fine.

    Raises UserError naming every key that does not fit and the nearest values that would.
    """
    problems = list(impossible(train, processes))
    if problems:
        raise UserError("\n".join(problems))
    rows = train.prompts_per_iteration * train.group_size
    rows_per_step = train.train_batch_size // processes
    micro_batch = _size(train) or rows_per_step
    return Plan(
        rows=rows,
        steps=rows // train.train_batch_size,
        total_steps=rows // train.train_batch_size * train.epochs * _step_rounds(train),
        processes=processes,
        prompts_per_process=train.prompts_per_iteration // processes,
        rows_per_process=rows // processes,
        rows_per_step=rows_per_step,
        micro_batch=micro_batch,
        accumulation=-(-rows_per_step // micro_batch),
        warnings=tuple(_warnings(train, supervised)),
    )


def _size(train: TrainOptions) -> int | None:
    """Return the configured rows of a pass; None: the maximum."""
    return None if train.micro_batch_size == "auto" else train.micro_batch_size


def _step_rounds(train: TrainOptions) -> int:
    """Count the passes of a run over the optimizer steps of an epoch, fast steps included."""
    if train.slow_fast is None:
        return train.iterations
    several = train.slow_fast.iterations
    fast = train.iterations if several is None else min(several, train.iterations)
    return train.iterations + fast * train.slow_fast.fast_steps


def impossible(train: TrainOptions, processes: int = 1) -> Iterator[str]:
    """List sentences, each beginning with the key, about sizes that do not divide."""
    unfit = False
    for key in (
        "prompts_per_iteration",
        "group_size",
        "train_batch_size",
        "epochs",
        "micro_batch_size",
    ):
        value = vars(train)[key]
        if isinstance(value, int) and value < 1:
            unfit = True
            yield f"train.{key} is {value}: at least 1"
    if unfit:
        return
    if problem := _indivisible(train, processes):
        yield problem
    if train.save_best and not train.evaluate_every:
        yield (
            "train.save_best keeps the checkpoint with the best held-out score, and nothing is "
            "evaluated: set train.evaluate_every too"
        )


def _indivisible(train: TrainOptions, processes: int) -> str | None:
    """Return the first sentence about sizes that do not divide; None if all do."""
    rows = train.prompts_per_iteration * train.group_size
    if train.prompts_per_iteration % processes:
        near = _nearest(train.prompts_per_iteration, processes, lambda n: True)
        return (
            f"train.prompts_per_iteration {train.prompts_per_iteration} cannot be shared by "
            f"{processes} processes: use {near}"
        )
    if rows > MOST_ROWS or train.prompts_per_iteration > MOST_ROWS:
        return (
            f"train.group_size {train.group_size} x train.prompts_per_iteration "
            f"{train.prompts_per_iteration} is {rows:.3g} samples of an iteration: at most "
            f"{MOST_ROWS:.0e}"
        )
    batch = train.train_batch_size
    if rows % batch:
        near = _nearest(min(batch, rows), processes, lambda n: n <= rows and rows % n == 0)
        return (
            f"train.train_batch_size {batch} does not divide the {rows} samples "
            f"(train.prompts_per_iteration {train.prompts_per_iteration} x "
            f"train.group_size {train.group_size}) of an iteration: use {near}"
        )
    if batch % processes:
        near = _nearest(batch, processes, lambda n: n <= rows and rows % n == 0)
        return (
            f"train.train_batch_size {batch} cannot be shared by {processes} processes: use {near}"
        )
    share = batch // processes
    size = _size(train)
    if size and size > share:
        return (
            f"train.micro_batch_size {size} is more than the {share} rows of an "
            f"optimizer step on one process (train.train_batch_size {batch} over {processes}): "
            f"at most {share}, or null"
        )
    return None


def _nearest(size: int, multiple: int, fits: Callable[[int], bool]) -> str:
    """Return the multiples of ``multiple`` nearest to ``size`` that fit, below and above."""
    first = size // multiple * multiple
    below = (
        n for n in range(first, max(0, first - 100_000 * multiple), -multiple) if n > 0 and fits(n)
    )
    above = (n for n in range(first + multiple, first + 100_000 * multiple, multiple) if fits(n))
    nearest = [n for n in (next(below, None), next(above, None)) if n]
    return " or ".join(map(str, nearest)) or f"a multiple of {multiple}"


def _warnings(train: TrainOptions, supervised: bool) -> Iterator[str]:
    are_apart = any(stage.baseline_of == "is_ground_truth" for stage in train.stages)
    are_given = supervised or train.preferences is not None
    if train.group_size < 2 and not are_given and not are_apart:
        yield (
            "train.group_size is 1: an advantage that compares the samples of a prompt is zero, "
            "nothing would be learned"
        )
    if train.dynamic_sampling_min_std and not train.dynamic_sampling_rounds:
        yield (
            "train.dynamic_sampling_min_std is set and train.dynamic_sampling_rounds is "
            "0: no group gives way; set "
            "its number of rounds"
        )
    if train.iterations == 0:
        yield "train.iterations is 0: nothing is trained"
