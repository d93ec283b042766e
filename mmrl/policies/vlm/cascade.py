"""Cascade attention while answers are sampled: one part attends to the prompt, whose keys and
values all its answers share, the other to the tokens of each answer.

A prompt is not copied by row: a step reads it once for a group, as one matrix product instead of a
matrix-vector product per row. The two parts are combined by their log-sum-exps, so the result
equals one attention up to rounding (Ye et al. 2024, "Cascade Inference"; Juravsky et al. 2024,
"Hydragen").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.host import on_host, sent
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.caches import KV

NAME = "mmrl_cascade"  # transformers' name of the attention below
# weights that are not rounded before the exponential, as half-precision kernels need not
EXACT = (torch.float32, torch.float64)


class Layout(NamedTuple):
    """Maps B rows to the prompts they continue, and to one of ``copies`` slots of each of P
    prompts."""

    prompts: Sequence[KV]  # keys and values of every layer, [P, heads, S, D]
    bias: Tensor | None  # [P, 1, 1, S] bool: padding; None: there is none
    slot: Tensor | None  # [B] long; None: rows are in slot order
    copies: int

    @property
    def num_prompts(self) -> int:
        return len(self.prompts[0][0])

    def attend(
        self,
        layer: int,
        query: Tensor,
        answers: KV,
        missing: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Attend with queries [B, H, 1, D] to a layer's prompts and to keys and values [B, heads,
        n, D] of the answers, but where they are ``missing`` [B, 1, 1, n]; returns [B, 1, H, D]."""
        keys, values = self.prompts[layer]
        heads = keys.shape[1]
        q = query.reshape(len(query), heads, -1, query.shape[-1]) * scale  # [B, heads, g, D]
        of_prompt = _part(self._together(q), keys, values, self.bias)
        of_answer = _part(q, *answers, missing)
        output, top, total = (self._apart(x, q.shape[2]) for x in of_prompt)
        highest = torch.maximum(top, of_answer[1])
        # weights of each part are relative to its maximum; now both to the larger
        factor = (top - highest).exp_(), (of_answer[1] - highest).exp_()
        joined = output * factor[0] + of_answer[0] * factor[1]
        total = total * factor[0] + of_answer[2] * factor[1]
        return (joined / total).reshape(len(query), 1, -1, query.shape[-1])

    def explicit(self, rows: int) -> Layout:
        """Return the same layout of B = ``rows`` rows with a tensor for every None, so that all
        calls of a compiled graph have the same signature."""
        keys = self.prompts[0][0]
        bias, slot = self.bias, self.slot
        if bias is None:
            shape = (len(keys), 1, 1, keys.shape[2])
            bias = torch.zeros(shape, dtype=torch.bool, device=keys.device)
        if slot is None:
            slot = torch.arange(rows, device=keys.device)
        return self._replace(bias=bias, slot=slot)

    def _together(self, x: Tensor) -> Tensor:
        """Regroup rows [B, heads, g, D] by prompt: [P, heads, C g, D]."""
        if self.slot is not None:
            slots = self.num_prompts * self.copies
            x = x.new_zeros(slots, *x.shape[1:]).index_copy(0, self.slot, x)
        rows, heads, each, width = (
            self.num_prompts,
            x.shape[1],
            self.copies * x.shape[2],
            x.shape[3],
        )
        split = x.view(rows, self.copies, heads, x.shape[2], width)
        return split.transpose(1, 2).reshape(rows, heads, each, width)

    def _apart(self, x: Tensor, each: int) -> Tensor:
        """Undo ``_together``."""
        rows, heads, width = self.num_prompts, x.shape[1], x.shape[3]
        split = x.view(rows, heads, self.copies, each, width)
        slots = split.transpose(1, 2).reshape(rows * self.copies, heads, each, width)
        return slots if self.slot is None else slots.index_select(0, self.slot)


class Cascade:
    """Holds P prompts and, of B rows that continue them, the keys and values of answers only."""

    def __init__(self, prompts: Sequence[KV], mask: Tensor, rows: Tensor):
        """Take keys and values [P, heads, S, D] of all layers, their mask [P, S] and the prompt of
        every row [B]."""
        # same layout as selected prompts: a compiled graph has one layout
        self.everything = [(k.contiguous(), v.contiguous()) for k, v in prompts]
        self.padding = ~mask
        self.empty = [(k[:, :, :0], v[:, :, :0]) for k, v in prompts]
        self.cache = caches.growing(self.empty, rows)
        self.missing: Tensor | None = None  # [B, 1, 1, n] where a row has no token in a column
        self._place(rows)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        caches.select(self.cache, rows)
        self._place(self.rows[rows])

    def refill(self, left: Tensor, rows: Tensor, width: int) -> None:
        """Keep the rows ``left`` and add answers to the prompts of ``rows``, which have no tokens
        yet, in ``width`` columns."""
        caches.refill(self.cache, left, self.empty, rows, width)
        self._place(torch.cat([self.rows[left], rows]))

    def hide(self, mask: Tensor | None) -> None:
        """Take the mask [B, n] of the columns before the next one; None: all rows have all."""
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True).logical_not()[:, None, None]
        self.missing = mask

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend with queries [B, H, 1, D] to a layer's prompts and to keys and values [B, heads,
        n, D] of the answers; returns [B, 1, H, D]."""
        return self.layout.attend(layer, query, (key, value), self.missing, scale)

    def laid_out(self) -> Layout:
        """Return what the rows attend to, in the form that graphs take."""
        return self.layout.explicit(len(self.rows))

    def _place(self, rows: Tensor) -> None:
        """Assign every row a slot of its prompt; prompts without rows are dropped."""
        self.rows = rows
        known = on_host(rows)
        prompts, number, counts = known.unique(return_inverse=True, return_counts=True)
        order = number.argsort(stable=True)
        before = counts.cumsum(0) - counts
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order)) - before[number[order]]
        copies = int(counts.max())
        slot = number * copies + rank
        in_turn = len(slot) == len(prompts) * copies and torch.equal(slot, torch.arange(len(slot)))
        chosen = sent(prompts, rows.device)
        whole = len(prompts) == len(self.padding)
        padding = self.padding[chosen]
        self.layout = Layout(
            self.everything
            if whole
            else [
                (k.index_select(0, chosen), v.index_select(0, chosen)) for k, v in self.everything
            ],
            padding[:, None, None] if padding.any() else None,
            None if in_turn else sent(slot, rows.device),
            copies,
        )


def _part(q: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, ...]:
    """Weigh values by scaled queries [N, heads, m, D]: their sum [N, heads, m, D], the largest
    exponent and the sum of weights, [N, heads, m, 1] each."""
    exponents = q @ key.transpose(-1, -2)
    if hidden is not None:
        exponents.masked_fill_(hidden, -torch.inf)
    top = exponents.amax(-1, keepdim=True)
    weights = exponents.sub_(top).exp_()
    return weights @ value, top, weights.sum(-1, keepdim=True)


def fits(hidden: Tensor, rows: int) -> bool:
    """Tell whether ``rows`` rows share prompts whose hidden states [P, H] have a dtype that the two
    parts support."""
    return hidden.dtype in EXACT and rows > len(hidden)


@contextmanager
def attending(config: Any) -> Iterator[None]:
    """Let the layers of a text model of this configuration use cascade attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cascade: Cascade | Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' interface: [B, heads, 1, D] -> [B, 1, heads, D]. What is neither
    None nor a cascade comes from a compiled graph, with the mask of its answers."""
    assert cascade is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    if isinstance(cascade, Cascade):
        return cascade.attend(layer, query, key, value, scale), None
    return cascade.attend(layer, query, (key, value), attention_mask, scale), None
