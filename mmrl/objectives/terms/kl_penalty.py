"""The term that holds the policy near the reference, in the loss or in the reward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.distributions import Dist
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.types import Rewards, Rollout, Transition
from mmrl.core.weights import Weights
from mmrl.objectives.base import frozen
from mmrl.objectives.kl import KL, KLTerm
from mmrl.objectives.policy_loss import PolicyLoss
from mmrl.objectives.terms.base import Scored, Term, decisions_of
from mmrl.policies.base import Policy
from mmrl.policies.capabilities import capabilities_of
from mmrl.policies.contracts import Remasks


@dataclass
class KLPenalty(Term):
    """kl: weight of the KL to the reference, or all its options."""

    kl: Annotated[float, Ge(0)] | KL = 0.0

    def __post_init__(self) -> None:
        self.held = KLTerm(self.kl)  # the weight in force, and the reference
        self.kl = self.options = self.held.options

    def active(self) -> bool:
        return self.held.active

    def in_loss(self) -> bool:
        return self.held.active and self.options.where == "loss"

    moves_all = in_loss

    def snapshots(self) -> tuple[str, ...]:
        if not self.held.active:
            return ()
        return (self.held.name, "old") if self.options.previous else (self.held.name,)

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        can = capabilities_of(policy)
        decisions = decisions_of(policy)
        kl = self.options
        if decisions == "categorical" and kl.form == "flow_grpo":
            yield "kl", "the form flow_grpo is for flow models; use k3 or exact"
        if can is not None and can.makes == "text" and kl.ref_guidance is not None:
            yield "kl", "ref_guidance is for models with classifier-free guidance: leave it out"
        one_by_one = decisions == "categorical" and not Remasks.kept_by(policy)
        if one_by_one and kl.whole():
            yield (
                "kl",
                f"the divergence {kl.divergence} is not exact over tokens that are scored "
                "one by one; use forward or chi2 without a form, or reverse",
            )
        if decisions == "mixed" and (kl.form == "flow_grpo" or kl.whole()):
            yield "kl", "its form and divergence are of one kind of decisions: use reverse"

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        if not self.held.in_force() or self.options.where != "loss":
            return loss
        return loss + self.held.weight() * self.distance(at)

    def distance(self, at: Scored) -> Tensor:
        """Return [B, L]: how far the policy is from the reference."""
        kl = self._far(self.held.reference_at(at.policy, at.point), at)
        observe("kl", kl, at.point.sampled_mask())
        if self.options.previous:
            gone = self._far(frozen(at.policy, "old", at.point), at)
            observe("kl_old", gone, at.point.sampled_mask())
            kl = torch.lerp(kl, gone, self.options.previous)
        if self.options.form == "flow_grpo":
            step = at.point.step
            if not isinstance(step, Transition):
                raise UserError("kl: the form flow_grpo is for flow models; use exact")
            kl = kl * (step.time - step.next_time)[:, None]
        if not self.options.corrected:
            return kl
        ratio = (at.logp - at.old).exp()
        # the gradient of the other estimators is complete already
        return kl * (ratio if self.options.divergence == "reverse" else ratio.detach())

    def _far(self, reference: Dist, at: Scored) -> Tensor:
        """Return [B, L]: the divergence from a snapshot's distribution."""
        mask = at.point.mask
        ref = torch.where(mask, reference.log_prob(at.point.target), 0.0)
        if self.options.reweigh is not None:
            ref = ref + torch.where(mask, at.advantage / self.options.reweigh, 0.0)
        return torch.where(mask, self.options.of(at.dist, reference, at.logp, ref), 0.0)

    @torch.no_grad()
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Return the rewards, minus the KL of every sampled sequence with ``where: reward``."""
        if self.options.where != "reward":
            return rewards
        return self.held.in_reward(policy, rollout, rewards)

    def begin_iteration(self, weights: Weights, iteration: int) -> None:
        self.held.reference.follow(weights, iteration)

    def restarts(self, iteration: int) -> bool:
        return self.held.reference.restarts(iteration)

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        self.held.adapt(iteration, metrics)

    def state_dict(self) -> dict[str, Any]:
        return self.held.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held.load_state_dict(state)
