"""Converts the policy's weights to formats that vLLM loads: a saved checkpoint's, or a peft
adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.sharding import is_sharded
from mmrl.policies.lora import merged
from mmrl.policies.vlm.families import part_of

WEIGHTS = "model.safetensors"


@torch.no_grad()
def checkpoint_weights(hf: Any, adapters: bool = True) -> dict[str, Tensor]:
    """Return the weights, adapters merged or left out, under their names in a saved checkpoint,
    which vLLM expects. Tied weights are listed once."""
    from transformers.core_model_loading import revert_weight_conversion

    state = merged(hf, adapters)
    for name in getattr(hf, "all_tied_weights_keys", None) or ():
        state.pop(name, None)
    named: dict[str, Tensor] = revert_weight_conversion(hf, state)
    return named


def check_whole(hf: nn.Module, engine: str) -> None:
    """Raise UserError for a sharded model: its weights would have to be gathered."""
    if any(is_sharded(p) for p in hf.parameters()):
        raise UserError(
            f"policy option engine = {engine} is for weights that every process holds whole; under "
            "FSDP2 use engine: own, or train without sharding"
        )


def has_tied_head(hf: Any) -> bool:
    """Tell whether the head is tied to the embeddings."""
    head, embeddings = hf.get_output_embeddings(), hf.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(embeddings, "weight", embeddings)


def check_adapters(hf: nn.Module) -> None:
    """Raise UserError unless only adapters in the language model are trained, which vLLM
    supports."""
    trained = [name for name, p in hf.named_parameters() if p.requires_grad]
    foreign = next((n for n in trained if "lora_" not in n or part_of(n) != "language"), None)
    if foreign is not None:
        raise UserError(
            f"policy option vllm.sync = lora: {foreign} is trained too, and vLLM takes adapters of "
            "the language model only; use sync: weights"
        )


def save_weights(hf: Any, folder: Path, adapters: bool = True) -> None:
    """Save all weights as one file that vLLM reads like a checkpoint's."""
    folder.mkdir(parents=True)
    _save(checkpoint_weights(hf, adapters), folder / WEIGHTS)


def _save(named: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    plain = {n: t.detach().cpu().contiguous() for n, t in named.items()}
    save_file(plain, path, metadata={"format": "pt"})


def on_device(named: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and plain tensors, as vLLM's loaders take them."""
    for name, tensor in named.items():
        yield name, tensor.detach()
