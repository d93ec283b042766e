"""Samples tokens of Llamas by code of ours in float32 on CPUs with AVX-512: one call passes a token
of every row through all layers, with weights laid out as they are read.

The code is ``decoder.cpp``, which the inductor's compiler builds once for each size of heads. What
it computes is what the layers compute, rounded in other places.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies import native
from mmrl.policies.image_tokens.kv_cache import Rooms
from mmrl.policies.native import at, threads
from mmrl.policies.products import Linear

SOURCE = Path(__file__).with_name("decoder.cpp")
VECTOR = 16  # numbers of a register
PANEL = 32  # outputs of a panel
LARGEST = 256  # head
ANY_HEAD = 64  # for products, which know no heads

Parts = Sequence[nn.Module]


class LlamaLayer(NamedTuple):
    """Names the parts of a layer; ``qkv`` are one, or three whose outputs are joined."""

    norm: Tensor
    qkv: Parts
    output: nn.Module
    second_norm: Tensor
    gate: nn.Module
    up: nn.Module
    down: nn.Module


class Llama(NamedTuple):
    """Describes the layers of a Llama: norms by root mean square, no biases, gates by SiLU."""

    layers: Sequence[LlamaLayer]
    norm: Tensor
    epsilon: float
    heads: int
    groups: int  # heads of keys
    size: int  # of a head
    scale: float  # of the products of queries and keys
    adjacent: bool  # parts of a complex number are neighbours, not of two halves


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("norm", "qkv", "output", "second_norm", "gated", "down", "k", "v")
    ]


class _Token(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("B", "width", "heads", "groups", "feed", "layers")),
        *((name, ctypes.c_long) for name in ("place", "adjacent", "rotation_row")),
        *((name, ctypes.c_long) for name in ("k_row", "k_head", "k_element")),
        *((name, ctypes.c_long) for name in ("v_row", "v_head", "v_token")),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("start", "cos", "sin", "norm", "layer")),
    ]


@dataclass
class Matrix:
    """Holds a linear layer as the code here reads it, for as long as its weights do not change."""

    panels: Tensor
    bias: Tensor | None
    shape: torch.Size  # [outputs, inputs]

    @classmethod
    def of(cls, layer: nn.Module) -> Matrix | None:
        """Lay a linear layer out; None where the code here does not compute it."""
        weight = weight_of(layer, biased=True)
        if weight is None or _library(ANY_HEAD) is None:
            return None
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else bias.detach().contiguous()
        return cls(_buffer([weight]), bias, weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the layer makes of x [*, inputs] in float32."""
        outputs, inputs = self.shape
        x = x.contiguous()
        product = x.new_empty(*x.shape[:-1], outputs)
        sizes = (ctypes.c_long(n) for n in (x.numel() // inputs, inputs, outputs))
        bias = None if self.bias is None else at(self.bias)
        _built(ANY_HEAD).linear(at(x), at(self.panels), bias, *sizes, at(product), threads())
        return product


@dataclass
class Weights:
    """Holds all weights of a Llama as the code here reads them, for as long as they do not
    change."""

    llama: Llama
    panels: Tensor
    first: list[list[int]]  # of every layer: where its four matrices begin
    norms: list[Tensor]  # alive as long as the code reads them
    width: int
    feed: int

    @classmethod
    def of(cls, llama: Llama | None) -> Weights | None:
        """Lay the layers out; None where the code here does not compute them."""
        if llama is None or not _serves(llama):
            return None
        matrices: list[Tensor] = []
        for layer in llama.layers:
            parts = [*layer.qkv, layer.output, layer.gate, layer.up, layer.down]
            weights = [weight for weight in map(weight_of, parts) if weight is not None]
            if len(weights) < len(parts):
                return None
            *qkv, output, gate, up, down = weights
            if output.shape[0] % VECTOR or gate.shape[0] % VECTOR:
                return None
            # 16 outputs of the gate, then the 16 that they weigh
            gated = torch.stack([gate.unflatten(0, (-1, VECTOR)), up.unflatten(0, (-1, VECTOR))], 1)
            matrices += [torch.cat(qkv), output, gated.flatten(0, 2), down]
        sizes = [_padded(len(matrix)) * matrix.shape[1] for matrix in matrices]
        starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        norms = [
            norm.detach().contiguous()
            for layer in llama.layers
            for norm in (layer.norm, layer.second_norm)
        ]
        return cls(
            llama,
            _buffer(matrices),
            [starts[i : i + 4] for i in range(0, len(matrices), 4)],
            [*norms, llama.norm.detach().contiguous()],
            width=len(matrices[1]),
            feed=matrices[3].shape[1],
        )

    def following(self, rooms: Rooms, padding: Tensor | None) -> Decoder | None:
        """Return the decoder of the tokens behind the columns of ``rooms``, of which those that
        ``padding`` [B, n] marks False do not count; None: the code here does not read them so."""
        k, v = rooms.layers[0]
        start = torch.zeros(rooms.rows, dtype=torch.long)
        if padding is not None:
            start = padding.long().argmax(1)
            if not torch.equal(padding.sum(1), padding.shape[1] - start):
                return None  # not all padding is on the left
        if k.dtype != torch.float32 or k.stride(2) != 1 or v.stride(3) != 1:
            return None
        return Decoder(self, start)


@dataclass
class Decoder:
    """Passes tokens of B rows through all layers."""

    weights: Weights
    start: Tensor  # [B] the first column of each row that is no padding

    def of_rows(self, rows: slice | Tensor) -> Decoder:
        """Return the decoder of some of the rows."""
        return replace(self, start=self.start[rows].contiguous())

    def token(self, x: Tensor, cos: Tensor, sin: Tensor, rooms: Rooms) -> Tensor:
        """Return hidden states [B, 1, H] for the head, of inputs x [B, 1, H]; writes keys and
        values into the next column of ``rooms``. Each number of a head counts ``cos`` times and its
        partner ``sin`` times, [B or 1, D] each."""
        weights, llama = self.weights, self.weights.llama
        rows = len(x)
        place = rooms.length
        rooms.length += 1
        hidden = x.clone(memory_format=torch.contiguous_format)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        k, v = rooms.layers[0]
        layers = (_Layer * len(rooms.layers))(*self._layers(rooms))
        described = _Token(
            *(rows, weights.width, llama.heads, llama.groups, weights.feed, len(rooms.layers)),
            *(place, llama.adjacent, cos.shape[-1] if len(cos) > 1 else 0),
            *(k.stride(0), k.stride(1), k.stride(3), v.stride(0), v.stride(1), v.stride(2)),
            *(llama.scale, llama.epsilon),
            *(self.start.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(weights.norms[-1].data_ptr(), ctypes.cast(layers, ctypes.c_void_p)),
        )
        numbers = weights.width + 2 * (llama.heads + llama.groups) * llama.size + weights.feed
        room = hidden.new_empty(rows * numbers + torch.get_num_threads() * (place + 2 * VECTOR))
        _built(llama.size).token(ctypes.byref(described), at(hidden), at(room), threads())
        return hidden

    def _layers(self, rooms: Rooms) -> list[_Layer]:
        weights = self.weights
        base = weights.panels.data_ptr()
        layers = []
        for i, (k, v) in enumerate(rooms.layers):
            qkv, output, gated, down = (base + 4 * first for first in weights.first[i])
            norm, second = (x.data_ptr() for x in weights.norms[2 * i : 2 * i + 2])
            layers.append(
                _Layer(norm, qkv, output, second, gated, down, k.data_ptr(), v.data_ptr())
            )
        return layers


@torch.no_grad()
def weight_of(layer: nn.Module, biased: bool = False) -> Tensor | None:
    """Return the weight of a linear layer with its LoRA adapters; None where it computes otherwise,
    has a bias that is not ``biased``, or others want to see its calls."""
    weight: Any = getattr(layer, "weight", None)
    if hasattr(layer, "get_delta_weight"):
        weight = _adapted(layer)
        layer = layer.get_base_layer()  # type: ignore[operator]
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if type(layer) not in (nn.Linear, Linear) or hooked or weight is None:
        return None
    if not biased and layer.bias is not None:
        return None
    plain = type(weight) in (nn.Parameter, Tensor)
    if not plain or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    bare: Tensor = weight.detach()
    return bare


def _adapted(layer: Any) -> Tensor | None:
    """Add the active adapters of a peft layer to its weight; None where they are no plain LoRA."""
    from peft.tuners.lora import Linear as Adapted

    if type(layer) is not Adapted or layer.lora_variant:
        return None
    weight: Tensor = layer.get_base_layer().weight
    if type(weight) is not nn.Parameter:
        return None
    if layer.merged or layer.disable_adapters:
        return weight
    for name in layer.active_adapters:
        if name in layer.lora_A:
            weight = weight + layer.get_delta_weight(name)
    return weight


def _serves(llama: Llama) -> bool:
    """Tell whether the code here knows these sizes and can be built."""
    width = len(llama.norm)
    return (
        llama.size % VECTOR == 0
        and llama.size <= LARGEST
        and width % VECTOR == 0
        and llama.heads % llama.groups == 0
        and llama.norm.dtype == torch.float32
        and llama.norm.device.type == "cpu"
        and _library(llama.size) is not None
    )


def _library(size: int) -> ctypes.CDLL | None:
    """Return the code for heads of this size, which is built when it is first asked for."""
    return native.library(SOURCE, f"#define HEAD {size}") if native.able() else None


def _built(size: int) -> ctypes.CDLL:
    library = _library(size)
    assert library is not None, "_serves() is asked first"
    return library


def _padded(outputs: int) -> int:
    return -(-outputs // PANEL) * PANEL


def _buffer(matrices: Sequence[Tensor]) -> Tensor:
    """Lay matrices [outputs, inputs] out as panels, one behind the other."""
    panels = [
        F.pad(matrix, (0, 0, 0, -len(matrix) % PANEL)).unflatten(0, (-1, PANEL)).transpose(1, 2)
        for matrix in matrices
    ]
    return torch.cat([panel.flatten() for panel in panels])
