"""Follows run folders while a training writes them; nothing here writes into them.

Only appended data is read, and an incomplete line waits for the next read. A file rewritten by a
resume is read from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError, suggest
from mmrl.experiment.lock import OWNER, STALE
from mmrl.monitoring.log import EVENTS, FINISHED, METRICS, ROLLOUTS
from mmrl.monitoring.report.pictures import ENDINGS, saved_picture
from mmrl.monitoring.report.runs import Run, by_iteration, is_run, read_run
from mmrl.monitoring.report.stages import parts

DEPTH = 4  # depth of the search for runs below a given folder
SKIPPED = {"samples", "checkpoints", "tb", "wandb", "swanlog"}
WATCHED = (METRICS, EVENTS, ROLLOUTS, "config.yaml", "machine.json", "evaluation.json")
SHEET = re.compile(r"[\w.-]+")


class Tail:
    """Reads a .jsonl file piece by piece; ``lines`` are its objects so far."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self.offset = 0
        self.inode = 0

    def read(self) -> list[dict[str, Any]]:
        """Read what was added, up to the last complete line; from the start if the file was
        replaced."""
        try:
            with self.path.open("rb") as file:
                state = self.path.stat()
                if state.st_ino != self.inode or state.st_size < self.offset:
                    self.lines = []
                    self.offset = 0
                    self.inode = state.st_ino
                file.seek(self.offset)
                text = file.read()
        except OSError:
            self.lines = []
            self.offset = 0
            return self.lines
        whole = text.rfind(b"\n") + 1
        self.offset += whole
        for line in text[:whole].decode("utf-8", errors="replace").split("\n"):
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                self.lines.append(content)
        return self.lines


@dataclass(frozen=True)
class Reference:
    """Represents a picture of a sheet in a page by its address."""

    url: str
    size: tuple[int, int]
    is_film: bool = False

    @property
    def width(self) -> int:
        return self.size[0]


@dataclass(frozen=True)
class LiveRun(Run):
    """A run for the report, with pictures as addresses of the server."""

    address: str = ""

    def sample(self, name: str) -> Any:
        layout = self._layout(name)
        size = layout.size() if layout else (512, 512)
        path = saved_picture(self.folder / "samples" / name)
        return path and Reference(f"{self._url(name)}{version(path)}", size, _is_film(path))

    def sample_tiles(self, name: str) -> list[Any]:
        layout = self._layout(name)
        path = saved_picture(self.folder / "samples" / name)
        if layout is None or path is None:
            return []
        stamp, size, film = version(path), (layout.width, layout.height), _is_film(path)
        return [Reference(f"{self._url(name)}/{i}{stamp}", size, film) for i in range(layout.count)]

    def _url(self, name: str) -> str:
        return f"{self.address}/sheets/{name}"


def _is_film(path: Path) -> bool:
    """Tell whether a sheet is a film."""
    return path.suffix == ".mp4"


def version(path: Path) -> str:
    """Return a query string that changes with a file."""
    try:
        return f"?v={path.stat().st_mtime_ns:x}"
    except OSError:
        return ""


@dataclass
class RunFolder:
    """Follows one run folder. ``key`` is its name in addresses."""

    key: str
    folder: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    tails: dict[str, Tail] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"/runs/{self.key}"

    def stamp(self) -> str:
        """Return a text that changes with any file shown on pages."""
        states = []
        for path in [*(self.folder / name for name in WATCHED), *self._sheets()]:
            try:
                state = path.stat()
                states.append((path.name, state.st_mtime_ns, state.st_size, state.st_ino))
            except OSError:
                continue
        return hashlib.sha256(repr((states, self.is_running())).encode()).hexdigest()[:24]

    def read(self) -> LiveRun:
        """Read the current state of the run."""
        with self.lock:
            lines = {n: list(self._tail(n).read()) for n in (METRICS, EVENTS, ROLLOUTS)}
        run = read_run(self.folder, jsonl=False)
        return LiveRun(
            folder=self.folder,
            metrics=by_iteration(lines[METRICS]),
            events=lines[EVENTS],
            config_text=run.config_text,
            config=run.config,
            machine=run.machine,
            evaluation=run.evaluation,
            captions=run.captions,
            rollouts=lines[ROLLOUTS],
            notes=run.notes,
            address=self.address,
        )

    def is_running(self) -> bool:
        """Tell whether a training had a recent heartbeat."""
        try:
            return time.time() - (self.folder / OWNER).stat().st_mtime < STALE
        except OSError:
            return False

    def status(self, run: Run) -> str:
        """Return the status of a run in a word."""
        kinds = [event.get("kind") for event in run.events]
        if FINISHED in kinds:
            return "finished"
        if self.is_running():
            return "running"
        ends = [kind for kind in kinds if kind in ("stopped", "error")]
        return str(ends[-1]) if ends else "not running"

    def sheet(self, name: str) -> Path | None:
        """Return the file of a sheet of samples; None unless it is in this folder."""
        if not SHEET.fullmatch(name):
            return None
        path = saved_picture(self.folder / "samples" / name)
        inside = path is not None and path.resolve().is_relative_to(self.folder.resolve())
        return path if inside else None

    def _sheets(self) -> list[Path]:
        files = (self.folder / "samples").glob("*.*")
        return sorted(path for path in files if path.suffix in ENDINGS)

    def _tail(self, name: str) -> Tail:
        return self.tails.setdefault(name, Tail(self.folder / name))


class Runs:
    """Holds the named runs, and those that appear in the named folders."""

    def __init__(self, places: Sequence[Path]):
        self.places = list(places)
        self.known: dict[Path, RunFolder] = {}
        self.lock = threading.Lock()
        for place in self.places:
            if not place.is_dir():
                raise UserError(_no_folder(place))
        self.look()

    def look(self) -> list[RunFolder]:
        """Return all runs, the newest first, including new ones."""
        with self.lock:
            for place in self.places:
                for folder in run_folders(place):
                    path = folder.resolve()
                    if path not in self.known:
                        self.known[path] = RunFolder(self._key(folder, place), folder)
            present = [run for run in self.known.values() if is_run(run.folder)]
        return sorted(present, key=lambda run: _changed(run.folder), reverse=True)

    def find(self, key: str) -> RunFolder | None:
        return next((run for run in self.known.values() if run.key == key), None)

    def _key(self, folder: Path, place: Path) -> str:
        inside = folder.resolve().relative_to(place.resolve()).parts
        name = "-".join(inside or (folder.resolve().name,))
        name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
        taken = {run.key for run in self.known.values()}
        numbered = (f"{name}-{i}" for i in range(2, len(taken) + 3))
        return name if name not in taken else next(n for n in numbered if n not in taken)


def run_folders(place: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the runs at or below a folder; for a run with stages, its stages."""
    if is_run(place):
        yield from parts(place) or [place]
    elif depth:
        for inner in sorted(place.iterdir()):
            hidden = inner.name.startswith(".") or inner.name in SKIPPED
            if inner.is_dir() and not inner.is_symlink() and not hidden:
                yield from run_folders(inner, depth - 1)


def _changed(folder: Path) -> float:
    times = [p.stat().st_mtime for name in WATCHED if (p := folder / name).exists()]
    return max(times, default=0.0)


def _no_folder(place: Path) -> str:
    if place.exists():
        return f"{place} is a file; give the folder of a run, or one with runs in it"
    near = place.parent
    around = [p.name for p in near.iterdir() if is_run(p)] if near.is_dir() else []
    return f"no run folder {place}; {suggest(place.name, around)}"
