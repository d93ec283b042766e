"""Sends a run's numbers, pictures and tables to experiment trackers: TensorBoard, W&B, trackio,
MLflow, SwanLab.

All share the interface ``Mirror``. accelerate's trackers are used if available; what they lack
(pictures of trackio and MLflow, tables of most) is added here. Each tracker runs in its own thread,
so that a slow or broken one neither delays nor ends the training.
"""

from __future__ import annotations

import io
import json
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.core.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


Cell = Any  # of a table: a text, a number, None, or a PIL picture
IDS = "trackers.json"  # file with the ids, so that a resume continues the same pages
WAITING = 256  # queued calls of a slow tracker; further ones are dropped
START = 20.0  # seconds after which a tracker that has not started is reported
PATIENCE = 60.0  # seconds that the end of a run waits for a tracker
REMEMBERING = threading.Lock()  # lock of the file IDS, since trackers start in parallel
MOST_FAILURES = 5  # failures in a row after which a tracker is switched off
LOGIN = {
    "wandb": "log in (wandb login), or write to the disk only (WANDB_MODE=offline)",
    "swanlab": "log in (swanlab login), or write to the disk only (SWANLAB_MODE=offline)",
    "mlflow": "name a server that runs, or a file, in MLFLOW_TRACKING_URI (sqlite:///mlflow.db)",
    "trackio": "without space_id in log.init_kwargs.trackio it writes to this disk only",
    "tensorboard": "check the disk of the run folder",
}


@dataclass(frozen=True)
class Table:
    """Holds rows of texts, numbers and PIL pictures under named columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Mirror(Protocol):
    """Receives what a run logs. Names are those of ``metrics.jsonl``, steps are iterations."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None: ...
    def image(self, iteration: int, name: str, picture: Image.Image) -> None: ...
    def table(self, iteration: int, name: str, table: Table) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Holds a tracker's start arguments: the run folder, the project, the configuration.

    ``init_kwargs``: further arguments of the tracker's ``init``. ``purge``: for a resume, the
    iteration from which earlier points are removed, if a tracker can do that.
    """

    folder: Path
    project: str = "mmrl"
    config: Mapping[str, Any] = field(default_factory=dict)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    purge: int | None = None

    def known_id(self, name: str) -> str | None:
        """Read the tracker's id of this run, from before a resume."""
        try:
            known = json.loads((self.folder / IDS).read_text(encoding="utf-8"))
            return str(known[name]) if name in known else None
        except (OSError, ValueError, TypeError):
            return None

    def remember_id(self, name: str, number: str) -> None:
        path = self.folder / IDS
        with REMEMBERING:
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                known = {}
            path.write_text(json.dumps({**known, name: number}, indent=1), encoding="utf-8")


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError if a tracker's package is missing, before a run creates its folder."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"log.report_to: {name} is not installed; run: pip install "
                f"'multimodal-rl[{name}]', or take it out"
            )


def start_tracker(name: str, place: Place, report: Callable[[str], None]) -> Mirror:
    """Start a tracker in its own thread. ``report`` is called with a sentence on failure: a
    package, a login, a server that does not answer."""
    return Lane(name, lambda: TRACKERS[name](place), report)


class Lane:
    """Runs a mirror in its own thread: calls return at once and never raise, even before it has
    started.

    Each kind of error is reported once; after five failures in a row the tracker is switched off.
    Some trackers (MLflow, trackio) keep "the current run" per thread, so it is started, fed and
    closed in the same one.
    """

    def __init__(self, name: str, build: Callable[[], Mirror], report: Callable[[str], None]):
        self.name = name
        self.report = report
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(WAITING)
        self.started = threading.Event()
        self.latest = time.monotonic() + START
        self.is_on = True
        self.reported: set[str] = set()
        self.failures = 0  # in a row
        self.thread = threading.Thread(
            target=self._work, args=(build,), name=f"tracker-{name}", daemon=True
        )
        self.watch = threading.Timer(START, self._late)
        self.watch.daemon = True
        self.thread.start()
        self.watch.start()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._put("scalars", iteration, dict(values))

    def image(self, iteration: int, name: str, picture: Image.Image) -> None:
        self._put("image", iteration, name, picture)

    def table(self, iteration: int, name: str, table: Table) -> None:
        self._put("table", iteration, name, table)

    def close(self) -> None:
        """Wait for the start, at most 20 s, and for queued calls, at most a minute, then abandon
        the tracker."""
        self.started.wait(max(0.0, self.latest - time.monotonic()))
        self.watch.cancel()
        if not self.started.is_set():
            self._late()
        elif self.is_on:
            until = time.monotonic() + PATIENCE
            with suppress(queue.Full):
                self.calls.put(None, timeout=PATIENCE)
            self.thread.join(max(0.0, until - time.monotonic()))
            if self.thread.is_alive():
                self._say(f"did not finish in {PATIENCE:.0f} s and is left behind")
        self.is_on = False

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            if self.is_on:
                self.calls.put_nowait((method, arguments))
        except queue.Full:
            self._say("does not keep up; some points are left out")

    def _work(self, build: Callable[[], Mirror]) -> None:
        try:
            mirror = build()
        except BaseException as error:  # also SystemExit, which some libraries raise
            self._say(f"did not start ({_cause(error)}); {LOGIN[self.name]}")
            self.is_on = False
            return
        finally:
            self.watch.cancel()
            self.started.set()
        if not self.is_on:  # the run has ended meanwhile
            with suppress(Exception, SystemExit):
                mirror.close()
            return
        while (call := self.calls.get()) is not None:
            method, arguments = call
            if self.failures < MOST_FAILURES:
                self._try(getattr(mirror, method), *arguments)
        self._try(mirror.close)

    def _late(self) -> None:
        self._say(f"has not started in {START:.0f} s and is not waited for; {LOGIN[self.name]}")

    def _try(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
            self.failures = 0
        except (Exception, SystemExit) as error:
            self.failures += 1
            why = " ".join(str(error).split())[:200]
            self._say(f"failed ({type(error).__name__}: {why})", type(error).__name__)
            if self.failures == MOST_FAILURES:
                self._say(f"failed {MOST_FAILURES} times in a row and is switched off for this run")

    def _say(self, what: str, kind: str = "") -> None:
        if not self.is_on or (kind or what) in self.reported:
            return
        self.reported.add(kind or what)
        self.report(f"{self.name} {what}; training goes on, and metrics.jsonl has every number")


def _cause(error: BaseException) -> str:
    """Return in a line why a tracker did not start."""
    if isinstance(error, ModuleNotFoundError):
        return f"it needs {error.name}, which is not installed"
    return " ".join(str(error).split())[:300] or type(error).__name__


class TensorBoard:
    """Writes event files into ``tb/`` of the run folder; read back by ``tensorboard --logdir``.

    It uses torch's writer: accelerate's cannot remove points after a resume.
    """

    def __init__(self, place: Place):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            str(place.folder / "tb"), purge_step=place.purge, **place.init_kwargs
        )

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, iteration)

    def image(self, iteration: int, name: str, picture: Image.Image) -> None:
        import numpy as np

        self.writer.add_image(name, np.asarray(picture), iteration, dataformats="HWC")

    def table(self, iteration: int, name: str, table: Table) -> None:
        """Write a table as Markdown, with its pictures inside."""
        self.writer.add_text(name, markdown(table), iteration)

    def close(self) -> None:
        self.writer.close()


class Accelerated(ABC):
    """Wraps a tracker of accelerate; subclasses add what it lacks."""

    def __init__(self, tracker: Any):
        self.tracker = tracker

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self.tracker.log(dict(values), step=iteration)

    def image(self, iteration: int, name: str, picture: Image.Image) -> None:
        self.tracker.log_images({name: [picture]}, step=iteration)

    @abstractmethod
    def table(self, iteration: int, name: str, table: Table) -> None:
        """Write a table of pictures and answers."""

    def close(self) -> None:
        self.tracker.finish()


class WandB(Accelerated):
    """Logs to Weights & Biases; the same page after a resume."""

    def __init__(self, place: Place):
        import wandb
        from accelerate.tracking import WandBTracker

        self.wandb = wandb
        options = {
            "name": place.folder.resolve().name,
            "dir": str(place.folder),
            "id": place.known_id("wandb") or _old_id(place.folder),
            "resume": "allow",
            "config": dict(place.config),
        }
        super().__init__(WandBTracker(place.project, **{**options, **place.init_kwargs}))
        self.tracker.start()
        place.remember_id("wandb", self.tracker.run.id)

    def table(self, iteration: int, name: str, table: Table) -> None:
        rows = shown(table.rows, self.wandb.Image)
        self.tracker.log_table(name, list(table.columns), rows, step=iteration)


class Trackio(Accelerated):
    """Logs to trackio: a local database that ``trackio show`` serves, or a Space."""

    def __init__(self, place: Place):
        import trackio
        from accelerate.tracking import TrackioTracker

        self.trackio = trackio
        known = place.known_id("trackio")
        options: dict[str, Any] = {"config": json.loads(json.dumps(dict(place.config)))}
        if known:
            options |= {"name": known, "resume": "allow"}
        else:
            options |= {"name": f"{place.folder.resolve().name}-{os.urandom(3).hex()}"}
        super().__init__(TrackioTracker(place.project, **{**options, **place.init_kwargs}))
        self.tracker.start()
        place.remember_id("trackio", str(self.tracker.run.name))

    def image(self, iteration: int, name: str, picture: Image.Image) -> None:
        self.tracker.log({name: self.trackio.Image(picture)}, step=iteration)

    def table(self, iteration: int, name: str, table: Table) -> None:
        import pandas

        rows = shown(table.rows, self.trackio.Image)
        frame = pandas.DataFrame(rows, columns=list(table.columns))
        self.tracker.log({name: self.trackio.Table(dataframe=frame)}, step=iteration)


class MLflow(Accelerated):
    """Logs to the MLflow store that MLFLOW_TRACKING_URI names, by default a local database.

    Tables are artifacts: ``NAME.json``, which grows with every iteration that writes it.
    """

    def __init__(self, place: Place):
        # by default it retries for minutes, which would block the start
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        import mlflow
        from accelerate.tracking import MLflowTracker

        self.mlflow = mlflow
        options = {
            "run_name": place.folder.resolve().name,
            "run_id": place.known_id("mlflow"),
        }
        super().__init__(MLflowTracker(place.project, **{**options, **place.init_kwargs}))
        self.tracker.start()
        if not options["run_id"]:
            self.tracker.store_init_configuration(flat(place.config))
        place.remember_id("mlflow", self.tracker.active_run.info.run_id)

    def image(self, iteration: int, name: str, picture: Image.Image) -> None:
        self.mlflow.log_image(picture, key=name, step=iteration)

    def table(self, iteration: int, name: str, table: Table) -> None:
        columns: dict[str, list[Any]] = {"iteration": [iteration] * len(table.rows)}
        rows = shown(table.rows, self.mlflow.Image)
        columns |= {column: [row[i] for row in rows] for i, column in enumerate(table.columns)}
        self.mlflow.log_table(columns, f"{name}.json")


class SwanLab(Accelerated):
    """Logs to SwanLab. It has no tables: rows are pictures with captions, or texts."""

    def __init__(self, place: Place):
        import swanlab
        from accelerate.tracking import SwanLabTracker

        self.swanlab = swanlab
        known = place.known_id("swanlab")
        options: dict[str, Any] = {
            "name": place.folder.resolve().name,
            "log_dir": str(place.folder / "swanlog"),
            "config": dict(place.config),
        }
        options |= {"id": known, "resume": "allow"} if known else {}
        super().__init__(SwanLabTracker(place.project, **{**options, **place.init_kwargs}))
        self.tracker.start()
        place.remember_id("swanlab", str(self.tracker.run.id))

    def table(self, iteration: int, name: str, table: Table) -> None:
        lab = self.swanlab
        rows = [
            (next((c for c in row if is_picture(c)), None), caption(table.columns, row))
            for row in table.rows
        ]
        items = [lab.Image(p, caption=text) if p else lab.Text(text) for p, text in rows]
        pictures = [item for item, (p, _) in zip(items, rows) if p]
        texts = [item for item, (p, _) in zip(items, rows) if not p]
        for kind, chosen in (("", pictures), ("_texts", texts)):
            if chosen:
                self.tracker.log({f"{name}{kind}": chosen}, step=iteration)


TRACKERS: dict[str, Callable[[Place], Mirror]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def is_picture(cell: Cell) -> bool:
    from PIL import Image

    return isinstance(cell, Image.Image)


def shown(rows: Sequence[Sequence[Cell]], image: Callable[[Any], Any]) -> list[list[Cell]]:
    """Return rows with their pictures as a tracker's own ``image``."""
    return [[image(cell) if is_picture(cell) else cell for cell in row] for row in rows]


def caption(columns: Sequence[str], row: Sequence[Cell]) -> str:
    """Join the cells of a row, except pictures, to one text."""
    cells = zip(columns, row)
    return "; ".join(f"{n}: {_text(c)}" for n, c in cells if c is not None and not is_picture(c))


def markdown(table: Table) -> str:
    """Write a table as Markdown; pictures are inside, as data."""
    lines = [table.columns, ["---"] * len(table.columns)]
    lines += [[_markdown_cell(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration: ``{"train": {"lr": 1}}`` becomes ``{"train.lr": 1}``."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    # MLflow takes letters, digits, "_", "-", ".", " " and "/" in a name
    return {
        "".join(c if c.isalnum() or c in "_-. /" else "_" for c in n): leaves[n] for n in leaves
    }


def warn(message: str) -> None:
    """Print a warning on the terminal."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _text(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _markdown_cell(cell: Cell) -> str:
    from mmrl.monitoring.report.pictures import data_uri

    if cell is None:
        return ""
    if is_picture(cell):
        return f"![]({data_uri(cell)})"
    text = _text(cell)
    for sign in "\\`*_{}[]<>|#":  # texts of models are shown verbatim
        text = text.replace(sign, f"\\{sign}" if sign not in "<>" else f"&#{ord(sign)};")
    return " ".join(text.split())


def _old_id(folder: Path) -> str | None:
    """Read the W&B id of a run begun with an earlier version of mmrl."""
    with suppress(OSError):
        return (folder / "wandb-id.txt").read_text().strip() or None
    return None


def decoded_picture(uri: str | None) -> Image.Image | None:
    """Open a picture that ``data_uri`` has encoded; None if there is none."""
    import base64

    from PIL import Image

    _, _, content = (uri or "").partition(";base64,")
    if not content:
        return None
    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    picture.load()
    return picture.convert("RGB")
