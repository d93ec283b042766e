"""Samples token by token: text until every row has ended, then images, on one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.policies.image_tokens.network import beside
from mmrl.policies.scores import recorded
from mmrl.policies.vlm.generate import draw
from mmrl.zoo.models.unified.net import State
from samplers.warp import Warp

if TYPE_CHECKING:
    from torch import nn

NONE = -1  # where a row has no token


def write(
    net: nn.Module,
    hidden: Tensor,
    state: State,
    uniform: Tensor,
    warp: Warp,
    stops: Tensor,
    quantities: Sequence[str] = (),
    busy: Callable[[bool], bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample text ids [B, W], ``NONE`` behind the stop token, with log-probs [B, W] and the
    ``quantities`` [B, W, R], by inversion at ``uniform`` [B, W].

    Afterwards ``state`` holds every token but the stop tokens. ``busy`` takes whether this process
    still writes and tells whether any does, where all must make equally many passes.
    """
    rows, tokens = uniform.shape
    ids = torch.full((rows, tokens), NONE, device=uniform.device)
    logprob = torch.zeros(
        rows, tokens, device=uniform.device, dtype=torch.promote_types(hidden.dtype, torch.float32)
    )
    values = logprob.new_zeros(rows, tokens, len(quantities))
    going = torch.ones(rows, dtype=torch.bool, device=uniform.device)
    for k in range(tokens):
        drawn = draw(net("text_logits", hidden), warp, uniform[:, k] if warp.temperature else None)
        ids[:, k] = torch.where(going, drawn.token, NONE)
        logprob[:, k] = torch.where(going, drawn.logprob.to(logprob), 0.0)
        value = recorded(quantities, drawn.logits, drawn.warped)
        values[:, k] = torch.where(going[:, None], value.to(values), 0.0)
        going = going & ~torch.isin(drawn.token, stops)
        left, every = torch.stack([going.any(), going.all()]).tolist()  # one device sync for both
        if not (busy(left) if busy else left):
            break
        state.whole = state.whole and every
        hidden = net("add_text", drawn.token, state, going)
    return ids, logprob, values


def paint(
    net: nn.Module,
    hidden: Tensor,
    state: State,
    uniform: Tensor,
    scale: Tensor | None,
    decide: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample image ids [B, N], log-probs [B, N] and quantities [B, N, R] from hidden states [B, H];
    with ``scale`` [N] conditional rows come first in [2B, H], then the unconditional ones.
    ``decide`` draws from features, as ``ImageTokenPolicy._decide``."""
    ids = []
    logprob = []
    values = []
    rows = len(uniform)
    for k in range(uniform.shape[1]):
        last = hidden[:, None]
        features = last
        if scale is not None:
            cond, empty = last.chunk(2)
            features = beside(cond, empty, scale[k : k + 1])
        token, score, value = decide(features, last[:rows], uniform[:, k : k + 1])
        ids.append(token)
        logprob.append(score)
        values.append(value)
        if k + 1 < uniform.shape[1]:
            hidden = net("add_image", token[:, 0].repeat(1 if scale is None else 2), state)
    return torch.cat(ids, 1), torch.cat(logprob, 1), torch.cat(values, 1)
