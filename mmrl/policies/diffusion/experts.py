"""Lets gradients through experts that a library asks without them: HiDream's, outside of training
mode, which no network is ever in here."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def let_gradients_through(net: nn.Module) -> None:
    """Replace the method by which such experts are asked, in place; outputs stay what they are."""
    for part in net.modules():
        if hasattr(type(part), "moe_infer"):
            part.__dict__["moe_infer"] = MethodType(mixed, part)


def mixed(layer: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Sum what the experts of a layer make of tokens x [T, C], each of which is given to K of them:
    ``chosen`` [T K] names them, ``weights`` [T K, 1] are their shares. Added in the library's
    order, so that outputs are equal to the bit."""
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
