"""Enables gradients through experts that diffusers evaluates without them: HiDream's in eval mode,
in which networks stay here."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def let_gradients_through(net: nn.Module) -> None:
    """Replace the method that calls such experts, in place; outputs are unchanged."""
    for part in net.modules():
        if hasattr(type(part), "moe_infer"):
            part.__dict__["moe_infer"] = MethodType(mixed, part)


def mixed(layer: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Sum the outputs of a layer's experts for tokens x [T, C], each routed to K of them:
    ``chosen`` [T K] are their indices, ``weights`` [T K, 1] their weights. Added in the library's
    order, so that outputs are bit-equal."""
    order = chosen.argsort()
    tokens = order // layer.num_activated_experts
    counts = torch.bincount(chosen, minlength=len(layer.experts)).tolist()
    total = torch.zeros_like(x)
    for expert, places, shares in zip(
        layer.experts, tokens.split(counts), weights[order].split(counts), strict=True
    ):
        if len(places):
            answer = expert(x[places]) * shares
            total = total.to(answer.dtype).index_add(0, places, answer)
    return total
