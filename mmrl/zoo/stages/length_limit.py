"""Limits the length of answers by a schedule (``train.max_new_tokens_schedule``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmrl.core.effects import Effects
from mmrl.core.errors import called
from mmrl.core.registry import STAGES
from mmrl.policies.base import Policy
from mmrl.policies.contracts import LimitsLength
from mmrl.rollout.stages import Setup, Stage


@STAGES.register("length_limit")
class LengthLimit(Stage):
    """Sets the policy's limit of new tokens before every iteration."""

    option = "max_new_tokens_schedule"
    effects = Effects(changes_sampling=True, in_dry_run=False)

    def __init__(self, policy: Policy, schedule: Sequence[tuple[int, int]]):
        """Take the ``schedule``: pairs (first iteration, tokens), in the order of iterations."""
        self.policy = LimitsLength.of(policy)
        self.schedule = schedule

    @classmethod
    def build(cls, setup: Setup) -> LengthLimit | None:
        schedule = setup.options.max_new_tokens_schedule
        return cls(setup.policy, schedule) if schedule else None

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not LimitsLength.kept_by(policy):
            yield (
                "",
                f"{called(policy)} writes no answers whose length could change; it is for vlm",
            )

    def begin(self, iteration: int) -> None:
        due = [tokens for start, tokens in self.schedule if start <= iteration]
        if due:
            self.policy.set_max_new_tokens(due[-1])
