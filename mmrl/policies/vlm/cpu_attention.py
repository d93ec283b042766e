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


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


def _longs(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_long) for name in names]


def _strides(*names: str) -> list[tuple[str, Any]]:
    return _longs(*(f"{name}_{axis}" for name in names for axis in ("row", "head", "token")))


class _Pass(ctypes.Structure):
    _fields_ = [
        *_longs("B", "T", "P", "S", "H", "G"),
        *_pointers("rows", "start"),
        ("scale", ctypes.c_float),
        *_pointers("q", "k", "v", "pk", "pv"),
        *_strides("q", "k", "v"),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_longs("B", "P", "S", "H", "G", "n"),
        *_pointers("rows", "start", "seen"),
        ("scale", ctypes.c_float),
        *_pointers("q", "k", "v", "pk", "pv"),
        *_longs("seen_row", "q_row", "q_head"),
        *_strides("k", "v", "pk", "pv"),  # the third of pk is that of its elements
    ]


class _Store(ctypes.Structure):
    _fields_ = [*_pointers("attended", "lse", "answers", "tokens"), *_longs("N")]


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


class Kept(NamedTuple):
    """Holds what attention returned for the tokens of N answers while they were sampled, so that
    an update need not attend again (``train.reuse_rollout_graph``)."""

    attended: Tensor  # [layers, T, N, H, D]
    lse: Tensor  # [layers, T, N, H] logarithms of sums of weights; inf where no token was read
    rows: Tensor  # [B] long: which of the N answers each row is
    columns: Tensor | None = None  # [B] long: the token of each that a step reads

    def put(self, layer: int, attended: Tensor, lse: Tensor) -> None:
        """Keep what a step returns, attended [B, H, D] and lse [B, H]."""
        assert self.columns is not None
        self.attended[layer, self.columns, self.rows] = attended
        self.lse[layer, self.columns, self.rows] = lse


class Direct(NamedTuple):
    """Says which prompts B rows continue, for passes of graphs."""

    prompts: Sequence[tuple[Tensor, Tensor]]  # keys and values of every layer, [P, G, S, D]
    rows: Tensor  # [B] long: the prompt of each row
    start: Tensor  # [P] long: the first column of each prompt that is no padding
    store: Kept | None = None  # where steps keep what they return, and passes take it

    def attend(
        self, layer: int, query: Tensor, answers: tuple[Tensor, Tensor], real: Tensor, scale: float
    ) -> Tensor:
        """Attend with queries [B, H, T, D] to a layer's prompts and to keys and values [B, G, n, D]
        of the answers; returns [B, T, H, D]. One token, T = 1: to the columns that are ``real`` [B,
        1, 1, n]; several: each token to those up to itself, n = T."""
        columns = [*answers, *self.prompts[layer]]
        ops, store = torch.ops.mmrl_vlm, self.store
        attended: Tensor
        if query.shape[2] == 1:
            step = query, columns, self.rows, self.start, real, scale
            attended = (
                ops.attend_step(*step) if store is None else ops.keep_step(*step, *store, layer)
            )
        elif store is not None:
            known = (store.attended[layer], store.lse[layer], store.rows)
            attended, _ = ops.recall(query, *columns, self.rows, self.start, scale, *known)
        else:
            attended, _ = ops.attend(query, *columns, self.rows, self.start, scale)
        return attended


def _elements(x: Tensor) -> Tensor:
    """Return x with its elements beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_column(keys: Tensor) -> Tensor:
    """Return keys [..., S, D] with their columns beside each other, as a step reads a prompt's."""
    beside = keys.stride(-2) == 1 or keys.shape[-2] == 1
    return keys if beside else keys.mT.contiguous().mT


def _pass(tensors: Sequence[Tensor], scale: float) -> tuple[_Pass, list[Tensor]]:
    """Describe a pass of q, k, v, pk, pv, rows and start; the tensors that are returned too must
    live as long as it."""
    q, k, v = (_elements(x) for x in tensors[:3])
    pk, pv, rows, start = (x.contiguous() for x in tensors[3:])
    sizes = q.shape[0], q.shape[2], pk.shape[0], pk.shape[2], q.shape[1], k.shape[1]
    described = _Pass(
        *sizes,
        rows.data_ptr(),
        start.data_ptr(),
        scale,
        *map(at, (q, k, v, pk, pv)),
        *(x.stride(axis) for x in (q, k, v) for axis in range(3)),
    )
    return described, [rows, start, q, k, v, pk, pv]


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Attend with q, k, v, pk, pv, rows, start and a scale; returns [B, T, H, D] and the logarithms
    of sums of weights [B, H, T]."""
    attended, lse = _fake_attend(*inputs)
    described, _alive = _pass(inputs[:7], inputs[7])
    _built(attended.shape[-1]).attend(ctypes.byref(described), at(attended), at(lse), threads())
    return attended, lse


def _recall(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return what ``_attend`` does, out of what was kept [T', N, H, D] and [T', N, H] of the
    answers ``rows`` [B], whose first T tokens it takes."""
    tokens = inputs[0].shape[2]
    attended, lse, rows = inputs[8:]
    return (
        attended[:tokens].transpose(0, 1).index_select(0, rows),
        lse[:tokens].index_select(1, rows).permute(1, 2, 0).contiguous(),
    )


def _attend_backward(
    inputs: Sequence[Tensor], results: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, pk and pv for what ``_attend`` took and returned, and the
    gradient of the latter."""
    described, _alive = _pass(inputs, scale)
    contiguous = [x.contiguous() for x in results]
    gradients = (
        *(x.new_empty(x.shape) for x in inputs[:3]),
        *(x.new_zeros(x.shape) for x in inputs[3:5]),
    )
    addresses = map(at, (*contiguous, *gradients))
    code = _built(inputs[0].shape[-1])
    code.attend_backward(ctypes.byref(described), *addresses, threads())
    return gradients


def _attend_step(
    q: Tensor, columns: Sequence[Tensor], rows: Tensor, start: Tensor, real: Tensor, scale: float
) -> Tensor:
    """Attend with queries [B, H, 1, D] to ``columns``: k, v [B, G, n, D], pk and pv; returns [B, 1,
    H, D]."""
    return _keep_step(q, columns, rows, start, real, scale)


def _keep_step(
    q: Tensor,
    columns: Sequence[Tensor],
    rows: Tensor,
    start: Tensor,
    real: Tensor,
    scale: float,
    *store: Any,
) -> Tensor:
    """Attend as ``_attend_step``, and write what is returned, and the logarithms of sums of
    weights, into a layer of a ``Kept``, if its fields and the layer's number are given."""
    attended = _fake_step(q)
    batch, heads, _, size = q.shape
    q, k, v, pv, real = (_elements(x) for x in (q, *columns[:2], columns[3], real))
    pk = by_column(columns[2])
    step = _Step(
        *(batch, pk.shape[0], pk.shape[2], heads, k.shape[1], k.shape[2]),
        *(x.data_ptr() for x in (rows, start, real)),
        scale,
        *map(at, (q, k, v, pk, pv)),
        *(real.stride(0), q.stride(0), q.stride(1)),
        *(x.stride(axis) for x in (k, v, pk.mT, pv) for axis in range(3)),
    )
    place = _Store()
    if store:
        results, lse, answers, tokens, layer = store
        parts = results[layer], lse[layer], answers, tokens
        place = _Store(*(x.data_ptr() for x in parts), results.shape[2])
    code = _built(size)
    code.attend_step(ctypes.byref(step), ctypes.byref(place), at(attended), threads())
    return attended


def _fake_attend(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, size = q.shape
    return q.new_empty(batch, tokens, heads, size), q.new_empty(batch, heads, tokens)


def _fake_backward(inputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _fake_step(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.scale = inputs[7]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> Any:
    inputs, results = list(ctx.saved_tensors[:7]), list(ctx.saved_tensors[7:])
    gradients = torch.ops.mmrl_vlm.attend_backward(inputs, [*results, gradient], ctx.scale)
    return (*gradients, *(None for _ in ctx.needs_input_grad[5:]))


_OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "attend": (
        "(Tensor q, Tensor k, Tensor v, Tensor pk, Tensor pv, Tensor rows, Tensor start, "
        "float scale) -> (Tensor, Tensor)",
        _attend,
        _fake_attend,
    ),
    "recall": (
        "(Tensor q, Tensor k, Tensor v, Tensor pk, Tensor pv, Tensor rows, Tensor start, "
        "float scale, Tensor attended, Tensor lse, Tensor answers) -> (Tensor, Tensor)",
        _recall,
        _fake_attend,
    ),
    "attend_backward": (
        "(Tensor[] inputs, Tensor[] results, float scale) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        _attend_backward,
        _fake_backward,
    ),
    "attend_step": (
        "(Tensor q, Tensor[] columns, Tensor rows, Tensor start, Tensor real, float scale) "
        "-> Tensor",
        _attend_step,
        _fake_step,
    ),
    "keep_step": (
        "(Tensor q, Tensor[] columns, Tensor rows, Tensor start, Tensor real, float scale, "
        "Tensor(a!) kept, Tensor(b!) lse, Tensor answers, Tensor tokens, int layer) -> Tensor",
        _keep_step,
        _fake_step,
    ),
}
_ops = torch.library.Library("mmrl_vlm", "DEF")
for _name, (_schema, _work, _fake) in _OPS.items():
    _ops.define(_name + _schema)
    _ops.impl(_name, _work, "CPU")
    torch.library.register_fake(f"mmrl_vlm::{_name}", _fake, lib=_ops)
for _name in ("attend", "recall"):
    torch.library.register_autograd(f"mmrl_vlm::{_name}", _gradients, setup_context=_keep, lib=_ops)
