"""Reads a run folder. Every file may be missing or torn: what cannot be read is listed in
``notes``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from mmrl.core.errors import UserError, suggest
from mmrl.monitoring.log import parse_line, read_captions
from mmrl.monitoring.report.pictures import (
    ENDINGS,
    Layout,
    Tile,
    open_picture,
    saved_picture,
    tiles,
)

MARKS = ("metrics.jsonl", "config.yaml", "evaluation.json")  # a folder with one of these is a run


@dataclass(frozen=True)
class Run:
    """Holds a run folder in memory. ``metrics`` are sorted by iteration, one line each."""

    folder: Path
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    machine: dict[str, Any]
    evaluation: dict[str, Any]
    captions: dict[str, Any]
    rollouts: list[
        dict[str, Any]
    ]  # lines of rollouts.jsonl, as mmrl.monitoring.gallery writes them
    notes: list[str] = field(default_factory=list)

    def column(self, key: str) -> list[float | None]:
        """Return one metric over the iterations; None if not measured."""
        return [finite(line.get(key)) for line in self.metrics]

    def iterations(self) -> list[int]:
        return [line["iteration"] for line in self.metrics]

    def measured(self) -> list[str]:
        """Return the metrics that hold at least one number, in order of first appearance."""
        return list(
            {
                key: None
                for line in self.metrics
                for key, value in line.items()
                if finite(value) is not None
            }
        )

    def optimised(self) -> list[str]:
        """Return the names of the rewards the run was trained on; ``my_module:sharpness`` is
        measured as ``sharpness``.

        Those of weight 0 and those with ``monitor: true`` were only monitored.
        """
        chosen = self.config.get("reward")
        if isinstance(chosen, dict):
            chosen = {name: settings for name, settings in chosen.items() if not _watched(settings)}
        if isinstance(chosen, str):
            chosen = [chosen]
        names = chosen if isinstance(chosen, (list, dict)) else []
        return [
            str(name).rpartition(":")[2]
            for item in names
            for name in (item if isinstance(item, dict) else [item])
        ]

    def sample(self, name: str) -> Tile | None:
        """Open the sheet samples/<name>.png, or the film samples/<name>.mp4; None (noted if it is
        broken)."""
        path = saved_picture(self.folder / "samples" / name)
        if path is None:
            return None
        layout = self._layout(name)
        try:
            return open_picture(path, None if layout is None else layout.size())
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            self.notes.append(f"{path.name} cannot be read: {error}")
            return None

    def sample_tiles(self, name: str) -> list[Tile]:
        """Return the single pictures of a sheet; empty if the sheet or its layout is missing."""
        picture = self.sample(name)
        layout = self._layout(name)
        if picture is None or layout is None:
            return []
        try:
            return tiles(picture, layout)
        except ValueError as error:
            self.notes.append(f"samples/{name} does not fit samples/captions.json: {error}")
            return []

    def sample_captions(self, name: str) -> list[str]:
        sheets = self.captions.get("sheets")
        sheet = sheets.get(name) if isinstance(sheets, dict) else None
        texts = (sheet if isinstance(sheet, dict) else self.captions).get("captions", [])
        return [str(text) for text in texts] if isinstance(texts, list) else []

    def sheets_over_time(self) -> list[str]:
        """Return the names of the sheets ``iter-*``, oldest first."""
        files = (self.folder / "samples").glob("iter-*.*")
        names = {path.stem for path in files if path.suffix in ENDINGS}
        return sorted(names, key=lambda name: (iteration_of(name), name))

    def _layout(self, name: str) -> Layout | None:
        try:
            known = self.captions["sheets"][name]
            numbers = {
                key: int(known[key]) for key in ("count", "columns", "width", "height", "gap")
            }
        except (KeyError, TypeError, ValueError):
            return None
        sensible = (
            0 < numbers["count"] <= 4096
            and min(numbers["columns"], numbers["width"], numbers["height"]) > 0
        )
        return Layout(**numbers) if sensible and numbers["gap"] >= 0 else None


def _watched(chosen: Any) -> bool:
    """Tell whether a reward of the configuration is only monitored."""
    options = chosen if isinstance(chosen, dict) else {"weight": chosen}
    return bool(options.get("monitor")) or options.get("weight") == 0


def iteration_of(name: str) -> int:
    """Return the number in ``iter-0040``, -1 without one."""
    digits = name.removeprefix("iter-")
    return int(digits) if digits.isdigit() else -1


def read_run(folder: Path | str, jsonl: bool = True) -> Run:
    """Read a run. Raises UserError if the folder is missing or holds no run, with the nearest run's
    name. Without ``jsonl`` the growing files are not read: metrics, events, rollouts."""
    folder = Path(folder)
    if not any((folder / mark).is_file() for mark in MARKS):
        raise UserError(_no_run(folder))
    notes: list[str] = []
    config_text = _text(folder / "config.yaml", notes)
    return Run(
        folder=folder,
        metrics=_metrics(_text(folder / "metrics.jsonl", notes), notes) if jsonl else [],
        events=_lines(folder / "events.jsonl") if jsonl else [],
        config_text=config_text,
        config=_yaml(config_text, notes),
        machine=_json(folder / "machine.json", notes),
        evaluation=_json(folder / "evaluation.json", notes, "run: mmrl evaluate " + str(folder)),
        captions=read_captions(folder),
        rollouts=_lines(folder / "rollouts.jsonl") if jsonl else [],
        notes=notes,
    )


def _no_run(folder: Path) -> str:
    if not folder.exists():
        parent = folder.parent
        around = [p.name for p in parent.iterdir() if is_run(p)] if parent.is_dir() else []
        return f"no run folder {folder}; {suggest(folder.name, around)}"
    if not folder.is_dir():
        return f"{folder} is a file; give the folder of a run"
    inside = [str(p) for p in sorted(folder.iterdir()) if is_run(p)][:5]
    hint = f"; runs in it: {', '.join(inside)}" if inside else ""
    return f"{folder} holds no run (none of {', '.join(MARKS)}){hint}"


def is_run(path: Path) -> bool:
    """Tell whether a folder holds what a run writes."""
    return path.is_dir() and any((path / mark).is_file() for mark in MARKS)


def _text(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        notes.append(f"no {path.name}")
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _json(path: Path, notes: list[str], remedy: str = "") -> dict[str, Any]:
    if not path.is_file():
        notes.append(f"no {path.name}" + (f" ({remedy})" if remedy else ""))
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} is not valid JSON: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def _yaml(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        notes.append(f"config.yaml is not valid YAML: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def _metrics(text: str, notes: list[str]) -> list[dict[str, Any]]:
    lines = [parse_line(line) for line in text.splitlines()]
    if torn := lines.count(None):
        notes.append(f"metrics.jsonl: {torn} torn line(s) left out")
    return by_iteration(line for line in lines if line is not None)


def by_iteration(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort lines of metrics.jsonl, keeping the last one of each iteration."""
    latest = {line["iteration"]: line for line in lines if isinstance(line.get("iteration"), int)}
    return [latest[iteration] for iteration in sorted(latest)]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def finite(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and abs(value) < float("inf") else None
