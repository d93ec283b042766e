"""Sets how MKL rounds on Intel's CPUs: it reads the setting when torch is loaded, so this comes
before."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let MKL round the rows of a product independently of each other; what the user has set
    stays.

    Without it a row of a product is rounded in one way or another by its place among the others.
    """
    if is_intel():
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")


def is_intel(cpuinfo: Path = CPUINFO) -> bool:
    """Tell whether Linux says that the CPU is Intel's; False where it says nothing."""
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False
