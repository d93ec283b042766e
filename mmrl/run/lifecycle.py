"""Runs a training from start to end: the loop, with everything that is written down, saved and
shown."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from mmrl import config
from mmrl.config.stages import OF_ALL, misfits
from mmrl.config.yamltext import read as parsed
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.monitoring.alarms import AlarmOptions, Alarms
from mmrl.monitoring.gallery import Gallery
from mmrl.monitoring.log import LogOptions, RunLog
from mmrl.run import checkpoint, state
from mmrl.run.build import CONFIG, SECTIONS, Session, config_of, read
from mmrl.run.evaluation import evaluate, sample
from mmrl.train.trainer import Trainer
from mmrl.utils.machine import machine, peak_memory_gib

PREVIEW = 8  # held-out prompts in a sample grid
SAME_INSTANT = 1.0  # seconds
FINISHED = (
    "finished"  # the kind of the event that says that a run has spent its iterations or budget
)
# limit of train.budget -> metric of an iteration that is added up
COSTS = {"cpu_seconds": "cpu_seconds", "samples": "samples/total", "forwards": "forwards"}


def train(name: Path, overrides: Sequence[str] = (), resume: bool = False) -> Path:
    """Train a configuration, or go on with a run folder. Returns the run folder. One with stages
    is trained stage by stage.

    Raises UserError for everything a user can mend; what was trained until then is saved.
    """
    file = config_of(name) if resume else name
    plain, stages = config.load_stages(file, overrides)
    if not stages:
        return train_one(name, overrides, resume)
    if resume and overrides:
        raise UserError(
            f"{name} has the stages {', '.join(stages)}: changes belong to one of them, such as "
            f"mmrl train --resume {name}/1-{stages[0]} {overrides[0]}"
        )
    checked = {stage: read(file, [*overrides, f"stage={stage}"]) for stage in stages}
    if problems := list(misfits({stage: known.plain for stage, known in checked.items()})):
        raise UserError("\n".join(f"{file}: {problem}" for problem in problems))
    folder = name if resume else run_folder(checked[stages[0]], name)
    if not resume and distributed.world()[0] == 0:
        _write_stages(folder, plain, checked)
    before: Path | None = None
    for number, stage in enumerate(stages, start=1):
        part = folder / f"{number}-{stage}"
        if not is_finished(part):
            print(f"stage {number} of {len(stages)}: {stage}", flush=True)
            begun = checkpoint.latest(part / "checkpoints") is not None
            added = {"run": str(part)} | ({"start": str(before.resolve())} if before else {})
            if begun:
                train_one(part, (), resume=True)
            else:
                train_one(file, [*overrides, f"stage={stage}"], added=added)
        if not is_finished(part):
            break
        before = part
    return folder


def _write_stages(
    folder: Path, plain: Mapping[str, Any], checked: Mapping[str, config.Config]
) -> None:
    """Write the configuration of a run with stages: all that each of them does stands in it."""
    whole = {name: parsed(config.dump(known), known.file)[0] for name, known in checked.items()}
    parts = {
        name: {key: value for key, value in sections.items() if key not in OF_ALL}
        for name, sections in whole.items()
    }
    shared = {key: plain[key] for key in ("plugins",) if key in plain}
    folder.mkdir(parents=True, exist_ok=True)
    written = config.Config({**shared, "run": str(folder), "stages": parts})
    (folder / CONFIG).write_text(config.dump(written))


def is_finished(folder: Path) -> bool:
    """Tell whether a run has spent its iterations or its budget."""
    try:
        lines = (folder / "events.jsonl").read_text().splitlines()
    except OSError:
        return False
    return any(json.loads(line).get("kind") == FINISHED for line in lines if line.startswith("{"))


def train_one(
    name: Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    added: Mapping[str, Any] = {},
) -> Path:
    """Train a configuration without stages, or one of its stages; ``added``: sections that code
    gives. Returns the run folder."""
    configuration = read(config_of(name) if resume else name, overrides, added=added)
    session = Session.of(configuration)
    trainer = session.trainer()
    config.check(configuration, SECTIONS, {"optimizer": ("parameters",)}, trainer.device.processes)
    folder = name if resume else run_folder(configuration, name)
    notes = _resume(trainer, folder) if resume else []
    with distributed.together():  # only the main process looks into the folder
        log = RunLog(
            folder,
            resume,
            start=trainer.iteration + 1,
            options=configuration.section("log", LogOptions),
            active=trainer.device.main,
            config=configuration.plain,
        )
    with log:
        run = Run(session, trainer, log, folder)
        watched = [name for name, weight in session.scorer.weights.items() if not weight]
        run.alarms = Alarms(configuration.section("alarms", AlarmOptions), watched)
        run.alarms.recall(log.past, log.past_alarms)
        run.recount(log.past)
        for note in [*trainer.plan.warnings, *session.policy.notes, *notes]:
            run.say("warning", note)
        run.begin(fresh=not resume)
        with run.rescued():
            run.loop()
        run.end()
    return folder


@dataclass
class Run:
    """Runs a trainer with its surroundings. ``stop`` is why the loop should end after the current
    iteration."""

    session: Session
    trainer: Trainer
    log: RunLog
    folder: Path
    stop: str = ""
    started: float = field(default_factory=time.monotonic)
    # reward -> failures already written to the events
    reported: dict[str, int] = field(default_factory=dict)
    alarms: Alarms = field(default_factory=lambda: Alarms(AlarmOptions()))
    # what the iterations so far have taken, by the names of train.budget
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0.0))
    finished: str = ""  # which budget ended the run

    def begin(self, fresh: bool) -> None:
        """Prepare what every process needs, and write what the main one writes before the first
        iteration."""
        session = self.session
        session.policy.prepare([*session.source.train, *session.source.held_out])
        if self.log.active:
            (self.folder / CONFIG).write_text(config.dump(session.config))
            (self.folder / "machine.json").write_text(json.dumps(machine(), indent=1))
        every = self.log.options.rollouts
        if self.log.active and every:
            gallery = Gallery(self.folder, session.scorer.rewards, every)
            self.trainer.monitors.append(gallery.see)
        self.trainer.monitors.append(self.alarms.see)
        if fresh:
            self.preview("before")
            if session.scorer.validates():
                self._evaluate()

    def loop(self) -> None:
        options = self.session.options
        trainer = self.trainer
        with self.log.progress(options.iterations, trainer.iteration) as bar, self._interruptible():
            while trainer.iteration < options.iterations and not self._should_stop():
                start = time.perf_counter()
                cpu_start = time.process_time()
                metrics = trainer.iterate()
                metrics["seconds"] = time.perf_counter() - start
                metrics["cpu_seconds"] = time.process_time() - cpu_start
                if (memory := peak_memory_gib()) is not None:
                    metrics["memory/peak_gib"] = memory
                self.recount([metrics])
                metrics |= self._every_so_often(trainer.iteration) | self._counted()
                self.log.metrics(trainer.iteration, metrics)
                self._tell(metrics)
                self._sound_alarms()
                bar.update(trainer.iteration, metrics.get("reward/mean"), self._note(metrics))

    def _note(self, metrics: Mapping[str, float]) -> str:
        """Return what the progress says besides the reward: the loss where there is none."""
        return "" if "reward/mean" in metrics else f"loss {metrics.get('loss', math.nan):.4f}"

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """Save what was trained before an error that all processes share ends the run."""
        start = self.trainer.iteration
        try:
            yield
        except distributed.StopAll as error:
            self.log.event("error", str(error))
            if self.trainer.iteration == start:
                raise
            again = f"mmrl train --resume {self.folder}"
            raise UserError(
                f"{error}\nsaved {self.save()}; when this is mended, go on with: {again}"
            ) from error

    def end(self) -> None:
        """Save the last checkpoint and pictures, and say how to go on if the run was stopped."""
        path = self.save()
        self.preview("after")
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

    def save(self) -> Path:
        iteration = self.trainer.iteration
        keep = self.session.options.save_total_limit
        arrays, meta = state.capture(self.trainer)
        path = checkpoint.save(self.folder / "checkpoints", iteration, arrays, meta, keep)
        self.log.event("checkpoint", f"iteration {iteration}")
        return path

    def preview(self, name: str) -> None:
        """Write a grid of held-out prompts with the noise that is always the same. Only pictures
        and videos have one."""
        prompts = self.session.prompts()[:PREVIEW]
        with self._best_weights():
            media, _ = sample(self.trainer.policy, prompts, 1, self.session.evaluation.seed)
        if isinstance(media, torch.Tensor) and media.ndim in (4, 5):
            shown = distributed.all_gather_rows(media)
            self.log.images(name, shown.float().cpu(), [str(p.get("text", "")) for p in prompts])

    def say(self, kind: str, message: str) -> None:
        self.log.event(kind, message)
        if self.log.active:
            print(f"{kind}: {message}", flush=True)

    def _every_so_often(self, iteration: int) -> dict[str, float]:
        """Evaluate, save and preview where that is due after this iteration; what rewards learn of
        an evaluation is saved with it."""
        options = self.session.options
        metrics: dict[str, float] = {}
        if due(iteration, options.evaluate_every):
            metrics = self._evaluate()
        if due(iteration, options.save_every) and iteration < options.iterations:
            self.save()
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
            losses = self.trainer.held_out(prompts[: options.prompts], options.seed)
        return metrics | {f"eval/{name}": value for name, value in losses.items()}

    def _best_weights(self) -> AbstractContextManager[None]:
        name = "ema" if "ema" in self.trainer.policy.weights.saved else "live"
        return self.trainer.policy.weights.using(name)

    def recount(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Add up what iterations took."""
        for line in metrics:
            for name, key in COSTS.items():
                self.spent[name] += line.get(key) or 0.0

    def _should_stop(self) -> bool:
        limit = self.session.options.time_limit
        if limit and time.monotonic() - self.started > limit:
            self.stop = self.stop or f"time limit of {limit:g} s reached"
        if budget := self.session.options.budget:
            self.finished = budget.spent(self.spent)
        return self.trainer.device.any(bool(self.stop or self.finished))

    def _tell(self, metrics: dict[str, float]) -> None:
        """Report samples that could not be scored and an iteration that taught nothing, once for
        every new case; and the policy's notes."""
        while self.session.policy.news:
            self.say("note", self.session.policy.news.pop(0))
        if metrics["skipped_steps"] == self.trainer.plan.steps * self.session.options.epochs:
            if "steps" not in self.reported:
                self.say(
                    "warning",
                    f"no optimizer step in iteration {self.trainer.iteration}: no "
                    f"decision to train on",
                )
            self.reported["steps"] = self.trainer.iteration
        for name, failures in self.session.scorer.failures.items():
            if failures.count > self.reported.get(name, 0):
                self.reported[name] = failures.count
                self.log.event(
                    "excluded",
                    f"{name}: {failures.count} samples so far; last cause {failures.cause}",
                )

    def _sound_alarms(self) -> None:
        """Write every new alarm as an event with its numbers, and a line for whoever looks."""
        while self.alarms.news:
            alarm = self.alarms.news.pop(0)
            self.log.event("alarm", alarm.message, alarm.numbers, about=alarm.kind)
            if self.log.active:
                print(f"alarm: {alarm.message}", flush=True)

    def _counted(self) -> dict[str, float]:
        """Sum what rewards count themselves over all processes."""
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

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """End the run after the current iteration on the first Ctrl-C (or SIGTERM), at once on the
        second.

        A launcher hands on the Ctrl-C that the terminal has also sent here, so the same instant
        counts once.
        """
        first = -math.inf

        def handle(number: int, _: object) -> None:
            nonlocal first
            if self.stop and time.monotonic() - first > SAME_INSTANT:
                raise KeyboardInterrupt
            if self.stop:
                return
            first = time.monotonic()
            self.stop = f"interrupted by {signal.Signals(number).name}"
            if self.log.active:
                print(
                    "\nfinishing this iteration, then saving; press Ctrl-C again to stop without",
                    flush=True,
                )

        handlers = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def due(iteration: int, every: int) -> bool:
    return bool(every) and iteration % every == 0


def run_folder(configuration: config.Config, name: Path) -> Path:
    """Choose the run folder: ``run`` of the configuration, or runs/<family>-<method>-<time>."""
    if chosen := configuration.plain.get("run"):
        return Path(chosen)
    return Path("runs") / f"{name.parent.name}-{name.stem}-{datetime.now():%Y%m%d-%H%M%S}"


def _resume(trainer: Trainer, folder: Path) -> list[str]:
    """Restore the newest whole checkpoint. Returns what was wrong with newer ones."""
    if checkpoint.latest(folder / "checkpoints") is None:
        raise UserError(
            f"{folder} has no checkpoint yet; start it again with: mmrl train {folder / CONFIG}"
        )
    path, problems = checkpoint.choose(folder / "checkpoints")
    with distributed.together():
        arrays, meta = checkpoint.load(path, checked=True)
    state.restore(trainer, arrays, meta)
    return [*problems, f"resumed from {path}"]
