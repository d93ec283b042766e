"""Speeds up vision towers of packed patches: one matrix product embeds all patches, and images of
one size attend in one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# model types whose towers pass on the lengths of their images
PACKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# transformers passes the lengths to an attention whose name contains "flash", and loops otherwise
FLASH = "mmrl_flash_"


def pack_vision_attention(hf: Any, xformers: bool = False) -> None:
    """Make a tower of ``PACKED`` compute the same in fewer calls; other models are unchanged."""
    from transformers import AttentionInterface

    if hf.config.model_type not in PACKED:
        return
    for module in list(hf.modules()):
        for name, child in module.named_children():
            if (
                type(child) is nn.Conv3d
                and child.kernel_size == child.stride
                and not any(child.padding)
            ):
                setattr(module, name, Patches(child))
    name, attend = ("xformers", by_xformers) if xformers else ("sdpa", by_length)
    AttentionInterface.register(FLASH + name, _interface(attend))
    hf.config.vision_config._attn_implementation = FLASH + name


class Patches(nn.Conv3d):
    """Applies a convolution to single patches as a matrix product, which is many times faster;
    weights and settings are those of ``plain``."""

    def __init__(self, plain: nn.Conv3d):
        nn.Module.__init__(self)
        vars(self).update(vars(plain))

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, out, 1, 1, 1] of patches [N, C, T, H, W] of the kernel's own size."""
        if x.shape[2:] != self.kernel_size or self.groups > 1:
            return super().forward(x)
        return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def by_length(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> Tensor:
    """Attend [N, heads, D] within each of the consecutive segments of ``lengths`` tokens.

    Segments of one length form one batch, so there are as many calls as different lengths.
    """
    distinct = sorted(set(lengths))
    if len(distinct) == 1:
        return _attended(query, key, value, distinct[0], scale)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    lengths_of_pieces = torch.tensor(lengths)
    attended = []
    places = []
    for length in distinct:
        at = (
            (starts[lengths_of_pieces == length][:, None] + torch.arange(length))
            .flatten()
            .to(query.device)
        )
        attended.append(_attended(query[at], key[at], value[at], length, scale))
        places.append(at)
    return torch.cat(attended)[torch.cat(places).argsort()]


def by_xformers(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> Tensor:
    """Attend as ``by_length`` does, on CUDA in one call of xformers for all lengths, with an
    implicit block-diagonal mask."""
    from xformers.ops import fmha

    mask = fmha.BlockDiagonalMask.from_seqlens(lengths)
    packed = (x[None].contiguous() for x in (query, key, value))
    attended: Tensor = fmha.memory_efficient_attention(*packed, attn_bias=mask, scale=scale)
    return attended[0]


def _attended(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    # [n, heads, length, D]
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)


def _interface(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Attend with transformers' interface: query, key and value [1, heads, N, D] -> [1, N, heads,
    D]."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        cu_seq_lens_q: Tensor,
        **_: Any,
    ) -> tuple[Tensor, None]:
        ends = cu_seq_lens_q.tolist()
        lengths = [end - start for start, end in zip(ends, ends[1:]) if end > start]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, lengths, scaling)[None], None

    return forward
