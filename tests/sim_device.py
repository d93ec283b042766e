"""A pretend accelerator, ``torch.device("sim")``: it shows without a GPU what a program does to
one.

Importing this module registers the device, once a process and for good, so tests do it in a process
of their own (tests/sim_worker.py). The numbers are real, computed on the CPU, but torch takes the
tensors for those of another device. That makes visible

* tensors of two devices in one operation: an error, as on CUDA. As there, CPU tensors without
  dimensions are numbers, and CPU indices are sent over, which counts;
* every place where the host stops until the device has caught up: values read (``item``,
  ``tolist``, ``bool``, a copy to the CPU), sizes that depend on values (``nonzero``, masks as
  indices, ``unique``), and copies to the device unless they are ``non_blocking`` (PyTorch waits for
  the stream after a blocking one, ``torch.tensor(..., device=...)`` too).

``STOPS`` counts these by place: (what, file:line). Nothing is said of speed, memory, precision or
CUDA's kernels. With accelerate: ``ACCELERATE_TORCH_DEVICE=sim:0`` in the environment. Needs torch
>= 2.10.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = str(Path(__file__).resolve().parents[1])
HERE = str(Path(__file__).resolve().parent)
STOPS: Counter[tuple[str, str]] = Counter()
SENT: Counter[tuple[str, str]] = Counter()  # copies that nobody waits for
VALUE_DEPENDENT = {  # CUDA's kernels of these tell the host a size or a value
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::bincount",
}
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"}
INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}


class SimTensor(Tensor):
    """A tensor of the device. ``raw`` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> SimTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device="sim:0",
        )
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return operate(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({self.raw})"

    def __reduce_ex__(self, protocol: int) -> Any:
        return _from_cpu, (self.detach().cpu(), self.requires_grad)

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = _from_cpu(self.detach().cpu().clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    # What torch does in C++ past the dispatcher:

    def tolist(self) -> Any:
        stop("tolist")
        return self.detach().raw.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert sim:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def new_tensor(
        self, values: Any, dtype: Any = None, device: Any = None, **options: Any
    ) -> Tensor:
        return torch.tensor(
            values, dtype=dtype or self.dtype, device=device or self.device, **options
        )

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_sent_over(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_sent_over(index), value)


def _from_cpu(tensor: Tensor, needs_grad: bool) -> Tensor:
    return tensor.to("sim").requires_grad_(needs_grad)


def _sent_over(index: Any) -> Any:
    """An index in which lists are tensors of the device, as torch makes them."""
    if isinstance(index, tuple):
        return tuple(_sent_over(part) for part in index)
    return torch.tensor(index, device="sim") if isinstance(index, list) else index


def place() -> str:
    """The line of this checkout that is being run, outside the tests if there is one: file:line."""
    frame = sys._getframe(1)
    inside = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and name != __file__ and "site-packages" not in name:
            line = f"{name.removeprefix(ROOT + '/')}:{frame.f_lineno}"
            if not name.startswith(HERE):
                return line
            inside = inside or line
        frame = frame.f_back
    return inside or "elsewhere"


def stop(kind: str) -> None:
    STOPS[kind, place()] += 1


@contextmanager
def counted() -> Iterator[Counter]:
    """The stops of the block, by kind and place."""
    before = STOPS.copy()
    counts: Counter = Counter()
    try:
        yield counts
    finally:
        counts.update(STOPS - before)


def operate(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One operation, on the numbers; what it does to the device is counted or refused."""
    name = func._schema.name
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    inputs = [tensor for tensor in tensors if isinstance(tensor, SimTensor)]
    target = kwargs.get("device")
    if name in COPIES:
        _count_copy(name, args, kwargs, len(inputs) < len(tensors), bool(inputs), target)
    elif inputs:
        _check_devices(name, tensors)
        _count_waits(name, args, kwargs)
    on_device = bool(inputs) if target is None else torch.device(target).type == "sim"
    if name == "aten::copy_":
        on_device = isinstance(args[0], SimTensor)
    args, kwargs = tree_unflatten([_plain(leaf) for leaf in leaves], spec)
    outputs = func(*args, **kwargs)
    known = {id(tensor.raw): tensor for tensor in inputs}

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, SimTensor):
            return leaf
        if id(leaf) in known:  # changed in place
            return known[id(leaf)]
        return SimTensor(leaf) if on_device else leaf

    return tree_map(wrapped, outputs)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, SimTensor):
        return leaf.raw
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "sim" else leaf


def _count_copy(
    name: str, args: tuple, kwargs: dict, mixed: bool, from_device: bool, target: Any
) -> None:
    crosses = mixed
    if name == "aten::_to_copy":
        crosses = target is not None and (torch.device(target).type == "sim") != from_device
    if not crosses:
        return
    passed = args[2] if name == "aten::copy_" and len(args) > 2 else False
    to_host = not isinstance(args[0], SimTensor) if name == "aten::copy_" else from_device
    if (kwargs.get("non_blocking") or passed) and not to_host:
        SENT["to the device", place()] += 1
    else:
        stop("to the host" if to_host else "to the device")


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    strangers = [tensor for tensor in tensors if not isinstance(tensor, SimTensor) and tensor.dim()]
    if strangers and name in INDEXED:
        stop("index to the device")
    elif strangers:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but got cpu and sim:0 in {name}"
        )


def _count_waits(name: str, args: tuple, kwargs: dict) -> None:
    if name in VALUE_DEPENDENT:
        stop(name)
    elif name in INDEXED:
        masks = [
            part for part in args[1] if part is not None and part.dtype in (torch.bool, torch.uint8)
        ]
        # those become masked_fill
        if masks and not (name.startswith("aten::index_put") and args[2].dim() == 0):
            stop("mask as index")
    elif (
        name == "aten::repeat_interleave"
        and kwargs.get("output_size") is None
        or name == "aten::isin"
        and _sorts(*args[:2])
    ):
        stop(name)


def _sorts(elements: Any, tests: Any) -> bool:
    """Whether ``isin`` takes the way by ``unique``, by its own rule."""
    if not (isinstance(elements, Tensor) and isinstance(tests, Tensor)):
        return False
    return tests.numel() >= 10 * elements.numel() ** 0.145


def _registered(name: str, overload: str) -> None:
    """Let the device have a factory function of its own."""
    func = getattr(getattr(torch.ops.aten, name), overload)
    full = name if overload == "default" else f"{name}.{overload}"
    _ATEN.impl(full, lambda *args, **kwargs: operate(func, args, kwargs), "PrivateUse1")


def _on_the_way(make: Callable) -> Callable:
    """``torch.tensor`` and its like: values are put together on the host and copied."""

    def called(values: Any, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if isinstance(values, SimTensor) or device is None or torch.device(device).type != "sim":
            if make is not torch.tensor and isinstance(values, SimTensor):
                known = {key: value for key, value in kwargs.items() if value is not None}
                return values.to(**known) if known else values
            return make(values, *args, **kwargs)
        needs_grad = kwargs.pop("requires_grad", False)
        return (
            make(values, *args, **kwargs | {"device": "cpu"}).to(device).requires_grad_(needs_grad)
        )

    return called


class SimModule:
    """``torch.sim``: what torch, accelerate and diffusers ask of a device's module."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        """Nothing: random numbers of the device are those of the CPU's generator."""
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("sim", backend_module=SimModule())
# parameters stay the objects an optimizer knows
torch.__future__.set_swap_module_params_on_conversion(True)
_ANY = torch.library.Library("_", "IMPL")
_ANY.fallback(lambda func, *args, **kwargs: operate(func, args, kwargs), "PrivateUse1")
_ATEN = torch.library.Library("aten", "IMPL")
for _name, _overload in (
    ("empty", "memory_format"),
    ("empty_strided", "default"),
    ("arange", "default"),
    ("arange", "start"),
    ("arange", "start_step"),
    ("linspace", "default"),
    ("logspace", "default"),
    ("randperm", "default"),
    ("randperm", "generator"),
    ("eye", "default"),
    ("eye", "m"),
    ("tril_indices", "default"),
    ("triu_indices", "default"),
):
    _registered(_name, _overload)
_device_constructors()  # remembers torch's own, which `with torch.device(...)` looks for
torch.tensor = _on_the_way(torch.tensor)
torch.as_tensor = _on_the_way(torch.as_tensor)
