"""How the numeric libraries wait and round: settings they read when torch is loaded, so they come before it.

Nothing here changes what the user has set. ``docs/speed.md`` says what was measured.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

# A thread of libgomp that waits for the others spins so often before it sleeps. libgomp's own 300,000 are
# milliseconds, which a busy machine needs for the thread that is waited for.
SPIN = "20000"
CPUINFO = Path("/proc/cpuinfo")


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set yet: how long threads spin, and on Intel's CPUs products whose rows do not see each other.

    Without the latter MKL rounds a row of a product in one way or another by its place among the others.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN)
    if is_intel():
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")


def is_intel(cpuinfo: Path = CPUINFO) -> bool:
    """Tell whether Linux says that the CPU is Intel's; False where it says nothing."""
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False
