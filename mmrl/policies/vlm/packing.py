"""Packs batches without padding: tokens of all rows in one sequence, each attending only within its
row."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.vlm.caches import KV

NAME = "mmrl_packed"  # transformers' name of the attention below


@dataclass
class Layout:
    """Describes the layout of B packed rows. The last keys of a row are its queries: a query
    attends to all keys up to itself.

    ``queries``, ``keys``: [B] long, how many each row has, at least 1. ``at``: [sum of keys] long,
    their indices among the packed keys; None: all in order. ``xformers``: attend by one call of it,
    with an implicit mask; else rows are padded for the attention only.
    """

    queries: Tensor
    keys: Tensor
    at: Tensor | None = None
    xformers: bool = False
    calls: int = 0
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend with queries [heads, N, D] to keys and values [heads, M, D]; returns [heads, N,
        D]."""
        self.calls += 1
        if not self.xformers or window is not None:
            return self._padded(query, key, value, scale, window)
        if self.at is not None:
            key = key.index_select(1, self.at)
            value = value.index_select(1, self.at)
        return self._fused(query, key, value, scale)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        from xformers.ops import fmha

        packed = (x.transpose(0, 1)[None].contiguous() for x in (query, key, value))
        attended: Tensor = fmha.memory_efficient_attention(
            *packed, attn_bias=self._bias, scale=scale
        )
        return attended[0].transpose(0, 1)

    @cached_property
    def _bias(self) -> Any:
        from xformers.ops import fmha

        kind = fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask
        return kind.from_seqlens(self.queries.tolist(), self.keys.tolist())

    def _padded(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        rows, columns, back = self._places
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        q, k, v = (
            x[:, i].transpose(0, 1) for x, i in ((query, rows), (key, columns), (value, columns))
        )
        # [B, heads, T, D]
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.masks[window], scale=scale
        )
        return attended.transpose(0, 1).flatten(1, 2).index_select(1, back)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the packed query [B, T] and key [B, S] at each position of a padded batch, and the
        positions of the N queries there.

        The padding repeats a row's last one, so that it attends to something.
        """
        rows, real = _spread(self.queries)
        columns, _ = _spread(self.keys)
        columns = columns if self.at is None else self.at[columns]
        return rows, columns, real.flatten().nonzero()[:, 0]

    def _mask(self, window: int | None) -> Tensor:
        """Return the attention mask, [B, 1, T, S] bool."""
        steps, columns = (
            torch.arange(int(n.max()), device=n.device) for n in (self.queries, self.keys)
        )
        # [B, T]
        last = (self.keys - self.queries)[:, None] + torch.minimum(steps, self.queries[:, None] - 1)
        visible = columns <= last[..., None]
        return (visible if window is None else visible & (columns > last[..., None] - window))[
            :, None
        ]


@dataclass(frozen=True)
class Read:
    """Holds P prompts that have been read, packed."""

    hidden: Tensor  # [P, H] at the last token
    lengths: Tensor  # [P] long
    following: Tensor  # [P] long: position of the first answer token
    key_values: list[KV]  # [1, heads, N, D] each


def enable(hf: Any) -> None:
    """Make the language model attend by a pass's layout, if any, else by transformers' SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    hf.config.get_text_config()._attn_implementation = NAME


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' interface: [B, heads, T, D] -> [B, T, heads, D]."""
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended
    groups = query.shape[1] // key.shape[1]
    k, v = (x[0].repeat_interleave(groups, 0) if groups > 1 else x[0] for x in (key, value))
    return packing.attend(query[0], k, v, scaling, sliding_window).transpose(0, 1)[None], None


def anything() -> Tensor:
    """Return the attention mask of a layout: transformers uses a 4D mask as it is."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def pack(inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Pack a left-padded batch of prompts to one row of all their tokens; returns it and the
    lengths [P]."""
    real = inputs["attention_mask"].bool()
    packed = {name: value for name, value in inputs.items() if name != "attention_mask"}
    for name in ("input_ids", "mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            packed[name] = inputs[name][real][None]
    places = inputs["position_ids"]
    packed["position_ids"] = places[..., real].unsqueeze(-2)
    return packed, real.sum(1)


def squeeze(key_values: list[KV], real: Tensor) -> list[KV]:
    """Pack keys and values of a left-padded batch [P, heads, S, D] to one row of those that are
    ``real`` [P, S]."""

    def packed(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[real].transpose(0, 1)[None]

    return [(packed(k), packed(v)) for k, v in key_values]


def unsqueeze(key_values: list[KV], lengths: Tensor) -> list[KV]:
    """Undo ``squeeze``; padding holds arbitrary keys, which masks hide."""
    at, real = _spread(lengths)
    order = real.long().argsort(dim=1, stable=True)  # the padding to the left
    at = at.gather(1, order)
    return [(k[0][:, at].transpose(0, 1), v[0][:, at].transpose(0, 1)) for k, v in key_values]


def continued(
    lengths: Tensor,
    rows: Tensor,
    answers: Tensor,
    xformers: bool,
    token: Tensor | None = None,
    fresh: Tensor | None = None,
) -> Layout:
    """Lay out answers of ``answers`` [B] tokens to the prompts of ``rows`` [B], whose keys,
    ``lengths`` [P] of them, are packed before those of the answers. Where answers share tokens:
    ``token`` [B, T], the packed index of each, and ``fresh`` [B], how many at a row's end are not
    shared."""
    fresh = answers if fresh is None else fresh
    if token is None:
        steps = torch.arange(int(answers.max()), device=rows.device)
        token = (answers.cumsum(0) - answers)[:, None] + steps
    at_work = (fresh > 0).nonzero()[:, 0]
    starts = (lengths.cumsum(0) - lengths)[rows][at_work]
    prompt_lengths = lengths[rows][at_work]
    keys = prompt_lengths + answers[at_work]
    row = torch.repeat_interleave(torch.arange(len(at_work), device=rows.device), keys)
    off = torch.arange(len(row), device=rows.device) - (keys.cumsum(0) - keys)[row]
    step = (off - prompt_lengths[row]).clamp_min(0)
    written = lengths.sum() + token[at_work[row], step]
    at = torch.where(off < prompt_lengths[row], starts[row] + off, written)
    return Layout(fresh[at_work], keys, at, xformers)


def owners(rows: Tensor, ids: Tensor, answers: Tensor) -> Tensor:
    """Find for each token of ids [B, T] the first row with the same prompt of ``rows`` [B] and the
    same tokens up to it, [B, T] long: equal prefixes are read once. A row has the first ``answers``
    [B] of its tokens."""
    equal = (ids[:, None] == ids[None]) & (rows[:, None] == rows)[..., None]
    long_enough = torch.arange(ids.shape[1], device=ids.device) < answers[:, None]
    alike = equal.to(torch.uint8).cumprod(2, dtype=torch.uint8) * long_enough[None]
    return torch.where(long_enough, alike.argmax(1), torch.arange(len(ids)).to(rows)[:, None])


def _spread(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed position of each row's tokens, [B, longest], the last one repeated after
    its end, and which are real."""
    steps = torch.arange(int(lengths.max()), device=lengths.device)
    real = steps < lengths[:, None]
    return (lengths.cumsum(0) - lengths)[:, None] + torch.minimum(steps, lengths[:, None] - 1), real
