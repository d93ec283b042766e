"""Lets a package be called like a function.

``mmrl.train`` is the package of the training loop and also the function that a Python user calls.
An imported package replaces any attribute of its name in the parent, so the package itself must be
callable.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module that forwards calls to a function, imported at the first call."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return called_for(self)(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the function, which help and notebooks show."""
        return inspect.signature(called_for(self))


def called_for(module: ModuleType) -> Any:
    """Import and return the function of a callable module."""
    place, name = vars(module)["_called"]
    return getattr(importlib.import_module(place), name)


def make_callable(module: str, place: str, name: str) -> None:
    """Forward calls of the imported ``module`` to the function ``name`` of the module ``place``."""
    package = sys.modules[module]
    vars(package)["_called"] = (place, name)
    package.__class__ = CallableModule
