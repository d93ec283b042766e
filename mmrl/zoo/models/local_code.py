"""Runs model code that comes with a user's weights, if the user trusts it."""

from __future__ import annotations

import inspect
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.registry import import_name
from mmrl.policies.lora import merged, save_model

LIBRARIES = ("mmrl", "transformers", "diffusers", "torch")  # whose code pip knows already


def build(name: str, trusted: bool, *arguments: Any) -> Any:
    """Call ``file.py:function`` with ``arguments``, and return what it makes. UserError where the
    code is not trusted, which is the case until ``remote_code`` is true."""
    if not trusted:
        raise UserError(
            f"policy option code: {name!r} is Python code that comes with a model: read it, then "
            f"set the policy's option remote_code to true, which runs it"
        )
    return import_name(name, "model")(*arguments)


def files_of(made: Any) -> dict[str, str]:
    """List the Python files beside the one in which the class of ``made`` is written, that itself
    included, as far as they were imported: their paths from its folder, and the SHA-256 of each.
    Nothing for classes of installed libraries."""
    module = sys.modules.get(type(made).__module__)
    if module is None or module.__name__.partition(".")[0] in LIBRARIES:
        return {}
    place = _file(module)
    if place is None:
        return {}
    imported = {_file(known) for known in list(sys.modules.values())}
    beside = [file for file in imported if file is not None and place.parent in file.parents]
    return {
        str(file.relative_to(place.parent)): sha256(file.read_bytes()).hexdigest()
        for file in sorted(beside)
    }


def save(net: Any, folder: Path) -> None:
    """Write weights as the model's own ``save_pretrained`` does; without one the state dict of what
    the code builds, adapters added to its weights, as ``model.safetensors``."""
    if hasattr(net, "save_pretrained"):
        save_model(net, folder)
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in merged(net).items()}
    save_file(state, folder / "model.safetensors")


def note(files: dict[str, str]) -> tuple[str, ...]:
    """Say which code runs, for the run's log."""
    if not files:
        return ()
    names = ", ".join(f"{name} (SHA-256 {digest[:12]})" for name, digest in files.items())
    return (f"remote_code: this run executes code of the model's author: {names}",)


_files: dict[str, Path | None] = {}  # by what modules say: a program has thousands of them


def _file(module: ModuleType) -> Path | None:
    name = vars(module).get("__file__")
    if not isinstance(name, str):  # built into Python
        return None
    if name not in _files:
        source = inspect.getsourcefile(module)
        path = None if source is None else Path(source).resolve()
        _files[name] = path if path is not None and path.is_file() else None
    return _files[name]
