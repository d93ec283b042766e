"""Defines what functions ask of a run and of a trainer that are given to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mmrl.api.isolation import Live


class RunLike(Protocol):
    """Is a run, such as ``mmrl.Run``."""

    folder: Path

    def live(self) -> Live:
        """Return the plug-ins that live in this Python session only."""


class TrainerLike(Protocol):
    """Is what trained a run, such as ``mmrl.Trainer``."""

    policy: Any

    @property
    def live(self) -> Live:
        """Return the plug-ins that live in this Python session only."""

    def train(self, *, resume: bool, accept_changes: bool, progress: bool) -> Any:
        """Train, or go on, and return the run."""
