"""Writes the record of a run: metrics, events, pictures, and progress on the terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.config.sections import LogOptions
from mmrl.core.errors import UserError
from mmrl.core.files import replace_file, sync
from mmrl.monitoring.progress import Progress, progress_for
from mmrl.monitoring.trackers import (
    Mirror,
    Place,
    Table,
    decoded_picture,
    start_tracker,
    warn,
)

if TYPE_CHECKING:
    from torch import Tensor

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
ROLLOUTS = "rollouts.jsonl"
# kind of the event at the end of iterations or budget
FINISHED = "finished"
DEFAULTS = LogOptions()
MOST_CLIPS = 4  # videos of a sheet that are also written as files
# kinds of events that recur when iterations are repeated
REPEATED = ("alarm", "checkpoint", "excluded", "note")


class RunLog:
    """Writes the run folder's record. Only ``active`` (the main process) writes; all processes may
    call.

    folder: the run folder, created if missing. resume: continue in a folder that holds a run;
    without it such a folder is refused with UserError. start: first iteration that will be logged;
    later lines are removed, so that no iteration appears twice. config: shown in W&B.
    """

    def __init__(
        self,
        folder: Path | str,
        resume: bool = False,
        *,
        start: int | None = None,
        options: LogOptions = DEFAULTS,
        active: bool = True,
        config: Mapping[str, Any] | None = None,
    ):
        self.folder = Path(folder)
        self.options = options
        self.active = active
        self.mirrors: list[Mirror] = []
        self.iteration = start or 0
        self.past: list[dict[str, Any]] = []  # metrics of the iterations before a resume
        # topic of alarms -> iteration of the last, before a resume
        self.past_alarms: dict[str, int] = {}
        if not active:
            return
        self._metrics_path = self.folder / METRICS
        if not resume and self._metrics_path.exists() and self._metrics_path.stat().st_size:
            raise UserError(holds_a_run(self.folder))
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        if resume:
            self.past = self._cut(METRICS, start)
            self._cut(EVENTS, start, REPEATED)
            self._cut(EVENTS, 0, (FINISHED,))  # not finished, until it is logged again
            self._cut(ROLLOUTS, start)
            self._recall_alarms(start)
        self._start_trackers(config or {}, purge=start if resume else None)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")

    def metrics(self, iteration: int, values: Mapping[str, float]) -> None:
        """Append one line, flushed at once. Values are numbers or one-element tensors; non-finite
        ones become null."""
        self.iteration = iteration
        if not self.active:
            return
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        line = {"iteration": iteration, **{name: _number(value) for name, value in numbers.items()}}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        if iteration % self.options.every == 0:
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            for mirror in self.mirrors:
                mirror.scalars(iteration, finite)

    def event(
        self, kind: str, message: str, numbers: Mapping[str, float] = {}, about: str = ""
    ) -> None:
        """Append a one-time event to events.jsonl: an excluded sample, a checkpoint, an alarm.

        ``about``: a key that identifies events on the same topic."""
        if not self.active:
            return
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        line = {"time": now, "iteration": self.iteration, "kind": kind, "message": message}
        line |= {"about": about} if about else {}
        line |= (
            {"numbers": {name: _number(float(value)) for name, value in numbers.items()}}
            if numbers
            else {}
        )
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def sync(self) -> None:
        """Flush all lines written so far to disk, before a checkpoint."""
        if self.active:
            for name in (METRICS, EVENTS, ROLLOUTS):
                if (self.folder / name).exists():
                    sync(self.folder / name)
            sync(self.folder)

    def images(
        self,
        name: str,
        images: Tensor,
        captions: Sequence[str] = (),
        fps: float | None = None,
    ) -> None:
        """Write images [N, 3, H, W] in 0..1 as samples/<name>.png, and their layout to
        samples/captions.json. Videos [N, F, 3, H, W], of ``fps`` frames a second, are small in
        samples/<name>.mp4; the first few are written whole into samples/<name> too."""
        from mmrl.monitoring.report import (
            pictures,
        )  # imports Pillow and numpy: not needed for options

        if not self.active:
            return
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{name!r} cannot be a file name")
        if images.ndim == 5:
            self._clips(name, images, fps or 1000 / pictures.PACE)
            picture, layout = pictures.film_sheet(images, fps=fps)
        else:
            picture, layout = pictures.sheet(images)
        pictures.save_picture(picture, self.folder / "samples" / name)
        texts = [str(c) for c in captions]
        sheets = read_captions(self.folder).get("sheets", {})
        sheets |= {name: {**asdict(layout), "captions": texts}}
        text = json.dumps({"captions": texts, "sheets": sheets}, ensure_ascii=False, indent=1)
        replace_file(self.folder / "samples" / "captions.json", text.encode())
        moment = re.fullmatch(r"iter-0*(\d+)", name)
        iteration = int(moment[1]) if moment else self.iteration
        # one slider over time instead of one tag per iteration
        tag = "samples" if moment else name
        still = pictures.still(picture)
        cut = pictures.tiles(still, layout)
        rows = [[text, tile] for text, tile in zip(texts, cut)]
        for mirror in self.mirrors:
            mirror.image(iteration, tag, still)
            if rows:
                mirror.table(iteration, f"tables/{tag}", Table(("prompt", "picture"), rows))

    def _clips(self, name: str, videos: Tensor, fps: float) -> None:
        """Write the first videos as files that any player plays, with their sound."""
        from mmrl.core.media.sample_files import write_sample

        folder = self.folder / "samples" / name
        folder.mkdir(parents=True, exist_ok=True)
        for i, video in enumerate(videos[:MOST_CLIPS]):
            write_sample(video, folder / f"{i:03d}", fps)

    def answers(self, iteration: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Show the answers of an iteration in the trackers, as a table with their pictures.

        groups: lines of rollouts.jsonl, as the gallery writes them."""
        if self.mirrors and groups:
            table = answers_table(groups)
            for mirror in self.mirrors:
                mirror.table(iteration, "tables/answers", table)

    def _start_trackers(self, config: Mapping[str, Any], purge: int | None) -> None:
        """Start the trackers named in the options, in threads."""
        options = self.options
        for name in options.trackers():
            kwargs = options.init_kwargs.get(name, {})
            place = Place(self.folder, options.project, config, kwargs, purge)
            self.mirrors.append(start_tracker(name, place, self._tracker_failed))

    def _tracker_failed(self, message: str) -> None:
        """Record a tracker's failure; called from its thread."""
        with suppress(OSError):
            self.event("warning", message)
        warn(message)

    @contextmanager
    def progress(self, total: int, start: int = 0, title: str = "training") -> Iterator[Progress]:
        """Show a bar with reward and remaining time on a terminal, occasional plain lines
        elsewhere."""
        bar = progress_for(title, self.active)
        bar.begin(total, start)
        try:
            yield bar
        finally:
            bar.end()

    def close(self) -> None:
        """Close files and mirrors; further calls would fail. Safe to call twice."""
        for mirror in self.mirrors:
            mirror.close()
        self.mirrors = []
        if self.active:
            with suppress(OSError):  # a full disk, already reported by the failed write
                self._metrics.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(
        self, name: str, start: int | None, kinds: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Keep the complete lines of a file before ``start``, since the others will be rewritten;
        warn of a line torn by a crash. ``kinds``: only these are removed. Returns the kept lines.
        """
        path = self.folder / name
        if not path.exists():
            return []
        lines, past = [], []
        text = path.read_text(encoding="utf-8", errors="replace")
        torn = []
        for number, written in enumerate(text.split("\n"), 1):
            line = parse_line(written)
            if line is None:
                torn += [number] if written.strip() else []
            elif (
                start is None
                or line["iteration"] < start
                or (kinds is not None and line.get("kind") not in kinds)
            ):
                lines.append(written + "\n")
                past.append(line)
        replace_file(path, "".join(lines).encode())
        for number in torn:
            self.event("warning", f"{path}: line {number} is torn; dropped")
        return past

    def _recall_alarms(self, start: int | None) -> None:
        """Read the alarms of the iterations before ``start``; later iterations are repeated."""
        path = self.folder / EVENTS
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in filter(None, map(parse_line, text.splitlines())):
            before = start is None or line["iteration"] < start
            if before and line.get("kind") == "alarm" and "about" in line:
                self.past_alarms[line["about"]] = line["iteration"]


def holds_a_run(folder: Path) -> str:
    """Say why a new run cannot begin in a folder."""
    return (
        f"{folder} already holds a run; go on with it (mmrl train --resume {folder}), or choose "
        f"another folder"
    )


def parse_line(text: str) -> dict[str, Any] | None:
    """Read one line of metrics.jsonl; None if it is not one (a crash may tear the last)."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    good = isinstance(line, dict) and isinstance(line.get("iteration"), int)
    return line if good else None


def read_captions(folder: Path) -> dict[str, Any]:
    """Read samples/captions.json of a run; empty if it is missing or broken."""
    try:
        captions = json.loads((folder / "samples" / "captions.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return captions if isinstance(captions, dict) else {}


def answers_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """Convert lines of rollouts.jsonl to a table: a row for every answer."""
    rewards = list(
        {
            name: None
            for group in groups
            for answer in group["answers"]
            for name in answer["rewards"]
        }
    )
    columns = ("prompt", "picture", "right", "answer", *rewards, "advantage", "tokens")
    rows = []
    for group in groups:
        picture = decoded_picture(group["picture"])
        for answer in group["answers"]:
            earned = [answer["rewards"].get(name) for name in rewards]
            ending = [answer["advantage"], answer["tokens"]]
            rows.append(
                [group["prompt"], picture, group["right"], answer["text"], *earned, *ending]
            )
    return Table(columns, rows)


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
