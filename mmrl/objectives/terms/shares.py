"""Terms that select and weight decisions: a share of a step's tokens, or of a row's timesteps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.types import Point, Rollout
from mmrl.objectives.decisions import of_high_entropy, subset
from mmrl.objectives.terms.base import Scored, Term
from mmrl.policies.base import Policy
from samplers.noise import Rng

Share = Annotated[float, Gt(0), Le(1)]


@dataclass
class TopEntropy(Term):
    """top_entropy: of tokens: only this share of the step's, those of highest entropy, has a policy
    gradient (Wang et al. 2025, "Beyond the 80/20 rule")."""

    top_entropy: Share = 1.0

    of = "tokens"
    regroups = True
    instead: ClassVar = {
        "top_entropy": "the entropy of a step is that of its noise: use timestep_fraction"
    }

    def moves_all(self) -> bool:
        return self.active()

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return the entropies [B, L]."""
        return torch.where(point.mask, policy.dist(point).entropy(), 0.0)

    def couple(self, point: Point, measured: Tensor) -> Point:
        return of_high_entropy(point, measured, self.top_entropy)


@dataclass
class TimestepShare(Term):
    """timestep_fraction, timestep_selection: of steps of flow and diffusion models: how much of
    every row's decisions is trained on, and which."""

    timestep_fraction: Share = 1.0
    timestep_selection: Literal["first", "random"] = "first"

    of = "steps"
    instead: ClassVar = {
        "timestep_fraction": "tokens have no time: use top_entropy",
        "timestep_selection": "tokens have no time: use top_entropy",
    }

    def __post_init__(self) -> None:
        if not 0 < self.timestep_fraction <= 1:
            raise UserError(f"timestep_fraction must lie in (0, 1], not {self.timestep_fraction}")

    def trained(self, rollout: Rollout, rng: Rng) -> Rollout:
        """Leave only decisions that are trained on, ``timestep_fraction`` of every row's."""
        if self.timestep_fraction == 1:
            return rollout
        by_chance = rng if self.timestep_selection == "random" else None
        mask = subset(rollout.mask, self.timestep_fraction, by_chance, rollout.row_id)
        return rollout.replace(mask=mask)


@dataclass
class TimestepWeighting(Term):
    """timestep_weighting: "noise" multiplies the loss of a step by the noise injected there, so
    that the early, decisive steps count more (TempFlow-GRPO, He et al. 2025; its code is not
    public)."""

    timestep_weighting: Literal["even", "noise"] = "even"

    of = "steps"
    instead: ClassVar = {
        "timestep_weighting": "noise is for flow and diffusion models: use top_entropy"
    }

    def factor(self, at: Scored) -> Tensor | None:
        if self.timestep_weighting == "even":
            return None
        if not isinstance(at.dist, Gaussian):
            raise UserError(f"timestep_weighting {self.instead['timestep_weighting']}")
        return at.dist.row_std("weighs by a step's noise", "leave timestep_weighting out")
