"""Adapts MiniMax H3's blocks to the common interface: they pack one prompt into one sequence, so
their latents have no batch dimension, and their scheduler uses 1 - sigma as time.
"""

from __future__ import annotations

from typing import Any

from torch import nn

SCHEDULER = "MiniMaxH3Scheduler"
REFERENCES = "ref2va"  # blocks for references, which are no plain values, with a second network


def is_h3(scheduler: Any) -> bool:
    """Tell whether a scheduler is MiniMax H3's."""
    return type(scheduler).__name__ == SCHEDULER


def without_references(blocks: list[Any]) -> None:
    """Drop the branches that read references, and with them the second network, of 62 GB."""
    for block in blocks:
        if REFERENCES in block.sub_blocks:
            block.sub_blocks.pop(REFERENCES)


def keep_one_layer(pipe: Any) -> None:
    """Make the text encoder return only the layer that the blocks read: a cache would keep all."""
    from transformers.modeling_outputs import BaseModelOutput

    model = reader(pipe.text_encoder)
    layer = pipe.text_encoder_layer
    plain = model.forward

    def forward(**inputs: Any) -> Any:
        states = plain(**inputs).hidden_states
        return BaseModelOutput(hidden_states={layer: states[layer]})

    model.forward = forward


def reader(text_encoder: Any) -> nn.Module:
    """Return the part of the text encoder that the blocks call."""
    model: nn.Module = text_encoder.model
    return model
