"""Loads and writes complete diffusers pipelines of any class: only installed classes, only
safetensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.errors import UserError
from mmrl.core.libraries import find_class, library_class
from mmrl.core.model_folders import check_libraries, class_of, refuse_file
from mmrl.core.registry import locate
from mmrl.policies.diffusion import (
    diffusers_folder,
    experts,
    guardrails,
    minimax_h3,
    modular_folder,
    two_stages,
)
from mmrl.policies.diffusion.modular_folder import is_modular
from mmrl.policies.lora import adapters_of

# makes a part from its config file without loading its weights: (class, folder, subfolder, type)
Make = Callable[[type, str, str, torch.dtype], nn.Module]
DENOISERS = ("transformer", "unet")  # pipelines' names of the denoising network


def load(
    path: str,
    dtype: torch.dtype,
    skip_blocks: Sequence[str] = (),
    guardrail: bool = True,
    make: Make | None = None,
) -> tuple[str, Any, tuple[str, ...]]:
    """Load a pipeline: its folder, itself, and the names of its denoising networks; a modular one
    without the named blocks; Cosmos with or without its guardrail; with ``make``, parts that have
    weights are made by it. UserError unless it is a pipeline of the installed libraries."""
    place = locate(path)
    refuse_file(place)
    local = Path(place).exists() or place.startswith((".", "/", "~"))
    indices = ("model_index.json", modular_folder.INDEX)
    if local and not any((Path(place) / index).is_file() for index in indices):
        raise UserError(
            f"policy path {path!r}: no model_index.json in {place}; a diffusers folder has one"
        )
    if is_modular(place):
        if not guardrail:
            raise guardrails.no_guardrail(f"the modular pipeline {path!r}")
        pipe = _modular(place, path, dtype, skip_blocks, make)
    elif skip_blocks:
        raise UserError(
            f"policy option skip_blocks: {path!r} is no modular pipeline, and has no blocks; leave "
            "it out"
        )
    else:
        pipe = _classic(place, path, dtype, guardrail, make)
    return place, pipe, _frozen(pipe, path)


def _frozen(pipe: Any, path: str) -> tuple[str, ...]:
    """Freeze a pipeline's networks except the denoising ones, and return the names of these.
    UserError where it has none, or no scheduler."""
    modules = _modules(pipe)
    for name, module in modules.items():
        module.requires_grad_(name.startswith(DENOISERS)).eval()
        if decodes(name):
            take_any_type(module)
    parts = tuple(name for name in modules if name.startswith(DENOISERS))
    for name in parts:
        experts.let_gradients_through(modules[name])
    if not parts:
        raise UserError(
            f"policy path {path!r}: {type(pipe).__name__} has no network called transformer or "
            f"unet to train; its parts: {', '.join(modules)}"
        )
    if getattr(pipe, "scheduler", None) is None:
        raise UserError(
            f"policy path {path!r}: {type(pipe).__name__} cannot be replayed: it has no scheduler, "
            "so it steps its latents by itself"
        )
    return parts


def _modular(
    place: str, path: str, dtype: torch.dtype, skip_blocks: Sequence[str], make: Make | None
) -> Any:
    index = modular_folder.read_index(place)
    modular_folder.check_index(index, path)
    return modular_folder.load(place, path, index, _dtypes(index, dtype), skip_blocks, make)


def _classic(place: str, path: str, dtype: torch.dtype, guardrail: bool, make: Make | None) -> Any:

    index = diffusers_folder.index(place)
    check_index(index, path)
    cls = library_class("diffusers", index["_class_name"])
    dtypes = _dtypes(index, dtype)
    replaced = {} if make is None else _made(index, place, dtypes, make)
    replaced |= guardrails.loaded_with(cls, index, guardrail)
    try:
        pipe = pretrained.load_pipeline(cls, place, dtypes, replaced, use_safetensors=True)
    except UserError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        # such as a package that checks prompts
        raise guardrails.missing(cls, path, error.__cause__) from error
    if two_stages.is_combined(pipe):
        return two_stages.decoder_with_prior(pipe)
    return guardrails.remembered(pipe)


def _dtypes(index: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each part: decoders of images or audio stay in float32."""
    decoders = [part for part in index if decodes(part) or part == "vocoder"]
    return {"default": dtype} | dict.fromkeys(decoders, torch.float32)


def _made(
    index: dict[str, Any], place: str, dtypes: dict[str, torch.dtype], make: Make
) -> dict[str, Any]:
    """Make the parts of a folder that have weights; those that are empty in its index are None."""
    entries = {part: entry for part, entry in index.items() if isinstance(entry, list)}
    classes = {part: class_of(entry) for part, entry in entries.items()}
    return {part: None for part, entry in entries.items() if entry[0] is None} | {
        part: make(cls, place, part, dtypes.get(part, dtypes["default"]))
        for part, cls in classes.items()
        if cls is not None and issubclass(cls, nn.Module)
    }


def decodes(part: str) -> bool:
    """Tell by its name whether a part of a pipeline decodes images or audio."""
    return "vae" in part or part in ("movq", "diffusion_decoder")


def take_any_type(autoencoder: Any) -> None:
    """Make an autoencoder convert its inputs to its own dtype: it stays in float32 where the
    pipeline computes in half precision, and not every pipeline converts."""

    def converted(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return plain(tensor.to(next(autoencoder.parameters()).dtype), *args, **kwargs)

        return call

    for name in ("encode", "decode"):
        if hasattr(autoencoder, name):
            autoencoder.__dict__[name] = converted(getattr(autoencoder, name))


def check_index(index: dict[str, Any], path: str) -> None:
    """Reject a folder with classes from outside the installed libraries: nothing else is
    imported."""
    import diffusers

    name = str(index.get("_class_name", ""))
    try:
        cls = find_class("diffusers", name) if name.isidentifier() else None
    except RuntimeError as error:  # a package that it needs is installed but fails
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"policy path {path!r}: {name} cannot be imported: {reason}; install what is missing"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise UserError(
            f"policy path {path!r}: diffusers {diffusers.__version__} has no pipeline "
            f"{name or 'without a name'}; install a version that has it"
        )
    if getattr(cls, "_load_connected_pipes", False) and name not in two_stages.COMBINED:
        raise UserError(
            f"policy path {path!r}: {name} cannot be replayed: it calls several pipelines one "
            "after the other, and which of their networks could be trained beside frozen others is "
            f"known of {', '.join(two_stages.COMBINED)} alone"
        )
    if name in two_stages.DECODERS:
        raise UserError(
            f"policy path {path!r}: {name} makes pictures of the embeddings of a prior, not of "
            "prompts; put both into one folder, and use that: diffusers.AutoPipelineForText2Image."
            "from_pretrained(...).save_pretrained(folder)"
        )
    check_libraries(index, path)


def encoders(pipe: Any, parts: tuple[str, ...]) -> list[nn.Module]:
    """List the frozen transformers networks, which encode texts and images."""
    read = [
        module for name, module in _modules(pipe).items() if name not in parts and _reads(module)
    ]
    return [minimax_h3.reader(m) for m in read] if minimax_h3.is_h3(pipe.scheduler) else read


def others(pipe: Any, parts: tuple[str, ...]) -> list[nn.Module]:
    """List the frozen networks that are neither trained nor encoders: autoencoders, connectors."""
    return [
        module
        for name, module in _modules(pipe).items()
        if name not in parts and not _reads(module) and any(True for _ in module.parameters())
    ]


def _reads(module: nn.Module) -> bool:
    """Tell whether a network is a transformers one, which encodes texts or images."""
    return type(module).__module__.startswith("transformers.")


def decode_in_parts(pipe: Any, **enabled: bool) -> None:
    """Turn on the memory-saving options of the autoencoder. UserError where it has none."""
    for name, on in enabled.items():
        enable = getattr(getattr(pipe, "vae", None), f"enable_{name}", None)
        if on and enable is None:
            raise UserError(
                f"policy option vae_{name}: the autoencoder of {type(pipe).__name__} has no "
                f"{name}; leave it false"
            )
        if on and enable is not None:
            enable()


def media_of(output: Any, pipeline: str) -> Tensor:
    """Convert a pipeline's output to images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1."""
    media = output if isinstance(output, Tensor) else None
    if isinstance(output, (list, tuple)) and output and isinstance(output[0], Tensor):
        media = torch.stack(list(output))
    if media is not None and media.ndim in (4, 5):
        media = on_white(media)
    if media is None or media.ndim not in (4, 5) or media.shape[-3] != 3:
        shape = tuple(media.shape) if media is not None else type(output).__name__
        raise UserError(
            f"{pipeline} cannot be replayed: it returns {shape}, neither pictures nor videos as "
            "tensors"
        )
    return media.float().clamp(0, 1)


def on_white(media: Tensor) -> Tensor:
    """Composite media with alpha [*, 4, H, W] in 0..1 on white; others stay."""
    if media.shape[-3] != 4:
        return media
    opacity = media[..., 3:, :, :]
    return media[..., :3, :, :] * opacity + (1 - opacity)


def rounding(media: Tensor) -> float:
    """Return the rounding error of media in 0..1 that a pipeline quantises to 8 bits, as Cosmos
    does for its guardrail; 0: none."""
    levels = media * 255
    return 1 / 255 if bool((levels - levels.round()).abs().max() < 1e-3) else 0.0


def export(pipeline: str, place: str, nets: dict[str, Any], folder: Path) -> None:
    """Write adapters, one folder per network if there are several, or the whole pipeline."""

    cls = library_class("diffusers", pipeline)
    if not any(map(adapters_of, nets.values())):
        if guardrails.builds_guardrail(cls):
            return guardrails.save_without(cls, place, nets, folder)
        save = modular_folder.save if is_modular(place) else diffusers_folder.save_parts
        return save(cls, place, nets, folder)
    for name, net in nets.items():
        target = folder if len(nets) == 1 else folder / name
        if hasattr(cls, "save_lora_weights") and name in ("transformer", "transformer_2", "unet"):
            part = "unet" if name == "unet" else "transformer"
            diffusers_folder.save_lora(cls, net, target, part)
        else:
            net.save_lora_adapter(target)
    return None


def _modules(pipe: Any) -> dict[str, nn.Module]:
    """List the parts that are networks, except a guardrail, which also is a Module."""
    parts = pipe.components.items()
    return {name: part for name, part in parts if issubclass(type(part), nn.Module)}
