"""Measures a piece of work by torch's own trackers, on fake tensors or on real ones: memory by
part, operations, and the seconds that a card would take.

torch's ``RuntimeEstimator`` runs only where torch has an accelerator, also for a card by name; it
stops at fused attention in half precision, and takes a product for faster than the card can be
(docs/scale.md). ``Work.seconds`` does such arithmetic for any card: an operation takes as long as
its arithmetic or its traffic with memory, whichever is longer (Williams et al. 2009).
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
    """Tracks memory by part as torch's tracker does, and notes the arithmetic and the traffic of
    every operation.

    Frozen weights may lie beside adapters: torch's tracker hooks every parameter's gradient, which
    frozen ones refuse.
    """

    def __init__(self) -> None:
        super().__init__()
        # of every call of torch: the bytes in use after it, and what it took; None: no data moved
        self.events: list[tuple[Sizes, Operation | None]] = []
        self.ends_forward = sys.maxsize  # number of events on the way there
        self.fake_mode: FakeTensorMode | None = None  # of the weights, where they are fake
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
            return produced  # two of three calls: fake tensors are asked for their device
        tensors = [x for x in tree_leaves(produced) if isinstance(x, Tensor)]
        if active_fake_mode() is self._entered_under:
            kind = self._kind()
            for tensor in tensors:
                self._track(kind, tensor)
        self.events.append((self._now(), _operation(func, args, kwargs, produced)))
        return produced

    def turn(self) -> None:
        """Note that the way there ends here, and the way back begins."""
        self.ends_forward = len(self.events)

    def _kind(self) -> _MemRefType:
        """Tell what a tensor that is made now is for, as torch's tracker does."""
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
        """Note the weights of a module when it is first called, and whether activations are being
        computed again. torch's own hook keeps statistics of every module, which refuse a network
        that is called twice in a pass, as shared prompts and guidance do."""
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
        """Return what was done between ``with`` and its end, and of it what the way there took,
        with the bytes that are held where it ends."""
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
    """Tells the tracker when a module is called. torch's own keeps account of each module's way
    back too, which takes longer than a fake pass and is not needed for sums."""

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
    """Stands for the hook of a frozen parameter, which has none."""

    def remove(self) -> None:
        return None


@dataclass
class Work:
    """Holds what one piece of work takes: bytes by part at its fullest moment, and of each
    operation (operations, bytes read and written, whether in half precision)."""

    memory: dict[str, int]
    operations: list[Operation] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return sum(flops for flops, _, _ in self.operations)

    def seconds(self, card: Card) -> float:
        """Estimate the seconds on a card, by the roofline with what code reaches of it."""
        total = 0.0
        for flops, traffic, half in self.operations:
            peak = (card.half if half else card.single) * MATMUL_SHARE
            total += max(flops / peak, traffic / (card.bandwidth * MEMORY_SHARE))
        return total


def _free(name: str) -> bool:
    """Tell whether an operation moves no data: it is a view, or only makes room."""
    plain = name.strip("_")
    return plain in FREE or plain.partition("_")[0] in FREE


def _grouped(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count the arithmetic of a product of groups of rows by a matrix each (experts): of 2 x 2
    dimensions the groups are parts of the sum."""
    if a.ndim == b.ndim == 2:
        return 2 * a.numel() * b.shape[-1]
    return 2 * out_val.numel() * a.shape[-1]


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the arithmetic of attention on a CPU as torch counts that of other kernels."""
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attended_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Count the arithmetic of its gradient, likewise."""
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# what torch's own table lacks; that of 2.14 has no attention on a CPU
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
    """Run ``work`` once and say what it took; the ``modules`` were there before."""
    return passed(lambda _: work(), modules)[0]


def passed(work: Callable[[Tracker], Any], modules: Sequence[nn.Module] = ()) -> tuple[Work, Work]:
    """Run ``work``, which may call the tracker's ``turn`` where the way there ends; return what it
    took, and what the way there took."""
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
    """Extend two measurements of the same work on a line: ``short`` and ``times`` what ``longer``
    has more."""
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
