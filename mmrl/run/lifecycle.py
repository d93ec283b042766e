"""Runs a training from start to end: the loop, with everything that is written down, saved and
shown."""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
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
from mmrl.monitoring.log import FINISHED, METRICS, LogOptions, RunLog, parse_line
from mmrl.monitoring.monitors import Sampled
from mmrl.run import changes, checkpoint, state
from mmrl.run.build import CONFIG, SECTIONS, Session, config_of, read
from mmrl.run.evaluation import evaluate, sample
from mmrl.run.lock import FolderLock
from mmrl.run.rescue import rescued
from mmrl.run.stopping import (
    BUDGET,
    CALLER,
    GO_ON,
    SIGNAL,
    STUCK,
    TIME_LIMIT,
    Ended,
    Signals,
    status_of,
)
from mmrl.run.throughput import ThroughputMeter
from mmrl.run.watching import Watcher
from mmrl.train.trainer import Trainer
from mmrl.utils.files import check_writable, on_disk, write_json, write_text
from mmrl.utils.machine import machine, peak_memory_gib
from mmrl.utils.output import lasting_output

PREVIEW = 8  # held-out prompts in a sample grid
# limit of train.budget -> metric of an iteration that is added up
COSTS = {"cpu_seconds": "cpu_seconds", "samples": "samples/total", "forwards": "forwards"}


def train(
    name: Path, overrides: Sequence[str] = (), resume: bool = False, accept: bool = False
) -> Path:
    """Train a configuration, or go on with a run folder. Returns the run folder. One with stages
    is trained stage by stage. ``accept``: a resume may change what makes it another run.

    Raises UserError for everything a user can mend; what was trained until then is saved.
    """
    return trained(name, overrides, resume, accept).folder


def trained(
    name: Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    accept: bool = False,
    watcher: Watcher | None = None,
) -> Ended:
    """Do the same, and tell how it ended. ``watcher`` is told what happens."""
    with ending_by_errors():
        return _train(name, overrides, resume, accept, watcher)


@contextmanager
def ending_by_errors() -> Iterator[None]:
    """Keep what is printed from ending a training, and turn code of the user's that ends the
    program into an error."""
    with lasting_output():
        try:
            yield
        except SystemExit as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{last.filename}:{last.lineno} ended the program ({last.line or 'sys.exit'}) in "
                f"the middle of a training; let it raise an error, or return NaN for a sample"
            ) from error


def _train(
    name: Path, overrides: Sequence[str], resume: bool, accept: bool, watcher: Watcher | None
) -> Ended:
    file = config_of(name) if resume else name
    plain, stages = config.load_stages(file, overrides)
    if not stages:
        return train_one(name, overrides, resume, accept=accept, watcher=watcher)
    if resume and overrides:
        raise UserError(
            f"{name} has the stages {', '.join(stages)}: changes belong to one of them, such as "
            f"mmrl train --resume {name}/1-{stages[0]} {overrides[0]}"
        )
    checked = {stage: read(file, [*overrides, f"stage={stage}"]) for stage in stages}
    if problems := list(misfits({stage: known.plain for stage, known in checked.items()})):
        raise UserError("\n".join(f"{file}: {problem}" for problem in problems))
    folder = name if resume else run_folder(checked[stages[0]], name)
    if not resume and distributed.is_main():
        _write_stages(folder, plain, checked)
    before: Path | None = None
    ended = Ended(folder)
    for number, stage in enumerate(stages, start=1):
        part = folder / f"{number}-{stage}"
        if not is_finished(part):
            print(f"stage {number} of {len(stages)}: {stage}", flush=True)
            added = {"run": str(part)} | ({"start": str(before.resolve())} if before else {})
            if is_begun(part):
                ended = train_one(part, (), resume=True, watcher=watcher)
            else:
                words = [*overrides, f"stage={stage}"]
                ended = train_one(file, words, added=added, watcher=watcher)
        if not is_finished(part):
            break
        before = part
    return replace(ended, folder=folder)


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
    write_text(folder / CONFIG, config.dump(written))


def is_finished(folder: Path) -> bool:
    """Tell whether a run has spent its iterations or its budget."""
    try:
        text = (folder / "events.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any((parse_line(line) or {}).get("kind") == FINISHED for line in text.splitlines())


def is_begun(folder: Path) -> bool:
    """Tell whether a folder holds a run that has trained or saved something."""
    metrics = folder / METRICS
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return has_metrics or checkpoint.latest(folder / "checkpoints") is not None


def train_one(
    name: Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    added: Mapping[str, Any] = {},
    accept: bool = False,
    watcher: Watcher | None = None,
) -> Ended:
    """Train a configuration without stages, or one of its stages; ``added``: sections that code
    gives. ``accept``: a resume may change what makes it another run."""
    configuration = read(config_of(name) if resume else name, overrides, added=added)
    folder = name if resume else run_folder(configuration, name)
    with distributed.together():
        check_writable(folder)  # before a large model is built in vain
    session = Session.of(configuration, judged=True)
    return train_session(session, folder, resume, accept, watcher)


def train_session(
    session: Session,
    folder: Path,
    resume: bool = False,
    accept: bool = False,
    watcher: Watcher | None = None,
) -> Ended:
    """Train what has been built, into a new folder, or go on with that of a run."""
    configuration = session.config
    trainer = session.trainer()
    config.check(configuration, SECTIONS, {"optimizer": ("parameters",)}, trainer.device.processes)
    # the clock of the main process names it
    folder = Path(distributed.all_gather_plain(str(folder))[0])
    with ExitStack() as held:
        lock = FolderLock(folder, active=trainer.device.main)
        with distributed.together(), on_disk(folder):  # only the main process looks into the folder
            held.enter_context(lock)
            if trainer.device.main and not resume and is_begun(folder):
                raise UserError(
                    f"{folder} already holds a run; go on with it (mmrl train --resume {folder}), "
                    f"or choose another folder"
                )
        begun = resume and distributed.any_of(checkpoint.latest(folder / "checkpoints") is not None)
        warnings = _resume(trainer, folder, configuration, accept) if begun else []
        with distributed.together(), on_disk(folder):
            log = RunLog(
                folder,
                resume,
                start=trainer.iteration + 1,
                options=configuration.section("log", LogOptions),
                active=trainer.device.main,
                config=configuration.plain,
            )
        held.enter_context(log)
        run = Run(session, trainer, log, folder, lock, watcher or Watcher())
        run.watcher.built(session, trainer)
        note = ""
        if begun:
            run.saved = trainer.iteration
            path = checkpoint.path_of(folder / "checkpoints", trainer.iteration)
            note = f"resumed from {path}"
        elif resume:
            note = f"{folder} has no checkpoint yet: begun anew"
        with run.writing():
            run.recall(warnings, note)
        with run.signals.caught():
            run.begin(fresh=not begun)
            with rescued(run):
                run.loop()
                run.end()
    return Ended(folder, run.status, run.stop, run.signals.number)


@dataclass
class Run:
    """Runs a trainer with its surroundings. ``stop`` is why the loop should end after the current
    iteration."""

    session: Session
    trainer: Trainer
    log: RunLog
    folder: Path
    lock: FolderLock = field(default_factory=lambda: FolderLock(Path(), active=False))
    watcher: Watcher = field(default_factory=Watcher)
    caller_ends: bool = False  # whoever watches wants the run to end
    stop: str = ""
    status: int = 0  # exit status of a command that runs this
    saved: int | None = None  # iteration of the newest checkpoint, where this process knows it
    started: float = field(default_factory=time.monotonic)
    # reward -> failures already written to the events
    reported: dict[str, int] = field(default_factory=dict)
    alarms: Alarms = field(default_factory=lambda: Alarms(AlarmOptions()))
    # what the iterations so far have taken, by the names of train.budget
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0.0))
    finished: str = ""  # which budget ended the run
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)
    # iteration and optimizer step at which the state was last whole
    whole: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self.signals = Signals(self._promise)

    def recall(self, warnings: Sequence[str], note: str = "") -> None:
        """Take up what was logged before a resume, and write what there is to be said about the
        beginning: what may be wrong as warnings, what is so as notes."""
        session = self.session
        weights = session.scorer.weights
        rewards = {name: r for name, r in session.scorer.rewards.items() if weights[name]}
        options = session.config.section("alarms", AlarmOptions)
        watched = [name for name, weight in weights.items() if not weight]
        alone = self.trainer.objective.proportional and not self.trainer.stages
        self.alarms = Alarms(options, watched, rewards, alone)
        self.alarms.recall(self.log.past, self.log.past_alarms)
        self.recount(self.log.past)
        for summary in session.summaries:
            for line in summary.lines():
                self.say("data", line)
        for warning in [*self.trainer.plan.warnings, *warnings]:
            self.say("warning", warning)
        for line in filter(None, [*session.policy.notes, note]):
            self.say("note", line)

    def begin(self, fresh: bool) -> None:
        """Prepare what every process needs, and write what the main one writes before the first
        iteration."""
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
        """Return what of this process sums may round by, and whose code makes the model."""
        return {
            "model_code": dict(self.session.policy.code),
            "threads": torch.get_num_threads(),
            "processes": distributed.process()[1],
            "mkl_cbwr": os.environ.get("MKL_CBWR"),
        }

    def loop(self) -> None:
        """Iterate until the end. The order lets a kill at any point be replayed: the line of an
        iteration is on the disk before its checkpoint, and lines after the last checkpoint are
        written again by a resume."""
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
                with self.writing():
                    self.log.metrics(trainer.iteration, metrics)
                    self._tell(metrics)
                    self._sound_alarms()
                bar.update(trainer.iteration, metrics.get("reward/mean"), self._note(metrics))
                self.caller_ends = self.watcher.iterated(trainer.iteration, metrics)
                if due(trainer.iteration, options.save_every):
                    self.save()

    def _show(self, gallery: Gallery, sampled: Sampled) -> dict[str, float]:
        """Let the gallery see an iteration, as a monitor; a collective call."""
        with self.writing():
            return gallery.see(sampled) if self.log.active else {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write something into the folder, on the main process; a collective call. Raises UserError
        on all of them if the disk cannot be written, or the folder is another process's now."""
        with distributed.together(), on_disk(self.folder):
            self.lock.check()
            yield

    def _note(self, metrics: Mapping[str, float]) -> str:
        """Return what the progress says besides the reward: the loss where there is none."""
        return "" if "reward/mean" in metrics else f"loss {metrics.get('loss', math.nan):.4f}"

    def end(self) -> None:
        """Save the last checkpoint and pictures, and say how to go on if the run was stopped."""
        self.log.iteration = self.trainer.iteration  # also where a resume had nothing left to do
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

    def save(self) -> Path:
        """Save a checkpoint, after everything that was logged until now has reached the disk."""
        iteration = self.trainer.iteration
        if self.saved == iteration:  # as it was read, or has just been written
            return checkpoint.path_of(self.folder / "checkpoints", iteration)
        with self.writing():
            self.log.sync()
        keep = self.session.options.save_total_limit
        arrays, meta = state.capture(self.trainer)
        meta["config"] = changes.text_of(self.session.config)
        path = checkpoint.save(self.folder / "checkpoints", iteration, arrays, meta, keep)
        self.saved = iteration
        with self.writing():
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
            with self.writing():
                texts = [str(p.get("text", "")) for p in prompts]
                self.log.images(name, shown.float().cpu(), texts)

    def say(self, kind: str, message: str) -> None:
        self.log.event(kind, message)
        if self.log.active:
            print(f"{kind}: {message}", flush=True)

    def _measured(self, iteration: int) -> dict[str, float]:
        """Evaluate and preview where that is due after this iteration; what rewards learn of an
        evaluation is saved with it."""
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
        """Add up what iterations took."""
        for line in metrics:
            for name, key in COSTS.items():
                self.spent[name] += line.get(key) or 0.0

    def _should_stop(self) -> bool:
        """Agree with the other processes on why to end, if there is a reason; a collective call."""
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
        """Return why this process would end the run."""
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
        """Say what a first signal does."""
        if self.log.active:
            print("\nfinishing this iteration, then saving; press Ctrl-C again to stop without")

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


def due(iteration: int, every: int) -> bool:
    return bool(every) and iteration % every == 0


def run_folder(configuration: config.Config, name: Path) -> Path:
    """Choose the run folder: ``run`` of the configuration, or runs/<family>-<method>-<time>; of a
    file in the working directory runs/<file>-<time>."""
    if chosen := configuration.plain.get("run"):
        return Path(chosen)
    family = name.parent.name if name.parent.name not in ("", ".", "..") else ""
    parts = [family, name.stem, f"{datetime.now():%Y%m%d-%H%M%S}"]
    return Path("runs") / "-".join(filter(None, parts))


def _resume(
    trainer: Trainer, folder: Path, configuration: config.Config | None = None, accept: bool = False
) -> list[str]:
    """Restore the newest whole checkpoint. Returns what was wrong with newer ones, and what the
    configuration changes."""
    path, problems = checkpoint.choose(folder / "checkpoints")
    with distributed.together():
        arrays, meta = checkpoint.load(path, checked=True)
    if configuration is not None:
        problems += changes.admit(meta.get("config"), configuration, folder, accept)
    try:
        state.restore(trainer, arrays, meta)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UserError(
            f"{path / 'state.json'} does not have the state that this configuration needs "
            f"({type(error).__name__}: {error}); go on with the configuration it was saved with, "
            f"or from another checkpoint (move this one away)"
        ) from error
    return problems
