"""Merges LoRA files into the weights of a model, and starts training from one.

Diffusers and peft read and merge what they support; full weight differences, which they skip, are
added here, by ComfyUI's rule: weight + strength * difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import weight_files
from mmrl.core.errors import UserError
from mmrl.policies.diffusion import single_file
from mmrl.policies.diffusion.lora_files import (
    DIFFERENCES,
    LISTED,
    LOG,
    PEFT_PREFIX,
    Base,
    differences,
    keys,
    load,
    read,
)
from mmrl.policies.lora import ADAPTER, adapters_of

PREFIXES = ("model.diffusion_model.", "diffusion_model.", PEFT_PREFIX, "transformer.", "unet.")
FLAT = "lora_unet_"  # kohya's prefix, after which dots are underscores
# common names of Wan 2.2's two networks in file names
HIGH_OR_LOW = re.compile(r"(?:^|[^a-z])(high|low)(?:[^a-z]*noise)?(?:[^a-z]|$)", re.IGNORECASE)
EXPERTS = {"high": "transformer", "low": "transformer_2"}


class StartsFromLora:
    """Policies of a diffusers model, which can start from a LoRA file."""

    place: str  # the model's folder
    net: nn.Module
    parts: tuple[str, ...] = ("",)  # names of the networks that are trained


@torch.no_grad()
def merge(
    base: Base,
    net: Any,
    file: Path,
    weight: float,
    text_encoders: Mapping[str, Any] | None = None,
) -> list[str]:
    """Add the whole change of a LoRA file, times ``weight``, to a network and to text encoders:
    matrices, biases, DoRA's magnitudes and norms, as diffusers loads them and peft merges them, and
    full weight differences, in float32. Returns the text encoders that have changed."""
    encoders = dict(text_encoders or {})
    with _in_float32([net, *encoders.values()]):
        load(base, net, file, encoders)
        merged = _merge_layers(net, weight)
        changed = {name: _merge_layers(encoder, weight) for name, encoder in encoders.items()}
        net.unload_lora()
        for encoder in encoders.values():
            _unload(encoder)
        added = _add_differences(base, net, file, weight)
    if not merged + sum(changed.values()) + added:
        raise UserError(
            f"{file}: diffusers' {base.pipeline.__name__} finds no LoRA weights for its "
            f"{base.part} in it, whose first name is {keys(file)[0]!r}"
        )
    return [name for name, count in changed.items() if count]


@contextmanager
def _in_float32(modules: Sequence[nn.Module]) -> Iterator[None]:
    known = [
        {name: (t.dtype, t.requires_grad) for name, t in module.state_dict(keep_vars=True).items()}
        for module in modules
    ]
    for module in modules:
        module.float()
    yield
    for module, before in zip(modules, known, strict=True):
        for name, tensor in module.state_dict(keep_vars=True).items():
            dtype, trained = before[name]
            tensor.data = tensor.data.to(dtype)
            tensor.requires_grad_(trained)


def _merge_layers(module: nn.Module, weight: float) -> int:
    """Merge the adapters of a network, times ``weight``; returns the number of layers with one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.scale_layer(weight)
        layer.merge()
    return len(layers)


def _unload(encoder: Any) -> None:
    """Remove the adapters of a model of transformers, as diffusers' pipelines do."""
    from diffusers.utils.peft_utils import recurse_remove_peft_layers

    if encoder._hf_peft_config_loaded:
        recurse_remove_peft_layers(encoder)
        del encoder.peft_config
        encoder._hf_peft_config_loaded = False


def _add_differences(base: Base, net: nn.Module, file: Path, weight: float) -> int:
    """Add full weight differences to a network; reports those that match nothing in it. Returns how
    many were added."""
    listed = differences(keys(file))
    if not listed:
        return 0
    tensors = weight_files.read_tensors(file)
    parameters = dict(net.named_parameters())
    left = []
    for key in listed:
        changes = _places(base, parameters, key, tensors[key].float())
        for name, change in changes.items():
            parameters[name].data += weight * change.to(parameters[name].device)
        if not changes:
            left.append(key)
    if left:
        LOG.warning(
            "%s: leaves out %d of %d differences of whole weights, which have no place in the "
            "network: %s",
            file,
            len(left),
            len(listed),
            ", ".join(left[:LISTED]) + (", ..." if len(left) > LISTED else ""),
        )
    return len(listed) - len(left)


def _places(
    base: Base, parameters: Mapping[str, Tensor], key: str, change: Tensor
) -> dict[str, Tensor]:
    """Return the parts of a difference by the parameters that they change; {}: no match."""
    ending = next(each for each in DIFFERENCES if key.endswith(each))
    stem = key.removesuffix(ending)
    if stem.startswith(FLAT):
        flat = {name.replace(".", "_"): name for name in parameters}
        name = flat.get(f"{stem.removeprefix(FLAT)}_{DIFFERENCES[ending]}")
        return _fitting(parameters, {name: change} if name else {})
    prefix = next((each for each in PREFIXES if stem.startswith(each)), "")
    stem = stem.removeprefix(prefix)
    # a parameter without its own module has its full name
    for original in (f"{stem}.{DIFFERENCES[ending]}", stem):
        for names in ({original: change}, _renamed(base, original, change)):
            if fitting := _fitting(parameters, names):
                return fitting
    return {}


def _renamed(base: Base, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Convert a tensor of the original network by diffusers' converter; {} where it cannot."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    kind = base.networks[base.part].__name__
    convert = SINGLE_FILE_LOADABLE_CLASSES.get(kind, {}).get("checkpoint_mapping_fn")
    try:
        return dict(convert({name: tensor.clone()})) if convert else {}
    except Exception:  # many converters expect a whole model, and raise various errors on a part
        return {}


def _fitting(parameters: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the changes; {} unless all match parameters in name and shape."""
    fits = all(n in parameters and parameters[n].shape == t.shape for n, t in names.items())
    return dict(names) if fits else {}


@torch.no_grad()
def begin(base: Base, net: Any, file: Path) -> None:
    """Start from a LoRA file: as the network's adapter, if it has one of the same ranks, else
    merged into its weights. UserError where it does not match."""
    if not adapters_of(net):
        merge(base, net, file, 1.0)
        return
    layers = {name: module for name, module in net.named_modules() if hasattr(module, "lora_A")}
    adapter = read(base, file)
    for name, pair in adapter.items():
        layer = layers.get(name)
        rank = 0 if layer is None else layer.r[ADAPTER]
        if layer is None or rank < pair.rank:
            have = f"of rank {rank}" if layer is not None else "not there"
            raise UserError(
                f"{file}: its adapter of {name} has rank {pair.rank}, and the policy's is {have}; "
                f"set lora: {{rank: {max(p.rank for p in adapter.values())}, targets: [...]}} to "
                f"its modules, or merge it first: mmrl convert {file} --base MODEL --into FOLDER"
            )
    for name, layer in layers.items():
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        up.zero_()
        if name in adapter:
            pair = adapter[name]
            down[: pair.rank] = pair.down.to(down)
            up[:, : pair.rank] = pair.scale / layer.scaling[ADAPTER] * pair.up.to(up)


def lora_at(path: Path) -> Path | None:
    """Return the LoRA file at a path: the path itself, diffusers' file in it, or the folder itself
    where it has files of two experts; None: there is none."""
    inner = path / "pytorch_lora_weights.safetensors"
    if path.suffix == ".safetensors" and path.is_file():
        return path
    if inner.is_file():
        return inner
    folders = [path / part for part in EXPERTS.values()]
    of_experts = any((folder / inner.name).is_file() for folder in folders)
    by_name = path.is_dir() and any(_expert(file) for file in path.glob("*.safetensors"))
    return path if of_experts or by_name else None


def by_part(adapter: Path, base: Base) -> dict[str, Path]:
    """Return the LoRA files of a path by the model part each is for: with two experts by folders
    named after them, or by "high" and "low" (noise) in the file names."""
    if len(base.networks) == 1:
        return {base.part: single(adapter)}
    if any((adapter / part).is_dir() for part in base.networks):
        return {p: single(adapter / p) for p in base.networks if (adapter / p).is_dir()}
    files = sorted(adapter.glob("*.safetensors")) if adapter.is_dir() else [adapter]
    parts = {_expert(file): file for file in files}
    if not files or None in parts or len(parts) < len(files):
        listed = ", ".join(file.name for file in files) or "no .safetensors file"
        raise UserError(
            f"{adapter}: this model has {' and '.join(base.networks)}, and the names do not say "
            f"which file is for which ({listed}); write high_noise (transformer) or low_noise "
            f"(transformer_2) into the name of each, or give a folder that has a folder "
            f"{' and one '.join(base.networks)} with its file (for both the same, if it is)"
        )
    for part, file in parts.items():
        LOG.warning("%s is taken for %s, by its name", file, part)
    return {str(part): file for part, file in parts.items()}


def _expert(file: Path) -> str | None:
    """Tell which of two experts a file is for, by its name; None where it is unclear."""
    names = {match.lower() for match in HIGH_OR_LOW.findall(file.stem)}
    return EXPERTS[names.pop()] if len(names) == 1 else None


def single(adapter: Path) -> Path:
    """Return the only LoRA file at a path. UserError where there are several or none."""
    if not adapter.is_dir():
        return adapter
    files = sorted(adapter.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    inner = [part for part in EXPERTS.values() if (adapter / part).is_dir()]
    hint = f"give {' and '.join(str(adapter / part) for part in inner)} one after the other"
    raise UserError(
        f"{adapter}: {len(files)} .safetensors files in this folder; "
        f"{hint if inner else 'give the file itself'}"
    )


def start(policy: Any, lora: Path) -> None:
    """Apply a LoRA file to a policy, or a folder with files of two experts. Raises UserError where
    policy or file do not support it."""
    if not isinstance(policy, StartsFromLora) or len(policy.parts) > 1:
        raise UserError(f"{lora} is a LoRA for one network of a model of diffusers")
    base = Base.of(policy.place)
    for part, file in by_part(lora, base).items():
        if single_file.is_checkpoint(file):
            raise UserError(
                f"{file} holds a model, no adapter: mmrl convert {file} --base {policy.place} "
                "--into FOLDER makes a folder of it, which is the policy's path"
            )
        two = len(base.networks) > 1
        begin(base, policy.net.get_submodule(part) if two else policy.net, file)
