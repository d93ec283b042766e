"""Converts LoRA files between the forms of diffusers, ComfyUI and kohya's sd-scripts, and merges
adapters into a model. Needs no run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from mmrl.core import pretrained
from mmrl.core.errors import UserError, suggest
from mmrl.core.files import check_writable, on_disk, whole_folder
from mmrl.core.hub import check_model
from mmrl.core.libraries import find_class
from mmrl.core.registry import locate
from mmrl.policies.diffusion import diffusers_folder, lora_files, lora_merging, single_file
from mmrl.policies.diffusion.lora_files import Base
from mmrl.policies.diffusion.lora_names import Format
from mmrl.policies.lora import check_alone, merged

LORA = "pytorch_lora_weights.safetensors"  # as diffusers names it
PEFT = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.index.json")


def form_of(name: str) -> Format:
    """Return a format by its name; UserError if unknown."""
    known: tuple[Format, ...] = get_args(Format)
    for form in known:
        if form == name:
            return form
    raise UserError(f"--format {name}: {suggest(name, known)}")


def file_name(form: Format) -> str:
    """Name the file of a form in an export."""
    return LORA if form == "diffusers" else f"lora_{form}.safetensors"


def rewrite_export(folder: Path, place: str, form: Format) -> None:
    """Rewrite every LoRA file of an export in another form. ``place``: the base model. UserError if
    all weights were trained, or the form cannot be checked."""
    files = [folder / LORA, *(folder / part / LORA for part in lora_merging.EXPERTS.values())]
    files = [file for file in files if file.is_file()]
    if not files:
        raise UserError(
            f"--format {form} is for LoRA weights of a model of diffusers; this run exports "
            f"{', '.join(sorted(file.name for file in folder.iterdir())[:4])}; leave --format out"
        )
    base = Base.of(place)
    for file in files:
        adapter = lora_files.read(base, file)
        lora_files.write(base, adapter, form, file.with_name(file_name(form)))
        file.unlink()


def convert(adapter: Path, base: str | None, form: Format, file: Path) -> Path:
    """Write a LoRA file of any form that diffusers reads in the form ``form``; returns ``file``."""
    if file.suffix != ".safetensors":
        raise UserError(f"--out {file}: name a file that ends in .safetensors")
    if file.exists():
        raise UserError(f"--out {file} exists; name a new file")
    check_writable(file.parent)
    if (adapter / PEFT).is_file():
        raise UserError(
            f"{adapter} is an adapter of peft for a model of transformers; it can only be merged, "
            f"with --into FOLDER"
        )
    known = _base_of(adapter, base)
    source = lora_files.read(known, lora_merging.single(adapter), with_texts=True)
    with on_disk(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        lora_files.write(known, source, form, file)
    return file


def merge(
    adapters: Sequence[Path], base: str | None, weights: Sequence[float], folder: Path
) -> Path:
    """Merge adapters, each times its weight (default 1), into their base model and write it as a
    new folder for its library: W + weight * scale * BA, in the base's dtype. A single-file model
    also becomes such a folder.

    Raises UserError before anything is written if files, weights and base do not fit.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--into {folder} exists and is not empty; name a new folder")
    check_writable(folder)
    scales = list(weights) or [1.0] * len(adapters)
    if len(scales) != len(adapters):
        raise UserError(
            f"--weight is given {len(scales)} times for {len(adapters)} adapters; give one each, "
            f"in their order, or none"
        )
    if not all(math.isfinite(scale) for scale in scales):
        raise UserError(f"--weight {scales}: give finite numbers")
    kinds = {(adapter / PEFT).is_file() for adapter in adapters}
    if len(kinds) > 1:
        raise UserError(
            "some adapters are of peft and some LoRA files of diffusers; they have no base model "
            "in common"
        )
    pairs = list(zip(adapters, scales, strict=True))
    if kinds == {True}:
        return _merge_peft(pairs, base, folder)
    if len(adapters) == 1 and single_file.is_checkpoint(adapters[0]):
        return single_file.write(
            adapters[0], _base_of(adapters[0], base or _around(adapters[0])), folder
        )
    return _merge_lora(pairs, _base_of(adapters[0], base), folder)


def _around(file: Path) -> str | None:
    """Return the diffusers folder that contains a file, if any."""
    return str(file.parent) if (file.parent / "model_index.json").is_file() else None


def _merge_lora(pairs: list[tuple[Path, float]], base: Base, folder: Path) -> Path:
    import diffusers

    read = [
        (part, file, scale)
        for adapter, scale in pairs
        for part, file in lora_merging.by_part(adapter, base).items()
    ]
    place = base.place
    if not Path(place).is_dir():
        place = diffusers.DiffusionPipeline.download(place, use_safetensors=True)
    changed = [part for part in base.networks if any(part == p for p, _, _ in read)]
    types = {part: lora_files.stored_dtype(place, part) for part in changed}
    encoders = _text_encoders(base, place, [file for _, file, _ in read])
    with on_disk(folder), whole_folder(folder) as draft:
        # all files but the networks are copied unchanged
        shutil.copytree(
            place,
            draft,
            dirs_exist_ok=True,
            ignore=lambda at, names: changed if Path(at) == Path(place) else [],
        )
        for part in changed:
            net = diffusers_folder.load_part(base.networks[part], place, part, types[part])
            for of, file, scale in read:
                if of == part:
                    for name in lora_merging.merge(base, net, file, scale, encoders):
                        shutil.rmtree(draft / name)
                        encoders[name].save_pretrained(draft / name)
            net.save_pretrained(draft / part)
    return folder


def _text_encoders(base: Base, place: str, files: Sequence[Path]) -> dict[str, Any]:
    """Load the text encoders that adapters are loaded into, if a file has any of them."""
    names = [name for file in files for name in lora_files.keys(file)]
    if not any(name.startswith(lora_files.OF_TEXT_ENCODERS) for name in names):
        return {}
    return {
        part: diffusers_folder.load_part(cls, place, part, lora_files.stored_dtype(place, part))
        for part, cls in base.text_encoders.items()
    }


def _merge_peft(pairs: list[tuple[Path, float]], base: str | None, folder: Path) -> Path:
    place = base or str(_json(pairs[0][0] / PEFT).get("base_model_name_or_path") or "")
    if not place:
        raise UserError(f"{pairs[0][0] / PEFT} names no base model; give it by --base")
    check_model(place)
    place = locate(place)
    for adapter, _ in pairs:
        if not (adapter / PEFT_WEIGHTS).is_file():
            raise UserError(f"{adapter}: no {PEFT_WEIGHTS}; other forms of weights are not read")
    source = Path(place) if Path(place).is_dir() else _downloaded(place)
    cls = _transformers_class(source)
    net = pretrained.load_model(cls, source, dtype="auto", use_safetensors=True)
    for adapter, scale in pairs:
        net.load_state_dict(_with_adapter(net, source, adapter, scale))
    with on_disk(folder), whole_folder(folder) as draft:
        ignore = shutil.ignore_patterns(*WEIGHTS, ".git", ".cache")
        shutil.copytree(source, draft, dirs_exist_ok=True, ignore=ignore)
        net.save_pretrained(draft)
    return folder


def _with_adapter(net: Any, source: Path, adapter: Path, scale: float) -> dict[str, torch.Tensor]:
    """Return the weights of ``net`` with an adapter added, times ``scale``."""
    from peft.tuners.lora import LoraLayer

    adapted = pretrained.load_model(type(net), source, dtype=net.dtype, use_safetensors=True)
    adapted.load_state_dict(net.state_dict())
    try:
        adapted.load_adapter(str(adapter), adapter_name="default")
    except (ValueError, RuntimeError, KeyError, OSError, TypeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"{adapter}: this adapter does not fit {source}: {reason}") from error
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            check_alone(net, name)  # in ``adapted`` its weight is no longer shared
            module.scaling["default"] *= scale
    return merged(adapted)


def _transformers_class(source: Path) -> Any:
    """Return the class of a model by its configuration; no code of the folder is run."""
    import transformers

    names = _json(source / "config.json").get("architectures") or [""]
    kind = find_class("transformers", str(names[0]))
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UserError(
            f"{source}: transformers itself has no model {names[0]!r}; models with code of their "
            f"own are not merged"
        )
    return kind


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    ignored = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf"]
    return Path(snapshot_download(name, ignore_patterns=ignored))


def _base_of(adapter: Path, base: str | None) -> Base:
    if not adapter.exists():
        raise UserError(f"{adapter}: no such file or folder")
    if base is None:
        raise UserError(
            f"{adapter} does not say what it is for; give --base: the folder or hub id of the "
            f"model it was trained on"
        )
    check_model(base)
    return Base.of(base)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object")
    return content
