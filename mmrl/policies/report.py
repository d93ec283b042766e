"""What a policy reports of itself, for the log and the record of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Report:
    """Holds what a policy reports: sentences for the log, its foreign code and its work."""

    notes: tuple[str, ...] = ()  # sentences for the log, before training
    warnings: list[str] = field(default_factory=list)  # sentences for the log, during training
    # the files of code outside mmrl that make the model, with their SHA-256
    code: Mapping[str, str] = field(default_factory=dict)
    forwards: int = 0  # rows that went through the network so far
