"""Chooses the kernels of a diffusers network: attention by xformers, SDPA or flash-attn, and
compiled blocks.

Attention is chosen at the first pass, when device, precision and shapes are known, and measured on
the network itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.effects import FREE_AT_RESUME
from mmrl.core.errors import UserError
from mmrl.core.machine import version
from mmrl.policies.base import unwrapped
from mmrl.policies.compiling import check_backend

Attention = Annotated[Literal["auto", "xformers", "sdpa", "flash"], FREE_AT_RESUME]
# the names of diffusers' dispatcher
BACKENDS = {"sdpa": "native", "xformers": "xformers", "flash": "flash"}
PACKAGES = {"xformers": "xformers", "flash": "flash-attn"}
EVEN = 1.02  # times within this factor are equal
CANNOT = (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError)
_measured: dict[tuple[Any, ...], str] = {}  # choices of "auto" in this process


def check(backend: Attention) -> None:
    """Raise UserError if this machine cannot run that backend at all, before a model is loaded."""
    package = PACKAGES.get(backend)
    if package is None:
        return
    if not torch.cuda.is_available():
        raise UserError(
            f"policy option attention = {backend} needs a CUDA device, and torch sees none "
            f"here; use auto or sdpa"
        )
    if version(package) is None:
        raise UserError(
            f"policy option attention = {backend} needs a package: pip install {package}; "
            f"or use auto or sdpa"
        )


class AttentionChoice:
    """Chooses the attention backend of a network; ``used`` is None until the first pass."""

    def __init__(self, net: nn.Module, backend: Attention):
        check(backend)
        self.net = net
        self.backend = backend
        self.used: str | None = None
        # device type and dtype it was chosen for
        self.where: tuple[str, torch.dtype] | None = None

    def settle(self, trial: Callable[[], Any]) -> list[str]:
        """Choose for the network's device; ``trial`` makes one pass. Does nothing if the network
        has not moved.

        Returns a sentence for the log about a choice that was measured.
        """
        first = next(self.net.parameters())
        if self.where == (where := (first.device.type, first.dtype)):
            return []
        self.where = where
        notes: list[str] = []
        chosen = self._chosen(*where, trial, notes)
        if self.used is None and self.backend == "auto" and chosen == "sdpa":
            self.used = "sdpa"  # the default of new models
        if chosen != self.used:
            self._use(chosen)
        if chosen in PACKAGES and self.backend == chosen:
            self._try(trial)
        return notes

    def _chosen(
        self, device: str, dtype: torch.dtype, trial: Callable[[], Any], notes: list[str]
    ) -> str:
        if self.backend != "auto":
            if self.backend in PACKAGES and device != "cuda":
                raise UserError(
                    f"policy option attention = {self.backend} runs on CUDA only; the "
                    f"model is on {device}"
                )
            return self.backend
        if (
            device != "cuda"
            or dtype == torch.float64
            or version("xformers") is None
            or not able(self.net, "xformers")
        ):
            return "sdpa"
        return self._measure(dtype, trial, notes)

    def _measure(self, dtype: torch.dtype, trial: Callable[[], Any], notes: list[str]) -> str:
        """Choose xformers where it runs on all processes and is no slower, timed by one network
        pass each."""
        key = (
            type(self.net).__name__,
            len(able(self.net, "xformers")),
            dtype,
            torch.is_autocast_enabled("cuda"),
        )
        if key not in _measured:
            seconds = {}
            for name in ("sdpa", "xformers"):
                self._use(name)
                seconds[name] = _seconds(trial)
            slower = seconds["xformers"] > EVEN * seconds["sdpa"]
            _measured[key] = (
                "sdpa" if distributed.all_max(torch.tensor(float(slower))) else "xformers"
            )
            shown = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in seconds.items())
            notes.append(f"attention: {_measured[key]} (a pass: {shown})")
        return _measured[key]

    def _use(self, name: str) -> None:
        if name != "sdpa" and not able(self.net, name):
            raise UserError(
                f"policy option attention = {name}: {type(self.net).__name__} has no "
                f"attention layer that can use it; "
                "use auto or sdpa"
            )
        use(self.net, name)
        self.used = name

    def _try(self, trial: Callable[[], Any]) -> None:
        """Make a trial pass; UserError if the backend chosen by name cannot run this network."""
        try:
            with torch.no_grad():
                trial()
        except torch.OutOfMemoryError:
            raise
        except CANNOT as error:
            raise UserError(
                f"policy option attention = {self.used} cannot run this model in this precision: "
                f"{str(error).strip().splitlines()[0]}; use auto or sdpa"
            ) from error


def computed(policy: Any, work: Callable[[], Tensor]) -> Tensor:
    """Compute a pass of a policy, ``work``, with the chosen kernels, ``policy.attending``.

    Compiled graphs and attention kernels may differ where gradients are recorded, and round
    differently: sampling then records them too, so that samples and scores are bit-equal. UserError
    where torch.compile fails.
    """
    policy.report.warnings += policy.attending.settle(work)
    same = not policy.compiled and policy.attending.used not in PACKAGES
    try:
        if torch.is_grad_enabled() or same:
            return work()
        with unwrapped(policy), torch.enable_grad():
            return work().detach()
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UserError(
            f"policy option compile: torch.compile cannot build this model's kernels here: "
            f"{str(error).strip().splitlines()[0]}; it needs a C++ compiler on CPU, "
            f"triton on CUDA; or leave it out"
        ) from error


def able(net: nn.Module, name: str) -> list[nn.Module]:
    """List the attention layers whose backend can be chosen: those of diffusers' dispatcher, and
    older ones with an xformers processor."""
    return _choosing(net) + ([layer for layer, _ in _older(net)] if name != "flash" else [])


def _choosing(net: nn.Module) -> list[nn.Module]:
    """List the layers whose processor asks diffusers' dispatcher."""
    return [
        layer
        for layer in net.modules()
        if hasattr(getattr(layer, "processor", None), "_attention_backend")
    ]


def use(net: nn.Module, name: str) -> None:
    """Run the attention of a network on a backend. Raises UserError where diffusers rejects the
    version of its package."""
    for layer, twins in _older(net):
        layer.set_processor(twins[name == "xformers"]())
    if _choosing(net):
        _dispatched(net, BACKENDS[name])


def _dispatched(net: nn.Module, backend: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    roots: list[Any] = [net] if hasattr(net, "set_attention_backend") else list(net.children())
    try:
        # it would also set the backend of all other models in this process
        with attention_backend(), quiet():
            for root in roots:
                root.set_attention_backend(backend)
    except RuntimeError as error:
        raise UserError(f"policy option attention: {error}") from error


def _older(net: nn.Module) -> Iterator[tuple[Any, tuple[type, type]]]:
    """Map the attention layers of UNets and of SD3 to their processors for SDPA and for
    xformers."""
    from diffusers.models import attention_processor as known

    pairs = [
        (known.AttnProcessor2_0, known.XFormersAttnProcessor),
        (known.JointAttnProcessor2_0, known.XFormersJointAttnProcessor),
    ]
    twins = {cls: pair for pair in pairs for cls in pair}
    for layer in net.modules():
        if isinstance(layer, known.Attention) and type(layer.processor) in twins:
            yield layer, twins[type(layer.processor)]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence diffusers' warnings of experimental features."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@torch.no_grad()
def _seconds(trial: Callable[[], Any], repeats: int = 3) -> float:
    """Time one pass: the shortest of several after one to warm up; infinite if it does not run."""
    times = []
    try:
        for _ in range(1 + repeats):
            start = time.perf_counter()
            trial()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        raise
    except CANNOT:
        return float("inf")
    return min(times[1:])


def compile_blocks(net: nn.Module, backend: str = "inductor") -> int:
    """Compile the repeated blocks of a network in place, for every shape separately; returns how
    many.

    ``_repeated_blocks`` of diffusers names their classes; where a class has none, the modules of
    its longest list are taken.
    """
    check_backend(backend)
    roots = [net] if hasattr(net, "_repeated_blocks") else list(net.children())
    count = 0
    for root in roots:
        named = set(getattr(root, "_repeated_blocks", None) or _longest(root))
        for block in root.modules():
            if type(block).__name__ in named:
                block.compile(backend=backend, dynamic=False)
                count += 1
    if not count:
        raise UserError(
            f"policy option compile: {type(net).__name__} has no repeated blocks to "
            f"compile; leave it out"
        )
    return count


def _longest(net: nn.Module) -> set[str]:
    """Return the class names in the longest of the module lists of a network."""
    lists = [part for part in net.modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        return set()
    longest = max(lists, key=len)
    return set(Counter(type(block).__name__ for block in longest))
