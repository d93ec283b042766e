"""Computes products with weights in float32 by oneDNN on CPUs with AVX-512 that are not Intel's,
where MKL, which torch takes, keeps to AVX2.

Products are the same to rounding, forwards and backwards. Everywhere else, and in every other
precision, layers compute as they always did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mmrl.utils.threads import is_intel

LEAST = 2**12  # weights of a layer that is worth a look
PASSES = 32  # from so many on it pays to lay weights out
WORK = 2**20  # multiplications of a product; with fewer the call costs more than it saves
OPS = "_linear_pointwise", "_reorder_linear_weight"


@cache
def faster() -> bool:
    """Tell whether oneDNN has wider vectors than MKL here."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and not is_intel()
        and all(hasattr(torch.ops.mkldnn, name) for name in OPS)
    )


def quicken(net: nn.Module) -> None:
    """Let the linear layers of a network compute by ``linear``; parameters and their names stay."""
    for part in net.modules():
        if faster() and type(part) is nn.Linear and part.weight.numel() >= LEAST:
            part.__class__ = Linear


@contextmanager
def kept_layout(net: nn.Module, passes: int = PASSES) -> Iterator[None]:
    """Keep the weights of a network in oneDNN's layout within the block, in which they must not
    change: each is brought into it when it is first used, and forgotten at the end. ``passes``: of
    how many the block consists; for a few no layout is kept."""
    long = passes >= PASSES
    layers = [part for part in net.modules() if long and isinstance(part, Linear)]
    layers = [layer for layer in layers if not layer.keeps]
    for layer in layers:
        layer.keeps = True
    try:
        yield
    finally:
        for layer in layers:
            layer.keeps = False
            layer.layout = layer.joint_layout = None


class Linear(nn.Linear):
    """Computes a linear layer by oneDNN."""

    keeps = False
    layout: Tensor | None = None  # the weights in oneDNN's layout
    joint_layout: Tensor | None = None  # with those of others, as ``together`` takes them

    def forward(self, x: Tensor) -> Tensor:
        # first, since small layers are called often, and a graph should not depend on the rows
        if torch.compiler.is_compiling() or x.numel() * self.out_features < WORK:
            return F.linear(x, self.weight, self.bias)
        if self.keeps and self.layout is None and serves(x, self.weight):
            self.layout = _laid_out(self.weight)
        return linear(x, self.weight, self.bias, self.layout)


def together(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return what linear layers make of one input, by one product where all keep their layout;
    the first of them is always with the same others."""
    first = layers[0]
    if torch.is_grad_enabled() or not (isinstance(first, Linear) and first.keeps):
        return each(x, layers)
    ours = [layer for layer in layers if isinstance(layer, Linear)]
    sizes = [layer.out_features for layer in ours]
    if len(ours) < len(layers) or any(layer.bias is not None for layer in ours):
        return each(x, layers)
    if not serves(x, first.weight, sum(sizes)):
        return each(x, layers)
    if first.joint_layout is None:
        first.joint_layout = _laid_out(torch.cat([layer.weight for layer in ours]))
    return torch.split(_product(x, first.joint_layout, None), sizes, -1)


def each(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Call every layer with x."""
    outputs: list[Tensor] = [layer(x) for layer in layers]
    return outputs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Tensor | None = None) -> Tensor:
    """Return x [*, K] times weight [N, K] transposed, plus bias [N]; ``layout``: the weight in
    oneDNN's layout."""
    if not serves(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight if layout is None else layout, bias)
    # of rows, since what comes out of a function as a view may not be changed in place
    rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias, layout)
    return rows.view(*x.shape[:-1], weight.shape[0])


def serves(x: Tensor, weight: Tensor, outputs: int | None = None) -> bool:
    """Tell whether oneDNN computes this product, of so many ``outputs`` (the weights' own): not
    within torch.compile or a mode that counts or replaces operations, which knows torch's own, nor
    of sharded weights or under autocast."""
    return (
        not torch.compiler.is_compiling()
        and x.numel() * (outputs or weight.shape[0]) >= WORK
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and faster()
        and type(weight) in (nn.Parameter, Tensor)
        and not torch.is_autocast_enabled("cpu")
        and _get_current_dispatch_mode() is None
    )


class _Product(torch.autograd.Function):
    """Records the product for its gradients, which are products too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight if layout is None else layout, bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        return (
            linear(gradient, weight.t(), None) if by_x else None,
            linear(gradient.t(), x.t(), None) if by_weight else None,
            gradient.sum(0) if by_bias else None,
            None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _laid_out(weight: Tensor) -> Tensor:
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return laid_out
