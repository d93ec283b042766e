"""Computes products with weights in float32 on CPUs with AVX-512 by what is fastest there: on
Intel's by MKL, which torch takes, of weights that are packed once a rollout for the number of rows
of its passes; on others, where MKL keeps to AVX2, by oneDNN, sampling and training alike.

Products are the same to rounding, forwards and backwards. Everywhere else, and in every other
precision, layers compute as they always did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mmrl.utils.threads import is_intel

Library = Literal["onednn", "mkl"]
LEAST = 2**12  # weights of a layer that is worth a look
WORK = 2**20  # multiplications of a product; with fewer the call costs more than it saves
ROWS = 64  # with more, MKL packs weights in a small part of a product's time
COUNTS = 2  # numbers of rows that MKL's weights of one layer are packed for
PASSES = 32  # from so many on it pays to lay weights out
ONEDNN = "_linear_pointwise", "_reorder_linear_weight"
MKL = "_mkl_linear", "_mkl_reorder_linear_weight"


@cache
def library() -> Library | None:
    """Choose the library that computes products; None: torch's own layers do."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if is_intel():
        able = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
        return "mkl" if able and all(hasattr(torch.ops.mkl, name) for name in MKL) else None
    able = torch.backends.mkldnn.is_available()
    return "onednn" if able and all(hasattr(torch.ops.mkldnn, name) for name in ONEDNN) else None


def quicken(net: nn.Module) -> None:
    """Let the linear layers of a network compute by ``linear``; parameters and their names stay."""
    for part in net.modules():
        if library() and type(part) is nn.Linear and part.weight.numel() >= LEAST:
            part.__class__ = Linear


@contextmanager
def kept_layout(net: nn.Module, passes: int = PASSES) -> Iterator[None]:
    """Keep the weights of a network laid out for products within the block, in which they must not
    change: each is laid out when it is first used, and forgotten at the end. ``passes``: of how
    many the block consists; nothing is laid out for a few."""
    long = passes >= PASSES
    layers = [part for part in net.modules() if long and isinstance(part, Linear)]
    layers = [layer for layer in layers if layer.layouts is None]
    for layer in layers:
        layer.layouts = {}
        layer.joint_layouts = {}
    try:
        yield
    finally:
        for layer in layers:
            layer.layouts = layer.joint_layouts = None


class Linear(nn.Linear):
    """Computes a linear layer by the library that is fastest."""

    # the weights, laid out for numbers of rows; None: they may change
    layouts: dict[int, Tensor] | None = None
    # with those of others, as ``together`` takes them
    joint_layouts: dict[int, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        # first, since small layers are called often, and a graph should not depend on the rows
        if torch.compiler.is_compiling() or x.numel() * self.out_features < WORK:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, self.layouts)


def together(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return what linear layers make of one input, by one product where all keep their layout;
    the first of them is always with the same others."""
    first = layers[0]
    if torch.is_grad_enabled() or not isinstance(first, Linear) or first.joint_layouts is None:
        return each(x, layers)
    ours = [layer for layer in layers if isinstance(layer, Linear)]
    sizes = [layer.out_features for layer in ours]
    if len(ours) < len(layers) or any(layer.bias is not None for layer in ours):
        return each(x, layers)
    if not serves(x, first.weight, sum(sizes)):
        return each(x, layers)
    layout = _layout(first.joint_layouts, x, [layer.weight for layer in ours])
    if layout is None:
        return each(x, layers)
    # of the joined weights only the shape is looked at
    shape = first.weight.new_empty(1, 1).expand(sum(sizes), x.shape[-1])
    return torch.split(_product(x, shape, None, layout), sizes, -1)


def each(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Call every layer with x."""
    outputs: list[Tensor] = [layer(x) for layer in layers]
    return outputs


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layouts: dict[int, Tensor] | None = None
) -> Tensor:
    """Return x [*, K] times weight [N, K] transposed, plus bias [N]; ``layouts``: of the weight,
    which are added to."""
    records = torch.is_grad_enabled()
    # MKL's are torch's own but for weights that are packed
    if not serves(x, weight) or (library() == "mkl" and (records or layouts is None)):
        return F.linear(x, weight, bias)
    layout = None if layouts is None else _layout(layouts, x, [weight])
    if not records:
        return _product(x, weight, bias, layout)
    # of rows, since what comes out of a function as a view may not be changed in place
    rows: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias, layout)
    return rows.view(*x.shape[:-1], weight.shape[0])


def serves(x: Tensor, weight: Tensor, outputs: int | None = None) -> bool:
    """Tell whether a library may compute this product, of so many ``outputs`` (the weights' own):
    not within torch.compile or a mode that counts or replaces operations, which knows torch's own,
    nor of sharded weights or under autocast."""
    return (
        not torch.compiler.is_compiling()
        and x.numel() * (outputs or weight.shape[0]) >= WORK
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and library() is not None
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
        return _product(x, weight, bias, layout)

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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Tensor | None) -> Tensor:
    if library() == "onednn":
        laid_out = weight if layout is None else layout
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
        return product
    if layout is None:
        return F.linear(x, weight, bias)
    packed: Tensor = torch.ops.mkl._mkl_linear(x, layout, weight, bias, _rows(x))
    return packed


def _layout(layouts: dict[int, Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """Return weights side by side, laid out for products with x, of those there are or added to
    them; None: it would not pay."""
    by_mkl = library() == "mkl"
    rows = _rows(x) if by_mkl else 0
    if rows not in layouts:
        if rows > ROWS or len(layouts) >= COUNTS:
            return None
        weight = weights[0].detach() if len(weights) == 1 else torch.cat([*weights]).detach()
        layouts[rows] = (
            torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
            if by_mkl
            else torch.ops.mkldnn._reorder_linear_weight(weight, None)
        )
    return layouts[rows]


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]
