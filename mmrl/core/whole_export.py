"""Completes an export after full training: weights in the dtypes of the base's files, and its other
files, such as the licence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core import weight_files
from mmrl.core.model_folders import folder_of

SKIPPED = (".git", ".cache", ".locks")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx")
TYPE_KEYS = ("dtype", "torch_dtype")


def complete(folder: Path, place: str) -> None:
    """Store weights in the dtypes of the base at ``place``, and copy files that a model needs and
    an export does not write."""
    base = folder_of(place)
    if base is None or not (base / "config.json").is_file():
        return
    restore_types(folder, base)
    for file in sorted(base.iterdir()):
        if file.is_file() and is_companion(file) and not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)


def is_companion(file: Path) -> bool:
    """Tell whether a file of a model's folder is neither weights, an index of weights nor cache."""
    return not (
        file.name.endswith((*WEIGHTS, ".index.json"))
        or file.name.startswith((*SKIPPED, "adapter_"))
    )


def restore_types(folder: Path, base: Path) -> None:
    """Store the weights of one part in the dtypes of its base's files."""
    types = weight_files.types_in(base)
    if not types:
        return
    common = weight_files.commonest(types)
    _rewrite(folder, lambda name: types.get(name, common))
    _say_type(folder, common)


def cast(folder: Path, dtype: torch.dtype) -> None:
    """Store all weights of a folder, and of its parts, in one dtype."""
    for part in sorted({file.parent for file in folder.rglob("*.safetensors")}):
        _rewrite(part, lambda _: dtype)
        _say_type(part, dtype)


def _rewrite(folder: Path, type_of: Any) -> None:
    from safetensors.torch import save_file

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        texts = weight_files.metadata(file)
        stored = weight_files.read_tensors(file)
        tensors = {name: _cast(value, type_of(name)) for name, value in stored.items()}
        total += sum(value.nbytes for value in tensors.values())
        if any(value.dtype != stored[name].dtype for name, value in tensors.items()):
            draft = file.with_name(f"{file.name}.draft")  # the file being read is memory-mapped
            save_file(tensors, draft, metadata=texts or {"format": "pt"})
            draft.replace(file)
    for index in folder.glob("*.safetensors.index.json"):
        content = json.loads(index.read_text(encoding="utf-8"))
        content.setdefault("metadata", {})["total_size"] = total
        index.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _say_type(folder: Path, dtype: torch.dtype) -> None:
    """Write the dtype into the config of a model of transformers and of its parts."""
    file = folder / "config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    text = str(dtype).removeprefix("torch.")

    def typed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {
            key: text if key in TYPE_KEYS and isinstance(value, str) else typed(value)
            for key, value in part.items()
        }

    file.write_text(json.dumps(typed(config), indent=2) + "\n", encoding="utf-8")
