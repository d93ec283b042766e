"""Lets Cosmos 2.5 condition on a picture or a video at any step: for the conditioning frames it
keeps the first noise, whose difference from the frames is their velocity.

In a replay the state x_t = (1 - t) x_0 + t e replaces that noise. The frames x_0 are known, so e is
x_0 + (x_t - x_0) / t, and the velocity e - x_0 leads the state to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIPELINES = ("Cosmos2_5_PredictBasePipeline",)


def remembers_noise(pipe: Any) -> bool:
    """Tell whether a pipeline remembers the first noise of frames that it holds."""
    return type(pipe).__name__ in PIPELINES


def first_noise(state: Tensor, prepared: tuple[Any, ...], time: Tensor) -> Tensor:
    """Return a state [B, *] at a time [] with the noise that is in it where frames are held,
    of what the pipeline has prepared: latents, the frames, and a mask of them [B, 1, ...]."""
    _, clean, mask, *_ = prepared
    noise = clean + (state - clean) / time.to(state)
    return torch.where(mask > 0, noise, state)


def put_back(state: Tensor, prepared: tuple[Any, ...]) -> Tensor:
    """Return a final state [B, *] with the frames that are held, to which a last step with noise
    has added some."""
    _, clean, mask, *_ = prepared
    return torch.where(mask > 0, clean.to(state), state)
