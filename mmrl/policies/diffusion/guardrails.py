"""Handles the guardrail that Cosmos pipelines build themselves: the package ``cosmos_guardrail``,
which rejects prompts and blurs faces in decoded frames."""

from __future__ import annotations

import inspect
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.core import pretrained
from mmrl.core.errors import UserError

CHECKER = (
    "CosmosSafetyChecker"  # the class of the package, or its placeholder where it is not installed
)
PART = "safety_checker"  # the pipelines' name of it
REMEMBERED = 1 << 16  # texts


def builds_guardrail(cls: type) -> bool:
    """Tell whether a pipeline's class builds a guardrail by default."""
    return hasattr(inspect.getmodule(cls), CHECKER)


def loaded_with(cls: type, index: dict[str, Any], guardrail: bool) -> dict[str, Any]:
    """Return the replacement for a folder's safety checker when loading. UserError where there is
    no guardrail to disable."""
    if not guardrail:
        if not builds_guardrail(cls):
            raise no_guardrail(cls.__name__)
        return {PART: Passing()}
    return {PART: None} if PART in index else {}


def no_guardrail(pipeline: str) -> UserError:
    """Return the error that there is none to disable."""
    return UserError(
        f"policy option guardrail: {pipeline} has no guardrail that could be left out (those of "
        "Cosmos have one); leave it true"
    )


def missing(cls: type, path: str, error: ImportError) -> UserError:
    """Return in one sentence why a class could not be built."""
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
    """Cache a guardrail's verdicts on prompts, where the pipeline has one."""
    checker = getattr(pipe, PART, None)
    if builds_guardrail(type(pipe)) and not isinstance(checker, Passing):
        pipe.__dict__[PART] = Remembering(checker)
    return pipe


def save_without(cls: Any, place: str, parts: dict[str, Any], folder: Path) -> None:
    """Write a complete folder with these parts instead of its own. Like every Cosmos folder it
    lists no guardrail: diffusers builds one on loading."""
    pipe = pretrained.load_pipeline(cls, place, parts={**parts, PART: Passing()})
    pipe.register_modules(**{PART: None})
    pipe.save_pretrained(folder)


class Passing:
    """Replaces a guardrail that the user has disabled: every prompt passes, and every frame is
    unchanged."""

    def to(self, *_: Any, **__: Any) -> Passing:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames


class Remembering:
    """Calls a guardrail once per prompt, though a replay calls the pipeline in every step, and
    keeps it on the network's device only while it runs. Blocked frames become black."""

    def __init__(self, checker: Any):
        self.__dict__.update(_checker=checker, _device="cpu")
        self.__dict__["check_text_safety"] = lru_cache(REMEMBERED)(self._check_text)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pipelines check that it is their guardrail
        return type(self.__dict__["_checker"])

    def to(self, device: Any = None, *_: Any, **__: Any) -> Any:
        """Record the device that the pipeline requests."""
        if str(device) != "cpu":
            self.__dict__["_device"] = device
        return self

    def _check_text(self, prompt: str) -> bool:
        return bool(self._at_work(lambda checker: checker.check_text_safety(prompt)))

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        """Return frames uint8 [F, H, W, 3] after the guardrail."""
        shown = self._at_work(lambda checker: checker.check_video_safety(frames))
        return np.zeros_like(frames) if shown is None else np.asarray(shown)

    def _at_work(self, ask: Any) -> Any:
        checker = self.__dict__["_checker"]
        checker.to(self.__dict__["_device"])
        try:
            return ask(checker)
        finally:
            checker.to("cpu")
