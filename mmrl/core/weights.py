"""Keeps named snapshots of the trainable parameters: reference, old, moving average.

With LoRA the adapter starts at zero, so the snapshot taken before step 0 *is* the base model:
reference, old and averaged policies need no second model. A snapshot is swapped in by *exchanging
contents in place*, shard by shard: no parameter object changes, so DDP, FSDP2 (DTensor) and
optimizers are unaffected, and only a part of a third copy exists at any time. Operations take lists
of tensors at once: a large model has hundreds, and each call costs the host time. Under FSDP2 every
method but ``parameters`` is called by all processes alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mmrl.core.sharding import extent, is_sharded, like, shards
from mmrl.core.tensor_files import Part

LIVE = "live"
SPARE = 2**28  # bytes of the third copy while snapshots are swapped
# wrapper names of activation checkpointing and torch.compile
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def reshard(module: nn.Module) -> None:
    """Make the shards the parameters again. After a forward pass FSDP2 keeps the unsharded weights
    of its outermost group for the backward pass; a pass after a change of the shards would use the
    old weights."""
    for part in module.modules():
        if shards(part):
            part.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: the same storage, without autograd's version
    counter."""
    detached = tensor.data
    return detached._local_tensor if is_sharded(detached) else detached


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors in one call."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, tensors)
    return fresh


def parts(tensors: Sequence[Tensor], size: int) -> Iterator[slice]:
    """Cut a list into runs of at most ``size`` bytes each, or of one tensor if that alone is
    larger."""
    start = held = 0
    for end, tensor in enumerate(tensors):
        if held and held + tensor.nbytes > size:
            yield slice(start, end)
            start = end
            held = 0
        held += tensor.nbytes
    if start < len(tensors):
        yield slice(start, len(tensors))


class Weights:
    """Keeps snapshots of a module's trainable parameters. ``module`` is the unwrapped one."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.saved: dict[str, dict[str, Tensor]] = {}
        self.current = LIVE

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters (under FSDP2 the shards) by name without wrappers; looked
        up each time, since sharding replaces the objects."""
        reshard(self.module)
        return {_plain(name): p for name, p in self.module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def keep(self, name: str) -> None:
        """Take (or retake) a snapshot of the live weights."""
        live = {key: local(p) for key, p in self.parameters().items()}
        self.saved[name] = dict(zip(live, copies(list(live.values())), strict=True))

    @torch.no_grad()
    def track(self, name: str, decay: float) -> None:
        """Move a snapshot towards the live weights: saved = decay * saved + (1 - decay) * live."""
        live = self.parameters()
        averages = [self.saved[name][key] for key in live]
        if averages:
            torch._foreach_lerp_(averages, [local(p) for p in live.values()], 1 - decay)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Run the block with a snapshot in place of the live weights. Blocks nest; ``live`` is
        always a valid name.

        Safe between a forward and its backward pass: contents are restored bit by bit before the
        block ends.
        """
        if name != LIVE and name not in self.saved:
            raise KeyError(f"no snapshot called {name!r}; kept: {', '.join(self.saved) or 'none'}")
        before = self.current
        self._put(name)
        try:
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, name: str) -> None:
        if name == self.current:
            return
        for snapshot in (self.current, name):  # back to live first, then to the snapshot
            if snapshot != LIVE:
                self._exchange(self.saved[snapshot])
        self.current = name

    def _exchange(self, saved: dict[str, Tensor]) -> None:
        parameters = self.parameters()
        live = [local(p) for p in parameters.values()]
        stored = [saved[key] for key in parameters]
        for part in parts(live, SPARE):
            copied = copies(stored[part])
            torch._foreach_copy_(stored[part], live[part])
            torch._foreach_copy_(live[part], copied)

    @torch.no_grad()
    def stored(self, name: str = LIVE) -> dict[str, Tensor]:
        """Return the tensors themselves, under FSDP2 each process's shards (DTensor). Nothing is
        copied or gathered."""
        parameters = self.parameters()
        return {
            key: p.detach() if name == LIVE else like(p, self.saved[name][key])
            for key, p in parameters.items()
        }

    @torch.no_grad()
    def full(self, name: str = LIVE) -> dict[str, Tensor]:
        """Return whole tensors on the CPU, gathered from all shards (a collective call), for
        checkpoints and export."""
        with self.using(name):
            return {key: _whole(p).detach().cpu().clone() for key, p in self.parameters().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], name: str = LIVE) -> None:
        """Put whole tensors back, under a snapshot's name or as the live weights. Names and shapes
        must agree.

        From a checkpoint only this process's shards are read.
        """
        parameters = self.parameters()
        if set(parameters) != set(tensors):
            odd = sorted(set(parameters) ^ set(tensors))
            raise ValueError(
                f"weights differ from the model's in {len(odd)} names, for example {odd[0]!r}"
            )
        for key, p in parameters.items():
            part = block(tensors, key, p).to(local(p))
            if name == LIVE:
                local(p).copy_(part)
            else:
                self.saved.setdefault(name, {})[key] = part.clone()


def block(tensors: Mapping[str, Tensor], key: str, parameter: Tensor) -> Tensor:
    """Return this process's block of the whole tensor ``key``, of the shape of ``parameter``."""
    shape = tensors.shape(key) if isinstance(tensors, Part) else tuple(tensors[key].shape)
    if shape != tuple(parameter.shape):
        raise ValueError(f"{key}: shape {shape} where the model has {tuple(parameter.shape)}")
    start, size = extent(parameter)
    if isinstance(tensors, Part):
        return tensors.block(key, start, size)
    return tensors[key][tuple(slice(a, a + n) for a, n in zip(start, size))]


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(p: Tensor) -> Tensor:
    return p.full_tensor() if is_sharded(p) else p
