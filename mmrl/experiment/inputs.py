"""Fingerprints the code of rewards and the rows of the data, so that a resume can report what has
changed since a checkpoint."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from mmrl.config import Chosen
from mmrl.experiment.build import Session, resolved, rewarded

OURS = ("mmrl", "rewards", "samplers")  # packages whose code comes with a version
LARGE = 2**26  # files of more bytes are compared by size only

Known = dict[str, dict[str, str]]  # input -> its parts by name, each with a fingerprint


def known(session: Session) -> Known:
    """Return the fingerprints of a run's inputs: each reward's code and data files, each data
    source's rows."""
    inputs: Known = {}
    for section in rewarded(session.config):
        for name, chosen in resolved(session.config, section).items():
            if files := {os.path.basename(f): _digest(f) for f in sorted(set(_files(chosen)))}:
                inputs[f"reward {name!r}"] = files
    for summary in session.summaries:
        rows = {"rows": f"{summary.train + summary.held_out}", "digest": summary.digest}
        inputs[f"data {os.path.basename(summary.name)}"] = rows
    return inputs


def changed(before: Mapping[str, Mapping[str, str]] | None, after: Known) -> list[str]:
    """Describe the inputs that differ, of those in both."""
    lines = []
    for what, parts in (before or {}).items():
        now = after.get(what, {})
        differing = [name for name in parts if name in now and parts[name] != now[name]]
        if not differing:
            continue
        if "rows" in parts:
            counts = f"{parts['rows']} rows then, {now['rows']} now"
            counts = counts if parts["rows"] != now["rows"] else f"{now['rows']} rows, other ones"
            lines.append(f"changed since the checkpoint: {what}: {counts}")
        else:
            lines.append(f"changed since the checkpoint: {what}: {', '.join(differing)}")
    return lines


def _files(chosen: Chosen) -> Iterator[str]:
    """Yield the user's files behind a reward: its module, what that imports from its folder, and
    files named in its options."""
    entry = inspect.unwrap(chosen.reward.entry)
    if entry.__module__.partition(".")[0] not in OURS:
        yield from _code_of(entry.__module__, set())
    for value in chosen.reward.options.values():
        if isinstance(value, (str, Path)) and os.path.isfile(value):
            yield str(value)


def _code_of(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the file of a module, and of those that it imports from the same folder."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None or name in seen:
        return
    seen.add(name)
    yield file
    for value in vars(module).values():
        imported = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")
        imported = imported if isinstance(imported, str) else ""
        place = getattr(sys.modules.get(imported), "__file__", None)
        if place and os.path.dirname(place) == os.path.dirname(file):
            yield from _code_of(imported, seen)


def _digest(file: str) -> str:
    size = os.path.getsize(file)
    if size > LARGE:
        return f"{size} bytes"
    return blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
