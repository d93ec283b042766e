"""Runs the iterations of a trainer, with logging, checkpoints and evaluation."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import mmrl.config as config
from mmrl.config.sections import AlarmOptions
from mmrl.core import distributed
from mmrl.core.files import on_disk, write_json, write_text
from mmrl.core.machine import machine, peak_memory_gib
from mmrl.experiment import changes, checkpoint, inputs, state
from mmrl.experiment.build import CONFIG, Session
from mmrl.experiment.evaluation import evaluate, sample
from mmrl.experiment.lock import FolderLock
from mmrl.experiment.reward_notes import notes
from mmrl.experiment.saving import Saving
from mmrl.experiment.stopping import (
    BUDGET,
    CALLER,
    GO_ON,
    SIGNAL,
    STUCK,
    TIME_LIMIT,
    Signals,
    status_of,
)
from mmrl.experiment.throughput import ThroughputMeter
from mmrl.experiment.watching import Watcher
from mmrl.monitoring.alarms import Alarms
from mmrl.monitoring.gallery import Gallery
from mmrl.monitoring.log import FINISHED, RunLog
from mmrl.policies.contracts import size_of
from mmrl.rollout.collect import Sampled
from mmrl.train.trainer import Trainer

PREVIEW = 8  # held-out prompts in a sample grid
# limit of train.budget -> metric of an iteration that is summed
COSTS = {"cpu_seconds": "cpu_seconds", "samples": "samples/total", "forwards": "forwards"}


@dataclass
class Run:
    """Runs a trainer with logging, checkpoints and evaluation. ``stop``: reason to end after the
    current iteration."""

    session: Session
    trainer: Trainer
    log: RunLog
    folder: Path
    lock: FolderLock = field(default_factory=lambda: FolderLock(Path(), active=False))
    watcher: Watcher = field(default_factory=Watcher)
    caller_ends: bool = False  # a watcher requests the end of the run
    stop: str = ""
    status: int = 0  # exit status of the command
    saved: int | None = None  # iteration of the newest checkpoint, if known to this process
    started: float = field(default_factory=time.monotonic)
    # reward -> failures already logged as events
    reported: dict[str, int] = field(default_factory=dict)
    alarms: Alarms = field(default_factory=lambda: Alarms(AlarmOptions()))
    # sums over the iterations so far, by the names of train.budget
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0.0))
    finished: str = ""  # which budget ended the run
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)
    # iteration and optimizer step at which the state was last consistent
    whole: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        options, weights = self.session.options, self.session.scorer.weights
        self.inputs = inputs.known(self.session)  # as they were read
        self.saving = Saving(options, self.folder / "checkpoints", weights)
        self.signals = Signals(self._promise)

    def recall(self, warnings: Sequence[str], note: str = "") -> None:
        """Restore what was logged before a resume, and log warnings and notes about the start."""
        session = self.session
        weights = session.scorer.weights
        rewards = {name: r for name, r in session.scorer.rewards.items() if weights[name]}
        options = session.config.section("alarms", AlarmOptions)
        watched = [name for name, weight in weights.items() if not weight]
        alone = self.trainer.objective.requires.proportional and not self.trainer.stages
        self.alarms = Alarms(options, watched, rewards, alone)
        self.alarms.recall(self.log.past, self.log.past_alarms)
        self.recount(self.log.past)
        self.saving.recall(self.trainer.iteration)
        for summary in session.summaries:
            for line in summary.lines():
                self.say("data", line)
        for warning in [*self.trainer.plan.warnings, *warnings]:
            self.say("warning", warning)
        for line in filter(None, [*session.policy.report.notes, note]):
            self.say("note", line)

    def begin(self, fresh: bool) -> None:
        """Prepare every process, and write the main one's files before the first iteration."""
        session = self.session
        session.policy.prepare([*session.source.train, *session.source.held_out])
        with distributed.together(), on_disk(self.folder):
            if self.log.active:
                write_text(self.folder / CONFIG, config.dump(session.config))
                write_json(self.folder / "machine.json", machine() | self._surroundings())
        every = self.log.options.rollouts
        if every:
            gallery = Gallery(self.folder, session.scorer.rewards, every, self.log.answers)
            self.trainer.monitors.append(partial(self._show, gallery))
        self.trainer.monitors.append(self.alarms.see)
        self.trainer.monitors.append(self.watcher.sampled)
        if fresh:
            self.preview("before")
            if session.scorer.validates():
                self._evaluate()

    def _surroundings(self) -> dict[str, Any]:
        """Return what may affect rounding in this process, and the library of the model."""
        return {
            "model_code": dict(self.session.policy.report.code),
            "threads": torch.get_num_threads(),
            "processes": distributed.process()[1],
            "mkl_cbwr": os.environ.get("MKL_CBWR"),
        }

    def loop(self) -> None:
        """Iterate until the end. A kill at any point can be resumed: the line of an iteration is on
        disk before its checkpoint, and a resume rewrites lines after the last checkpoint."""
        options = self.session.options
        trainer = self.trainer
        with self.log.progress(options.iterations, trainer.iteration) as bar:
            while trainer.iteration < options.iterations and not self._should_stop():
                start = time.perf_counter()
                cpu_start = time.process_time()
                metrics = self.meter.iterate(trainer)
                self.whole = (trainer.iteration, trainer.update.step)
                metrics["seconds"] = time.perf_counter() - start
                metrics["cpu_seconds"] = time.process_time() - cpu_start
                metrics |= self.meter.rates(metrics, trainer)
                if (memory := peak_memory_gib()) is not None:
                    metrics["memory/peak_gib"] = memory
                self.recount([metrics])
                self.alarms.after_update(trainer.iteration, metrics)
                metrics |= self._measured(trainer.iteration) | self._counted()
                metrics |= self._sub_scores()
                with self.writing():
                    self.log.metrics(trainer.iteration, metrics)
                    self._tell(metrics)
                    self._sound_alarms()
                bar.update(trainer.iteration, metrics.get("reward/mean"), self._note(metrics))
                self.caller_ends = self.watcher.iterated(trainer.iteration, metrics)
                best = self.saving.improved(trainer.iteration, metrics)
                if due(trainer.iteration, options.save_every) or best or self.saving.by_clock():
                    self.save()
                if best:
                    with self.writing():
                        self.saving.note_best(self.log.active)

    def _show(self, gallery: Gallery, sampled: Sampled) -> dict[str, float]:
        """Pass an iteration to the gallery, as a monitor; a collective call."""
        with self.writing():
            return gallery.see(sampled) if self.log.active else {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write something into the folder, on the main process; a collective call. Raises UserError
        on all if the disk cannot be written, or another process now owns the folder."""
        with distributed.together(), on_disk(self.folder):
            self.lock.check()
            yield

    def _note(self, metrics: Mapping[str, float]) -> str:
        """Return what the progress bar shows besides the reward: the loss if there is none."""
        return "" if "reward/mean" in metrics else f"loss {metrics.get('loss', math.nan):.4f}"

    def end(self) -> None:
        """Save the last checkpoint and pictures, and say how to resume if the run was stopped."""
        self.log.iteration = self.trainer.iteration  # also if a resume had nothing left to do
        path = self.save()
        self.preview("after")
        with self.writing():
            if self.stop:
                self.say(
                    "stopped",
                    f"{self.stop}; saved {path}. Go on with: mmrl train --resume {self.folder}",
                )
            else:
                iterations = f"{self.trainer.iteration} iterations"
                self.log.event(FINISHED, self.finished or iterations, self.spent)
                if self.log.active:
                    print(f"finished: {self.folder}")
                    print(f"next: {' | '.join(self._next())}")

    def _next(self) -> list[str]:
        """List the commands that show the result."""
        judged = bool(self.session.scorer.rewards)
        measure = [f"mmrl evaluate {self.folder}"] if judged else []
        best = " --checkpoint best" if self.saving.best is not None else ""
        return [
            *measure,
            f"mmrl report {self.folder}",
            f"mmrl export {self.folder}{best} --out FOLDER",
        ]

    def save(self) -> Path:
        """Save a checkpoint, after everything logged so far has reached the disk."""
        iteration = self.trainer.iteration
        if self.saved == iteration:  # as read, or as just written
            return checkpoint.path_of(self.folder / "checkpoints", iteration)
        with self.writing():
            self.log.sync()
        keep = self.session.options.save_total_limit
        arrays, meta = state.capture(self.trainer)
        meta["config"] = changes.text_of(self.session.config)
        meta["inputs"] = self.inputs
        path = checkpoint.save(
            self.folder / "checkpoints", iteration, arrays, meta, keep, self.saving.best
        )
        self.saved = iteration
        self.saving.since = time.monotonic()
        with self.writing():
            self.log.event("checkpoint", f"iteration {iteration}")
        return path

    def preview(self, name: str) -> None:
        """Write a grid of held-out prompts with fixed noise. Only pictures and videos have one."""
        prompts = self.session.prompts()
        size = size_of(self.trainer.policy, prompts[0])  # a grid has one
        alike = (p for p in prompts if size_of(self.trainer.policy, p) == size)
        prompts = list(islice(alike, PREVIEW))
        with self._best_weights():
            media, _ = sample(self.trainer.policy, prompts, 1, self.session.evaluation.seed)
        if isinstance(media, torch.Tensor) and media.ndim in (4, 5):
            alone = distributed.world()[1] == 1  # gathered tensors have no sound
            shown = media if alone else distributed.all_gather_rows(media)
            with self.writing():
                texts = [str(p.get("text", "")) for p in prompts]
                fps = self.trainer.policy.media.fps
                self.log.images(name, shown.float().cpu(), texts, fps=fps)

    def say(self, kind: str, message: str) -> None:
        self.log.event(kind, message)
        if self.log.active:
            print(f"{kind}: {message}", flush=True)

    def _measured(self, iteration: int) -> dict[str, float]:
        """Evaluate and preview if due after this iteration; what rewards learn from an evaluation
        is saved with it."""
        options = self.session.options
        metrics: dict[str, float] = {}
        if due(iteration, options.evaluate_every):
            metrics = self._evaluate()
        if due(iteration, options.sample_every):
            self.preview(f"iter-{iteration:06d}")
        return metrics

    def _evaluate(self) -> dict[str, float]:
        """Measure the rewards and the loss on held-out prompts; a collective call."""
        session = self.session
        prompts = session.prompts()
        options = session.evaluation
        metrics: dict[str, float] = {}
        with self._best_weights():
            if session.scorer.rewards:
                each = evaluate(session.policy, prompts, session.scorer, options)
                metrics |= {f"eval/{name}": value.mean for name, value in each.items()}
                session.scorer.validated()
                self.watcher.evaluated(self.trainer.iteration, each)
            losses = self.trainer.held_out(prompts[: options.prompts], options.seed)
        return metrics | {f"eval/{name}": value for name, value in losses.items()}

    def _best_weights(self) -> AbstractContextManager[None]:
        name = "ema" if "ema" in self.trainer.policy.weights.saved else "live"
        return self.trainer.policy.weights.using(name)

    def recount(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Sum the cost of iterations."""
        for line in metrics:
            for name, key in COSTS.items():
                self.spent[name] += line.get(key) or 0.0

    def _should_stop(self) -> bool:
        """Agree with the other processes on a reason to end, if any; a collective call."""
        code = distributed.largest(self._reason(), self.trainer.device.accelerator.device)
        limit = self.session.options.time_limit
        if code >= SIGNAL:
            self.stop = f"interrupted by {signal.Signals(code - SIGNAL).name}"
        elif code == CALLER:
            self.stop = "ended by a callback"
        elif code == TIME_LIMIT:
            self.stop = f"time limit of {limit or 0:g} s reached"
        elif code == STUCK:
            self.stop = self.alarms.ended
        elif code == BUDGET:
            self.finished = self._spent() or "budget of another process spent"
        self.status = status_of(code)
        return code != GO_ON

    def _reason(self) -> int:
        """Return this process's reason to end the run."""
        limit = self.session.options.time_limit
        if self.signals.number:
            return SIGNAL + self.signals.number
        if limit and time.monotonic() - self.started > limit:
            return TIME_LIMIT
        if self.alarms.ended:
            return STUCK
        if self.caller_ends:
            return CALLER
        return BUDGET if self._spent() else GO_ON

    def _spent(self) -> str:
        budget = self.session.options.budget
        return budget.spent(self.spent) if budget else ""

    def _promise(self) -> None:
        """Print what the first signal does."""
        if self.log.active:
            print(
                "\nfinishing this iteration, then saving; press Ctrl-C again to stop now, without "
                "saving"
            )

    def _tell(self, metrics: dict[str, float]) -> None:
        """Report samples without a score and an iteration without a gradient, once per kind; and
        the policy's notes."""
        while self.session.policy.report.warnings:
            self.say("note", self.session.policy.report.warnings.pop(0))
        if metrics["skipped_steps"] == self.trainer.plan.steps * self.session.options.epochs:
            if "steps" not in self.reported:
                self.say(
                    "warning",
                    f"no optimizer step in iteration {self.trainer.iteration}: no "
                    f"decision to train on",
                )
            self.reported["steps"] = self.trainer.iteration
        scorer = self.session.scorer
        chunks = self.session.options.reward_overlap_chunks
        about = notes(metrics, scorer.weights, scorer.seconds, chunks, self.trainer.advantage)
        for kind, sentence in about.items():
            if kind not in self.reported:
                self.reported[kind] = self.trainer.iteration
                self.say("note", sentence)
        for name, failures in scorer.failures.items():
            if failures.count > self.reported.get(name, 0):
                self.reported[name] = failures.count
                self.log.event(
                    "excluded",
                    f"{name}: {failures.count} samples so far; last cause {failures.cause}",
                )

    def _sound_alarms(self) -> None:
        """Write every new alarm as an event with its numbers, and a line on the terminal."""
        while self.alarms.news:
            alarm = self.alarms.news.pop(0)
            self.log.event("alarm", alarm.message, alarm.numbers, about=alarm.kind)
            if self.log.active:
                print(f"alarm: {alarm.message}", flush=True)

    def _sub_scores(self) -> dict[str, float]:
        """Average the sub-scores of rewards over all processes, some of which may have none."""
        sums: dict[str, list[float]] = {}
        for parts in distributed.all_gather_json([self.session.scorer.sub_scores()]):
            for name, (total, count) in parts.items():
                before = sums.setdefault(name, [0.0, 0.0])
                sums[name] = [before[0] + total, before[1] + count]
        return {f"reward/{n}/mean": total / count for n, (total, count) in sums.items() if count}

    def _counted(self) -> dict[str, float]:
        """Sum the counters of rewards over all processes."""
        counts = self.session.scorer.counters()
        if not counts:
            return {}
        device = self.trainer.device.accelerator.device
        total = distributed.all_sum(
            torch.tensor(list(counts.values()), dtype=torch.float64, device=device)
        )
        return {
            f"judged/{name}": number for name, number in zip(counts, total.tolist(), strict=True)
        }


def due(iteration: int, every: int) -> bool:
    return bool(every) and iteration % every == 0
