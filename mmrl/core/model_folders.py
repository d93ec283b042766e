"""Reads model folders as transformers, diffusers and peft write them: where they are, their
contents, and the classes they name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from mmrl.core import weight_files
from mmrl.core.errors import UserError

ADAPTER = "adapter_config.json"  # of peft
LIBRARIES = ("diffusers", "transformers")
# model types of authors' original folders: the converted ones, and the conversion scripts
ORIGINALS = {
    "Emu3": ("BAAI/Emu3-Gen-hf or BAAI/Emu3-Chat-hf", "emu3/convert_emu3_weights_to_hf.py"),
    "multi_modality": (
        "deepseek-community/Janus-Pro-1B or Janus-Pro-7B",
        "janus/convert_janus_weights_to_hf.py",
    ),
    "internvl_chat": (
        "the folder with -hf at its end, such as OpenGVLab/InternVL3-8B-hf",
        "internvl/convert_internvl_weights_to_hf.py",
    ),
}
# prefixes of hub ids that are not local yet
IDS = {"BAAI/Emu3-": "Emu3", "deepseek-ai/Janus": "multi_modality"}
CONFIGS = ("config.json", "model_index.json", "preprocessor_config.json", ADAPTER)


def folder_of(place: str, subfolder: str = "") -> Path | None:
    """Return the local folder of a model or of one of its parts; of a hub id its cached snapshot;
    None if there is none yet."""
    local = Path(place)
    if local.exists():
        return local / subfolder if (local / subfolder).is_dir() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    prefix = f"{subfolder}/" if subfolder else ""
    for name in CONFIGS:
        try:
            file = try_to_load_from_cache(place, prefix + name)
        except HFValidationError:  # a path that does not exist
            return None
        if isinstance(file, str):
            return Path(file).parent
    return None


def adapted_base(folder: Path) -> str | None:
    """Return the base model of a peft adapter ("" if it names none); None for other folders."""
    if not (folder / ADAPTER).is_file():
        return None
    try:
        content = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        return str(content.get("base_model_name_or_path") or "")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{folder / ADAPTER} is no readable JSON object: {error}") from error


def refuse_adapter(place: str, folder: Path | None) -> None:
    """Raise UserError for a folder with a peft adapter: libraries would silently load it onto the
    base that it names."""
    base = None if folder is None else adapted_base(folder)
    if base is not None:
        raise UserError(
            f"{place} holds a LoRA adapter on {base or 'a base model'}, not a model: give "
            f"path: {base or 'the base model'}, and the adapter by `start: {place}` with the lora "
            f"options it was trained with, or merge both by `mmrl convert {place} --into FOLDER`"
        )


def refuse_original(place: str, folder: Path | None) -> None:
    """Raise UserError for a folder in the authors' layout of a model that transformers reads only
    in its own layout."""
    kind = next((kind for start, kind in IDS.items() if place.startswith(start)), "")
    if folder is not None:
        kind = _model_type(folder)
    if kind not in ORIGINALS or place.endswith("-hf"):
        return
    converted, script = ORIGINALS[kind]
    raise UserError(
        f"{place} is in the layout of its authors (model_type {kind}), which transformers does not "
        f"read: take {converted}, or convert it with src/transformers/models/{script} of "
        f"transformers' repository"
    )


def _model_type(folder: Path) -> str:
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):  # other problems are reported elsewhere
        return ""


def refuse_file(place: str) -> None:
    """Raise UserError for a path that is a file instead of a folder: a model in one file."""
    file = Path(place)
    if not file.is_file():
        return
    if file.suffix == ".gguf":
        raise UserError(_gguf(file))
    if file.suffix in weight_files.PICKLED:
        raise UserError(
            f"{file} is a pickle, which could run code: take the .safetensors file of the same "
            "weights, or the model's folder"
        )
    raise UserError(
        f"{file} is a file, and a model is a folder with its configuration: for weights of a model "
        f"of diffusers, mmrl convert {file} --base FOLDER --into NEW makes one, where FOLDER is of "
        "the same architecture"
    )


def refuse_gguf(folder: Path) -> None:
    """Raise UserError for a folder with GGUF weights only."""
    files = sorted(folder.glob("*.gguf"))
    if files and not any(file.suffix in weight_files.WEIGHTS for file in folder.iterdir()):
        raise UserError(_gguf(files[0]))


def _gguf(file: Path) -> str:
    return (
        f"{file} is GGUF, weights quantised for inference: take the model's original folder "
        "(safetensors); policy option quantization keeps its frozen weights in 4 or 8 bits"
    )


def refuse_eight_bits(folder: Path) -> None:
    """Raise UserError for weights in fp8."""
    for file in sorted(folder.glob("*.safetensors")):
        weight_files.refuse_eight_bits(file)


def is_entry(entry: Any) -> bool:
    """Tell whether a value of an index names a part: (library, class), in modular ones with its
    location."""
    if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
        return False
    return len(entry) == 2 or isinstance(entry[2], dict)


def check_libraries(index: Mapping[str, Any], place: str) -> None:
    """Raise UserError for a pipeline with classes of no installed library: they would be code of
    its folder."""
    import diffusers

    name = index.get("_class_name", "")
    if not isinstance(name, str):
        raise UserError(
            f"{place}: its pipeline is Python code of the folder (_class_name is {name}), which is "
            f"not run; take a folder whose classes diffusers has"
        )
    for part, entry in index.items():
        if part.startswith("_") or not is_entry(entry):
            continue
        library = (entry[2].get("type_hint") or entry)[0] if len(entry) == 3 else entry[0]
        top = str(library).partition(".")[0]
        if top not in (*LIBRARIES, "None") and not hasattr(diffusers.pipelines, top):
            raise UserError(
                f"{place}: {part} is of {library!r}, which is no part of diffusers or "
                "transformers; code of a folder is not run"
            )


def class_of(entry: Sequence[Any]) -> type | None:
    """Find the class of a part by its entry in an index, (library, class); None if it has none."""
    import diffusers
    import transformers

    library, name = entry[:2]
    if library is None or name is None:
        return None
    known = {"diffusers": diffusers, "transformers": transformers}
    cls = getattr(known.get(library) or getattr(diffusers.pipelines, library), name, None)
    return cls if isinstance(cls, type) else None


def networks_of(index: Mapping[str, Any], place: str) -> dict[str, type]:
    """List the classes of a pipeline's networks that have a folder."""
    entries = {name: entry for name, entry in index.items() if not name.startswith("_")}
    classes = {name: class_of(entry) for name, entry in entries.items() if is_entry(entry)}
    return {name: cls for name, cls in classes.items() if is_network(cls) and has_part(place, name)}


def is_network(entry: Any) -> TypeGuard[type[nn.Module]]:
    """Tell whether a value is a class of networks."""
    return isinstance(entry, type) and issubclass(entry, nn.Module)


def has_part(place: str, name: str) -> bool:
    """Tell whether a folder has a folder for a part; a hub id is assumed to be complete."""
    return not Path(place).exists() or (Path(place) / name).is_dir()
