"""Trains a configuration from start to end: its stages, its folder, a resume, and the loop."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import mmrl.config as config
from mmrl.config.sections import SECTIONS, LogOptions
from mmrl.config.stages import OF_ALL, misfits
from mmrl.config.yamltext import read as parsed
from mmrl.core import distributed, peers
from mmrl.core.errors import UserError
from mmrl.core.files import check_writable, on_disk, write_text
from mmrl.core.output import lasting_output
from mmrl.experiment import changes, checkpoint, inputs, state
from mmrl.experiment.build import CONFIG, Session, check_trackers, config_of, read
from mmrl.experiment.emergency_checkpoint import rescued
from mmrl.experiment.lock import FolderLock
from mmrl.experiment.loop import Run
from mmrl.experiment.stopping import Ended
from mmrl.experiment.watching import Watcher
from mmrl.monitoring.log import FINISHED, METRICS, RunLog, holds_a_run, parse_line
from mmrl.train.trainer import Trainer


def train(
    name: Path, overrides: Sequence[str] = (), resume: bool = False, accept: bool = False
) -> Path:
    """Train a configuration, or resume a run folder. Returns the run folder. One with stages is
    trained stage by stage. ``accept``: allow a resume with changes that make it another run.

    Raises UserError for everything a user can fix; progress until then is saved.
    """
    return trained(name, overrides, resume, accept).folder


def trained(
    name: Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    accept: bool = False,
    watcher: Watcher | None = None,
) -> Ended:
    """Do the same, and return how it ended. ``watcher`` is notified of what happens."""
    with ending_by_errors(), peers.watched():
        return _train(name, overrides, resume, accept, watcher)


@contextmanager
def ending_by_errors() -> Iterator[None]:
    """Keep printing from ending a training, and turn ``SystemExit`` of user code into an error."""
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
    for configuration in checked.values():
        check_trackers(configuration)
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
    """Write the configuration of a run with stages, each complete."""
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
    """Tell whether a run has completed its iterations or its budget."""
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
    """Train a configuration without stages, or one of its stages; ``added``: sections supplied by
    code. ``accept``: allow a resume with changes that make it another run."""
    configuration = read(config_of(name) if resume else name, overrides, added=added)
    check_trackers(configuration)
    folder = name if resume else run_folder(configuration, name)
    with distributed.together():
        check_writable(folder)  # before building a large model
    session = Session.of(configuration, judged=True)
    return train_session(session, folder, resume, accept, watcher)


def train_session(
    session: Session,
    folder: Path,
    resume: bool = False,
    accept: bool = False,
    watcher: Watcher | None = None,
) -> Ended:
    """Train a built session, into a new folder, or resume that of a run."""
    configuration = session.config
    trainer = session.trainer()
    config.check(configuration, SECTIONS, {"optimizer": ("parameters",)}, trainer.device.processes)
    # the clock of the main process names it
    folder = Path(distributed.all_gather_plain(str(folder))[0])
    with ExitStack() as held:
        lock = FolderLock(folder, active=trainer.device.main)
        with distributed.together(), on_disk(folder):  # only the main process reads the folder
            held.enter_context(lock)
            if trainer.device.main and not resume and is_begun(folder):
                raise UserError(holds_a_run(folder))
        begun = resume and distributed.any_of(checkpoint.latest(folder / "checkpoints") is not None)
        warnings: list[str] = []
        before = None
        if begun:
            warnings, before = _resume(trainer, folder, configuration, accept)
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
        warnings += inputs.changed(before, run.inputs)
        run.watcher.built(session, trainer)
        _iterate(run, warnings, resume, begun)
    return Ended(folder, run.status, run.stop, run.signals.number)


def _iterate(run: Run, warnings: Sequence[str], resume: bool, begun: bool) -> None:
    """Iterate a run to its end. ``begun``: a checkpoint of it has been restored."""
    note = ""
    if begun:
        run.saved = run.trainer.iteration
        path = checkpoint.path_of(run.folder / "checkpoints", run.trainer.iteration)
        note = f"resumed from {path}"
    elif resume:
        note = f"{run.folder} has no checkpoint yet: started from the beginning"
    with run.writing():
        run.recall(warnings, note)
    with run.signals.caught():
        run.begin(fresh=not begun)
        with rescued(run):
            run.loop()
            run.end()


def run_folder(configuration: config.Config, name: Path) -> Path:
    """Choose the run folder: ``run`` of the configuration, or runs/<family>-<method>-<time>; for a
    file in the working directory runs/<file>-<time>."""
    if chosen := configuration.plain.get("run"):
        return Path(chosen)
    family = name.parent.name if name.parent.name not in ("", ".", "..") else ""
    parts = [family, name.stem, f"{datetime.now():%Y%m%d-%H%M%S}"]
    return Path("runs") / "-".join(filter(None, parts))


def _resume(
    trainer: Trainer, folder: Path, configuration: config.Config | None = None, accept: bool = False
) -> tuple[list[str], Any]:
    """Restore the newest complete checkpoint. Returns warnings about newer ones and changes of the
    configuration, and the recorded fingerprints of the run's inputs."""
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
    return problems, meta.get("inputs")
