"""The interface of a unified model's code, and the module that wraps its two passes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmrl.core.contract import check_memory, returned, unpacked
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt

NEEDED = ("latent_shape", "stops", "encode", "text_logits", "velocity", "images", "text")


class TextAndFlow(Protocol):
    """Offers what ``unified_flow`` needs of a model that writes text token by token and draws by
    rectified flow on the latents of a picture (BAGEL, Show-o2).

    Two attributes are optional: ``process``, a ``samplers.processes.Process`` that says what
    ``velocity`` returns, and ``suppressed``, ids that are never written. So is a method
    ``next_logits(ids [B, n], mask [B, S], cache, **shown) -> (logits [B, V], cache)``, with which
    texts are written on a cache: ids are the n newest columns, None is the empty cache.
    """

    latent_shape: tuple[int, ...]  # of a picture
    stops: tuple[int, ...]  # ids after any of which a text ends

    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Return ``ids`` [P, S] and ``mask`` [P, S], padded on the left, and whatever else the
        passes take of a prompt, [P, *], such as its pictures."""

    def text_logits(self, ids: Tensor, mask: Tensor, at: Tensor, **shown: Tensor) -> Tensor:
        """Return logits [B, n, V] of the tokens that follow the places ``at`` [B, n]; attention is
        causal and excludes places whose mask is False."""

    def velocity(
        self, latents: Tensor, time: Tensor, ids: Tensor, mask: Tensor, **shown: Tensor
    ) -> Tensor:
        """Return noise less data [B, *] at time [B] in 0..1, where 1 is noise, of pictures that
        follow the prompt and what was written after it."""

    def images(self, latents: Tensor) -> Tensor:
        """Decode to pictures [B, 3, H, W] in 0..1, or bytes."""

    def text(self, ids: list[int]) -> str:
        """Decode a text."""


class Passes(nn.Module):
    """Wraps the model so that one ``forward`` reaches both of its passes: data-parallel wrappers
    know no other. The model gets copies of tensors, in which it may work in place."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, work: str, *arguments: Any, **shown: Any) -> Any:
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        known = {name: x.clone() if isinstance(x, Tensor) else x for name, x in shown.items()}
        output = getattr(self.model, work)(*copies, **known)
        if work == "text_logits":
            logits = unpacked(output, "logits")
            places = tuple(arguments[2].shape)
            classes = tuple(logits.shape[2:]) if isinstance(logits, Tensor) else ()
            return returned(logits, "the method text_logits", B_n_V=(*places, *classes[:1]))
        if work == "velocity":
            shape = tuple(arguments[0].shape)
            return returned(unpacked(output), "the method velocity", B_latents=shape)
        return output


def checked(model: Any, name: str) -> nn.Module:
    """Return what the code ``name`` built, a module with all that is needed; else UserError."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"policy option code: {name!r} must return an nn.Module, not {type(model).__name__}"
        )
    missing = [attribute for attribute in NEEDED if not hasattr(model, attribute)]
    if missing:
        raise UserError(
            f"policy option code: the model of {name!r} has no {', '.join(missing)}; "
            f"docs/unified.md lists what unified_flow needs of it"
        )
    check_memory(model, f"policy option code: {name!r}")
    return model


def check_prompts(encoded: dict[str, Tensor], prompts: int) -> None:
    """Refuse an output of ``encode`` that is not one row a prompt, padded on the left."""
    if not {"ids", "mask"} <= set(encoded):
        raise UserError("policy option code: encode must return ids and mask, both [P, S]")
    plain = [name for name, value in encoded.items() if not isinstance(value, Tensor)]
    if plain:
        raise UserError(
            f"policy option code: encode must return tensors; {plain[0]} is of type "
            f"{type(encoded[plain[0]]).__name__}"
        )
    odd = [name for name, tensor in encoded.items() if len(tensor) != prompts]
    if odd:
        raise UserError(
            f"policy option code: encode returned {len(encoded[odd[0]])} rows of {odd[0]} for "
            f"{prompts} prompts"
        )
    if not bool(torch.as_tensor(encoded["mask"][:, -1]).bool().all()):
        raise UserError(
            "policy option code: encode must pad on the left: the last place of every prompt is "
            "a token"
        )
