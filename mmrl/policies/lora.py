"""Injects low-rank adapters by peft (Hu et al. 2021), in place, into any module."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError

ALL_LINEAR = "all-linear"  # in peft, every linear layer but the head
ADAPTER = "default"  # peft's name of the adapter
ADAPTER_FILE = "adapter_model.safetensors"
# peft and diffusers import bitsandbytes if it is there; it warns of a kernel that is not needed
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# attention projections of diffusers' transformers; a family may offer its own list
ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
# of blocks with self-attention and cross-attention
TWO_ATTENTIONS = tuple(f"{layer}.{name}" for layer in ("attn1", "attn2") for name in PROJECTIONS)


@dataclass(frozen=True)
class Lora:
    """Holds the options of adapters, which are float32 and start at zero: the reference is the
    model without them.

    rank: of both factors. alpha: the adapter counts alpha / rank times; null: twice the rank.
    targets: module-name suffixes, ``all-linear``, or a regular expression of whole names; null: the
    attention projections."""

    rank: int
    alpha: float | None = None
    targets: Sequence[str] | str | None = None


def add_lora(net: nn.Module, lora: Lora, attention: Sequence[str] = ATTENTION) -> None:
    """Freeze ``net`` and inject adapters in float32; they start at zero, so the policy is still the
    base model.

    Raises UserError when no module has one of the target names.
    """
    from peft import LoraConfig

    linears = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if isinstance(lora.targets, str):
        targets = ending_like(linears, lora.targets, type(net).__name__)
    else:
        targets = list(lora.targets) if lora.targets else _present(net, attention)
    if not targets or not _present(net, targets):
        raise UserError(
            f"lora.targets match no module of {type(net).__name__}; its linear "
            f"layers: {linears[:8]} ..."
        )
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.rank
    config = LoraConfig(
        r=lora.rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets
    )
    inject(net, config)
    for name, p in net.named_parameters():
        p.requires_grad_("lora_" in name)
        if p.requires_grad and p.dtype.itemsize < 4:
            p.data = p.data.float()


def inject(net: Any, config: Any) -> None:
    """Add an adapter, and record it where diffusers and transformers look for it.

    For transformers models peft itself adds it: transformers 5.24 rejects peft older than 0.22.
    """
    from peft import inject_adapter_in_model
    from transformers.integrations.peft import PeftAdapterMixin

    if isinstance(net, PeftAdapterMixin):
        config.base_model_name_or_path = net.__dict__.get("name_or_path")
        net._hf_peft_config_loaded = True
    elif hasattr(net, "add_adapter"):
        net.add_adapter(config)
        return
    inject_adapter_in_model(config, net)


def keep_input_dtype(net: nn.Module) -> None:
    """Stop adapters from casting their inputs, for passes under autocast.

    peft casts them to the adapters' float32, and autocast casts them back: the same numbers, at a
    third of all kernel launches of a token.
    """
    for layer in net.modules():
        if "cast_input_dtype_enabled" in vars(layer):  # peft's, which is slow to import
            vars(layer)["cast_input_dtype_enabled"] = False


@contextmanager
def casting_inputs(net: nn.Module) -> Iterator[None]:
    """Make adapters cast their inputs within the block, as passes outside autocast need."""
    layers = [vars(x) for x in net.modules() if vars(x).get("cast_input_dtype_enabled") is False]
    for layer in layers:
        layer["cast_input_dtype_enabled"] = True
    try:
        yield
    finally:
        for layer in layers:
            layer["cast_input_dtype_enabled"] = False


def save_adapter(net: Any, folder: Path) -> None:
    """Save the adapter as peft does: adapter_config.json and adapter_model.safetensors."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(net, adapter_name=ADAPTER)
    named = {f"base_model.model.{n}": t.detach().cpu().contiguous() for n, t in state.items()}
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
    net.peft_config[ADAPTER].save_pretrained(folder)


def adapters_of(net: Any) -> Any:
    """Return the configurations of a network's adapters, by name; None without peft's mixin."""
    return getattr(net, "peft_config", None)


def save_model(net: Any, folder: Path) -> None:
    """Save a model by its own ``save_pretrained``; for a transformers model with an adapter, only
    the adapter."""
    from transformers.integrations.peft import PeftAdapterMixin

    if isinstance(net, PeftAdapterMixin) and adapters_of(net):
        save_adapter(net, folder)
        return
    net.save_pretrained(folder)
    if isinstance(net, PeftAdapterMixin):
        from mmrl.core import whole_export

        whole_export.complete(folder, str(net.config.name_or_path))


@torch.no_grad()
def merged(net: nn.Module, adapters: bool = True) -> dict[str, Tensor]:
    """Return the weights with adapters merged or left out, under the names of a model without
    adapters. UserError where a layer with an adapter shares its weight with another layer, which
    the merged weight would change too."""
    state = {name: value for name, value in net.state_dict().items() if "lora_" not in name}
    for name, module in net.named_modules() if adapters else ():
        if hasattr(module, "get_delta_weight"):
            check_alone(net, f"{name}.base_layer")
            weight = state[f"{name}.base_layer.weight"]
            state[f"{name}.base_layer.weight"] = (weight + module.get_delta_weight("default")).to(
                weight.dtype
            )
    return {name.replace(".base_layer.", "."): value for name, value in state.items()}


def check_alone(net: nn.Module, layer: str) -> None:
    """Raise UserError if a layer into which an adapter is to be merged shares its weight."""
    weight = net.get_submodule(layer).weight
    shared = [
        key.removesuffix(".weight").removesuffix(".base_layer")
        for key, parameter in net.named_parameters(remove_duplicate=False)
        if parameter is weight and key != f"{layer}.weight"
    ]
    if shared:
        name = layer.removesuffix(".base_layer")
        raise UserError(
            f"the adapter of {name} cannot be merged: its weight is also that of {shared[0]} (tied "
            f"embeddings), which would change too; keep the adapter beside its base, or train one "
            f"without {name.rpartition('.')[2]} among lora.targets"
        )


def ending_like(names: Sequence[str], ends: Sequence[str] | str | None, part: str) -> list[str]:
    """Select the linear layers ``names`` of a part that end in one of ``ends`` (None: all), as peft
    does for ``all-linear`` (all but the head) or a regular expression of the whole name. UserError
    where there is none."""
    if ends == ALL_LINEAR:
        matches = [name for name in names if name.rpartition(".")[2] != "lm_head"]
    elif isinstance(ends, str):
        try:
            matches = [name for name in names if re.fullmatch(ends, name)]
        except re.error as error:
            raise UserError(
                f"lora.targets {ends!r} is no regular expression ({error}); give one, all-linear, "
                f"or a list of the ends of names"
            ) from error
    else:
        matches = [
            name
            for name in names
            if ends is None or any(f".{name}".endswith(f".{end}") for end in ends)
        ]
    if not matches:
        raise UserError(
            f"lora.targets match no module of the {part}; its linear layers: {list(names[:8])} ..."
        )
    return matches


def _present(net: nn.Module, targets: Sequence[str]) -> list[str]:
    names = [name for name, _ in net.named_modules()]
    return [t for t in targets if any(n == t or n.endswith("." + t) for n in names)]
