"""Attends in float32 on CPUs with AVX-512 where passes are compiled: answers to their prompts,
which many rows read from one copy, and to themselves.

torch's kernels want a copy of the prompt for every row and compute what lies ahead of a token too.
The code is ``attention.cpp``, which the inductor's compiler builds once for each size of heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.policies import native
from mmrl.policies.native import at, threads

SOURCE = Path(__file__).with_name("attention.cpp")
VECTOR = 16  # numbers of a register
LARGEST = 256  # head

_COUNTS = ("B", "T", "P", "S", "H", "G")
_LONGS = ctypes.c_long
_POINTER = ctypes.c_void_p


class _Pass(ctypes.Structure):
    _fields_ = (
        [(name, _LONGS) for name in _COUNTS]
        + [("rows", _POINTER), ("start", _POINTER), ("scale", ctypes.c_float)]
        + [(name, _POINTER) for name in ("q", "k", "v", "pk", "pv")]
        + [(f"{name}_{axis}", _LONGS) for name in "qkv" for axis in ("row", "head", "token")]
    )


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, _LONGS) for name in ("B", "P", "S", "H", "G", "n")]
        + [(name, _POINTER) for name in ("rows", "start", "seen")]
        + [("scale", ctypes.c_float)]
        + [(name, _POINTER) for name in ("q", "k", "v", "pk", "pv")]
        + [(name, _LONGS) for name in ("seen_row", "q_row", "q_head")]
        + [
            (f"{name}_{axis}", _LONGS)
            for name in ("k", "v", "pk", "pv")
            for axis in ("row", "head", "token")
        ]
    )


def serves(size: int, keys: Tensor) -> bool:
    """Tell whether heads of this size and precision are attended to by the code here."""
    return (
        keys.device.type == "cpu"
        and keys.dtype == torch.float32
        and size % VECTOR == 0
        and size <= LARGEST
        and native.able()
        and _library(size) is not None
    )


def _library(size: int) -> ctypes.CDLL | None:
    """Return the code for heads of this size, which is built when it is first asked for."""
    return native.library(SOURCE, f"#define HEAD {size}")


def _built(size: int) -> ctypes.CDLL:
    library = _library(size)
    assert library is not None, "serves() is asked first"
    return library


class Direct(NamedTuple):
    """Says which prompts B rows continue, for passes of graphs."""

    prompts: Sequence[tuple[Tensor, Tensor]]  # keys and values of every layer, [P, G, S, D]
    rows: Tensor  # [B] long: the prompt of each row
    start: Tensor  # [P] long: the first column of each prompt that is no padding

    def attend(
        self, layer: int, query: Tensor, answers: tuple[Tensor, Tensor], seen: Tensor, scale: float
    ) -> Tensor:
        """Attend with queries [B, H, T, D] to a layer's prompts and to keys and values [B, G, n, D]
        of the answers; returns [B, T, H, D]. One token, T = 1: to the columns ``seen`` [B, 1, 1,
        n]; several: each token to those up to itself, n = T."""
        keys, values = self.prompts[layer]
        if query.shape[2] == 1:
            out: Tensor = torch.ops.mmrl_vlm.attend_step(
                query, *answers, keys, values, self.rows, self.start, seen, scale
            )
            return out
        out, _ = torch.ops.mmrl_vlm.attend(
            query, *answers, keys, values, self.rows, self.start, scale
        )
        return out


def _elements(x: Tensor) -> Tensor:
    """Return x with its elements beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pk: Tensor,
    pv: Tensor,
    rows: Tensor,
    start: Tensor,
    scale: float,
) -> tuple[_Pass, list[Tensor]]:
    """Describe a pass; the tensors must live as long as it."""
    q, k, v = (_elements(x) for x in (q, k, v))
    pk, pv = (x.contiguous() for x in (pk, pv))
    rows, start = (x.contiguous() for x in (rows, start))
    tensors = [rows, start, q, k, v, pk, pv]
    described = _Pass(
        q.shape[0],
        q.shape[2],
        pk.shape[0],
        pk.shape[2],
        q.shape[1],
        k.shape[1],
        *(x.data_ptr() for x in (rows, start)),
        scale,
        *(x.data_ptr() for x in (q, k, v, pk, pv)),
        *(x.stride(axis) for x in (q, k, v) for axis in range(3)),
    )
    return described, tensors


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pk: Tensor,
    pv: Tensor,
    rows: Tensor,
    start: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, size = q.shape
    out = q.new_empty(batch, tokens, heads, size)
    lse = q.new_empty(batch, heads, tokens)
    described, _kept = _pass(q, k, v, pk, pv, rows, start, scale)
    _built(size).attend(ctypes.byref(described), at(out), at(lse), threads())
    return out, lse


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pk: Tensor,
    pv: Tensor,
    rows: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    gradient: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    described, _kept = _pass(q, k, v, pk, pv, rows, start, scale)
    gradient, out, lse = (x.contiguous() for x in (gradient, out, lse))
    gradients = (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        *(x.new_zeros(x.shape) for x in (pk, pv)),
    )
    _built(q.shape[-1]).attend_backward(
        ctypes.byref(described),
        *map(at, (out, lse, gradient, *gradients)),
        threads(),
    )
    return gradients


def _attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pk: Tensor,
    pv: Tensor,
    rows: Tensor,
    start: Tensor,
    seen: Tensor,
    scale: float,
) -> Tensor:
    batch, heads, _, size = q.shape
    out = q.new_empty(batch, 1, heads, size)
    q, k, v, pk, pv, seen = (_elements(x) for x in (q, k, v, pk, pv, seen))
    step = _Step(
        batch,
        pk.shape[0],
        pk.shape[2],
        heads,
        k.shape[1],
        k.shape[2],
        rows.data_ptr(),
        start.data_ptr(),
        seen.data_ptr(),
        scale,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pk.data_ptr(),
        pv.data_ptr(),
        seen.stride(0),
        q.stride(0),
        q.stride(1),
        *(x.stride(axis) for x in (k, v, pk, pv) for axis in range(3)),
    )
    _built(size).attend_step(ctypes.byref(step), at(out), threads())
    return out


def _fake_attend(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, size = q.shape
    return q.new_empty(batch, tokens, heads, size), q.new_empty(batch, heads, tokens)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, pk, pv))


def _fake_step(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.scale = inputs[7]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> Any:
    saved = ctx.saved_tensors
    gradients = torch.ops.mmrl_vlm.attend_backward(*saved, gradient, ctx.scale)
    return (*gradients, None, None, None)


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor pk, Tensor pv, Tensor rows, Tensor start"
_OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "attend": (f"({_TENSORS}, float scale) -> (Tensor, Tensor)", _attend, _fake_attend),
    "attend_backward": (
        f"({_TENSORS}, Tensor out, Tensor lse, Tensor gradient, float scale) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        _attend_backward,
        _fake_backward,
    ),
    "attend_step": (f"({_TENSORS}, Tensor seen, float scale) -> Tensor", _attend_step, _fake_step),
}
_ops = torch.library.Library("mmrl_vlm", "DEF")
for _name, (_schema, _work, _fake) in _OPS.items():
    _ops.define(_name + _schema)
    _ops.impl(_name, _work, "CPU")
    torch.library.register_fake(f"mmrl_vlm::{_name}", _fake, lib=_ops)
torch.library.register_autograd("mmrl_vlm::attend", _gradients, setup_context=_keep, lib=_ops)
