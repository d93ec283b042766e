"""Sets how the numeric libraries wait and round: they read these settings when torch is loaded, so
they come before it.

Nothing here changes what the user has set. ``docs/speed.md`` says what was measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

# A thread of libgomp that waits for the others spins so often before it sleeps. libgomp's own
# 300,000 are
# milliseconds, which a busy machine needs for the thread that is waited for.
SPIN_IDLE = "5000"
SPIN_BUSY = "1000"
BUSY = 0.25  # share of all cores that others use
STAT = Path("/proc/stat")
CPUINFO = Path("/proc/cpuinfo")


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set yet: how long threads spin, and, on Intel's CPUs, products whose rows are
    rounded independently of each other.

    Without the latter MKL rounds a row of a product in one way or another by its place among the
    others.
    """
    if (
        not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment)
        and environment.get("OMP_NUM_THREADS") != "1"
    ):
        environment["GOMP_SPINCOUNT"] = SPIN_BUSY if share_in_use() > BUSY else SPIN_IDLE
    if is_intel():
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")


def share_in_use(stat: Path = STAT, pause: float = 0.1) -> float:
    """Measure for ``pause`` seconds which share (0 to 1) of all cores is in use by other processes,
    since this one sleeps; 0 where Linux does not say."""
    try:
        idle, every = _ticks(stat)
        time.sleep(pause)
        idle_after, every_after = _ticks(stat)
    except (OSError, ValueError):
        return 0.0
    passed = every_after - every
    return 1 - (idle_after - idle) / passed if passed > 0 else 0.0


def _ticks(stat: Path) -> tuple[int, int]:
    """Return the ticks since the machine began: idle (waiting for disks included), and all."""
    counts = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return counts[3] + counts[4], sum(counts)


def is_intel(cpuinfo: Path = CPUINFO) -> bool:
    """Tell whether Linux says that the CPU is Intel's; False where it says nothing."""
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False
