"""Writes a dry run's report as text."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.dry_run.dryrun import Report

GIB = 2**30


def lines(report: Report) -> Iterator[str]:
    """Return the report's lines, each a name and its numbers."""
    plan = report.plan
    train = report.train
    yield f"policy      {report.policy}: {report.path}"
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
    yield f"passes      of {plan.micro_batch} rows on a device; {passes}"
    yield from _forwards(report)
    yield from _memory(report)
    for what in report.unknown:
        yield f"unknown     {what}"
    for warning in plan.warnings:
        yield f"warning     {warning}"


def _once(report: Report) -> str:
    return "for each trained step of the sampler" if report.shape else "of them"


def _sample(report: Report) -> Iterator[str]:
    if report.shape:
        shape = " x ".join(map(str, report.shape))
        tokens = (
            ""
            if report.tokens is None
            else (f", {report.tokens[0]} tokens and {report.tokens[1]} of text")
        )
        guided = ", guided (two rows of the network each)" if report.guided else ""
        yield (
            f"sample      latents {shape}{tokens}; {report.steps} steps, {report.noisy} of "
            f"them with noise{guided}"
        )
    elif report.tokens:
        yield f"sample      up to {report.tokens[0]} tokens"


def _forwards(report: Report) -> Iterator[str]:
    counts = report.counted
    if counts is None:
        return
    kind = "rows of the network" if report.shape else "answers"
    training = "an unknown number" if counts.training is None else f"{counts.training:,}"
    yield (
        f"forwards    {counts.sampling:,} {kind} to sample, {training} to train: an iteration, "
        f"all processes"
    )
    if report.shape:
        yield (
            f"decisions   {counts.decisions:,} with a density in the first iteration; "
            f"{counts.steps} optimizer steps"
        )


def _memory(report: Report) -> Iterator[str]:
    model = report.model
    counts = report.counted
    if not report.memory or model is None or counts is None:
        return
    count = (
        "unknown"
        if model.parameters is None
        else (f"{model.parameters / 1e9:.2f} billion parameters")
    )
    trained = "unknown" if model.trained is None else f"{model.trained / 1e6:,.1f} million trained"
    yield (f"model       {count}, {trained}; snapshots: {', '.join(counts.snapshots) or 'none'}")
    parts = ", ".join(
        f"{name} {'?' if value is None else f'{value / GIB:.2f}'}"
        for name, value in report.memory.items()
        if value != 0
    )
    yield f"memory      GiB a device, estimated: {parts}"
    if report.stored and report.offload:
        yield (
            f"            {report.stored / GIB:.2f} GiB of visited latents wait in the CPU's memory"
        )
    if report.peak is not None:
        yield (
            f"peak        about {report.peak / GIB:.0f} GiB a device, without rewards and the "
            f"decoder's activations"
        )
    if report.sharded is not None:
        yield (
            f"            about {report.sharded / GIB:.0f} GiB with the weights shared out "
            f"over all processes (FSDP)"
        )
