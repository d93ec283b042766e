"""Gives MiniMax H3's blocks the form of the others: they pack one prompt into one sequence, so
their latents have no row for a sample, and their scheduler calls 1 - sigma the time.
"""

from __future__ import annotations

from typing import Any

from torch import nn

SCHEDULER = "MiniMaxH3Scheduler"
REFERENCES = "ref2va"  # blocks for references, which are no plain values, with a network of theirs


def is_h3(scheduler: Any) -> bool:
    """Tell whether a scheduler is MiniMax H3's."""
    return type(scheduler).__name__ == SCHEDULER


def without_references(blocks: list[Any]) -> None:
    """Leave out the branches that read references, and so the second network, of 62 GB."""
    for block in blocks:
        if REFERENCES in block.sub_blocks:
            block.sub_blocks.pop(REFERENCES)


def keep_one_layer(pipe: Any) -> None:
    """Let the text encoder return the one layer that the blocks read: a cache would keep all."""
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
