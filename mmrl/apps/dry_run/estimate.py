"""Converts a rehearsal's measurements to the memory of a device and, on named cards, an iteration's
communication, seconds and MFU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import mmrl.config as configs
from mmrl.apps.dry_run import rehearsal
from mmrl.apps.dry_run.dryrun import Report, dry_run, learners
from mmrl.apps.dry_run.rehearsal import Rehearsed, decoding, rehearse
from mmrl.core.cards import MEMORY_SHARE, Devices
from mmrl.core.errors import UserError
from mmrl.core.registry import OPTIMIZERS
from mmrl.policies.image_tokens.network import ImageNet

USABLE = 0.92  # usable share of a card's memory: the rest is for the driver, NCCL and fragmentation
PARTS = ("parameters", "gradients", "optimizer", "snapshots")  # the parts that sharding divides


@dataclass(frozen=True)
class Run:
    """Holds a configuration's report and its measurements at one batch size of passes."""

    report: Report
    measured: Rehearsed
    optimizer_bytes: float  # bytes per trained parameter
    checkpointing: bool
    answer_tokens: int  # tokens that are generated one by one; 0: none
    passes_to_sample: int  # forward passes of a row in sampling, unless autoregressive
    adamw: str | None = None  # options of the optimizer as YAML, if it is AdamW


@dataclass(frozen=True)
class Estimate:
    """Holds an iteration on one of ``devices``; bytes and seconds of one device."""

    devices: Devices
    sharded: bool
    memory: dict[str, float]  # in an update
    moments: dict[str, float]  # bytes of an update, of decoding samples, of encoding prompts
    gathered: float  # bytes of received weights
    reduced: float  # bytes of sent gradients
    flops: float  # of all devices, without recomputation by checkpointing
    seconds: dict[str, float]  # rollout, update, communication that is not overlapped
    samples_per_second: float

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak(self) -> float:
        return max(self.moments.values())

    @property
    def fullest(self) -> str:
        """Return the moment with the most bytes."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def mfu(self) -> float:
        return self.flops / (self.whole * self.devices.count * self.devices.card.half)

    @property
    def fits(self) -> bool:
        return self.peak <= USABLE * self.devices.card.memory


def measure(path: Any, overrides: Any, processes: int) -> Run:
    """Rehearse a configuration: its report, and one pass at true size. UserError if the
    architecture is unknown."""
    return measured(dry_run(path, overrides, processes))


def measured(report: Report, decode: bool = True) -> Run:
    """Rehearse what a report describes. decode: also decoding a sample. Raises UserError."""
    if report.stage is None:
        raise UserError(f"--devices: unknown: {report.unknown[-1]}; or leave --devices out")
    options = report.options
    once, length, at_once = _rehearsed(report, decode)
    masked = not report.shape and "steps" in options and not at_once
    return Run(
        report,
        once,
        optimizer_bytes(report),
        report.train.gradient_checkpointing,
        0 if at_once or masked else length,
        int(options["steps"]) if masked else 1,
        _adamw(report.configuration),
    )


def _rehearsed(report: Report, decode: bool) -> tuple[Rehearsed, int, bool]:
    """Return (a pass, tokens of a sample, whether a network of image tokens predicts many of them
    at once)."""
    assert report.stage is not None
    try:
        stage = report.stage()
    except (UserError, ValueError) as error:
        raise UserError(report.resolved.place.say(str(error))) from error
    if report.rehearsed is not None:
        decoded = decoding(stage) if decode else None
        return replace(report.rehearsed, decoding=decoded), 0, True
    once = rehearse(stage, decode=decode)
    if report.shape:
        return once, 0, True
    tokens = rehearsal.answer_tokens(stage.net, report.options)
    return once, tokens, isinstance(stage.net, ImageNet) and len(stage.net.turns) < tokens


def optimizer_bytes(report: Report) -> float:
    """Measure the optimizer's bytes per trained parameter, on a small real matrix; a trained
    snapshot needs the same again."""
    weight = nn.Parameter(torch.zeros(256, 256))
    optimizer = report.configuration.build("optimizer", OPTIMIZERS)([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = (x for x in states if isinstance(x, torch.Tensor) and x.ndim)
    return learners(report) * sum(x.nbytes for x in tensors) / weight.numel()


def _adamw(configuration: configs.Config) -> str | None:
    """Return the options of AdamW as YAML of one line; None for another optimizer."""
    chosen = configuration["optimizer"]
    if chosen == "adamw":
        return "{}"
    if not isinstance(chosen, dict) or "adamw" not in chosen:
        return None
    return json.dumps(chosen["adamw"] or {}).replace('"', "")


def estimate(run: Run, devices: Devices, sharded: bool) -> Estimate:
    """Estimate an iteration of a run on these devices, as copies (DDP) or in shards (FSDP2)."""
    memory = memory_of(run, devices.count if sharded else 1)
    counts = _passes(run, devices.count)
    card = devices.card
    work = run.measured
    rollout = counts["sampling"] * _sampling_seconds(run, devices)
    if work.decoding is not None:
        rollout += run.report.plan.rows_per_process * work.decoding.seconds(card)
    looks = 0.0
    if work.looking is not None:  # at the pictures of every prompt once
        looks = run.report.plan.prompts_per_process / work.prompts
        rollout += looks * work.looking.seconds(card)
    frozen = counts["frozen"] * work.sampling.seconds(card)
    update = counts["trained"] * work.update.seconds(card) + frozen
    gathered, reduced = _travel(run, devices.count, sharded, counts)
    travel = (gathered + reduced) / devices.link
    # FSDP2 prefetches the next layer's weights while this one computes; DDP reduces at the end
    waits = max(0.0, travel - update - rollout) if sharded else travel
    seconds = {"rollout": rollout, "update": update, "communication": waits}
    extra = work.sampling.flops if run.checkpointing else 0.0
    flops = devices.count * (
        (counts["sampling"] * run.passes_to_sample + counts["frozen"]) * work.sampling.flops
        + counts["trained"] * (work.update.flops - extra)
        + (looks * work.looking.flops if work.looking is not None else 0.0)
    )
    return Estimate(
        devices,
        sharded,
        memory,
        moments_of(run, memory),
        gathered,
        reduced,
        flops,
        seconds,
        run.report.plan.rows / sum(seconds.values()),
    )


def memory_of(run: Run, shards: int = 1) -> dict[str, float]:
    """Return a device's bytes at the peak of an update, by purpose.

    shards: devices that shard weights, gradients and optimizer (FSDP2); 1: each has all.
    """
    work = run.measured
    peak = work.update.memory
    each, empty = work.conditions
    snapshots = len(run.report.counted.snapshots) if run.report.counted else 0
    memory = {
        "parameters": float(work.bytes_parameters),
        "gradients": float(work.bytes_trained),
        "optimizer": run.optimizer_bytes * work.trained,
        "snapshots": float(snapshots * work.bytes_trained),
        "activations": float(peak["activations"] + peak["buffers"]),
        "temporary": float(peak["temporary"] + peak["other"]),
        "rollout": 0.0 if run.report.offload else float(run.report.stored),
        "conditions": float(run.report.plan.prompts_per_process * each + empty),
        "autoencoder": float(work.bytes_decoder),
    }
    if shards > 1:
        for name in PARTS:
            memory[name] /= shards
        # this layer and the prefetched next one, in addition to the unsharded rest; a network that
        # is gathered whole stays in its buffer, since nothing follows it
        layers = 2.0 * (work.largest_unit or work.around_units)
        memory["gathered layers"] = layers + (work.around_units if work.largest_unit else 0)
    return memory


def moments_of(run: Run, memory: dict[str, float]) -> dict[str, float]:
    """Return a device's bytes in an update, while decoding a sample and while encoding prompts,
    which never overlap."""
    report = run.report
    resident = ("parameters", "optimizer", "snapshots", "autoencoder", "rollout", "conditions")
    rest = sum(memory[name] for name in resident)
    moments = {"update": sum(memory.values())}
    decoding = run.measured.decoding
    if decoding is not None:
        passing = ("activations", "temporary", "other", "buffers")
        moments["decoding"] = rest + sum(decoding.memory[name] for name in passing)
    if report.encoders and report.placement != "cpu":
        encoding = rest - memory["rollout"] - memory["conditions"] + report.encoders
        moments["encoding prompts"] = encoding
    if report.placement == "keep":
        moments = {
            name: size + (0 if name == "encoding prompts" else report.encoders)
            for name, size in moments.items()
        }
    return moments


def _passes(run: Run, processes: int) -> dict[str, float]:
    """Count a device's passes of an iteration: of sampling, with gradients, and extra ones with
    frozen weights."""
    report = run.report
    counted = report.counted
    rows = processes * run.measured.rows
    guided = report.network_rows
    if counted is None:
        return {"sampling": 0.0, "trained": 0.0, "frozen": 0.0}
    if not report.shape:
        epochs = report.train.epochs
        references = len([name for name in counted.snapshots if name == "reference"])
        trained = report.plan.rows * epochs / rows
        return {
            "sampling": counted.sampling / rows,
            "trained": trained,
            "frozen": references * trained,
        }
    trained = counted.decisions * report.train.epochs / rows
    if report.critic_steps:  # a state of each row's path, and as many of each of its steps
        states = report.plan.rows * report.train.epochs * (1 + report.critic_steps) / rows
        trained = states + (trained if report.critic_beside else 0.0)
    every = (counted.training or counted.sampling) / guided / rows
    if every < trained or not trained:  # denoising losses use re-noised samples
        trained = every / (1 + len(counted.snapshots))
    return {
        "sampling": counted.sampling / guided / rows,
        "trained": trained,
        "frozen": max(0.0, every - trained),
    }


def _sampling_seconds(run: Run, devices: Devices) -> float:
    """Estimate a pass of sampling. A token at a time reads all weights for each."""
    card = devices.card
    work = run.measured
    once = work.sampling.seconds(card)
    read = work.bytes_parameters / (card.bandwidth * MEMORY_SHARE)
    return run.passes_to_sample * once + run.answer_tokens * read


def _travel(
    run: Run, processes: int, sharded: bool, counts: dict[str, float]
) -> tuple[float, float]:
    """Count the bytes of weights that a device receives, and of gradients that it sends, in an
    iteration."""
    share = (processes - 1) / processes
    work = run.measured
    steps = run.report.plan.steps * run.report.train.epochs * (1 + run.report.critic_steps)
    if not sharded:  # a ring sends every gradient twice: reduce-scatter and all-gather
        return 0.0, 2 * share * work.bytes_trained * steps
    sampled = counts["sampling"] * max(run.passes_to_sample, run.answer_tokens, 1)
    gathers = sampled + counts["frozen"] + 2 * counts["trained"]
    spared = counts["trained"] * work.around_units  # from the forward to the backward pass
    return (
        share * (work.bytes_parameters * gathers - spared),
        share * work.bytes_trained * counts["trained"],
    )


@dataclass(frozen=True)
class Fit:
    """Holds a proposal: overrides to paste, how to start it, and its cost."""

    overrides: tuple[str, ...]
    estimate: Estimate


def fit(path: Any, overrides: Any, devices: Devices) -> Iterator[Fit]:
    """Propose what fits, the fastest of each kind first: DDP before FSDP2, no checkpointing before
    checkpointing, large micro-batches before small ones; with offloading if that allows larger
    ones."""
    for checkpointing in (False, True):
        chosen = [f"train.gradient_checkpointing={str(checkpointing).lower()}"]
        narrow = measure(path, [*overrides, *chosen, "train.micro_batch_size=1"], devices.count)
        pair = measure(path, [*overrides, *chosen, "train.micro_batch_size=2"], devices.count)
        for sharded in (False, True) if devices.count > 1 else (False,):
            widest = 0
            for words, lighten in _reliefs(narrow):
                for rows in _widths(narrow):
                    run = narrow if rows == 1 else _wider(narrow, pair, rows)
                    guess = estimate(lighten(run), devices, sharded)
                    if guess.fits and rows > widest:
                        widest = rows
                        sizes = (f"train.micro_batch_size={rows}", *chosen)
                        yield Fit((*sizes, *words), guess)
                        break


Lighten = Callable[[Run], Run]
BYTES_8BIT = 2 * (1 + 4 / 256)  # two moments, and a scale of each block of 256


def _reliefs(run: Run) -> Iterator[tuple[tuple[str, ...], Lighten]]:
    """List what can be offloaded, step by step: text encoders, the latents of the trajectory, three
    quarters of the optimizer's moments; as overrides, and their effect on a run."""
    report = run.report
    words: tuple[str, ...] = ()
    changes: dict[str, Any] = {}
    yield words, partial(_lightened, **changes)
    if report.encoders and report.placement != "cpu":
        words = (*words, f"policy.{report.policy}.text_encoder_placement=cpu")
        changes = changes | {"placement": "cpu"}
        yield words, partial(_lightened, **changes)
    if report.stored and not report.offload:
        words = (*words, f"policy.{report.policy}.offload_trajectory=true")
        changes = changes | {"offload": True}
        yield words, partial(_lightened, **changes)
    if run.adamw is not None:
        words = (*words, f"optimizer={{adamw_8bit: {run.adamw}}}")
        yield words, partial(_lightened, **changes, optimizer=learners(report) * BYTES_8BIT)


def _lightened(
    run: Run, placement: str | None = None, offload: bool = False, optimizer: float | None = None
) -> Run:
    report = run.report
    if placement is not None:
        report = replace(report, placement=placement)
    if offload:
        report = replace(report, offload=True)
    return replace(run, report=report, optimizer_bytes=optimizer or run.optimizer_bytes)


def _widths(run: Run) -> list[int]:
    """List the micro-batch sizes that divide a device's rows of an optimizer step, the largest
    first."""
    plan = run.report.plan
    most = plan.rows_per_process // max(plan.steps, 1)
    return [rows for rows in (64, 32, 16, 8, 4, 2, 1) if rows <= most and most % rows == 0] or [1]


def _wider(one: Run, two: Run, rows: int) -> Run:
    """Extrapolate two measurements linearly to ``rows`` rows: activations, operations and traffic
    grow with the rows, weights do not."""
    if rows == 2:
        return two
    update = replace(
        two.measured.update,
        memory={
            name: size + (rows - 2) * max(0, size - one.measured.update.memory[name])
            for name, size in two.measured.update.memory.items()
        },
        operations=_scaled(two.measured.update.operations, rows / 2),
    )
    sampling = replace(
        two.measured.sampling, operations=_scaled(two.measured.sampling.operations, rows / 2)
    )
    return replace(two, measured=replace(two.measured, rows=rows, update=update, sampling=sampling))


def _scaled(
    operations: list[tuple[float, float, bool]], factor: float
) -> list[tuple[float, float, bool]]:
    return [(flops * factor, traffic * factor, half) for flops, traffic, half in operations]
