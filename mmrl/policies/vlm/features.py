"""Caches image features that training does not change, within a memory budget."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

Encoded = dict[str, Tensor]
# inputs read only by the tower and projector
PIXELS = ("pixel_values", "pixel_attention_mask", "image_token_pooling")
# outputs of a tower that language models read
NAMES = ("pooler_output", "deepstack_features", "visual_indicator_features")
Looked = dict[str, Any]  # by name, of the images of one prompt


def can_keep(hf: Any) -> bool:
    """Tell whether the family's forward pass takes features instead of images, computed without
    weights of its language model: Chameleon's are embeddings of its vocabulary."""
    base = hf.base_model
    return (
        not getattr(hf.config, "vocabulary_map", None)
        and hasattr(base, "get_image_features")
        and "mm_encoder_outputs" in inspect.signature(base.forward).parameters
    )


def look(hf: Any, encoded: Encoded) -> Looked:
    """Compute the features of the images of one prompt."""
    parameters = inspect.signature(hf.base_model.get_image_features).parameters
    inputs = {
        name: value for name, value in encoded.items() if name in parameters and name != "input_ids"
    }
    with torch.no_grad():
        output = hf.base_model.get_image_features(**inputs, return_dict=True)
    looked = {name: value for name in NAMES if (value := getattr(output, name, None)) is not None}
    return looked or {"last_hidden_state": output.last_hidden_state}  # projected later (Llama 4)


def joined(looked: Sequence[Looked]) -> dict[str, Any]:
    """Join the features of several prompts as the forward pass takes those of one batch."""
    features: dict[str, Any] = {}
    for name in looked[0]:
        values = [prompt_features[name] for prompt_features in looked]
        if isinstance(values[0], Tensor):
            features[name] = torch.cat(values)
        elif name == "deepstack_features":  # per layer, then per image
            features[name] = [
                [image for part in layer for image in part] for layer in zip(*values, strict=True)
            ]
        else:  # per image, its tokens
            features[name] = [image for prompt_features in values for image in prompt_features]
    return {"mm_encoder_outputs": {"image": SimpleNamespace(**features)}}


def size_of(looked: Looked) -> int:
    """Return the size of features in bytes."""
    return sum(part.nbytes for part in tree_iter(looked))
