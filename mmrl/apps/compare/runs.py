"""Trains and evaluates the runs of a comparison, each in its own process, and continues where an
earlier call stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import mmrl.config as config
from mmrl.apps.compare.plan import Plan
from mmrl.apps.compare.settings import Setting, overrides_of
from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.experiment import checkpoint
from mmrl.experiment.build import read
from mmrl.experiment.lifecycle import is_finished

REQUEST = "request.yaml"  # the request of a run, next to its folder
COMMAND = (sys.executable, "-m", "mmrl")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Job:
    """Describes one run: a setting with a seed."""

    setting: Setting
    seed: int
    overrides: list[str]
    place: Path  # folder of the run, its log and its scores

    @property
    def run(self) -> Path:
        return self.place / "run"

    def name(self) -> str:
        return f"{self.setting.label}, seed {self.seed}"

    def scores(self, split: str) -> Path:
        return self.place / f"{split}.json"

    def words(self) -> list[str]:
        """Return the arguments of ``mmrl`` that train or resume it."""
        if checkpoint.latest(self.run / "checkpoints") is not None:
            return ["train", "--resume", str(self.run)]
        return ["train", self.setting.config, *self.overrides, f"run={self.run}"]

    def is_trained(self) -> bool:
        return is_finished(self.run)


def jobs_of(plan: Plan, folder: Path) -> list[Job]:
    """List the runs, seed by seed, so that a comparison that is stopped early has all settings of
    its first seeds. Raises UserError if the folder holds runs of other settings."""
    jobs = []
    for seed in plan.seeds:
        for setting in plan.settings:
            overrides = overrides_of(setting, plan.budget, seed)
            job = Job(setting, seed, overrides, folder / setting.folder / f"seed-{seed}")
            _request(job)
            jobs.append(job)
    return jobs


def _request(job: Job) -> None:
    """Record the request of a run, and compare it with an earlier one."""
    configuration = read(find_config(job.setting.config), job.overrides)
    text = config.dump(configuration)
    path = job.place / REQUEST
    if path.is_file() and (before := path.read_text(encoding="utf-8")) != text:
        keys = ", ".join(sorted(_changed(yaml.safe_load(before), yaml.safe_load(text)))[:3])
        raise UserError(
            f"{job.place} holds a run of other settings ({keys}); choose another folder with --out"
        )
    job.place.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _changed(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Name the keys whose values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{path}.{key}" if path else str(key)
            yield from _changed(before.get(key), after.get(key), inner)
    elif before != after:
        yield path


@dataclass
class Workers:
    """Runs jobs in parallel, at most ``count`` at a time, one thread each."""

    count: int
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: bool = False

    def finish(self, jobs: Sequence[Job], splits: Sequence[str]) -> None:
        """Train and evaluate unfinished runs. Raises UserError naming the runs that failed, after
        all others have finished."""
        with ThreadPoolExecutor(self.count) as pool, self._interruptible():
            problems = [p for p in pool.map(lambda job: self._finish(job, splits), jobs) if p]
        if self.stopped:
            raise KeyboardInterrupt
        if problems:
            raise UserError(
                f"{len(problems)} of {len(jobs)} runs failed; fix this and repeat the command, "
                "which continues from here:\n" + "\n".join(problems)
            )

    def _finish(self, job: Job, splits: Sequence[str]) -> str:
        """Finish one run; return what went wrong, or nothing."""
        if not job.is_trained():
            if job.run.is_dir() and checkpoint.latest(job.run / "checkpoints") is None:
                shutil.rmtree(job.run)  # stopped before anything was saved
            if problem := self._call(job, job.words()):
                return problem
            if not job.is_trained():
                return f"{job.name()}: stopped before its end"
        for split in splits:
            if not job.scores(split).is_file():
                words = ["evaluate", str(job.run), f"evaluate.split={split}"]
                options = ["evaluate.guidance=[]", "--scores", str(job.scores(split))]
                if problem := self._call(job, [*words, *options]):
                    return problem
        return ""

    def _call(self, job: Job, words: Sequence[str]) -> str:
        if self.stopped:
            return f"{job.name()}: not run"
        print(f"{job.name()}: mmrl {words[0]}", flush=True)
        with (job.place / "log.txt").open("ab") as log:
            with self.lock:
                process = subprocess.Popen(
                    [*COMMAND, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | ONE_THREAD,
                    start_new_session=True,  # a Ctrl-C reaches it only once, from here
                )
                self.processes.add(process)
            status = process.wait()
            self.processes.discard(process)
        if not status:
            return ""
        return f"{job.name()}: mmrl {words[0]} ended with status {status}: {_last_line(log.name)}"

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """On Ctrl-C or SIGTERM let every run finish its iteration and save, and start no more."""

        def handle(number: int, _: object) -> None:
            self.stopped = True
            for process in list(self.processes):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            print("\nlet the runs save what they have", flush=True)

        numbers = (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _last_line(log: str) -> str:
    lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    written = [line for line in lines if line.strip()]
    last = (errors or written or ["nothing was written"])[-1]
    return f"{last.removeprefix('error: ')} (all of it: {log})"
