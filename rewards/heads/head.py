"""Holds a small network on frozen embeddings, and reads it from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError, suggest
from mmrl.core.weight_files import metadata, read_tensors
from rewards.base.tensors import fetch

Activation = Literal["none", "relu", "gelu", "silu"]
ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Head(nn.Module):
    """Maps standardised embeddings [..., E] -> [..., K] by linear layers with an activation between
    them."""

    mean: Tensor
    std: Tensor

    def __init__(self, layers: Sequence[nn.Linear], activation: Activation = "none"):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.activation = ACTIVATIONS[activation]()
        self.kind = activation
        self.width = layers[0].in_features
        self.outputs = layers[-1].out_features
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("std", torch.ones(self.width))

    def forward(self, embeddings: Tensor) -> Tensor:
        x = (embeddings.float() - self.mean) / self.std
        for i, layer in enumerate(self.layers):
            x = layer(self.activation(x) if i else x)
        return x

    def save(self, file: Path) -> None:
        """Write a safetensors file for ``load_head``, with the activation in its metadata."""
        from safetensors.torch import save_file

        tensors = {name: value.detach().cpu().contiguous() for name, value in self.named_tensors()}
        save_file(tensors, file, metadata={"activation": self.kind})

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]


def load_head(where: str, activation: Activation | None = None) -> Head:
    """Read the linear layers of a head from a file, in the order of their numbers.

    Takes any ``.safetensors`` or ``.pth`` of weights [out, in], with or without biases; consecutive
    layers must fit. ``activation`` None: the one in the file, else none.

    Raises:
        UserError: no such file, or tensors that are not a chain of linear layers.
    """
    file = fetch(where, "head")
    tensors = read_tensors(file)
    names = sorted(
        (name for name, value in tensors.items() if name.endswith("weight") and value.ndim == 2),
        key=lambda name: [int(n) for n in re.findall(r"\d+", name)] or [0],
    )
    shapes = [tuple(tensors[name].shape) for name in names]
    chained = all(a[0] == b[1] for a, b in zip(shapes, shapes[1:], strict=False))
    if not names or not chained:
        listed = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
        raise UserError(f"{file} holds no chain of linear layers: {listed[:200] or 'nothing'}")
    head = Head(linear_layers(tensors, names), activation or _activation_in(file))
    for name, values in (("mean", head.mean), ("std", head.std)):
        if name in tensors:
            if tensors[name].shape != values.shape:
                raise UserError(f"{file}: {name} must hold {head.width} numbers, one an input")
            values.copy_(tensors[name])
    return head.eval().requires_grad_(False)


def linear_layers(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[nn.Linear]:
    """Build float32 layers from the weights [out, in] of these names, with biases if present."""
    layers = []
    for name in names:
        bias = tensors.get(name.removesuffix("weight") + "bias")
        outputs, inputs = tensors[name].shape
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias is not None)
        layer.weight.data = tensors[name].float()
        if bias is not None:
            layer.bias.data = bias.float()
        layers.append(layer)
    return layers


def _activation_in(file: Path) -> Activation:
    """Return the activation named in a file written by mmrl; none for other files."""
    if file.suffix != ".safetensors":
        return "none"
    name = metadata(file).get("activation", "none")
    if name not in ACTIVATIONS:
        raise UserError(f"{file} names the activation {name!r}; {suggest(name, ACTIVATIONS)}")
    known: dict[str, Activation] = {"none": "none", "relu": "relu", "gelu": "gelu", "silu": "silu"}
    return known[name]
