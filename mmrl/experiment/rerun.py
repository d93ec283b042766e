"""Repeats a finished run from its folder alone, and tells whether the result is bit-equal, or what
differs: versions, device, threads, and the first differing metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import mmrl.config as config
from mmrl.core.errors import UserError
from mmrl.core.files import json_object, sha256, write_json
from mmrl.experiment import checkpoint
from mmrl.experiment.build import config_of
from mmrl.experiment.lifecycle import is_finished, trained
from mmrl.experiment.loop import COSTS
from mmrl.monitoring.log import EVENTS, METRICS, parse_line

# metrics of time, not of results
MEASURED = ("time/", "seconds", "cpu_seconds", "memory/", "throughput/", "share/")
# keys of machine.json that may affect rounding
SURROUNDINGS = ("cpu", "gpus", "threads", "processes", "mkl_cbwr", "python", "system", "commit")
REPORT = "rerun.json"


@dataclass(frozen=True)
class Rerun:
    """Holds the result of a repetition. ``surroundings`` are differences that may be the cause."""

    folder: Path
    iterations: int
    differences: tuple[str, ...]  # empty: bit-equal
    surroundings: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Write it for a reader."""
        if self.differences:
            yield f"not equal, in {self.iterations} iterations:"
            yield from (f"  {line}" for line in self.differences)
        else:
            yield (
                f"bit-equal: weights, optimizer and metrics of {self.iterations} iterations are "
                f"the same"
            )
        if self.surroundings:
            yield "surroundings that differ:"
            yield from (f"  {line}" for line in self.surroundings)


def rerun(run: Path, folder: Path | None = None) -> Rerun:
    """Repeat the training of a run folder in another folder, and compare. Raises UserError if the
    run is not finished."""
    file = config_of(run)
    _, stages = config.load_stages(file)
    if stages:
        raise UserError(
            f"{run} has the stages {', '.join(stages)}: repeat them one by one, "
            f"mmrl rerun {run / f'1-{stages[0]}'}"
        )
    if not is_finished(run):
        raise UserError(f"{run} is not finished; go on with it first: mmrl train --resume {run}")
    target = folder or run.with_name(f"{run.name}-rerun")
    ended = trained(file, [f"run={target}", *_limits(run, file), *_sizes(run, file)])
    if ended.status:
        raise UserError(f"{target} was stopped before its end; delete it and repeat the command")
    outcome = compare(run, target)
    write_json(
        target / REPORT,
        {
            "of": str(run.resolve()),
            "equal": not outcome.differences,
            "iterations": outcome.iterations,
            "differences": outcome.differences,
            "surroundings": outcome.surroundings,
        },
    )
    return outcome


def _limits(run: Path, file: Path) -> list[str]:
    """Return overrides that end a run where the first one did: after the same number of samples, if
    it ended by a budget or another number of processes would count differently."""
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    lines = _lines(run / METRICS)
    limits = ["train.time_limit=null"]
    if lines and len(lines) < plain["train"]["iterations"]:
        for name in ("samples", "forwards"):
            if total := int(sum(line.get(COSTS[name]) or 0 for line in lines)):
                return [*limits, f"train.budget={{{name}: {total}}}"]
    return limits


def _sizes(run: Path, file: Path) -> list[str]:
    """Return overrides with the batch size that the first run has measured."""
    newest = checkpoint.latest(run / "checkpoints")
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    if newest is None or plain["train"].get("micro_batch_size") != "auto":
        return []
    rows = checkpoint.load(newest)[1].get("pass_rows")
    return [f"train.micro_batch_size={rows}"] if rows else []


def compare(first: Path, second: Path) -> Rerun:
    """Compare the outputs of two runs."""
    before, after = _lines(first / METRICS), _lines(second / METRICS)
    differences = [*_metrics(before, after), *_tensors(first, second)]
    surroundings = [*_surroundings(first, second), *_past(first)]
    return Rerun(second, len(after), tuple(differences), tuple(surroundings))


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics without timings."""
    return {key: value for key, value in line.items() if not key.startswith(MEASURED)}


def _metrics(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the first metric that differs, and how many do."""
    if len(before) != len(after):
        yield f"{len(before)} iterations, now {len(after)}"
    pairs = [
        (line["iteration"], key, line.get(key), again.get(key))
        for line, again in zip(map(timeless, before), map(timeless, after))
        for key in {**line, **again}
        if line.get(key) != again.get(key)
    ]
    if pairs:
        iteration, key, old, new = pairs[0]
        yield f"first differing metric: {key} in iteration {iteration}, {old} and now {new}"
        names = sorted({pair[1] for pair in pairs})
        yield f"{len(pairs)} values differ, of {', '.join(names[:5])}" + (
            f" and {len(names) - 5} more" if len(names) > 5 else ""
        )


def _tensors(first: Path, second: Path) -> Iterator[str]:
    """Compare the newest checkpoints, file by file; of weights, by how much they differ."""
    paths = [checkpoint.latest(run / "checkpoints") for run in (first, second)]
    if None in paths:
        yield "a run has no checkpoint"
        return
    old, new = (path for path in paths if path is not None)
    if old.name != new.name:
        yield f"checkpoint {old.name}, now {new.name}"
        return
    arrays, again = checkpoint.load(old)[0], checkpoint.load(new)[0]
    for part in sorted({*arrays, *again}):
        if part not in arrays or part not in again:
            yield f"{part} is in one checkpoint only"
        elif not _same_file(old, new, part) and (gap := _gap(arrays[part], again[part])):
            yield f"{part} of {old.name}: {gap}"


def _same_file(old: Path, new: Path, part: str) -> bool:
    """Tell whether a part is one file of the same bytes; shards may be divided differently."""
    files = [path / f"{part}.safetensors" for path in (old, new)]
    return all(file.is_file() for file in files) and sha256(files[0]) == sha256(files[1])


def _gap(tensors: Any, again: Any) -> str:
    """Describe the distance of tensors; empty if they are equal."""
    import torch

    if set(tensors) != set(again):
        return "other tensors"
    unequal = [n for n in tensors if not torch.equal(tensors[n], again[n])]
    if not unequal:
        return ""
    apart = [
        float((tensors[n].double() - again[n].double()).abs().max())
        for n in unequal
        if tensors[n].shape == again[n].shape
    ]
    most = f", by at most {max(apart):.3g}" if apart else ""
    return f"{len(unequal)} of {len(list(tensors))} tensors differ{most}"


def _surroundings(first: Path, second: Path) -> Iterator[str]:
    """List what differs between the machines: versions, processor, devices, threads."""
    old, new = (json_object(run / "machine.json") for run in (first, second))
    for key in SURROUNDINGS:
        if old.get(key) != new.get(key) and key in old:
            yield f"{key}: {old.get(key)}, now {new.get(key)}"
    versions, newer = old.get("versions", {}), new.get("versions", {})
    for name in sorted({*versions, *newer}):
        if versions.get(name) != newer.get(name):
            yield f"{name}: {versions.get(name)}, now {newer.get(name)}"


def _past(run: Path) -> Iterator[str]:
    """List changes made during a run, which its last configuration does not show."""
    for line in _lines(run / EVENTS):
        message = str(line.get("message", ""))
        if line.get("kind") == "warning" and message.startswith("changed: "):
            yield f"the run {message} after iteration {line['iteration'] - 1}"


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in map(parse_line, text.splitlines()) if line is not None]
