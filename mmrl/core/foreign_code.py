"""Prevents Python code in a model's folder from running, and libraries from prompting about it.

transformers prompts if a folder has code and ``trust_remote_code`` is not set; diffusers and others
read ``trust_remote_code`` from files of the folder. While a model is loaded by
``mmrl.core.pretrained``, both go through the check below. Trusted classes written for transformers
4 are adapted here to transformers 5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.registry import is_safe

# modules with the function by which libraries import the code of a folder
IMPORTERS = ("transformers.dynamic_module_utils", "diffusers.utils.dynamic_modules_utils")
IMPORT = "get_class_in_module"
# libraries' messages about a folder whose code may not run
COMPLAINTS = ("custom code", "trust_remote_code", "remote code")
_refused: ContextVar[bool] = ContextVar("foreign_code_refused", default=False)


class ForeignCode(UserError):
    """Signals that a folder's Python code was not run."""


@contextmanager
def guarded(trusted: bool = False) -> Iterator[None]:
    """Refuse code of a folder while a model is loaded, unless it is ``trusted``; under ``--safe``
    it never is. Other threads and callers are not affected."""
    if trusted and is_safe():
        raise ForeignCode(
            "remote_code: true runs Python code of the model's folder, which --safe refuses; read "
            "that code, then run without --safe (and MMRL_SAFE), or take a model without code"
        )
    _guard_libraries()
    before = _refused.set(not trusted)
    try:
        yield
    finally:
        _refused.reset(before)


def is_about_code(error: BaseException) -> bool:
    """Tell whether a library complains that a folder's code may not run."""
    return isinstance(error, ForeignCode) or any(words in str(error) for words in COMPLAINTS)


def _guard_libraries() -> None:
    """Patch the check into the functions that import code of folders, once."""
    for name in IMPORTERS:
        module = sys.modules.get(name)
        if module is None:  # a library that is not loaded runs nothing
            continue
        importer = getattr(module, IMPORT)
        if not hasattr(importer, "__wrapped__"):
            setattr(module, IMPORT, _checked(importer))
        if hasattr(module, "TIME_OUT_REMOTE_CODE"):
            # seconds that transformers waits for an answer at the terminal; 0: it does not ask
            module.__dict__["TIME_OUT_REMOTE_CODE"] = 0


def _checked(importer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(importer)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _refused.get():
            raise ForeignCode("it needs custom code of its folder, which is not run")
        return _finished(importer(*args, **kwargs))

    return call


def _finished(cls: Any) -> Any:
    """Call ``post_init`` after the constructor of a class that never calls it, which transformers
    before 5 did not require (LLaDA, MMaDA and others of their time)."""
    from transformers import PreTrainedModel

    if not issubclass(cls, PreTrainedModel) or "__init__" not in vars(cls):
        return cls
    make = cls.__init__

    @wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if type(self) is cls and "all_tied_weights_keys" not in vars(self):
            self.post_init()

    if not hasattr(make, "__wrapped__"):
        cls.__init__ = init
    return cls
