"""Measures work by torch's trackers, on fake or real tensors: memory by part, operations, and the
seconds on a card.

torch's ``RuntimeEstimator`` runs only where torch has an accelerator, also for a card by name; it
stops at fused attention in half precision, and underestimates the time of matrix products
(docs/scale.md). ``Work.seconds`` does such arithmetic for any card: an operation takes as long as
its arithmetic or its memory traffic, whichever is longer (the roofline, Williams et al. 2009).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.nn.modules import module as modules_of_torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from mmrl.apps.dry_run.fakes import faked_where_large
from mmrl.core.cards import MATMUL_SHARE, MEMORY_SHARE, Card

Sizes = tuple[int, ...]  # bytes of each part, their sum last
Operation = tuple[float, float, bool]  # operations, bytes read and written, whether in half
PARTS = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporary",
    "Other": "other",
}


FREE = (
    *("view", "t", "transpose", "expand", "permute", "slice", "select", "unsqueeze", "squeeze"),
    *("split", "detach", "alias", "empty", "unbind", "as_strided", "chunk", "unsafe_view"),
)


class Tracker(MemTracker):
    """Tracks memory by part as torch's tracker does, and records the arithmetic and traffic of
    every operation.

    Supports frozen weights: torch's tracker hooks every parameter's gradient, which fails for
    frozen ones.
    """

    def __init__(self) -> None:
        super().__init__()
        # per torch call: the bytes in use after it, and its cost; None: no data moved
        self.events: list[tuple[Sizes, Operation | None]] = []
        self.ends_forward = sys.maxsize  # number of events of the forward pass
        self.fake_mode: FakeTensorMode | None = None  # of the weights, if they are fake
        self._mod_tracker = _Calls()  # type: ignore[assignment]  # fewer hooks, the same calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and each call would pay for it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.repeat.default and self.fake_mode is not None:
            args = (faked_where_large(self.fake_mode, *args), *args[1:])
        produced = func(*args, **kwargs)
        if func is torch.ops.prim.device.default or produced is NotImplemented:
            return produced  # two of three calls only query the device of fake tensors
        tensors = [x for x in tree_leaves(produced) if isinstance(x, Tensor)]
        if active_fake_mode() is self._entered_under:
            kind = self._kind()
            for tensor in tensors:
                self._track(kind, tensor)
        self.events.append((self._now(), _operation(func, args, kwargs, produced)))
        return produced

    def turn(self) -> None:
        """Mark the end of the forward pass and the start of the backward pass."""
        self.ends_forward = len(self.events)

    def _kind(self) -> _MemRefType:
        """Return the purpose of a tensor created now, as torch's tracker does."""
        if self._in_opt:
            return _MemRefType.OPT
        back = self._mod_tracker.is_bw and not self._in_ac
        return _MemRefType.TEMP if back else _MemRefType.ACT

    def _now(self) -> Sizes:
        """Return the bytes in use by parts, in the order of ``KINDS``, and their sum."""
        snapshots = [tuple(sizes.values()) for sizes in self._curr_mem_snap.values()]
        if len(snapshots) == 1:
            return snapshots[0]
        return tuple(map(sum, zip(*snapshots, strict=True))) or (0,) * (len(KINDS) + 1)

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        handles = self._param_to_grad_hook_handles
        frozen = [p for p in module.parameters() if not p.requires_grad and p not in handles]
        for parameter in frozen:
            handles[parameter] = (_NoHook(), _NoHook())
        sizes: tuple[int, int] = super()._track_module_params_and_buffers(
            module, install_grad_hooks
        )
        return sizes

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        """Record the weights of a module when it is first called, and whether activations are being
        recomputed. torch's own hook keeps statistics of every module, which refuse a network that
        is called twice in a pass, as shared prompts and guidance do."""
        if module not in self.memory_tracking:
            self.memory_tracking[module] = True
            self._track_module_params_and_buffers(module)
        elif self._mod_tracker.is_bw and self._ac_mod is None:
            self._ac_mod = weakref.ref(module)
            self._in_ac = True

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._ac_mod is not None and self._ac_mod() is module:
            self._ac_mod = None
            self._in_ac = False

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        return None

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        return None

    def work(self) -> tuple[Work, Work]:
        """Return the work inside ``with``, and that of the forward pass, with the bytes held at its
        end."""
        peak = held = self._begin
        operations: list[Operation] = []
        of_forward: list[Operation] = []
        for number, (sizes, operation) in enumerate(self.events):
            forward = number < self.ends_forward
            if sizes[-1] > peak[-1]:
                peak = sizes
            held = sizes if forward else held
            if operation is not None:
                operations.append(operation)
                if forward:
                    of_forward.append(operation)
        return Work(_by_part(peak), operations), Work(_by_part(held), of_forward)

    def __enter__(self) -> Self:
        self._entered_under = active_fake_mode()  # torch 2.11's own tracker does not keep it
        super().__enter__()
        self._begin = self._now()
        return self


KINDS = tuple(_MemRefType)


def _by_part(sizes: Sizes) -> dict[str, int]:
    """Name bytes by what they are for, and their sum."""
    memory = {PARTS[kind.value]: size for kind, size in zip(KINDS, sizes)}
    return memory | {"total": sum(memory.values())}


class _Calls:
    """Notifies the tracker of module calls. torch's version also tracks each module's backward,
    which takes longer than a fake pass and is not needed for sums."""

    def __init__(self) -> None:
        self._hooks: tuple[Any, Any, Any, Any] = (None, None, None, None)
        self._handles: list[Any] = []

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None:
        self._hooks = hooks

    def clear_user_hooks(self) -> None:
        self._hooks = (None, None, None, None)

    def __enter__(self) -> None:
        before, after, *_ = self._hooks
        self._handles = [
            modules_of_torch.register_module_forward_pre_hook(before),
            modules_of_torch.register_module_forward_hook(after, always_call=True),
        ]

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


class _NoHook:
    """Replaces the hook of a frozen parameter, which has none."""

    def remove(self) -> None:
        return None


@dataclass
class Work:
    """Holds the cost of a piece of work: bytes by part at its peak, and of each operation
    (operations, bytes read and written, whether in half precision)."""

    memory: dict[str, int]
    operations: list[Operation] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return sum(flops for flops, _, _ in self.operations)

    def seconds(self, card: Card) -> float:
        """Estimate the seconds on a card, by the roofline with achievable rates."""
        total = 0.0
        for flops, traffic, half in self.operations:
            peak = (card.half if half else card.single) * MATMUL_SHARE
            total += max(flops / peak, traffic / (card.bandwidth * MEMORY_SHARE))
        return total


def _free(name: str) -> bool:
    """Tell whether an operation moves no data: a view or an allocation."""
    plain = name.strip("_")
    return plain in FREE or plain.partition("_")[0] in FREE


def _grouped(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count the arithmetic of a grouped matrix product (experts): with 2 x 2 dimensions the groups
    are parts of the sum."""
    if a.ndim == b.ndim == 2:
        return 2 * a.numel() * b.shape[-1]
    return 2 * out_val.numel() * a.shape[-1]


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the arithmetic of CPU attention as torch counts other kernels."""
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attended_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Count the arithmetic of its gradient, likewise."""
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# missing in torch's own table; 2.14 has no CPU attention
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
UNCOUNTED: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped,
    CPU_ATTENTION: _attended,
    f"{CPU_ATTENTION}_backward": _attended_backward,
}


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], produced: Any
) -> Operation | None:
    """Return the arithmetic and the traffic of a call of torch; None: it moves no data."""
    packet = func.overloadpacket
    if _free(packet.__name__):
        return None
    count = UNCOUNTED.get(packet.__name__) or flop_registry.get(packet)
    flops = count(*args, **kwargs, out_val=produced) if count else 0
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    written = [x for x in tree_leaves(produced) if isinstance(x, Tensor)]
    traffic = sum(x.numel() * x.element_size() for x in (*inputs, *written))
    half = any(x.dtype.is_floating_point and x.element_size() < 4 for x in inputs)
    return flops, traffic, half


def tracked(work: Callable[[], Any], modules: Sequence[nn.Module] = ()) -> Work:
    """Run ``work`` once and return its cost; the ``modules`` existed before."""
    return passed(lambda _: work(), modules)[0]


def passed(work: Callable[[Tracker], Any], modules: Sequence[nn.Module] = ()) -> tuple[Work, Work]:
    """Run ``work``, which may call the tracker's ``turn`` after the forward pass; return its cost,
    and that of the forward pass."""
    tracker = Tracker()
    tracker.fake_mode = _fake_mode(modules)
    tracker.track_external(*modules)
    with tracker:
        work(tracker)
    return tracker.work()


def _fake_mode(modules: Sequence[nn.Module]) -> FakeTensorMode | None:
    weights = (weight for module in modules for weight in module.parameters())
    return next((w.fake_mode for w in weights if isinstance(w, FakeTensor)), None)


def extended(short: Work, longer: Work, times: float) -> Work:
    """Extrapolate two measurements linearly: ``short`` plus ``times`` the difference of
    ``longer``."""
    memory = {
        name: int(size + times * (longer.memory[name] - size))
        for name, size in short.memory.items()
    }
    factor = [(times, longer.operations), (1.0 - times, short.operations)]
    operations = [
        (part * flops, part * traffic, half)
        for part, known in factor
        for flops, traffic, half in known
    ]
    return Work(memory, operations)
