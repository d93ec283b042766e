"""Describes the machine of a measurement: processor, memory, accelerators, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from mmrl.core.version import __version__

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

PACKAGES = (
    "mmrl",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "open_clip_torch",
    "timm",
)


def peak_memory_gib() -> float | None:
    """Return the peak memory of this process in GiB: on the accelerator if it uses one, else
    resident; None if unknown."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated() / 2**30)
    if resource is None:
        return None
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes on macOS, KiB elsewhere
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def version(package: str) -> str | None:
    """Return the installed version from its metadata, without an import; None if not installed. For
    mmrl, whose distribution has another name, that of the running code."""
    if package == "mmrl":
        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the marketing name of the processor, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Count the logical cores this process may use, which a container or taskset may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float | None:
    """Return the physical memory in GiB."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def gpus() -> list[str]:
    """Return ``NVIDIA H200 (139.8 GiB)`` for each visible CUDA device; [] without torch or CUDA."""
    try:
        import torch

        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception:  # a broken driver must not stop a run from describing its machine
        return []
    return [f"{device.name} ({device.total_memory / 2**30:.1f} GiB)" for device in devices]


def commit() -> str | None:
    """Return the commit of the checkout mmrl is imported from, with ``+changes`` if the tree
    differs; None when installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changed else head or None


def command() -> str:
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program == "__main__.py":
        program = f"python -m {Path(sys.argv[0]).parent.name}"
        return " ".join([program, *map(shlex.quote, sys.argv[1:])])
    return shlex.join([program, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Describe machine, versions and command, JSON-ready; never raises."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": memory_gib(),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
        "command": command(),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _output(*words: str) -> str:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
