"""Puts the ground truth into each group as one member (TempSamp-R1), and finds its writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called, suggest
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt
from mmrl.policies.base import RolloutContext
from mmrl.rollout.stages import Setup, Stage
from rewards.card import method_of

Writer = Callable[[Prompt], str | None]


@STAGES.register("ground_truth")
class GroundTruth(Stage):
    """Replaces one sample of every group by the ground truth (``train.ground_truth_rollout``)."""

    option = "ground_truth_rollout"
    effects = Effects(
        idle_without_samples=True,
        changes_sampling=True,
        exchanges_rows=True,
        in_dry_run=False,
    )

    def __init__(self, write: Writer):
        self.write = write

    @classmethod
    def build(cls, setup: Setup) -> GroundTruth | None:
        name = setup.options.ground_truth_rollout
        return cls(writer(name, setup.rewards)) if name else None

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not policy.capabilities.ground_truth:
            yield "", f"{called(policy)} takes no demonstrations; it is for vlm"

    def context(self, context: RolloutContext) -> RolloutContext:
        return replace(context, ground_truth=self.write)


def writer(name: str, rewards: Mapping[str, Any]) -> Writer:
    """Return the function that gives the ground truth of a prompt: from the reward, or else the
    prompt's field, of this name.

    It returns None where the reward or the prompt has none. Raises UserError if the reward knows no
    ground truths.
    """
    if name not in rewards:
        return lambda prompt: None if prompt.get(name) is None else str(prompt[name])
    write = method_of(rewards[name], "ground_truth")
    if write is None:
        able = [
            known_name
            for known_name, candidate in rewards.items()
            if method_of(candidate, "ground_truth")
        ]
        raise UserError(
            f"train.ground_truth_rollout: reward {name!r} cannot write down a ground "
            f"truth; {suggest(name, able)}"
        )
    return lambda prompt: _written(write, prompt)


def _written(write: Writer, prompt: Prompt) -> str | None:
    from rewards.answers.coords import Unscorable

    try:
        return write(prompt)
    except Unscorable:
        return None
