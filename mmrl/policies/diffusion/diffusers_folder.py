"""Reads and writes model folders in diffusers' format: parts by their real classes, errors as
UserError."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.core import pretrained, whole_export
from mmrl.core.errors import UserError
from mmrl.core.model_folders import is_network, refuse_file
from mmrl.core.registry import locate
from mmrl.core.weight_files import variant_of


def shift_of(vae: Any) -> float:
    """Return by what an autoencoder's latents are shifted; 0 where its configuration names none."""
    return getattr(vae.config, "shift_factor", None) or 0.0


def resolve(path: str, expected: str, *also: str) -> str:
    """Return the local folder or hub id of a pipeline of class ``expected`` or ``also``; UserError
    if a folder is not."""
    place = locate(path)
    refuse_file(place)
    index = Path(place) / "model_index.json"
    if Path(place).exists() or place.startswith((".", "/", "~")):
        if not index.is_file():
            raise UserError(
                f"policy path {path!r}: no model_index.json in {place}; a diffusers folder has one"
            )
        class_name = json.loads(index.read_text()).get("_class_name", "")
        if class_name.removesuffix("Pipeline") not in {
            name.removesuffix("Pipeline") for name in (expected, *also)
        }:
            raise UserError(
                f"policy path {path!r} holds a {class_name or 'nameless pipeline'}, "
                f"expected {expected}"
            )
    return place


def index(place: str) -> dict[str, Any]:
    """Read ``model_index.json`` of a folder or hub id."""
    from diffusers import DiffusionPipeline

    return pretrained.load_config(DiffusionPipeline, place)


def load_part(cls: Any, place: str, subfolder: str, dtype: torch.dtype | None = None) -> Any:
    """Load one part (transformer, vae, scheduler) of a pipeline, in float32 unless ``dtype`` says
    otherwise."""
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if not is_network(cls):
        return pretrained.load_processor(cls, place, subfolder=subfolder)
    return pretrained.load_model(cls, place, subfolder=subfolder, **options)


def load_config(cls: Any, place: str, subfolder: str) -> dict[str, Any]:
    """Read the config file of one part."""
    return pretrained.load_config(cls, place, subfolder)


def load_text_pipeline(
    cls: Any, place: str, dtype: torch.dtype, without: Sequence[str] = (), part: str = "transformer"
) -> Any:
    """Load the pipeline with tokenizers and text encoders only; ``without`` names those to skip."""
    return load_without(cls, place, dtype, [part, "vae", *without])


def load_without(cls: Any, place: str, dtype: torch.dtype, absent: Sequence[str]) -> Any:
    """Load the pipeline without the parts named ``absent``."""
    return pretrained.load_pipeline(cls, place, dtype, dict.fromkeys(absent))


def holds(place: str, part: str) -> bool:
    """Tell whether a local folder has that part; a hub id is assumed to be complete."""
    index = Path(place) / "model_index.json"
    return not index.is_file() or (json.loads(index.read_text()).get(part) or [None])[0] is not None


def save_lora(pipeline: Any, net: Any, folder: Path, part: str = "transformer") -> None:
    """Write ``pytorch_lora_weights.safetensors`` as ``pipe.load_lora_weights(folder)`` reads it."""
    from peft import get_peft_model_state_dict

    # not the whole state_dict, which would dequantise quantised networks
    adapters = {name: p for name, p in net.named_parameters() if "lora_" in name}
    layers = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in get_peft_model_state_dict(net, state_dict=adapters).items()
    }
    layers, config = unscaled(net, layers)
    if f"{part}_lora_layers" in inspect.signature(pipeline.save_lora_weights).parameters:
        named = {f"{part}_lora_layers": layers, f"{part}_lora_adapter_metadata": config}
        pipeline.save_lora_weights(folder, **named)
        return
    # Anima's pipeline reads such files but has no method to write them
    pipeline._save_lora_weights(folder, {part: layers}, {part: config})


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of diffusers and transformers about each truncated prompt:
    ``prompt_lengths`` reports them once, before training."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def unscaled(
    net: Any, layers: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Fold the scale of an adapter into its tensors and configuration, so that readers without
    metadata get the same change: they take a missing alpha to be the rank."""
    scales = {
        name: module.scaling for name, module in net.named_modules() if hasattr(module, "lora_B")
    }
    for key, tensor in layers.items():
        name, _, rest = key.partition(".lora_B")
        if rest:
            layers[key] = next(iter(scales[name].values())) * tensor
    config = next(iter(net.peft_config.values())).to_dict()
    ranks = {"lora_alpha": config["r"], "alpha_pattern": config["rank_pattern"]}
    return layers, config | ranks | {"use_rslora": False}


def save_full(
    pipeline: Any, place: str, net: nn.Module, folder: Path, part: str = "transformer"
) -> None:
    """Write a complete diffusers folder with ``net`` as its ``part``."""
    save_parts(pipeline, place, {part: net}, folder)


def save_parts(pipeline: Any, place: str, parts: dict[str, nn.Module], folder: Path) -> None:
    """Write a complete diffusers folder with these parts instead of its own, in the dtypes of its
    files; everything else is copied unchanged."""
    source = Path(place)
    if not source.is_dir():
        source = Path(pipeline.download(place, use_safetensors=True))

    def left_out(at: str, names: list[str]) -> set[str]:
        if Path(at) != source:
            return set()
        weights = {name for name in names if name.endswith(whole_export.WEIGHTS)}
        return {*parts, *whole_export.SKIPPED, *weights}

    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=left_out)
    for name, net in parts.items():
        saved: Any = net
        saved.save_pretrained(folder / name, variant=variant_of(source / name))
        whole_export.restore_types(folder / name, source / name)
