"""Defines the interfaces of runs and trainers passed to functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mmrl.api.isolation import Live


class RunLike(Protocol):
    """A run, such as ``mmrl.Run``."""

    folder: Path

    def live(self) -> Live:
        """Return the plug-ins that exist only in this Python session."""


class TrainerLike(Protocol):
    """The trainer of a run, such as ``mmrl.Trainer``."""

    policy: Any

    @property
    def live(self) -> Live:
        """Return the plug-ins that exist only in this Python session."""

    def train(self, *, resume: bool, accept_changes: bool, progress: bool) -> Any:
        """Train, or resume, and return the run."""
