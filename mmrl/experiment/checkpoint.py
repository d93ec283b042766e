"""Writes checkpoints atomically, verifies them when read, never pickles.

A checkpoint is a folder ``iteration-000012`` of safetensors files and ``state.json``, which lists
every file with its size and SHA-256. It is written under a temporary name, synced to the disk and
renamed, so a crash at any moment leaves either the whole checkpoint or none.

A part (weights, a snapshot, the optimizer's state) is one file of whole tensors. Under FSDP2 it is
a folder of files, in which each process writes its shards by torch.distributed.checkpoint, without
gathering. Both are read block by block, by any number of processes. All processes must see the
folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.files import json_object, on_disk, sha256, sync
from mmrl.core.sharding import is_sharded
from mmrl.core.tensor_files import Part
from mmrl.core.version import __version__

FORMAT = "mmrl-checkpoint-2"
READABLE = (FORMAT, "mmrl-checkpoint-1")  # version 1 had whole tensors only
PREFIX = "iteration-"
BEST = "best.json"  # next to the checkpoints: the one with the best held-out score
NAME = re.compile(rf"{PREFIX}(\d{{6,}})")

Tensors = Mapping[str, Tensor]
Arrays = Mapping[str, Tensors]  # part -> name -> tensor


def save(
    folder: Path,
    iteration: int,
    arrays: Arrays,
    meta: dict[str, Any],
    keep: int = 3,
    best: int | None = None,
) -> Path:
    """Write ``folder/iteration-NNNNNN`` atomically, then delete all but the newest ``keep`` and
    that of iteration ``best``. Returns the path.

    A collective call: each process writes its shards, the main one everything else.
    """
    main = distributed.is_main()
    final = path_of(folder, iteration)
    work = folder / f".{final.name}.partial"
    with distributed.together(), on_disk(folder):
        if main:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
    for part, tensors in arrays.items():
        _write(work / part, tensors, main)
    with distributed.together():  # all have written
        pass
    names = _names(work)
    with distributed.together(), on_disk(folder):
        prints = {name: _fingerprint(work / name) for name in _share(names)}
    files: dict[str, Any] = {}
    for each in distributed.all_gather_plain(prints):
        files |= each
    with distributed.together(), on_disk(folder):  # the others continue once it exists
        if main:
            listed = {name: files[name] for name in names}
            made_by = {"format": FORMAT, "mmrl": __version__}
            state = made_by | {"iteration": iteration, "files": listed, "meta": meta}
            _finish(work, final, state)
            prune(folder, keep, iteration, best)
    return final


def _finish(work: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Write the list of files of a complete checkpoint, and rename its folder."""
    (work / "state.json").write_text(json.dumps(state, indent=1))
    for path in [*work.rglob("*"), work]:
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(work, final)
    sync(final.parent)


def path_of(folder: Path, iteration: int) -> Path:
    return folder / f"{PREFIX}{iteration:06d}"


def _write(path: Path, tensors: Tensors, main: bool) -> None:
    """Write one part: whole tensors by the main process, shards by all of them; a collective
    call."""
    if not any(map(is_sharded, tensors.values())):
        with distributed.together(), on_disk(path.parent):
            if main:
                _write_whole(path.with_name(f"{path.name}.safetensors"), tensors)
        return
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    state_dict_saver.save(dict(tensors), storage_writer=writer)


def _write_whole(path: Path, tensors: Tensors) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path)
    except SafetensorError as error:  # its error for a full disk
        raise OSError(None, str(error), str(path)) from error


def load(path: Path, checked: bool = False) -> tuple[Arrays, dict[str, Any]]:
    """Open a checkpoint: lazily read arrays, and its metadata.

    UserError says what is wrong with a damaged or foreign one. ``checked``: ``choose`` has already
    verified the SHA-256 of the files.
    """
    state = _read(path) if checked else _checked(path)
    parts: dict[str, list[Path]] = {}
    for name in state["files"]:
        part = name.partition("/")[0].removesuffix(".safetensors")
        parts.setdefault(part, []).append(path / name)
    return {part: Part(files) for part, files in parts.items()}, state["meta"]


def every(folder: Path) -> list[Path]:
    """List the checkpoints of a run, the newest first, without reading them. Other names, and
    files, belong to the user."""
    named = {path: NAME.fullmatch(path.name) for path in folder.glob(PREFIX + "*")}
    numbers = {path: int(match[1]) for path, match in named.items() if match and path.is_dir()}
    return sorted(numbers, key=lambda path: numbers[path], reverse=True)


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, unread; None if there is none."""
    return next(iter(every(folder)), None)


def named(folder: Path, name: str) -> Path:
    """Return the checkpoint of that name, or the ``best`` by ``train.save_best``.

    Raises UserError if no evaluation has chosen one."""
    if name != "best" or (folder / name).is_dir():
        return folder / name
    iteration = json_object(folder / BEST).get("iteration")
    if not isinstance(iteration, int):
        raise UserError(
            f"{folder} has no best checkpoint: train with train.save_best=true and "
            f"train.evaluate_every, or name one, such as {PREFIX}000050"
        )
    return path_of(folder, iteration)


def choose(folder: Path) -> tuple[Path, list[str]]:
    """Choose the newest complete checkpoint, and say what was wrong with newer ones. UserError if
    none is complete.

    A collective call: each process compares its share of the files with their SHA-256.
    """
    problems: list[str] = []
    for path in every(folder):
        try:
            with distributed.together():
                _checked(path)
            return path, problems
        except UserError as error:
            problems.append(str(error))
    if not problems:
        raise UserError(f"{folder}: there is no checkpoint yet; mmrl train writes one")
    raise UserError("\n".join([f"no usable checkpoint in {folder}", *problems]))


def prune(folder: Path, keep: int, newest: int, best: int | None = None) -> None:
    """Delete all but the newest ``keep`` checkpoints up to iteration ``newest`` and the ``best``,
    and the remains of crashed writers. Those of later iterations are damaged, or the run would have
    resumed from them; they will be overwritten."""
    limit = path_of(folder, newest)
    known = every(folder)
    stays = None if best is None else path_of(folder, best)
    for path in known[known.index(limit) :][keep or None :]:
        if path != stays:
            shutil.rmtree(path)
    for path in folder.glob(f".{PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path)


def _read(path: Path) -> dict[str, Any]:
    """Read state.json, which must be of a format that can be read and name files that exist."""
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} is not a checkpoint: it has no state.json") from error
    except (ValueError, OSError) as error:
        raise UserError(
            f"checkpoint {path} is damaged: state.json cannot be read ({error})"
        ) from error
    if not isinstance(state, dict) or state.get("format") not in READABLE:
        raise UserError(f"{path} {_foreign(state)}")
    if not _is_whole(state):
        raise UserError(f"checkpoint {path} is damaged: state.json lacks its files or its state")
    for name in state["files"]:
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path} is torn: {name} is missing")
    return state


def _foreign(state: Any) -> str:
    """Say which version has written a checkpoint that this one cannot read."""
    state = state if isinstance(state, dict) else {}
    name, _, number = str(state.get("format")).rpartition("-")
    if name == FORMAT.rpartition("-")[0] and number.isdecimal():
        return (
            f"was written by a newer mmrl ({state.get('mmrl') or 'version unknown'}), in format "
            f"{number}; mmrl {__version__} reads formats up to {FORMAT.rpartition('-')[2]}: "
            f"update it (pip install -U multimodal-rl)"
        )
    return f"is not an mmrl checkpoint of format {FORMAT}; it was written by something else"


def _is_whole(state: Mapping[str, Any]) -> bool:
    """Tell whether state.json has all required fields."""
    files, meta = state.get("files"), state.get("meta")
    return isinstance(files, dict) and isinstance(meta, dict)


def _checked(path: Path) -> dict[str, Any]:
    """Read state.json and verify this process's share of the files."""
    state = _read(path)
    for name in _share(list(state["files"])):
        if _fingerprint(path / name) != state["files"][name]:
            raise UserError(
                f"checkpoint {path} is torn: {name} is not what was written (size or "
                f"SHA-256 differ)"
            )
    return state


def _names(folder: Path) -> list[str]:
    """List all files below a folder, relative to it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _share(names: Sequence[str]) -> Sequence[str]:
    """Select the files that this process reads to hash them."""
    rank, size = distributed.process()
    return names[rank::size]


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}
