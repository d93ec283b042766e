"""Sets how MKL rounds on Intel CPUs, before torch is loaded, when MKL reads the setting."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make MKL round the rows of a product independently of each other; keeps a user's setting.

    Otherwise the rounding of a row depends on its position in the batch.
    """
    if is_intel():
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")


def is_intel(cpuinfo: Path = CPUINFO) -> bool:
    """Tell whether Linux reports an Intel CPU; False if unknown."""
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False
