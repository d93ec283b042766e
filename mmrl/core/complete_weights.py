"""Checks that a model was loaded completely: no weight missing, of another shape, left on the meta
device or NaN, and no unused weight in the file that belongs to one of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# wrapper modules of trainers, whose names remain in saved weights
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
WRAPPER = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPERS)})\.")
ADAPTED = (".base_layer.", ".lora_A.", ".lora_B.", "lora_")
SHOWN = 3


@dataclass(frozen=True)
class Loading:
    """Holds a library's loading info: names ``missing`` in the file, ``unexpected`` ones in it, and
    those of another shape."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    @classmethod
    def of(cls, info: Any, unread: Sequence[str] = ()) -> Loading:
        """Read the loading info of transformers or diffusers, without names in ``unread``: parts
        that the caller does not use."""

        def needed(names: Iterable[Any]) -> tuple[str, ...]:
            # with misshapen names come their two shapes
            texts = sorted(name if isinstance(name, str) else name[0] for name in names)
            return tuple(t for t in texts if not any(part in f".{t}" for part in unread))

        return cls(
            needed(info["missing_keys"]),
            tuple(sorted(info["unexpected_keys"])),
            needed(info["mismatched_keys"]),
        )

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.misshapen


def unwrapped(name: str) -> str:
    """Remove wrapper names from a tensor's name."""
    return WRAPPER.sub("", name)


def complaint(net: nn.Module, loading: Loading, what: str) -> str | None:
    """Say in a sentence what a loaded model lacks; None if it is complete."""
    total = len(net.state_dict())
    kind = type(net).__name__
    if loading.missing:
        return (
            f"{what}: {len(loading.missing)} of the {total} weights of {kind} are missing, such as "
            f"{listed(loading.missing)}, and would be random numbers"
            f"{_instead(loading)}; {_remedy(loading)}"
        )
    if loading.misshapen:
        return (
            f"{what}: {len(loading.misshapen)} of the {total} weights of {kind} have another shape "
            f"than its config says, such as {listed(loading.misshapen)}; take weights and config "
            f"from the same place"
        )
    on_meta = [name for name, value in net.state_dict().items() if value.is_meta]
    if on_meta:
        return (
            f"{what}: {len(on_meta)} of the {total} weights of {kind} were not loaded, such as "
            f"{listed(on_meta)}; {_remedy(loading)}"
        )
    unread = without_place(net, loading.unexpected)
    if unread:
        return (
            f"{what}: it holds {len(unread)} weights, such as {listed(unread)}, that layers of "
            f"{kind} do not use, so it would compute something else; take weights and config from "
            f"the same place, or another class of model"
        )
    return None


def without_place(net: nn.Module, unexpected: Sequence[str]) -> list[str]:
    """List unused tensors of a file that belong to a layer of the model: a bias, a quantiser's
    scale. Heads and layers that the model lacks are left out on purpose."""
    layers = {
        name: dict(module.named_buffers())
        for name, module in net.named_modules()
        if not any(True for _ in module.children()) and any(True for _ in module.parameters())
    }
    places = {name: name.rpartition(".") for name in unexpected}
    return [
        name
        for name, (layer, _, tensor) in places.items()
        if layer in layers and tensor not in layers[layer]
    ]


def listed(names: Sequence[str]) -> str:
    """List the first names."""
    return ", ".join(names[:SHOWN])


def _instead(loading: Loading) -> str:
    if not loading.unexpected:
        return ""
    return (
        f" (the file holds {len(loading.unexpected)} names that the model does not know, such as "
        f"{listed(loading.unexpected)})"
    )


def _remedy(loading: Loading) -> str:
    if any(part in name for name in loading.unexpected for part in ADAPTED):
        return (
            "it was saved with a LoRA loaded: save the model without it (unload or merge the "
            "adapter first), and the adapter by itself"
        )
    if loading.unexpected:
        return (
            "save the model inside the wrapper by its own save_pretrained, with the names of its "
            "library"
        )
    return "download the folder again, or save the whole model again (all shards gathered)"
