"""Lets a package be called like a function.

``mmrl.train`` is the room of the training loop and also what a Python user calls. Python puts an
imported package into its parent under its own name, whatever stood there, so the package itself
answers the call.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """Is a module that hands calls to a function, imported with the first of them."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return called_for(self)(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the function, which help and notebooks show."""
        return inspect.signature(called_for(self))


def called_for(module: ModuleType) -> Any:
    """Import and return the function that stands behind a callable module."""
    place, name = vars(module)["_called"]
    return getattr(importlib.import_module(place), name)


def make_callable(module: str, place: str, name: str) -> None:
    """Let calls of the imported ``module`` go to the function ``name`` of the module ``place``."""
    package = sys.modules[module]
    vars(package)["_called"] = (place, name)
    package.__class__ = CallableModule
