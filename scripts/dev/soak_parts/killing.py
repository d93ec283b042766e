"""Runs toy trainings in forked processes, kills them, resumes them, and compares what is left with
a run that nobody disturbed.

A fork costs nothing beside the import of torch, so that hundreds of kills take minutes. The
process that forks must not have computed anything with torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.dev.soak_parts.states import SETS

FAMILIES = ("ToyFlow", "ToyDiffusion", "ToyVideo", "ToyMasked", "ToyCausal")
PATIENCE = 120.0  # seconds in which a run of a few iterations ends, or hangs
IMPORTED = (
    "accelerate",
    "mmrl.experiment.lifecycle",
    "psutil",
    "tests.fixtures.toys",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
)

Act = Callable[[], None]


def configuration(
    folder: Path, family: str, iterations: int, states: str = "averages", **changes: Any
) -> Path:
    """Write a configuration in which many parts have a state: those of a set of ``states.SETS``."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    rows = [{"text": f"p{i}", "label": i / 8 - 1, "kind": "ab"[i % 2]} for i in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = family in ("ToyMasked", "ToyCausal")
    plain = {
        "policy": f"tests.fixtures.toys:{family}",
        "data": {
            "adaptive_group_size": {
                "of": {"prompts": {"path": str(prompts), "held_out": 0.25}},
                "most": 8,
            }
        },
        "reward": {"tests.fixtures.toys:reward": 1.0},
        "advantage": {"running": {"base": {"maxmin": {"base": {"ddpo": {"buffer": 64}}}}}},
        "objective": {"policy_gradient": {"kl": 0.05, "clip_range": 0.2}},
        "optimizer": {"adamw": {"lr": 3e-3}},
        "train": {
            "prompts_per_iteration": 4,
            "group_size": 4,
            "train_batch_size": 8,
            "iterations": iterations,
            "save_every": 2,
            "evaluate_every": 2,
            "ema": 0.5,
            "warmup_steps": 2,
            "lr_schedule": "cosine",
            "stages": [
                {"replay_buffer": {"share": 0.5, "size": 8}},
                *([{"response_reuse": {"when": "always", "threshold": None}}] if tokens else []),
            ],
        },
        "evaluate": {"prompts": 2, "num_samples": 2},
        "log": {"tensorboard": False},
    }
    for key, value in (SETS[states](family, prompts) | changes).items():
        section, _, name = key.partition("__")
        plain[section] = {**plain[section], name: value} if name else value
    path = folder / f"{family}.yaml"
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return path


def forked(act: Act, log: Path, env: dict[str, str] | None = None) -> int:
    """Start ``act`` in a forked process whose output goes to a file. Returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(env or {})
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        status = _status(act)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(act: Act) -> int:
    """Run something and return what the command would exit with."""
    from mmrl.core.errors import UserError

    try:
        act()
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1


def waited(pid: int, patience: float = PATIENCE) -> int | None:
    """Wait for the end of a process; None, and it is killed, if it hangs. Returns its status,
    negative if a signal ended it."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        known, status = os.waitpid(pid, os.WNOHANG)
        if known:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Run:
    """A training of a configuration in a folder, by one process or two."""

    config: Path
    folder: Path
    processes: int = 1
    overrides: Sequence[str] = ()
    pids: list[int] = field(default_factory=list)
    logs: Path | None = None  # folder of what it prints; null: beside its own

    @property
    def log(self) -> Path:
        return (self.logs or self.folder.parent) / f"{self.folder.name}.log"

    def start(self, before: Callable[[int], None] = lambda rank: None) -> None:
        """Begin it, or go on with what is there. ``before`` is called in each process first."""
        port = str(free_port())
        self.pids = []
        for rank in range(self.processes):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.processes}
            names = {name: str(value) for name, value in env.items()}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            several = names | address if self.processes > 1 else {}
            self.pids.append(forked(lambda rank=rank: self._act(rank, before), self.log, several))

    def _act(self, rank: int, before: Callable[[int], None]) -> None:
        from mmrl.core import distributed
        from mmrl.experiment import lifecycle

        before(rank)
        if (self.folder / "config.yaml").exists():
            ended = lifecycle.trained(self.folder, [], resume=True)
        else:
            ended = lifecycle.trained(self.config, [f"run={self.folder}", *self.overrides])
        distributed.leave()
        raise SystemExit(ended.status)

    def ends(self) -> list[int | None]:
        """Wait for all processes; those left alone by a killed one are killed after a while."""
        statuses = [waited(pid) for pid in self.pids]
        return statuses

    def finish(self) -> list[int | None]:
        self.start()
        return self.ends()


def left_behind(folder: Path) -> dict[str, Any]:
    """Collect what two equal runs have in common: weights and state to the bit, metrics without
    times, rollouts, and what happened."""
    from mmrl.experiment import checkpoint
    from mmrl.experiment.rerun import timeless

    newest = checkpoint.latest(folder / "checkpoints")
    if newest is None:
        return {}
    content: dict[str, Any] = {
        file.name: file.read_bytes() for file in sorted(newest.glob("*.safetensors"))
    }
    meta = json.loads((newest / "state.json").read_text())["meta"]
    content["state"] = {key: value for key, value in meta.items() if key != "config"}
    content["metrics"] = [timeless(line) for line in _lines(folder / "metrics.jsonl")]
    content["rollouts"] = _lines(folder / "rollouts.jsonl")
    content["events"] = [
        (line["iteration"], line["kind"], line["message"])
        for line in _lines(folder / "events.jsonl")
        if line["kind"] in ("alarm", "excluded", "finished")
    ]
    return content


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Name the parts that differ."""
    return [key for key in {**first, **second} if first.get(key) != second.get(key)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Fault:
    """Says what befalls a process at one of its writes: ``strike`` happens to it, ``repair`` is
    done after its end, and ``wrong`` judges how it ended, from its status and what it printed.
    ``tears``: a line of metrics that is struck is half written first."""

    strike: Act
    wrong: Callable[[int | None, str], str]
    repair: Act = lambda: None
    tears: bool = True


def killed() -> None:
    """End this process as a kill does: at once, nothing is written."""
    os._exit(9)


KILL = Fault(killed, lambda status, printed: "" if status == 9 else f"ended with {status}")


class Writes:
    """Counts what a process does to the disk below a folder, and strikes at one of them: before
    it, or of a line of metrics in its middle."""

    def __init__(
        self,
        folder: Path,
        fault: Fault = KILL,
        at: int | None = None,
        report: Path | None = None,
    ):
        self.folder = str(folder)
        self.fault = fault
        self.at = at
        self.report = report
        self.count = 0

    def install(self) -> None:
        """Watch from now on, for the rest of the process."""
        from mmrl.monitoring.log import RunLog

        sys.addaudithook(self._hear)
        plain = RunLog.__init__
        watch = self

        def opened(log: Any, *args: Any, **options: Any) -> None:
            plain(log, *args, **options)
            if log.active:
                log._metrics = _Torn(log._metrics, watch)

        RunLog.__init__ = opened  # type: ignore[method-assign]

    def step(self, torn: Act = lambda: None) -> None:
        """Count one more, and strike if it is the one."""
        self.count += 1
        if self.report is not None:
            self.report.write_text(str(self.count))
        if self.count == self.at:
            if self.fault.tears:
                torn()
            self.fault.strike()

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not self._writes(*args):
            return
        watched = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime")
        if event in watched and str(args[0]).startswith(self.folder):
            self.step()

    def _writes(self, path: Any, mode: Any, flags: Any) -> bool:
        """Tell an open that may write; those of ``os.open`` are what is synced."""
        return mode is None or any(letter in str(mode) for letter in "wax+")


class _Torn:
    """Stands for the file of metrics: a process that ends in a line has written half of it."""

    def __init__(self, file: Any, watch: Writes):
        self.file = file
        self.watch = watch

    def write(self, text: str) -> None:
        def torn() -> None:
            self.file.write(text[: len(text) // 2])
            self.file.flush()

        self.watch.step(torn)
        self.file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def warm() -> None:
    """Import what forked processes need, so that each of them does not."""
    import importlib

    import torch

    from mmrl.core.registry import load_built_in

    torch.set_num_threads(1)
    load_built_in()
    for name in IMPORTED:
        importlib.import_module(name)
    # looking for installed plug-ins again would be half of a run's time
    importlib.import_module("mmrl.experiment.build").load_built_in = lambda: None


def at_every_write(
    folder: Path,
    config: Path,
    points: Callable[[int], Sequence[int]],
    fault: Fault = KILL,
    place: Path | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield (write, what is wrong) for processes that a fault befalls at chosen writes, and that
    are then resumed. ``place``: where the run folders are; null: in ``folder``."""
    place = place or folder
    whole = Run(config, place / "whole", logs=folder)
    report = folder / "count"
    report.write_text("0")
    whole.start(lambda rank: Writes(whole.folder, report=report).install())
    statuses = whole.ends()
    assert statuses == [0], (statuses, whole.log.read_text())
    expected = left_behind(whole.folder)
    for at in points(int(report.read_text())):
        run = Run(config, place / f"struck-{at}", logs=folder)
        run.start(lambda rank, run=run, at=at: Writes(run.folder, fault, at).install())
        (status,) = run.ends()
        printed = run.log.read_text()
        fault.repair()
        problem = fault.wrong(status, printed)
        if not problem and (statuses := run.finish()) != [0]:
            problem = f"resumed: {statuses}; {run.log.read_text()[-600:]}"
        problem = problem or ", ".join(differences(expected, left_behind(run.folder)))
        shutil.rmtree(run.folder, ignore_errors=True)
        yield at, problem
