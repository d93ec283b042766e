"""Writes a dry run's report as text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from mmrl.apps.dry_run.dryrun import Report, dry_run
from mmrl.apps.dry_run.estimate import (
    Estimate,
    Fit,
    Run,
    estimate,
    fit,
    measured,
    memory_of,
    moments_of,
)
from mmrl.core.cards import Devices

GIB = 2**30


def pages(
    path: Path,
    overrides: Sequence[str] = (),
    processes: int = 1,
    devices: Devices | None = None,
    propose: bool = False,
    name: object = "",
) -> Iterator[str]:
    """Return the lines of a configuration: its report, its memory if the architecture is known, and
    an iteration on named cards, with proposals if requested. ``name``: of the configuration, as
    typed."""
    report = dry_run(path, overrides, processes)
    once = cache(partial(measured, report, decode=devices is not None))  # after the first lines
    yield from lines(report, memory(report, once) if report.stage is not None else ())
    if devices is None:
        return
    run = once()
    iterate = partial(device_lines, iterations=report.train.iterations, proposed=propose)
    guesses = [estimate(run, devices, sharded) for sharded in (False, True)[: devices.count]]
    for guess in guesses:
        yield from iterate(run, guess)
    if propose:
        yield "looking for what fits, by a few more passes ..."
        best = min((guess.whole for guess in guesses if guess.fits), default=math.inf)
        proposals = list(fit(path, overrides, devices))
        faster = [each for each in proposals if each.estimate.whole < best]
        if proposals and not faster:
            yield "fit         as it is, it is the fastest that fits"
        else:
            yield from fit_lines(name, faster, devices)


def lines(report: Report, of_memory: Iterable[str] = ()) -> Iterator[str]:
    """Return the report's lines, each a name and its numbers, including memory."""
    plan = report.plan
    train = report.train
    reckoned = (
        f" (estimated as if it were the built-in family {report.stand_in})"
        if report.stand_in
        else ""
    )
    yield f"policy      {report.policy}: {report.path}{reckoned}"
    if report.call_defaults:
        yield f"call        not set, so taken as they are: {report.call_defaults}"
    for line in report.account:
        yield f"data        {line}"
    for line in report.cut_prompts:
        yield f"prompts     {line}"
    yield from _sample(report)
    yield (
        f"batches     {train.prompts_per_iteration} prompts x {train.group_size} copies = "
        f"{plan.rows} rows "
        f"an iteration; {plan.steps} "
        f"optimizer steps of {train.train_batch_size} rows, {train.epochs} epoch(s), "
        f"{train.iterations} iterations"
    )
    if plan.processes > 1:
        each = f"{plan.prompts_per_process} prompts, {plan.rows_per_process} rows"
        yield f"            on {plan.processes} processes: {each} each"
    passes = f"an optimizer step takes {plan.accumulation} {_once(report)}"
    size = "up to " if train.micro_batch_size == "auto" else ""
    yield f"passes      of {size}{plan.micro_batch} rows on a device; {passes}"
    yield from _forwards(report)
    yield from of_memory
    for what in report.unknown:
        yield f"unknown     {what}"
    for warning in plan.warnings:
        yield f"warning     {warning}"


def _once(report: Report) -> str:
    return "for each trained step of the sampler" if report.shape else "of them"


def _sample(report: Report) -> Iterator[str]:
    if report.shape:
        shape = " x ".join(map(str, report.shape))
        rows = f", {report.network_rows:g} rows of the network each"
        if report.network_rows in (1, 2):
            guided = report.network_rows == 2
            rows = ", guided (two rows of the network each)" if guided else ""
        yield (
            f"sample      latents {shape}; {report.steps} steps, {report.noisy} of "
            f"them with noise{rows}"
        )
    elif report.tokens:
        yield f"sample      up to {report.tokens} tokens"


def _forwards(report: Report) -> Iterator[str]:
    counts = report.counted
    if counts is None or (report.policy == "pipeline" and not report.shape):
        return
    kind = "rows of the network" if report.shape else "answers"
    training = "an unknown number" if counts.training is None else f"{counts.training:,}"
    yield (
        f"forwards    {counts.sampling:,} {kind} to sample, {training} to train: an iteration, "
        f"all processes"
    )
    if report.shape:
        yield (
            f"decisions   {counts.decisions:,} sampling steps have a log-probability in the first "
            f"iteration; {counts.steps} optimizer steps"
        )


def _count(parameters: int) -> str:
    """Write a number of parameters; those of the embedded world are thousands."""
    if parameters < 10**7:
        return f"{parameters / 1e6:.2f} million"
    return f"{parameters / 1e9:.2f} billion"


def memory(report: Report, once: Callable[[], Run]) -> Iterator[str]:
    """Return the lines of a device's memory, by ``once``, a pass at true size on fake weights."""
    run = once()
    snapshots = report.counted.snapshots if report.counted is not None else ()
    yield (
        f"model       {_count(run.measured.parameters)} parameters, "
        f"{run.measured.trained / 1e6:,.1f} million "
        f"trained; snapshots: {', '.join(snapshots) or 'none'}"
    )
    sizes = memory_of(run)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items() if size)
    yield f"memory      GiB a device in an update, tracked: {parts}"
    if report.stored and report.offload:
        yield (
            f"            {report.stored / GIB:.2f} GiB of visited latents wait in the CPU's memory"
        )
    yield f"peak        {_peak(run)}, without rewards and the decoder's activations"
    if report.plan.processes > 1:
        yield f"            {_peak(run, report.plan.processes)} in shards on all processes (FSDP)"


def _peak(run: Run, shards: int = 1) -> str:
    """Write a device's peak bytes, and at which moment."""
    moments = moments_of(run, memory_of(run, shards))
    fullest = max(moments, key=lambda name: moments[name])
    return f"about {_size(moments[fullest])} a device ({fullest})"


def _size(count: float) -> str:
    """Write bytes in GiB; less than a hundredth of one in MiB or KiB."""
    if count >= 0.995 * GIB or not count:
        return f"{count / GIB:,.1f} GiB"
    if count >= 0.01 * GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _seconds(value: float) -> str:
    """Write seconds; less than a tenth of one in milliseconds."""
    return f"{value:,.1f} s" if value >= 0.1 or not value else f"{1000 * value:.2g} ms"


def device_lines(run: Run, guess: Estimate, iterations: int, proposed: bool) -> Iterator[str]:
    """Return the lines of ``--devices``: an iteration of a run on named cards, and the whole run.
    ``proposed``: proposals follow."""
    kind = "shards (FSDP2)" if guess.sharded else "copies (DDP)"
    devices = guess.devices
    card = devices.card
    yield (
        f"devices     {devices}, {devices.machines} machine(s), {kind}; true size, passes of "
        f"{run.measured.rows} rows"
    )
    parts = ", ".join(f"{n} {_size(size)}" for n, size in guess.memory.items() if size)
    yield f"  memory    a device in an update, tracked: {parts}"
    moments = ", ".join(f"{name} {_size(size)}" for name, size in guess.moments.items())
    yield f"  phases    peak by phase: {moments}"
    room = "fits" if guess.fits else "does not fit"
    room += ": see --fit" if not (guess.fits or proposed) else ""
    yield (
        f"  peak      {_size(guess.peak)} of {card.memory / GIB:.0f} GiB ({guess.fullest}): {room}"
    )
    yield (
        f"  network   communication: {_size(guess.gathered)} of weights gathered, "
        f"{_size(guess.reduced)} of gradients reduced, a device and iteration"
    )
    yield f"  compute   {guess.flops / 1e15:,.3g} PFLOP an iteration, all devices"
    seconds = ", ".join(f"{name} {_seconds(value)}" for name, value in guess.seconds.items())
    yield (
        f"  time      about {_seconds(guess.whole)} an iteration ({seconds}), without rewards: "
        f"{guess.samples_per_second / devices.count:.3g} samples a second and device, "
        f"MFU {guess.mfu:.0%}"
    )
    yield f"  whole run {_whole_run(guess.whole * iterations, devices.count)}, without rewards"


def _whole_run(seconds: float, devices: int) -> str:
    """Write the time of a run: days or hours, and device hours."""
    days, hours = seconds / 86400, seconds / 3600
    long = f"{days:,.1f} days" if days >= 1 else f"{hours:,.2g} hours"
    return f"about {long}, {hours * devices:,.3g} GPU hours"


def fit_lines(path: object, fits: list[Fit], devices: Devices) -> Iterator[str]:
    """Return the lines of ``--fit``: what to paste."""
    if not fits:
        yield (
            f"fit         nothing fits {devices}: even one row a pass, sharded, with gradient "
            "checkpointing; take more or larger cards, policy option lora, or a smaller size"
        )
    for proposal in sorted(fits, key=lambda each: each.estimate.whole):
        guess = proposal.estimate
        start = "accelerate launch --multi_gpu" if devices.count > 1 else "mmrl train"
        if guess.sharded:
            start = (
                "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy "
                "TRANSFORMER_BASED_WRAP"
            )
        if devices.count > 1:
            start += f" --num_processes {devices.count} -m mmrl train"
        yield f"fit         {start} {path} {shlex.join(proposal.overrides)}"
        yield f"            {_size(guess.peak)} a device, {_seconds(guess.whole)} an iteration"
