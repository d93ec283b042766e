"""Implements ``mmrl doctor``: reports what is installed, what is missing and what to type; missing
optional parts are no failure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from mmrl.core.machine import cores, cpu_model, memory_gib, version
from mmrl.core.paths import PACKAGE, cache_dir

Status = Literal["ok", "warn", "missing"]
OPTIONAL = {
    "xformers": "memory-efficient attention on CUDA",
    "flash-attn": "FlashAttention kernels",
    "wandb": "W&B logs",
    "trackio": "trackio logs",
    "mlflow": "MLflow logs",
    "swanlab": "SwanLab logs",
}
DISTRIBUTION = "multimodal-rl"  # on the package index "mmrl" is another project
LITTLE_DISK = 5.0  # GiB; a checkpoint of a large model needs more


class Check(NamedTuple):
    """Holds one line of the report; ``remedy`` is a command or an action, empty when all is
    well."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def diagnose() -> list[Check]:
    """Run every check, in reading order. A check that raises is reported as a warning."""
    groups = (
        check_python,
        check_packages,
        check_optional,
        check_devices,
        check_precision,
        check_attention,
        check_places,
    )
    return [line for group in groups for line in _guarded(group)]


def print_report() -> bool:
    """Print the checks as a table; return False if something required is missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    checks = diagnose()
    for line in checks:
        detail = Text(line.detail)
        if line.remedy:
            detail.append(f"\n-> {line.remedy}", style=colours[line.status])
        table.add_row(
            Text(line.status, style=colours[line.status]), Text(line.name, style="bold"), detail
        )
    console = Console()
    console.print(table)
    missing = [line.name for line in checks if line.status == "missing"]
    warned = sum(line.status == "warn" for line in checks)
    console.print()
    console.print(
        Text(f"missing: {', '.join(missing)}" if missing else f"ready; {warned} warning(s)")
    )
    console.print(Text("documentation: mmrl docs; the first hour: mmrl docs start"))
    return not missing


def check_python() -> list[Check]:
    text = f"{platform.python_version()} at {sys.executable}"
    good = sys.version_info >= (3, 11)
    return [
        Check(
            "python",
            "ok" if good else "missing",
            text,
            "" if good else "install Python 3.11 or newer",
        )
    ]


def requirements() -> list[str]:
    """Return the requirements of pyproject.toml without extras: from the checkout, else from the
    installed metadata."""
    file = PACKAGE.parent / "pyproject.toml"
    project = (
        tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    )
    if project.get("name") == DISTRIBUTION:
        return list(project["dependencies"])
    declared = importlib.metadata.requires(DISTRIBUTION) or []
    return [line for line in declared if "extra ==" not in line]


def check_packages() -> list[Check]:
    return [_package(requirement) for requirement in requirements()]


def _package(requirement: str) -> Check:
    name = next(
        (requirement[:i] for i, c in enumerate(requirement) if not (c.isalnum() or c in "_-.")),
        requirement,
    )
    requirement_range = requirement[len(name) :].strip()
    installed = version(name)
    remedy = f'pip install "{requirement}"'
    if installed is None:
        return Check(name, "missing", "not installed", remedy)
    if requirement_range and not _satisfies(installed, requirement_range):
        return Check(name, "missing", f"{installed}, but {requirement_range} is needed", remedy)
    return Check(name, "ok", installed)


def _satisfies(installed: str, specifier: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # installed, but its version is unknown
        return True
    return SpecifierSet(specifier.partition(";")[0]).contains(installed, prereleases=True)


def check_optional() -> list[Check]:
    """Check the optional extras."""
    versions = {name: version(name) for name in OPTIONAL}
    return [
        Check(name, "ok", versions[name] or f"not installed (optional: {use})")
        for name, use in OPTIONAL.items()
    ]


def check_devices() -> list[Check]:
    memory = memory_gib()
    threads = os.environ.get("OMP_NUM_THREADS")
    cpu = f"{cpu_model()}, {cores()} cores" + (f", {memory} GiB" if memory else "")
    lines = [Check("cpu", "ok", cpu + (f", OMP_NUM_THREADS={threads}" if threads else ""))]
    if not _there("torch"):
        return lines
    import torch

    for i in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(i)
        free, total = torch.cuda.mem_get_info(i)
        lines.append(
            Check(f"cuda:{i}", "ok", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        )
    if not torch.cuda.is_available():
        lines.append(_no_cuda(torch.version.cuda))
    if torch.backends.mps.is_available():
        lines.append(Check("mps", "ok", "Apple GPU available"))
    return lines


def _no_cuda(built_for: str | None) -> Check:
    if shutil.which("nvidia-smi"):
        remedy = (
            "install a torch build that fits the driver: https://pytorch.org/get-started/locally"
        )
        return Check(
            "cuda",
            "warn",
            f"there is an NVIDIA driver, but torch (CUDA {built_for}) cannot use it",
            remedy,
        )
    return Check("cuda", "ok", "no device; the digits world needs none, large models do")


def check_precision() -> list[Check]:
    """Tell whether bf16 arithmetic works by trying it."""
    if not _there("torch"):
        return []
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(8, 8, device=device)
    with torch.autocast(device, torch.bfloat16):
        works = (x @ x).dtype == torch.bfloat16
    good, bad = "autocast works on cpu", "autocast fails; use fp32"
    if device == "cuda":
        works = torch.cuda.is_bf16_supported(including_emulation=False)
        good, bad = "in hardware", "emulated: use fp16 or fp32"
    return [Check("bf16", "ok", good) if works else Check("bf16", "warn", bad)]


def check_attention() -> list[Check]:
    if not _there("torch"):
        return []
    import torch

    cuda = torch.backends.cuda
    flags = {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    where = "" if torch.cuda.is_available() else " (on this CPU: torch's own choice)"
    lines = [
        Check(
            "sdpa", "ok", "allowed: " + ", ".join(name for name, on in flags.items() if on) + where
        )
    ]
    # importing it without a GPU only prints warnings
    if torch.cuda.is_available() and _there("xformers"):
        lines.append(_imports("xformers.ops"))
    return lines


def _imports(module: str) -> Check:
    try:
        importlib.import_module(module)
    except Exception as error:
        remedy = "install the build that matches torch: pip install -U xformers"
        return Check(module, "warn", f"installed, but cannot be imported: {error}", remedy)
    return Check(module, "ok", "imports")


def check_places() -> list[Check]:
    cache = cache_dir()
    offline = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_HOME")}
    hub = ", ".join(f"{name}={value}" for name, value in offline.items() if value) or (
        "online use allowed (not tried)"
    )
    return [
        _place("runs", Path("runs").absolute(), "start mmrl in a folder you may write to"),
        _place("cache", cache, "set MMRL_CACHE to a folder you may write to"),
        Check("cached", "ok", _contents(cache)),
        Check("hub", "ok", hub),
    ]


def _place(name: str, folder: Path, remedy: str) -> Check:
    """Check whether a folder is writable and how much space is left; leave no files behind, not
    even the folder."""
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free / 2**30
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(name, "missing", f"cannot write to {existing}: {error.strerror}", remedy)
    if free < LITTLE_DISK:
        return Check(
            name, "warn", f"{folder}, only {free:.1f} GiB free", "make room, or choose another disk"
        )
    return Check(name, "ok", f"{folder}, {free:.0f} GiB free")


def _contents(cache: Path) -> str:
    """List what worlds have built so far: ``digits/sd3-1f2e (9.1 MiB)``."""
    if not cache.is_dir():
        return "nothing yet"
    files: dict[str, int] = {}
    for path in cache.rglob("*"):
        if path.is_file():
            top = "/".join(path.relative_to(cache).parts[:-1][:2]) or path.name
            files[top] = files.get(top, 0) + path.stat().st_size
    return (
        ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in sorted(files.items()))
        or "nothing yet"
    )


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _guarded(group: Callable[[], list[Check]]) -> list[Check]:
    try:
        return group()
    except Exception as error:  # a half-installed package may raise anything on import
        return [
            Check(group.__name__.removeprefix("check_"), "warn", f"could not be checked: {error!r}")
        ]
