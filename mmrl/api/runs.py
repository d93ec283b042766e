"""Trains configurations from Python, and reads runs back."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mmrl.config as configurations
from mmrl.api.arguments import Overrides, needed, plain, words_of
from mmrl.api.callbacks import Callbacks, Watching
from mmrl.api.display import gallery_of, run_html
from mmrl.api.evaluating import Evaluation, evaluate
from mmrl.api.isolation import Live, isolated
from mmrl.api.media import Samples
from mmrl.api.policies import Policy, load_policy
from mmrl.api.processes import meet, writes
from mmrl.api.protocols import TrainerLike
from mmrl.config import Config
from mmrl.config.sections import SECTIONS
from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.experiment import build, lifecycle
from mmrl.experiment.stopping import Ended
from mmrl.monitoring.report import page
from mmrl.monitoring.report.runs import Run as History
from mmrl.monitoring.report.runs import read_run

if TYPE_CHECKING:
    import pandas


class Run:
    """Holds a run: its metrics, samples and trained policy. It reads the folder each time, so that
    a run in another process can be followed.

    folder: the run folder, the same as the command line's. stopped: why it ended early, or "".
    Shown as its report in notebooks: verdict, curves, pictures, answers with their boxes.
    """

    def __init__(self, folder: str | Path, stopped: str = "", trainer: TrainerLike | None = None):
        self.folder = Path(folder)
        self.stopped = stopped
        self.trainer = trainer

    @property
    def metrics(self) -> pandas.DataFrame:
        """Return the metrics of every iteration as a pandas frame, a row per iteration."""
        pandas = needed("pandas", "result.metrics")
        rows = self._history().metrics
        return pandas.DataFrame(rows).set_index("iteration") if rows else pandas.DataFrame()

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the events: checkpoints, alarms, samples without a reward."""
        return self._history().events

    @property
    def samples(self) -> dict[str, Samples]:
        """Return the samples of the run, oldest first: for pictures and videos "before",
        "iter-000010" ..., "after", the same prompts and noise in each; for texts the answers of
        "iteration 1", "iteration 10" ..., with their rewards."""
        return gallery_of(self._history())

    @property
    def config(self) -> dict[str, Any]:
        """Return the trained configuration as plain values."""
        return self._history().config

    @property
    def finished(self) -> bool:
        """Tell whether the run has completed its iterations or its budget."""
        return lifecycle.is_finished(self.folder)

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the last evaluation; None before the first ``evaluate``."""
        known = self._history().evaluation
        return Evaluation(known.get("rows", []), known) if known else None

    @cached_property
    def policy(self) -> Policy:
        """Return the trained policy: that of the Trainer, or loaded from the newest checkpoint."""
        if self.trainer is not None and self.trainer.policy is not None:
            return cast(Policy, self.trainer.policy)
        return load_policy(self.folder)

    def evaluate(self, overrides: Overrides = None) -> Evaluation:
        """Measure the rewards on held-out prompts, of the base model and of the trained one, as
        ``mmrl evaluate`` does."""
        return evaluate(self, overrides)

    def resume(
        self,
        overrides: Overrides = None,
        *,
        accept_changes: bool = False,
        callbacks: Callbacks = (),
        progress: bool = True,
    ) -> Run:
        """Resume the run, as ``mmrl train --resume`` does: after a stop, or with more iterations,
        ``result.resume({"train.iterations": 40})``."""
        return resumed(self, overrides, accept_changes, callbacks, progress)

    def report(self) -> Path:
        """Write ``report.html``, one page with everything, and return its path; with several
        processes, the main one writes."""
        return page.write_report(self.folder) if writes() else self.folder / "report.html"

    def export(self, folder: str | Path) -> Path:
        """Write the trained weights for the model's own library (diffusers, peft) into a new
        folder."""
        return self.policy.export(folder)

    def live(self) -> Live:
        """Return the plug-ins of this run that exist only in Python."""
        return self.trainer.live if self.trainer is not None else {}

    def _history(self) -> History:
        return read_run(build.last_stage(self.folder))

    def _repr_html_(self) -> str:
        return run_html(self.folder)

    def __repr__(self) -> str:
        history = self._history()
        state = "finished" if self.finished else self.stopped or "not finished"
        rewards = [value for value in history.column("reward/mean") if value is not None]
        change = f", reward {rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else ""
        return f"mmrl.Run({str(self.folder)!r}: {len(history.metrics)} iterations{change}, {state})"


def load_run(folder: str | Path) -> Run:
    """Open a run folder, finished or not: metrics, samples, evaluation, policy. Raises UserError
    for a folder that holds no run."""
    run = Run(folder)
    if not build.PART.fullmatch(run.folder.name) and (run.folder / build.CONFIG).is_file():
        return run
    read_run(run.folder)
    return run


def train(
    config: str | Path | Mapping[str, Any],
    overrides: Overrides = None,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    callbacks: Callbacks = (),
    progress: bool = True,
) -> Run:
    """Train a configuration, as ``mmrl train`` does, and return its run.

    config: a shipped name such as ``"digits/flow_grpo"``, a file, or a whole configuration as a
    dict; with ``resume`` the folder of a run. overrides: ``{"train.iterations": 20}``, or words as
    on the command line. callbacks: ``mmrl.Callback``s. progress: False prints nothing.

    Ctrl-C (the stop button of a notebook) saves after the iteration and returns the run, whose
    ``stopped`` says why; SIGTERM also saves, and then has its usual effect. Raises UserError with
    the same sentence as the command line.
    """
    if resume and not isinstance(config, Mapping):
        return resumed(Run(config), overrides, accept_changes, callbacks, progress)
    words = words_of(overrides)
    watcher = Watching(callbacks)
    with isolated(quiet=not progress):
        if isinstance(config, Mapping):
            known = configurations.from_mapping(plain(config), words)
            ended = _trained(known, watcher)
        else:
            if Path(config).is_dir():
                raise UserError(
                    f"{config} is a folder; to go on with a run: "
                    f"mmrl.train({str(config)!r}, resume=True)"
                )
            ended = lifecycle.trained(find_config(config), words, watcher=watcher)
    return finished(ended)


def _trained(known: Config, watcher: Watching) -> Ended:
    """Train a configuration that is not a file."""
    configurations.check(known, SECTIONS, {"optimizer": ("parameters",)})
    build.check_trackers(known)
    folder = lifecycle.run_folder(known, Path("python/train"))
    with lifecycle.ending_by_errors():
        return lifecycle.train_session(
            build.Session.of(known, judged=True), folder, watcher=watcher
        )


def resumed(
    run: Run, overrides: Overrides, accept: bool, callbacks: Callbacks, progress: bool
) -> Run:
    """Resume a run, with the Python-only plug-ins of its Trainer."""
    if run.trainer is not None and not overrides and not callbacks:
        again = run.trainer.train(resume=True, accept_changes=accept, progress=progress)
        return cast(Run, again)
    watcher = Watching(callbacks)
    with isolated(run.live(), quiet=not progress):
        ended = lifecycle.trained(run.folder, words_of(overrides), True, accept, watcher)
    if run.trainer is not None and run.trainer.policy is not None:
        from mmrl.api.policies import load_weights, model_of

        load_weights(model_of(run.trainer.policy), run.folder)
    return finished(ended, run.trainer)


def finished(ended: Ended, trainer: TrainerLike | None = None) -> Run:
    """Return the run of a call. A signal other than Ctrl-C then has its usual effect."""
    meet()
    if ended.signal and ended.signal != signal.SIGINT:
        signal.raise_signal(ended.signal)
    return Run(ended.folder, ended.reason, trainer)
