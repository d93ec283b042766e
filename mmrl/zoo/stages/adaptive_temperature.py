"""Adapts temperatures to the entropy (HAPO): measures the scale of an iteration's entropies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from mmrl.core.decisions import entropy_scale
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES
from mmrl.policies.base import Policy
from mmrl.policies.contracts import WarpsLogits
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage
from samplers.warp import EntropyScale


@STAGES.register("adaptive_temperature")
class AdaptiveTemperature(Stage):
    """Gives the policy the scale of the previous iteration's entropies
    (``policy.adaptive_temperature``).

    In the first iteration there is none, and the temperature is the same for all tokens.
    """

    saved_as = "adaptive_temperature"
    asked_by = "the policy's option adaptive_temperature"

    def __init__(self, policy: Policy):
        self.policy = policy
        self.scale: EntropyScale | None = None

    @classmethod
    def build(cls, setup: Setup) -> AdaptiveTemperature | None:
        policy = setup.policy
        if not isinstance(policy, WarpsLogits) or not policy.warp or not policy.warp.adaptive:
            return None
        if not setup.policy.record_entropy:
            raise UserError(
                "policy option adaptive_temperature follows the entropies of the iteration before: "
                "set the policy's option record_entropy to true"
            )
        return cls(setup.policy)

    def begin(self, iteration: int) -> None:
        policy: Any = self.policy
        policy.warp = replace(policy.warp, scale=self.scale)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        """Measure the entropies for the next iteration; all groups stay."""
        self.scale = entropy_scale(drawn.rollout)
        median = 0.0 if self.scale is None else self.scale.median
        return drawn, {"adaptive_temperature/median_log_entropy": median}

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        return {}, None if self.scale is None else asdict(self.scale)

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        self.scale = EntropyScale(**plain) if plain else None
