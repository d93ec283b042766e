"""Handles the guardrail that pipelines of Cosmos build for themselves: the package
``cosmos_guardrail``, which rejects prompts and hides faces in what is decoded."""

from __future__ import annotations

import inspect
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.core import pretrained
from mmrl.core.errors import UserError

CHECKER = (
    "CosmosSafetyChecker"  # the class of the package, or what stands for it where it is absent
)
PART = "safety_checker"  # what pipelines call it
REMEMBERED = 1 << 16  # texts


def builds_guardrail(cls: type) -> bool:
    """Tell whether a pipeline's class builds a guardrail where none is given to it."""
    return hasattr(inspect.getmodule(cls), CHECKER)


def loaded_with(cls: type, index: dict[str, Any], guardrail: bool) -> dict[str, Any]:
    """Return what a pipeline is loaded with in place of a folder's safety checker. UserError where
    there is no guardrail to leave out."""
    if not guardrail:
        if not builds_guardrail(cls):
            raise no_guardrail(cls.__name__)
        return {PART: Passing()}
    return {PART: None} if PART in index else {}


def no_guardrail(pipeline: str) -> UserError:
    """Say that there is none to leave out."""
    return UserError(
        f"policy option guardrail: {pipeline} has no guardrail that could be left out (those of "
        "Cosmos have one); leave it true"
    )


def missing(cls: type, path: str, error: ImportError) -> UserError:
    """Say in one sentence why a class could not be built."""
    if builds_guardrail(cls):
        return UserError(
            f"policy path {path!r}: {cls.__name__} checks prompts and pictures by the package "
            "cosmos_guardrail, which is not installed; install it (pip install cosmos_guardrail; "
            "its weights are gated), or set policy option guardrail to false if you are allowed to "
            "run without it"
        )
    reason = str(error).strip().splitlines()[0]
    return UserError(f"policy path {path!r}: {cls.__name__} cannot be loaded: {reason}")


def remembered(pipe: Any) -> Any:
    """Let a pipeline's guardrail, where it has one, remember the prompts that it has read."""
    checker = getattr(pipe, PART, None)
    if builds_guardrail(type(pipe)) and not isinstance(checker, Passing):
        pipe.__dict__[PART] = Remembering(checker)
    return pipe


def save_without(cls: Any, place: str, parts: dict[str, Any], folder: Path) -> None:
    """Write a complete folder with these parts in place of its own. It names no guardrail, as any
    folder of Cosmos does: diffusers builds one when it loads it."""
    pipe = pretrained.load_pipeline(cls, place, parts={**parts, PART: Passing()})
    pipe.register_modules(**{PART: None})
    pipe.save_pretrained(folder)


class Passing:
    """Stands in for the guardrail where a user has said that there shall be none: every prompt
    passes, and every picture as it is."""

    def to(self, *_: Any, **__: Any) -> Passing:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames


class Remembering:
    """Asks a guardrail about each prompt once, though a replay calls the pipeline in every step,
    and moves it to the network's device only where it works. What it blocks becomes black."""

    def __init__(self, checker: Any):
        self.__dict__.update(_checker=checker, _device="cpu")
        self.__dict__["check_text_safety"] = lru_cache(REMEMBERED)(self._check_text)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pipelines ask whether it is their guardrail
        return type(self.__dict__["_checker"])

    def to(self, device: Any = None, *_: Any, **__: Any) -> Any:
        """Remember where the pipeline wants it."""
        if str(device) != "cpu":
            self.__dict__["_device"] = device
        return self

    def _check_text(self, prompt: str) -> bool:
        return bool(self._at_work(lambda checker: checker.check_text_safety(prompt)))

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        """Return frames uint8 [F, H, W, 3] as the guardrail gives them."""
        shown = self._at_work(lambda checker: checker.check_video_safety(frames))
        return np.zeros_like(frames) if shown is None else np.asarray(shown)

    def _at_work(self, ask: Any) -> Any:
        checker = self.__dict__["_checker"]
        checker.to(self.__dict__["_device"])
        try:
            return ask(checker)
        finally:
            checker.to("cpu")
