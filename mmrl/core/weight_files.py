"""Reads weight files without executing code in them, and names a broken file: truncated, empty, a
Git LFS pointer, a missing shard, NaN in a tensor."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from mmrl.core.errors import UserError

LFS = b"version https://git-lfs.github.com/spec/"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = (".safetensors", *PICKLED)
# the names under which transformers and diffusers save weights
STEMS = ("model", "diffusion_pytorch_model", "pytorch_model")
WRAPPED = ("state_dict", "model", "module")  # keys that trainers put around weights
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
SMALL = 1 << 10  # bytes: no LFS pointer is larger


def read_tensors(file: Path, within: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read tensors by name; ``state_dict``, ``model`` or ``module`` around them is removed, then
    the nested keys ``within``.

    Raises:
        UserError: no file, a broken one, or one that holds something else than tensors.
    """
    content: Any = _content(file)
    for key in (*WRAPPED, *within):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, not tensors by name")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def settings(file: Path) -> dict[str, Any]:
    """Return the settings that a training script saved with the weights as ``args``; {}: none."""
    content: Any = _content(file) if file.suffix in PICKLED else {}
    options = content.get("args") if isinstance(content, dict) else None
    if isinstance(options, Namespace):
        return vars(options)
    return options if isinstance(options, dict) else {}


def _content(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"no file {file}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        # the options of a training script, as plain values
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if broken := fault(file):
            raise UserError(broken) from error
        raise UserError(
            f"cannot read {file} as tensors: a whole pickled module is not read, as it could run "
            f"code: save its state_dict() where you trust it"
        ) from error
    # zip, pickle and safetensors each have their own exception for "not my format"
    except Exception as error:
        first = (str(error) or "no message").splitlines()[0]
        raise UserError(
            fault(file) or f"cannot read {file} as tensors: {type(error).__name__}: {first}"
        ) from error


def metadata(file: Path) -> dict[str, str]:
    """Read the texts in the header of a safetensors file."""
    return _opened(file).metadata() or {}


def names(file: Path) -> list[str]:
    """List the tensors of a safetensors file, by its header."""
    return list(_opened(file).keys())


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            fault(file) or f"{file}: no safetensors file: {str(error).splitlines()[0]}"
        ) from error


def files_of(folder: Path, variant: str | None = None) -> list[Path]:
    """List the existing files from which a library reads the weights of one part."""
    middle = f".{variant}" if variant else ""
    for suffix in (".safetensors", ".bin"):
        for stem in STEMS:
            if index := _index(folder, stem, suffix, middle):
                return [folder / name for name in sorted(set(index.values()))]
            if (file := folder / f"{stem}{middle}{suffix}").is_file():
                return [file]
    return []


def _index(folder: Path, stem: str, suffix: str, middle: str) -> dict[str, str]:
    for name in (f"{stem}{suffix}.index{middle}.json", f"{stem}{middle}{suffix}.index.json"):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            return dict(content.get("weight_map", {}))
    return {}


def variant_of(folder: Path) -> str | None:
    """Return the only variant of the weights in a folder, such as ``fp16``; None if there are plain
    ones, or no variant."""
    if files_of(folder):
        return None
    known = set()
    for file in folder.glob("*.safetensors"):
        stem, _, rest = file.name.removesuffix(".safetensors").partition(".")
        if rest and stem.partition("-0")[0] in STEMS:
            known.add(rest.partition("-0")[0])
    return known.pop() if len(known) == 1 else None


def fault_in(folder: Path) -> str | None:
    """Say which file of a folder is broken; None if all look complete."""
    files = files_of(folder) or sorted(f for f in folder.glob("*") if f.suffix in WEIGHTS)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        return (
            f"{folder} lacks {len(absent)} of its {len(files)} files of weights, such as "
            f"{absent[0]}: download the folder again"
        )
    texts = [file for file in sorted(folder.glob("*")) if file.suffix not in WEIGHTS]
    faults = (fault(file) for file in (*files, *texts) if file.is_file())
    return next(filter(None, faults), None)


def fault(file: Path) -> str | None:
    """Say in a sentence why a weight file is broken; None if it looks complete."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(SMALL)
    if start.startswith(LFS):
        return (
            f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, "
            f"or download it with `hf download`"
        )
    if file.suffix not in WEIGHTS:
        return None
    if not size:
        return f"{file} is empty: download it again"
    return _cut(file, size) if file.suffix == ".safetensors" else _zip_fault(file, start)


def _cut(file: Path, size: int) -> str | None:
    """Compare a safetensors file's size with its header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > max(size - 8, 0):
            return f"{file} is cut short, or no safetensors file: download it again"
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return f"{file} has no readable header: download it again"
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    if expected > size:
        return (
            f"{file} is cut short: it has {size:,} bytes of {expected:,}; download it again (a "
            f"full disk while it was saved does the same)"
        )
    return None if tensors else f"{file} holds no tensors: download it again, or save it again"


def _zip_fault(file: Path, start: bytes) -> str | None:
    """Check the central directory of a torch file, a zip file since torch 1.6."""
    from zipfile import ZipFile

    if not start.startswith(b"PK"):
        return None
    try:
        ZipFile(file).close()
    except BadZipFile:
        return f"{file} is cut short: download it again"
    return None


def not_finite(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Name the tensors that hold NaN or infinity, which a bound may be (``input_max`` of Gemma 4's
    layers that clip)."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            wide = tensor.detach().float() if tensor.itemsize < 2 else tensor.detach()
            low, high = wide.aminmax()
            bound = tensor.dim() == 0 and name.endswith(("_min", "_max")) and not low.isnan()
            if not (bound or torch.isfinite(low) and torch.isfinite(high)):
                yield name


def first_not_finite(folder: Path, variant: str | None = None) -> str | None:
    """Name the first file and tensor of a folder that holds NaN or infinity."""
    for file in files_of(folder, variant):
        if file.is_file() and (name := next(not_finite(read_tensors(file)), None)):
            return f"{file}: {name}"
    return None


def types_of(file: Path) -> dict[str, torch.dtype]:
    """Return the types in which a safetensors file stores its tensors."""
    refuse_eight_bits(file)
    content = _opened(file)
    return {
        name: TYPES.get(content.get_slice(name).get_dtype(), torch.float32)
        for name in list(content.keys())
    }


def refuse_eight_bits(file: Path) -> None:
    """Raise UserError for a safetensors file with fp8 values."""
    content = _opened(file)
    for name in list(content.keys()):
        if str(content.get_slice(name).get_dtype()).startswith("F8"):
            raise UserError(
                f"{file}: {name} and others are floats of 8 bits (fp8), from which no training "
                "starts: take the same model in bfloat16 or float16; policy option quantization: "
                "8bit, with lora, needs as little memory"
            )


def types_in(folder: Path) -> dict[str, torch.dtype]:
    """Return the types in which a folder's safetensors files store their tensors."""
    kinds = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = _opened(file)
        for name in list(content.keys()):
            kinds[name] = TYPES.get(content.get_slice(name).get_dtype(), torch.float32)
    return kinds


def commonest(types: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the type of most tensors."""
    return Counter(types.values()).most_common(1)[0][0]
