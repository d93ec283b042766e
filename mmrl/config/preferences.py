"""Options of ``train.preferences``: preference pairs in the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.registry import declared


@dataclass(frozen=True)
class Preferences:
    """Trains on preference pairs in the data: nothing is sampled or rewarded.

    A prompt's group is the better and the worse of its two answers, and any objective that compares
    samples of a group by their likelihood or denoising error learns from it: dpo, ipo, simpo, kto,
    diffusion_dpo and others.

    ``chosen``: the field of a row with the better answer: a text (of a conversation the last turn
    counts), a picture or a video. ``rejected``: the field with the worse answer. ``path``: instead,
    a .jsonl file of lines {"prompt", "chosen", "rejected"}, as ``mmrl label`` and ``mmrl view
    --rate`` write it; of several lines for a prompt an iteration takes one at random, and prompts
    without any are left out of training. ``key``: the field of a row that "prompt" repeats.
    ``label``: instead, the field that labels a row's single answer as good (true, 1) or bad (false,
    0, -1), for kto; ``train.group_size`` is then 1. ``answer``: the field with that answer.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    path: Path | None = None
    key: str = "text"
    label: str | None = None
    answer: str = "answer"

    def __post_init__(self) -> None:
        if self.path is not None and self.label is not None:
            raise UserError("preferences: set either path, a .jsonl file of pairs, or label")
        if self.chosen == self.rejected:
            raise UserError("preferences: chosen and rejected name the same field")

    @property
    def group_size(self) -> int:
        """Return the number of answers of a prompt."""
        return 2 if self.label is None else 1


def unfit_for_preferences(
    preferences: Preferences, group_size: int, objective: Any, policy: Any
) -> Iterator[str]:
    """List sentences, each beginning with the key, about what cannot be trained on preferences.

    ``objective``: an object or a class; ``policy``: an object, a class or a factory.
    """
    from mmrl.policies.capabilities import capabilities_of
    from mmrl.policies.contracts import Demonstrates

    if group_size != preferences.group_size:
        has = "two answers" if preferences.label is None else "one answer"
        yield (
            f"train.group_size: {group_size}, but with train.preferences a prompt has {has}: set "
            f"it to {preferences.group_size}"
        )
    can = capabilities_of(policy)
    if can is not None and not Demonstrates.kept_by(policy):
        yield "train.preferences: this policy takes no demonstrations: it has no demonstrate"
    if not objective.requires.offline:
        yield (
            "train.preferences: the objective learns from what the policy samples itself; choose "
            "one that compares finished answers, such as dpo, ipo, simpo, kto, real or, for flow "
            "and diffusion models, diffusion_dpo or dgpo"
        )
    elif (
        can is not None
        and can.decisions == "gaussian"
        and objective.requires.reads != "sample"
        and declared(objective, "num_noise_draws", 1) is None
    ):
        yield (
            "train.preferences: the sampler's path to an external picture is unknown: "
            "set the objective's num_noise_draws, or choose diffusion_dpo"
        )
    if preferences.label is not None and not objective.requires.unpaired:
        yield (
            "train.preferences.label: the objective compares two answers to a prompt; choose kto, "
            "or give pairs"
        )
