"""Keeps the frozen weights of a network in 4 or 8 bits under adapters, as QLoRA does (Dettmers et
al. 2023), so that large models train on one card of 24 GB.

bitsandbytes quantises the weights by blocks and dequantises them for every pass. The matrix product
itself is torch's, in the type of the activations, whatever the number of rows: sampling and
training compute the same, so the first ratio stays 1. Backward dequantises the weights again;
nothing of full size is kept between the passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.errors import UserError

Quantization = Literal["nf4", "fp4", "8bit"]
BLOCK = {"nf4": 64, "fp4": 64, "8bit": 256}  # number of weights that share a scale
IN_BLOCKS = re.compile(r"\.\d+\.")  # layers of the repeated blocks; others are not quantised


class QuantizedLinear(nn.Linear):
    """Computes a frozen linear layer whose weight [out, in] is stored in 4 or 8 bits.

    Quantised values and scales are bytes, which no conversion of the network's dtype touches;
    ``state_dict`` holds the dequantised weight, as of a plain layer, on the CPU, so that exports
    and engines need no special case.
    """

    def __init__(self, linear: nn.Linear, quantization: Quantization):
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.quantization = quantization
        self.stored_dtype = linear.weight.dtype
        numbers, scales = _quantized(linear.weight.detach(), quantization)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.scales = nn.Parameter(scales.view(torch.uint8), requires_grad=False)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def restored(self) -> Tensor:
        """Return the weight [out, in] in the dtype it was loaded in."""
        from bitsandbytes import functional

        state = functional.QuantState(
            absmax=self.scales.view(torch.float32),
            shape=torch.Size((self.out_features, self.in_features)),
            code=_code(self.quantization, self.weight.device),
            blocksize=BLOCK[self.quantization],
            quant_type=self.quantization,
            dtype=self.stored_dtype,
        )
        whole: Tensor
        if self.quantization == "8bit":
            whole = functional.dequantize_blockwise(self.weight, state)
        else:
            whole = functional.dequantize_4bit(self.weight, state)
        return whole.view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.restored().cpu()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


class _Product(torch.autograd.Function):
    """Multiplies by a frozen weight that is dequantised only for the product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        dtype = _computed_in(rows)
        return F.linear(rows.to(dtype), layer.restored().to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.restored().to(gradient.dtype), None


def _computed_in(rows: Tensor) -> torch.dtype:
    """Return the dtype in which a product of these rows is computed: autocast's, where it is on.

    Autocast would convert the weight again, through a float32 copy of twice its size.
    """
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return rows.dtype


def check_quantization(quantization: Quantization | None, adapters_only: bool) -> None:
    """Raise UserError, before anything is loaded, where weights cannot be quantised: the package is
    not installed, or they would be trained."""
    check_frozen(quantization, adapters_only)
    if quantization is not None and find_spec("bitsandbytes") is None:
        raise UserError(
            f"policy option quantization = {quantization} needs the package bitsandbytes: "
            "pip install 'multimodal-rl[low-memory]'"
        )


def check_frozen(quantization: Quantization | None, adapters_only: bool) -> None:
    """Raise UserError where weights that would be quantised are trained themselves."""
    if quantization is not None and not adapters_only:
        raise UserError(
            f"policy option quantization = {quantization} freezes the network's weights: train "
            "adapters, by the option lora"
        )


def quantize(net: nn.Module, quantization: Quantization | None) -> None:
    """Replace the linear layers of the repeated blocks, in place; None does nothing.

    They are quantised one after the other on the accelerator, where there is one, then moved back.
    """
    if quantization is None:
        return
    plain = [(name, layer) for name, layer in in_blocks(net) if type(layer) is nn.Linear]
    for name, linear in plain:
        parent, _, child = name.rpartition(".")
        setattr(net.get_submodule(parent), child, QuantizedLinear(linear, quantization))


def in_blocks(net: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """List the linear layers that ``quantize`` replaces, or has replaced, with their names."""
    for name, module in net.named_modules():
        if type(module) in (nn.Linear, QuantizedLinear) and IN_BLOCKS.search(f".{name}"):
            yield name, module


@dataclass(frozen=True)
class Blocks:
    """Holds the number of weights that ``quantize`` quantises, and that of the largest layer."""

    weights: int = 0
    largest: int = 0


def blocks_of(net: nn.Module) -> Blocks:
    """Count the weights of a network's blocks, quantised or not, without adapters."""
    sizes = [
        linear.in_features * linear.out_features
        for name, linear in in_blocks(net)
        if "lora_" not in name
    ]
    return Blocks(sum(sizes), max(sizes, default=0))


def parameters(net: nn.Module) -> int:
    """Count a network's weights without adapters, quantised ones at their unquantised number."""
    stored = {
        id(stand_in): size
        for layer in net.modules()
        if isinstance(layer, QuantizedLinear)
        for stand_in, size in (
            (layer.weight, layer.in_features * layer.out_features),
            (layer.scales, 0),
        )
    }
    named = net.named_parameters()
    return sum(stored.get(id(p), p.numel()) for name, p in named if "lora_" not in name)


def bytes_of(weights: int, quantization: Quantization) -> int:
    """Count the bytes that store ``weights`` weights of a layer: quantised values and scales."""
    numbers = weights if quantization == "8bit" else -(-weights // 2)
    return numbers + 4 * -(-weights // BLOCK[quantization])


def is_quantized(net: nn.Module) -> bool:
    """Tell whether some weights of the network are quantised."""
    return any(isinstance(module, QuantizedLinear) for module in net.modules())


def _quantized(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Quantise a weight to bytes with a float32 scale for each block, where the weight is."""
    from bitsandbytes import functional

    fast = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    moved = weight.to(weight.device if weight.is_meta else fast or weight.device).contiguous()
    if quantization == "8bit":
        numbers, state = functional.quantize_blockwise(moved, blocksize=BLOCK[quantization])
    else:
        numbers, state = functional.quantize_4bit(
            moved, blocksize=BLOCK[quantization], quant_type=quantization
        )
    return numbers.to(weight.device), state.absmax.float().contiguous().to(weight.device)


_CODES: dict[tuple[str, torch.device], Tensor] = {}


def _code(quantization: str, device: torch.device) -> Tensor:
    """Dequantise: return the weight's values."""
    from bitsandbytes import functional

    key = (quantization, device)
    if key not in _CODES:
        table = (
            functional.create_dynamic_map()
            if quantization == "8bit"
            else functional.get_4bit_type(quantization, device=device)
        )
        _CODES[key] = table.to(device)
    return _CODES[key]
