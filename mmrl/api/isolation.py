"""Keeps calls of the Python API from leaving traces in the program around them."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mmrl.config.overrides import WRITTEN_IN
from mmrl.core.registry import ALL, IN_PYTHON, Registry, load_built_in

# plug-ins that exist only in Python: kind -> name -> class or function
Live = Mapping[str, Mapping[str, Any]]
OURS = ("mmrl", "rewards", "samplers", "__main__")
# one call at a time: torch's global settings belong to the process
LOCK = threading.RLock()
# tqdm's warning in notebooks without ipywidgets: mmrl draws its own progress
warnings.filterwarnings("ignore", message="IProgress not found")


def live_name(name: str) -> str:
    """Return the configuration name of a plug-in that exists only in Python."""
    return f"{IN_PYTHON}:{name}"


@contextmanager
def isolated(live: Live | None = None, quiet: bool = False) -> Iterator[None]:
    """Restore, after the block, what training changes in a process: random generators, torch's
    threads and deterministic flags, the environment, ``sys.path``, and what plug-ins have
    registered.

    Modules from a user's folder are unloaded, so that the next call reads the current files.
    ``live``: plug-ins that can be named inside the block, by ``live_name``. ``quiet``: nothing is
    printed.
    """
    with LOCK, ExitStack() as held:
        held.callback(WRITTEN_IN.reset, WRITTEN_IN.set("overrides"))
        load_built_in()
        held.callback(_forget, _known_entries(), set(sys.modules), list(sys.path))
        held.callback(_restore_environment, dict(os.environ))
        held.callback(_restore_torch, _torch_settings())
        held.callback(random.setstate, random.getstate())
        held.callback(np.random.set_state, np.random.get_state())
        held.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            held.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        for kind, entries in (live or {}).items():
            ALL[kind].update({live_name(name): entry for name, entry in entries.items()})
        if quiet:
            held.enter_context(redirect_stdout(StringIO()))
        yield


def _known_entries() -> dict[str, dict[str, Any]]:
    return {kind: dict(registry) for kind, registry in ALL.items()}


def _forget(known: Mapping[str, Mapping[str, Any]], modules: set[str], path: list[str]) -> None:
    """Unload the modules imported from a user's folders, and unregister their plug-ins."""
    folders = {Path(place or ".").resolve() for place in {*sys.path} - {*path}} | {Path.cwd()}
    new = [name for name in set(sys.modules) - modules if _is_users(sys.modules[name], folders)]
    for kind, registry in ALL.items():
        _forget_entries(registry, known[kind], set(new))
    for name in new:
        del sys.modules[name]
    sys.path[:] = path


def _forget_entries(registry: Registry, known: Mapping[str, Any], modules: set[str]) -> None:
    """Drop from a registry the entries that exist only in Python or come from these modules."""
    for name, entry in list(registry.items()):
        foreign = name.startswith(f"{IN_PYTHON}:") or getattr(entry, "__module__", "") in modules
        if foreign and name not in known:
            del registry[name]
    registry.update(known)


def _is_users(module: ModuleType, folders: set[Path]) -> bool:
    """Tell whether a module is a user's file, neither installed nor mmrl's."""
    file = vars(module).get("__file__")
    if not file or module.__name__.partition(".")[0] in OURS or "site-packages" in file:
        return False
    with suppress(OSError, ValueError):
        place = Path(file).resolve()
        return any(place.is_relative_to(folder) for folder in folders)
    return False


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _torch_settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


def _restore_torch(before: Mapping[str, Any]) -> None:
    if torch.get_num_threads() != before["threads"]:
        torch.set_num_threads(before["threads"])
    torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn_only"])
    torch.backends.cudnn.deterministic = before["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = before["cudnn_benchmark"]
    torch.set_float32_matmul_precision(before["precision"])
    torch.set_default_dtype(before["dtype"])
    torch.set_grad_enabled(before["grad"])
