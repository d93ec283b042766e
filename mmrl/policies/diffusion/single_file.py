"""Makes a diffusers folder from a single file with a network or a whole pipeline, as on Civitai and
for ComfyUI; configurations and missing parts come from a base folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from mmrl.core import pretrained, weight_files
from mmrl.core.errors import UserError
from mmrl.core.files import on_disk, whole_folder
from mmrl.core.model_folders import networks_of
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.lora_files import Base

ADAPTER = re.compile(
    r"lora|dora|lokr|hada_|oft_|\.diff(_b|_m)?$|\.[wb]_norm$"
)  # in tensor names of adapters
# prefixes of parts in files with several
PREFIXES = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.", "text_encoders.clip_l."),
    "text_encoder_2": ("conditioner.embedders.1.", "text_encoders.clip_g."),
    "text_encoder_3": ("text_encoders.t5xxl.",),
}


def is_checkpoint(file: Path) -> bool:
    """Tell whether a safetensors file holds a model and no adapter."""
    return file.is_file() and not any(ADAPTER.search(name) for name in weight_files.names(file))


def parts_in(file: Path, base: Base) -> tuple[str, ...]:
    """Name the parts of the base that a file holds: its network, and parts with a known prefix."""
    names = weight_files.names(file)
    known = networks_of(diffusers_folder.index(base.place), base.place)
    further = [
        part
        for part, prefixes in PREFIXES.items()
        if part in known and any(name.startswith(prefixes) for name in names)
    ]
    return (base.part, *further)


def write(file: Path, base: Base, folder: Path) -> Path:
    """Write a complete diffusers folder with the parts that a file holds, in the file's dtype, read
    by diffusers' own converters; everything else is copied from ``base``."""
    kind = weight_files.commonest(weight_files.types_of(file))
    if not Path(base.place).is_dir():
        raise UserError(f"--base {base.place}: give a local folder, whose other files are copied")
    if len(base.networks) > 1:
        raise UserError(
            f"{file}: {base.place} has {' and '.join(base.networks)}, and the file does not say "
            "which it is; this is not read"
        )
    parts = parts_in(file, base)
    nets: dict[str, nn.Module] = {}
    if parts == (base.part,):
        network = base.networks[base.part]
        nets[base.part] = pretrained.load_single_file(network, file, base.place, base.part, kind)
    else:
        pipe = _pipeline(file, base, parts, kind)
        nets = {part: getattr(pipe, part) for part in parts}
    with on_disk(folder), whole_folder(folder) as draft:
        shutil.copytree(
            base.place,
            draft,
            dirs_exist_ok=True,
            ignore=lambda at, names: {*nets, file.name} if Path(at) == Path(base.place) else set(),
        )
        for part, net in nets.items():
            saved: Any = net
            saved.save_pretrained(draft / part)
    return folder


def _pipeline(file: Path, base: Base, parts: tuple[str, ...], kind: Any) -> Any:
    """Load the pipeline of a file, the networks that it lacks from the folder."""
    index = diffusers_folder.index(base.place)
    lacking = {
        name: pretrained.load_model(network, base.place, subfolder=name, dtype=kind)
        for name, network in networks_of(index, base.place).items()
        if name not in parts
    }
    absent = {
        name: None
        for name, entry in index.items()
        if isinstance(entry, (list, tuple)) and entry[0] is None
    }
    return pretrained.load_single_file(
        base.pipeline, file, base.place, "", kind, parts=parts, **lacking, **absent
    )
