"""Runs toy trainings in forked processes, kills them, resumes them, and compares the result with an
undisturbed run.

A fork is much cheaper than importing torch, so that hundreds of kills take minutes. The forking
process must not have computed anything with torch.
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
PATIENCE = 120.0  # seconds after which a run of a few iterations counts as hanging
IMPORTED = (
    "accelerate",
    "mmrl.experiment.lifecycle",
    "mmrl.scoring.signatures",
    "mmrl.train.checks",
    "psutil",
    "pydantic.json_schema",
    "scipy.special",
    "tests.fixtures.toys",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
)

Act = Callable[[], None]


def configuration(
    folder: Path, family: str, iterations: int, states: str = "averages", **changes: Any
) -> Path:
    """Write a configuration with many stateful parts: those of a set of ``states.SETS``."""
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
    """Run something and return the exit status of the command."""
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
    """Wait for the end of a process. Returns its status, negative for a signal; None, after a kill,
    if it hangs."""
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
    """Holds a training of a configuration in a folder, by one process or two."""

    config: Path
    folder: Path
    processes: int = 1
    overrides: Sequence[str] = ()
    pids: list[int] = field(default_factory=list)
    logs: Path | None = None  # folder of its output; null: next to its own

    @property
    def log(self) -> Path:
        return (self.logs or self.folder.parent) / f"{self.folder.name}.log"

    def start(self, before: Callable[[int], None] = lambda rank: None) -> None:
        """Start or resume it. ``before`` is called in each process first."""
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
        """Wait for all processes; those left behind by a killed one are killed after a while."""
        statuses = [waited(pid) for pid in self.pids]
        return statuses

    def finish(self) -> list[int | None]:
        self.start()
        return self.ends()


def left_behind(folder: Path) -> dict[str, Any]:
    """Collect what must agree between equal runs: weights and state bit by bit, metrics without
    times, rollouts, and events."""
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
    """Describes a fault at one of a process's writes: ``strike`` injects it, ``repair`` runs after
    its end, and ``wrong`` judges its end, from status and output. ``tears``: half of a metrics line
    is written first."""

    strike: Act
    wrong: Callable[[int | None, str], str]
    repair: Act = lambda: None
    tears: bool = True


def killed() -> None:
    """End this process like a kill: at once, without flushing."""
    os._exit(9)


KILL = Fault(killed, lambda status, printed: "" if status == 9 else f"ended with {status}")


class Writes:
    """Counts a process's writes below a folder, and injects a fault at one: before it, or in the
    middle of a metrics line."""

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
        """Start watching, for the rest of the process."""
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
        """Count a write, and inject the fault if it is the chosen one."""
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
        """Tell whether an open may write; ``os.open`` is used for syncing."""
        return mode is None or any(letter in str(mode) for letter in "wax+")


class _Torn:
    """Wraps the metrics file: a process that ends in a line has written half of it."""

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
    """Import what forked processes need, once."""
    import importlib

    import torch

    from mmrl.core.registry import load_built_in

    torch.set_num_threads(1)
    load_built_in()
    for name in IMPORTED:
        importlib.import_module(name)
    # searching installed plug-ins again would take half of a run's time
    importlib.import_module("mmrl.experiment.build").load_built_in = lambda: None


def at_every_write(
    folder: Path,
    config: Path,
    points: Callable[[int], Sequence[int]],
    fault: Fault = KILL,
    place: Path | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield (write, what is wrong) for processes with a fault at chosen writes, which are then
    resumed. ``place``: parent of the run folders; null: ``folder``."""
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
