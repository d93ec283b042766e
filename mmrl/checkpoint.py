"""Checkpoints on disk: written whole or not at all, checked when read, never pickled.

A checkpoint is a folder ``iteration-000012`` of safetensors files and ``state.json``, which lists every file with its
size and SHA-256. It is written under a temporary name, synced to the disk and renamed, so a crash at any moment leaves
either the whole checkpoint or none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import sha256, sync
from .registry import UserError

FORMAT = "mmrl-checkpoint-1"
PREFIX = "iteration-"

Arrays = dict[str, dict[str, Tensor]]  # part -> name -> tensor


def save(folder: Path, iteration: int, arrays: Mapping[str, Mapping[str, Tensor]], meta: dict, keep: int = 3) -> Path:
    """Write ``folder/iteration-NNNNNN`` atomically, then delete all but the newest ``keep``. Returns the path."""
    from safetensors.torch import save_file

    final = folder / f"{PREFIX}{iteration:06d}"
    work = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for part, tensors in arrays.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work / f"{part}.safetensors")
    files = {path.name: _fingerprint(path) for path in sorted(work.iterdir())}
    state = {"format": FORMAT, "iteration": iteration, "files": files, "meta": meta}
    (work / "state.json").write_text(json.dumps(state, indent=1))
    for path in [*work.iterdir(), work]:
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(work, final)
    sync(folder)
    prune(folder, keep)
    return final


def load(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and meta of a checkpoint; UserError that says what is wrong with a torn or foreign one."""
    from safetensors.torch import load_file

    state = _checked(path)
    arrays = {name.removesuffix(".safetensors"): load_file(path / name) for name in state["files"]}
    return arrays, state["meta"]


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run, unread; None if there is none."""
    return max(folder.glob(PREFIX + "*"), key=lambda path: path.name, default=None)


def choose(folder: Path) -> tuple[Path, list[str]]:
    """The newest whole checkpoint, and what was wrong with newer ones. UserError if none is whole."""
    problems = []
    for path in sorted(folder.glob(PREFIX + "*"), key=lambda path: path.name, reverse=True):
        try:
            _checked(path)
            return path, problems
        except UserError as error:
            problems.append(str(error))
    raise UserError(
        "\n".join(
            [
                f"no usable checkpoint in {folder}",
                *problems,
                "mmrl train makes one; nothing can be resumed, evaluated or exported without",
            ]
        )
    )


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what crashed writers left behind."""
    for path in sorted(folder.glob(PREFIX + "*"), key=lambda path: path.name)[: -keep or None]:
        shutil.rmtree(path)
    for path in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(path)


def _checked(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} is not a checkpoint: it has no state.json") from error
    except (ValueError, OSError) as error:
        raise UserError(f"checkpoint {path} is damaged: state.json cannot be read ({error})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is not an mmrl checkpoint of format {FORMAT}; it was written by something else")
    for name, expected in state["files"].items():
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path} is torn: {name} is missing")
        if _fingerprint(path / name) != expected:
            raise UserError(f"checkpoint {path} is torn: {name} is not what was written (size or SHA-256 differ)")
    return state


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}
