"""Caches outputs of frozen encoders, so that a pipeline replayed for every step encodes each text
once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mmrl.core.effects import FREE_AT_RESUME
from samplers.batching import chunks

Placement = Annotated[Literal["offload", "keep", "cpu"], FREE_AT_RESUME]
PLAIN = (bool, int, float, str, type(None))


class EncoderCache:
    """Replaces a frozen module's ``forward`` and caches its results on the CPU, first in first out.

    Rows are encoded one by one, so that none depends on the others of its batch, where all inputs
    and outputs are tensors with a row each; else the batch is kept as a whole. After a pass the
    module stays on the device ("keep"), or goes to the CPU ("offload"); or it runs there ("cpu").
    """

    def __init__(
        self,
        module: nn.Module,
        device: Callable[[], torch.device],
        placement: Placement,
        limit: int,
    ):
        self.module = module
        self.device = device
        self.placement = placement
        self.limit = limit
        self.plain = module.forward
        self.results: dict[bytes, Any] = {}
        self.whole = False  # whether results have no batch dimension
        module.forward = self

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        rows = {len(x) if x.ndim else 0 for x in leaves if isinstance(x, Tensor)}
        settings = [x for x in leaves if not isinstance(x, Tensor)]
        if not rows or not all(isinstance(x, PLAIN + (torch.dtype,)) for x in settings):
            return self._computed(args, kwargs)
        if self.whole or len(rows) > 1 or rows == {0}:
            return self._remembered(leaves, spec, whole=True)
        parts = []
        for part in chunks(rows.pop(), 1):
            row = [x[part] if isinstance(x, Tensor) else x for x in leaves]
            parts.append(self._remembered(row, spec))
            if self.whole:
                return self._remembered(leaves, spec, whole=True)
        return _joined(parts)

    def _remembered(self, leaves: list[Any], spec: Any, whole: bool = False) -> Any:
        key = _key(leaves, spec)
        device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
        if key not in self.results:
            args, kwargs = tree_unflatten(leaves, spec)
            encoding = self._computed(args, kwargs)
            parts = tree_flatten(encoding)[0]
            self.whole = whole or not all(
                x is None or (isinstance(x, Tensor) and x.ndim and len(x) == 1) for x in parts
            )
            if self.whole and not whole:
                return encoding
            self.results[key] = _moved(encoding, torch.device("cpu"))
            while len(self.results) > self.limit:
                del self.results[next(iter(self.results))]
        return _moved(self.results[key], device)

    def _computed(self, args: Any, kwargs: Any) -> Any:
        place = torch.device("cpu") if self.placement == "cpu" else self.device()
        if next(iter(self.module.parameters())).device != place:
            self.module.to(place)
        encoding = self.plain(*_moved(args, place), **_moved(kwargs, place))
        if self.placement == "offload" and place.type != "cpu":
            self.module.to("cpu")
        return _moved(encoding, self.device())


def _key(leaves: list[Any], spec: Any) -> bytes:
    digest = hashlib.sha256(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.digest()


def _moved(nest: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, nest)


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    leaves = [tree_flatten(part)[0] for part in parts]
    spec = tree_flatten(parts[0])[1]
    return tree_unflatten(
        [None if row[0] is None else torch.cat(row) for row in zip(*leaves)], spec
    )
