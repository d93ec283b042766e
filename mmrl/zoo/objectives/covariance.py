"""Clip-Cov and KL-Cov: restrain the few tokens whose log-prob and advantage covary most.

Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models".
The covariance of a token is (log p - mean log p) (A - mean A), the means over all tokens of the
step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.distributed import all_gather_rows
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Fields, Point, Rollout
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.surrogates import without_slope
from mmrl.objectives.terms import OF_TOKENS, Scored, TopEntropy
from mmrl.policies.base import Policy
from samplers.noise import Rng

Share = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class HeldBack(Fields):
    """Holds which tokens of the step are held back."""

    held: Tensor  # [B, L] 1 for those held back


@dataclass(frozen=True, kw_only=True)
class Drawing(Fields):
    """Holds what chooses the tokens of the step that are held back."""

    draw: Tensor  # [B, L] uniform random numbers


class _Covariance(PolicyGradient):
    requires = replace(PolicyGradient.requires, decisions="categorical", proportional=False)
    term_types = tuple(term for term in OF_TOKENS if term is not TopEntropy)

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return torch.where(point.mask, policy.dist(point).log_prob(point.target), 0.0)

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Choose the tokens that are held back."""
        advantage = point.advantage.expand_as(measured)
        # [N, 2]
        every = all_gather_rows(torch.stack([measured[point.mask], advantage[point.mask]], 1))
        mean = every.mean(0)
        covariance = (measured - mean[0]) * (advantage - mean[1])
        chosen = (
            self.chosen((every - mean).prod(1), covariance, self._free(point, measured))
            & point.mask
        )
        observe("held_back", chosen.double(), point.mask)
        return point.replace(coupling=HeldBack(held=chosen.to(measured)))

    @abstractmethod
    def chosen(self, every: Tensor, covariance: Tensor, point: Point) -> Tensor:
        """Return [B, L] bool: those held back, given the covariances of all processes and its
        own."""

    def _free(self, point: Point, measured: Tensor) -> Point:
        """Return the point with the tokens of ``mask`` that may be held back: here all."""
        return point


@OBJECTIVES.register("clip_cov")
class ClipCov(_Covariance):
    """Clip the ratio and detach a random few tokens of high covariance (Clip-Cov).

    share: of all tokens of the step; tokens that the ratio's clip left without gradient are not
    drawn. low, high: bounds of their covariance. Others as in policy_gradient.
    """

    def __init__(self, share: Share = 2e-4, low: float = 1.0, high: float = 5.0, **options: Any):
        super().__init__(**options)
        self.share = share
        self.low = low
        self.high = high

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        for point in super().points(policy, rollout, rng):
            draw = rng.uniform(point.row_id, (point.mask.shape[1],)).to(point.logprob)
            yield point.replace(coupling=Drawing(draw=draw))

    def chosen(self, every: Tensor, covariance: Tensor, point: Point) -> Tensor:
        """Return the ``share`` with the smallest of their random numbers, among those in the
        window."""
        inside = (covariance > self.low) & (covariance < self.high) & point.mask
        draw = point.coupled(Drawing).draw
        draws = all_gather_rows(draw[inside]).sort().values
        count = min(max(int(self.share * len(every)), 1), len(draws))
        return inside & (draw <= draws[count - 1]) if count else torch.zeros_like(inside)

    def _free(self, point: Point, measured: Tensor) -> Point:
        """Exclude clipped tokens: holding them back would use up the share and change nothing."""
        recorded = torch.where(point.mask, point.recorded, 0.0)
        old = point.old(measured, recorded)
        advantage = self.surrogate.advantage(point)
        surrogate = self.surrogate.function
        clipped = without_slope(surrogate, measured, old, advantage, point.mask)
        return point.replace(mask=point.mask & ~clipped)

    def token_weight(self, at: Scored) -> Tensor:
        return 1 - held_back(at)


@OBJECTIVES.register("kl_cov")
class KLCov(_Covariance):
    """Penalise |log ratio| of the tokens of highest covariance, without a clip (KL-Cov).

    share: of all tokens of the step. weight: of |log ratio|. Others as in policy_gradient, which
    has no surrogate here.
    """

    not_options = ("surrogate", "clip_range")

    def __init__(self, share: Share = 2e-4, weight: Annotated[float, Ge(0)] = 1.0, **options: Any):
        super().__init__(**options)
        self.share = share
        self.weight = weight

    def chosen(self, every: Tensor, covariance: Tensor, point: Point) -> Tensor:
        count = min(max(int(self.share * len(every)), 1), len(every))
        return (
            covariance >= every.sort(descending=True).values[count - 1]
            if count
            else torch.zeros_like(point.mask)
        )

    def policy_loss(self, at: Scored) -> Tensor:
        observe("ratio", (at.logp - at.old).exp(), at.point.mask)
        penalty = self.weight * (at.logp - at.old).abs()
        return -at.advantage * (at.logp - at.old).exp() + held_back(at) * penalty


def held_back(at: Scored) -> Tensor:
    """Return [B, L]: 1 for the tokens that ``couple`` held back, 0 for all before it."""
    coupling = at.point.coupling
    return coupling.held if isinstance(coupling, HeldBack) else torch.zeros_like(at.logp)
