"""Builds C++ code of ours by the inductor's compiler, for CPUs with AVX-512, when it is first
asked for; where that cannot be, torch's own kernels serve."""

from __future__ import annotations

import ctypes
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SHARED = Path(__file__).with_name("vectors.h")


def able() -> bool:
    """Tell whether code of ours can run here, if it can be built."""
    return sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def library(source: Path, definition: str = "") -> ctypes.CDLL | None:
    """Build a source behind what all share and a line of definition; None, with a warning: it
    cannot be built here."""
    from torch._inductor.codecache import CppCodeCache

    try:
        built: ctypes.CDLL = CppCodeCache.load(
            f"{SHARED.read_text()}\n{definition}\n{source.read_text()}"
        )
    except Exception as error:  # a compiler's, of any kind
        warnings.warn(
            f"policy option compile: {source.name} is not built, torch's own kernels are taken "
            f"({str(error)[:300]})",
            stacklevel=2,
        )
        return None
    return built


def at(x: Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's first number, which is float32."""
    if x.dtype != torch.float32:
        raise TypeError(f"code of ours computes in float32, not in {x.dtype}")
    return ctypes.c_void_p(x.data_ptr())


def threads() -> ctypes.c_long:
    """Return how many threads torch would take."""
    return ctypes.c_long(torch.get_num_threads())
