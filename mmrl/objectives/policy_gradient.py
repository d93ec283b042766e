"""The policy gradient on any decisions: a paper's surrogate of ratio and advantage, and a list of
terms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mmrl.config.compatibility import unsuited
from mmrl.core.distributions import Dist
from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES, SURROGATES
from mmrl.core.types import Point, Rollout, Surrogate
from mmrl.objectives.contracts import Couples
from mmrl.objectives.decisions import WHOLE, TokenWeights, one_pass
from mmrl.objectives.policy_loss import PolicyLoss
from mmrl.objectives.surrogates import Width, ppo
from mmrl.objectives.terms import TERMS
from mmrl.objectives.terms.base import Scored, decisions_of, in_one
from mmrl.objectives.terms.composed import Composed
from mmrl.policies.base import Policy
from samplers.noise import Rng


@OBJECTIVES.register("policy_gradient")
class PolicyGradient(Composed, Couples):
    """Follow the policy gradient on any decisions: GRPO, Flow-GRPO, DanceGRPO, DAPO, GSPO ...

    surrogate: the loss of ratio and advantage, one a paper. clip_range: of its ratio, one number or
    [low, high], overrides the surrogate's clip_low and clip_high. advantage_clip: bound on
    |A|. behavior_policy: the weights that sample. All other options are those of its terms.

    Surrogates of whole samples see all decisions of a row, in however many passes they are scored.
    """

    # evaluates decisions on the path: a sampler without noise has none
    requires = Requires(mixes=True, reads="decisions", visits=True, proportional=True)
    not_options: Collection[str] = ()
    term_types = TERMS

    def __init__(
        self,
        surrogate: Annotated[Surrogate, SURROGATES] = ppo,
        clip_range: float | tuple[float, float] | None = None,
        advantage_clip: Width | None = None,
        behavior_policy: str = "live",
        **options: Any,
    ):
        self.surrogate = PolicyLoss(surrogate, clip_range, advantage_clip)
        self.compose(options)
        self.clip_range = clip_range
        self.advantage_clip = advantage_clip
        self.behavior_policy = behavior_policy
        self.clip_bounds = self.surrogate.clip_bounds
        if self.surrogate.of_rows:
            self.requires = replace(self.requires, single_paths=True)

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        in_parts = self._in_parts(policy)
        for term in self.terms:  # options of a term without weight are checked too
            rest = (each for each in self.active if each is not term)
            coupled = in_parts or any(each.couples(policy) for each in rest)
            yield from term.unfit(policy, self.surrogate, coupled)
        mixed = decisions_of(policy) == "mixed" and self.surrogate.of_rows
        if mixed or (in_parts and self.couples(policy) != "rows"):
            yield "surrogate", f"it {WHOLE}"

    # What is trained on.

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if why := unsuited(type(self), policy):
            raise UserError(why)
        if self.requires.single_paths and rollout.edge_id is not None:
            raise UserError(
                "the objective compares whole samples, which share the steps of a tree: leave out "
                "the policy's option tree, or choose ppo, cispo, sapo, spo or reinforce, without "
                "off_policy and with importance_sampling of level token"
            )
        for point in policy.path(self.trained_share(rollout, rng)):
            if self.surrogate.of_rows and self.couples(policy) != "rows" and not one_pass(point):
                raise UserError(f"this surrogate {WHOLE}")
            yield point
        for term in self.active:
            yield from term.points(policy, rollout, rng)

    def trained_share(self, rollout: Rollout, rng: Rng) -> Rollout:
        """Leave only decisions that are trained on, with what terms need of them."""
        for term in self.active:
            rollout = term.trained(rollout, rng)
        return rollout

    # The loss of a decision.

    def loss(self, policy: Policy, point: Point) -> Tensor:
        for term in self.active:
            imitation = term.loss(policy, point)
            if imitation is not None:
                return imitation
        return self.loss_at(policy, point, policy.dist(point))

    def loss_at(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        """Compute the loss [B, L] of the decisions at a point from their distributions."""
        at = self.scored(policy, point, dist)
        # the gate measures the effect of rounding
        observe("log_ratio", at.logp - at.recorded, point.current())
        loss = self.policy_loss(at)
        for term in self.active:
            loss = term.substitute(loss, at)
        for weight in (self.token_weight(at), self._factor(at)):
            loss = loss if weight is None else loss * weight
        for term in self.active:
            loss = term.add(loss, at)
        return loss

    def policy_loss(self, at: Scored) -> Tensor:
        """Return [B, L]: the surrogate."""
        return self.surrogate(at.logp, at.old, at.point, self.clip_scale(at.point))

    def scored(self, policy: Policy, point: Point, dist: Dist) -> Scored:
        """Look up the log-probs of a point's decisions."""
        logp = torch.where(point.mask, dist.log_prob(point.target), 0.0)
        recorded = torch.where(point.mask, self.recorded(policy, point, logp), 0.0)
        old, advantage = point.old(logp, recorded), self.surrogate.advantage(point)
        return Scored(policy, point, dist, logp, recorded, old, advantage)

    def recorded(self, policy: Policy, point: Point, logp: Tensor) -> Tensor:
        """Return [B, L]: log-probs under the sampling weights."""
        return point.recorded

    def clip_scale(self, point: Point) -> Tensor | float:
        """Return the factor on the clip of the ratio: the policy's, as modified by the terms."""
        scale: Tensor | float = 1.0 if point.clip_scale is None else point.clip_scale
        for term in self.active:
            scale = term.widen(scale, point)
        return scale

    def token_weight(self, at: Scored) -> Tensor | None:
        """Return how much the policy gradient of every token counts, [B, L]; None: 1."""
        coupling = at.point.coupling
        return coupling.weight if isinstance(coupling, TokenWeights) else None

    def _factor(self, at: Scored) -> Tensor | None:
        """Return the factor on the policy loss, [B, 1] or [B, L]; None: 1."""
        product = None
        for factor in (term.factor(at) for term in self.active):
            if factor is not None:
                product = factor if product is None else product * factor
        return product

    # Losses of several points: of a term, or of a surrogate of rows that take several passes.

    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        which = (coupled for term in self.active if (coupled := term.couples(policy)))
        return next(which, "rows" if self._in_parts(policy) else "")

    def _in_parts(self, policy: Any) -> bool:
        """Tell whether the surrogate needs whole rows, which this policy scores in several
        passes."""
        return self.surrogate.of_rows and not in_one(policy)

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return what the first term that couples needs; or [B, 3 L] log-probs, old ones, and
        weights in the mean of the loss."""
        for term in self.active:
            if term.regroups:
                return term.measure(policy, point)
        at = self.scored(policy, point, policy.dist(point))
        weight = point.mask.to(at.logp)
        for factor in (self._factor(at), point.weight, point.estimator_weight):
            weight = weight if factor is None else weight * factor
        return torch.cat([at.logp, at.old, weight], 1)

    def couple(self, point: Point, measured: Tensor) -> Point:
        for term in self.active:
            if term.regroups:
                return term.couple(point, measured)
        return self.surrogate.tangent(point, measured)
