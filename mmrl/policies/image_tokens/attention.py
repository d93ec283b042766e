"""Computes attention of image-token networks by the chosen kernel."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.effects import FREE_AT_RESUME
from mmrl.core.errors import UserError

Kernel = Annotated[Literal["auto", "xformers", "sdpa", "flash"], FREE_AT_RESUME]
XFORMERS = "mmrl_xformers"  # mmrl's name among transformers' attentions


def available(kernel: Kernel) -> Kernel:
    """Return the kernel's name, ``auto`` resolved to torch's own choice. Raises UserError where it
    cannot run."""
    if kernel == "auto":
        return "sdpa"
    if kernel in ("xformers", "flash") and not torch.cuda.is_available():
        raise UserError(
            f"policy option attention = {kernel} needs a CUDA device; sdpa computes "
            f"the same anywhere"
        )
    if kernel == "xformers" and find_spec("xformers") is None:
        raise UserError(
            "policy option attention = xformers needs the package xformers: pip "
            "install xformers, or sdpa"
        )
    return kernel


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    kernel: Kernel = "sdpa",
) -> Tensor:
    """Attend with queries [B, heads, n, D] to keys and values [B, heads or fewer, S, D]; returns
    [B, heads, n, D].

    ``mask`` [B or 1, 1, n, S] is bool or additive. xformers and flash serve passes without a mask;
    with one sdpa is used, whose CUDA kernel for masks is that of xformers.
    """
    shared = k.shape[1] != q.shape[1]
    if mask is None and kernel == "xformers":
        return _by_xformers(q, k, v, causal, scale)
    if mask is None and kernel == "flash":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=shared
            )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared
    )


def _by_xformers(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    q, k, v = (x.transpose(1, 2) for x in (q, *_repeated(q, k, v)))  # [B, n, heads, D]
    bias = LowerTriangularMask() if causal else None
    attended: Tensor = memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale)
    return attended.transpose(1, 2)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def of_transformers(kernel: Kernel) -> str:
    """Return the name under which transformers' models compute the same attention."""
    if kernel != "xformers":
        return {"sdpa": "sdpa", "flash": "flash_attention_2"}[kernel]
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(XFORMERS, _interface)
    AttentionMaskInterface.register(XFORMERS, sdpa_mask)
    return XFORMERS


def _interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    causal = mask is None and query.shape[2] > 1
    output = attend(query, key, value, mask, causal, scaling, "xformers")
    return output.transpose(1, 2).contiguous(), None
