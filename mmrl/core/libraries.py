"""Looks up classes and number formats in libraries by the names that configurations and index files
use."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import torch

from mmrl.core.errors import UserError

Library = Literal["diffusers", "transformers"]


def torch_dtype(name: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for "bfloat16"."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def find_class(library: Library, name: str | None) -> Any:
    """Return what a library exports under a name; None if nothing."""
    return getattr(import_module(library), name or "-", None)


def library_class(library: Library, name: str) -> Any:
    """Return what a library exports under a name. UserError if it has nothing of that name."""
    if (cls := find_class(library, name)) is None:
        version = import_module(library).__version__
        raise UserError(f"{library} {version} has no {name!r}; another version may")
    return cls
