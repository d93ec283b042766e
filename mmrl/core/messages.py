"""Serialises nests of tensors and plain values: safetensors with a header; no code is ever
executed.

A nest is a dict with texts as keys, a list or a tuple of nests, a tensor, or None, a truth value, a
number or a text.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

FORMAT = "mmrl-message-1"
DEPTH = 16  # dicts and lists inside each other
TENSORS = 20_000
HEADER = 2**24  # bytes of the header
TENSOR, DICT, LIST, TUPLE = "tensor", "dict", "list", "tuple"


class BadMessage(ValueError):
    """Says what is wrong with the bytes of a message."""


def pack(nest: Any) -> bytes:
    """Write a nest. Raises TypeError for anything else, with the name of its type."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    outline = json.dumps(_outlined(nest, tensors), allow_nan=False)
    content: bytes = save(tensors, metadata={"format": FORMAT, "outline": outline})
    return content


def _outlined(nest: Any, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors by their names in ``tensors``, which it fills."""
    if isinstance(nest, Tensor):
        name = str(len(tensors))
        # cloned: tensors that share memory are refused
        tensors[name] = nest.detach().cpu().contiguous().clone()
        return {TENSOR: name}
    if isinstance(nest, dict):
        if not all(isinstance(key, str) for key in nest):
            raise TypeError("a dictionary whose keys are no texts")
        return {DICT: {key: _outlined(value, tensors) for key, value in nest.items()}}
    if isinstance(nest, (list, tuple)):
        kind = LIST if isinstance(nest, list) else TUPLE
        return {kind: [_outlined(value, tensors) for value in nest]}
    if nest is None or isinstance(nest, (bool, int, float, str)):
        return nest
    raise TypeError(type(nest).__name__)


def unpack(content: bytes | bytearray) -> Any:
    """Read a nest from untrusted bytes. Raises BadMessage."""
    from safetensors.torch import load

    outline = _outline(content)
    try:
        tensors = load(bytes(content))
    except Exception as error:  # whatever a decoder raises on untrusted bytes
        raise BadMessage(f"is no safetensors file ({type(error).__name__})") from error
    return _filled(outline, tensors, 0)


def _outline(content: bytes | bytearray) -> Any:
    """Read the outline in a message's header, before any tensor."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(HEADER, len(content) - 8):
        raise BadMessage("is no safetensors file, or has too long a header")
    try:
        header = json.loads(bytes(content[8 : 8 + length]))
        described = header["__metadata__"]
        if described["format"] != FORMAT:
            raise BadMessage(f"is no message of format {FORMAT}")
        if len(header) > TENSORS:
            raise BadMessage(f"holds more than {TENSORS} tensors")
        return json.loads(described["outline"], parse_constant=_refused)
    except BadMessage:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadMessage("has a header that cannot be read") from error


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _filled(outline: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > DEPTH:
        raise BadMessage(f"is nested more than {DEPTH} deep")
    if not isinstance(outline, dict):
        if isinstance(outline, list):
            raise BadMessage("has a list that does not say so")
        return outline
    if len(outline) != 1:
        raise BadMessage("has a part of no kind or several")
    ((kind, value),) = outline.items()
    if kind == TENSOR and isinstance(value, str) and value in tensors:
        return tensors[value]
    if kind == DICT and isinstance(value, dict):
        return {key: _filled(item, tensors, depth + 1) for key, item in value.items()}
    if kind in (LIST, TUPLE) and isinstance(value, list):
        items = [_filled(item, tensors, depth + 1) for item in value]
        return items if kind == LIST else tuple(items)
    raise BadMessage(f"has a part of kind {str(kind)[:40]!r} that cannot be read")


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Round floats to bfloat16, for half the bytes; one number per row, such as the noise of a
    step, is kept."""
    return {
        name: x.to(torch.bfloat16) if x.is_floating_point() and x.numel() > len(x) else x
        for name, x in tensors.items()
    }
