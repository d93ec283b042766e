"""Writes texts with a user's model code, and scores them in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.policies.vlm.generate import draw
from mmrl.zoo.models.unified.draw import NONE
from samplers.warp import Warp


def read(ids: Tensor, mask: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Append the text [b, W] to the prompt [b, S]: ids and mask [b, S + W]."""
    behind = text.clamp_min(0)
    return torch.cat([ids, behind], 1), torch.cat([mask, text != NONE], 1)


def answer_logits(net: nn.Module, shown: Mapping[str, Tensor], text: Tensor) -> Tensor:
    """Compute the logits [b, W, V] of the tokens of text [b, W] in one pass."""
    rest = dict(shown)
    prompt = rest.pop("ids")
    ids, mask = read(prompt, rest.pop("mask"), text[:, :-1])
    at = prompt.shape[1] - 1 + torch.arange(text.shape[1], device=ids.device)
    logits: Tensor = net("text_logits", ids, mask, at.expand(len(ids), -1), **rest)
    return logits


def write(
    net: nn.Module,
    shown: Mapping[str, Tensor],
    uniform: Tensor,
    warp: Warp,
    stops: Tensor,
    limit: Tensor,
    busy: Callable[[bool], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample texts [b, W], ``NONE`` after a stop token and after ``limit`` [b] tokens, with
    log-probs [b, W], by inversion at ``uniform`` [b, W]; on the model's KV cache, if it has one.
    ``busy`` as of ``draw.write``."""
    rest = dict(shown)
    ids, mask = rest.pop("ids"), rest.pop("mask")
    text = torch.full(uniform.shape, NONE, device=uniform.device)
    score = torch.zeros(uniform.shape, device=uniform.device, dtype=torch.float64)
    going = limit > 0
    cached = hasattr(getattr(net, "model", net), "next_logits")
    cache: Any = None
    for k in range(uniform.shape[1]):
        if cached:
            newest = ids if k == 0 else ids[:, -1:]
            logits, cache = net("next_logits", newest, mask, cache, **rest)
        else:
            at = torch.full((len(ids), 1), ids.shape[1] - 1, device=ids.device)
            logits = net("text_logits", ids, mask, at, **rest)[:, 0]
        drawn = draw(logits, warp, uniform[:, k] if warp.temperature else None)
        text[:, k] = torch.where(going, drawn.token, NONE)
        score[:, k] = torch.where(going, drawn.logprob.to(score), 0.0)
        ids, mask = read(ids, mask, text[:, k : k + 1])
        going = going & ~torch.isin(drawn.token, stops) & (k + 1 < limit)
        left = bool(going.any())
        if not (busy(left) if busy else left):
            break
    return text, score
