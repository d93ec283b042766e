"""Measures a piece of work by torch's own trackers, on fake tensors or on real ones: memory by
part, operations, and the seconds that a card would take.

torch's ``RuntimeEstimator`` runs only where torch has an accelerator, and stops at the CPU's
attention in bf16; ``Work.seconds`` does such arithmetic for any card: an operation takes as long as
its arithmetic or its traffic with memory, whichever is longer (Williams et al. 2009).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmrl.utils.cards import MATMUL_SHARE, MEMORY_SHARE, Card

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
        self.operations: list[tuple[float, float, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls: fake tensors are asked
            return func(*args, **(kwargs or {}))
        produced = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        packet = func.overloadpacket
        if produced is NotImplemented or _free(packet.__name__):
            return produced
        count = flop_registry.get(packet)
        flops = count(*args, **(kwargs or {}), out_val=produced) if count else 0
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(produced) if isinstance(x, Tensor)]
        traffic = sum(x.numel() * x.element_size() for x in (*inputs, *written))
        half = any(x.dtype.is_floating_point and x.element_size() < 4 for x in inputs)
        self.operations.append((flops, traffic, half))
        return produced

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

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Keep the peak of the device only: torch's keeps one of every module, and looks at them
        all at every operation, which takes minutes for a large network."""
        for device, sizes in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < sizes["Total"]:
                self._peak_mem[device] = sizes["Total"]
                self._peak_mem_snap[device] = dict(sizes)

    def peak(self) -> dict[str, int]:
        """Return the bytes of every part at the fullest moment, ``total`` their sum."""
        return _named(self.get_tracker_snapshot("peak"))


class _NoHook:
    """Stands for the hook of a frozen parameter, which has none."""

    def remove(self) -> None:
        return None


def _named(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    sizes = dict.fromkeys(PARTS.values(), 0)
    for by_part in snapshot.values():
        for part, size in by_part.items():
            label = getattr(part, "value", part)
            if label in PARTS:
                sizes[PARTS[label]] += size
    return sizes | {"total": sum(sizes.values())}


@dataclass
class Work:
    """Holds what one piece of work takes: bytes by part at its fullest moment, and of each
    operation (operations, bytes read and written, whether in half precision)."""

    memory: dict[str, int]
    operations: list[tuple[float, float, bool]] = field(default_factory=list)

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


def tracked(
    work: Callable[[], Any],
    modules: Iterable[nn.Module] = (),
    others: Iterable[Tensor] = (),
) -> Work:
    """Run ``work`` once and say what it took; ``modules`` and ``others`` were there before."""
    tracker = Tracker()
    tracker.track_external(*modules, *others)
    with tracker:
        work()
    return Work(tracker.peak(), tracker.operations)


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
