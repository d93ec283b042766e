"""The objective of text: a paper's surrogate, a KL, an entropy bonus and corrections, on the
sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.distributed import all_gather_rows
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES, SURROGATES
from mmrl.core.types import Fields, Point, Rewards, Rollout, Surrogate
from mmrl.objectives.base import Objective, frozen
from mmrl.objectives.importance_sampling import Importance, off_policy
from mmrl.objectives.kl import KL, estimate
from mmrl.objectives.surrogates import ppo, row_sum, sees_whole_rows
from mmrl.policies.base import Policy
from samplers.noise import Rng

Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Entropy:
    """An entropy bonus: the loss minus weight times the entropy of the token's distribution.

    With ``target`` (nats a token) the weight adapts (He et al. 2025, Skywork-OR1, section 4): after
    every iteration it rises by ``step`` if the mean entropy was below the target and falls by it
    otherwise, within [low, high]; and it is 0 for as long as the entropy is above the target.
    """

    weight: Annotated[float, Ge(0)] = 0.0
    target: Positive | None = None
    step: Positive = 5e-3
    low: Annotated[float, Ge(0)] = 0.0
    high: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class TokenWeights(Fields):
    """How much every token's policy gradient counts."""

    weight: Tensor  # [B, L]


@OBJECTIVES.register("text")
class Text(Objective):
    """Policy gradients for text models: GRPO, DAPO, GSPO, CISPO, SAPO ... by the surrogate.

    surrogate: the loss of ratio and advantage. kl: its weight, or all its choices; entropy:
    likewise. importance_sampling: correction for another engine that sampled. off_policy: answers
    with A < 0 leave the loss when their tokens have become this much less likely on average, in
    nats. top_entropy: only this share of the step's tokens, those of highest entropy, has a policy
    gradient (Wang et al. 2025, "Beyond the 80/20 rule").
    """

    needs = "categorical"

    def __init__(
        self,
        surrogate: Annotated[Surrogate, SURROGATES] = ppo,
        kl: Annotated[float, Ge(0)] | KL = 0.0,
        entropy: Annotated[float, Ge(0)] | Entropy = 0.0,
        importance_sampling: Importance | None = None,
        off_policy: Positive | None = None,
        top_entropy: Annotated[float, Gt(0), Le(1)] = 1.0,
    ):
        self.surrogate = surrogate
        self.importance_sampling = importance_sampling
        self.off_policy = off_policy
        self.top_entropy = top_entropy
        self.kl = kl if isinstance(kl, KL) else KL(weight=kl)
        self.entropy = entropy if isinstance(entropy, Entropy) else Entropy(weight=entropy)
        # the weight in force
        self.bonus = self.entropy.weight if self.entropy.target is None else 0.0
        self.controlled = self.entropy.weight  # what the controller has arrived at
        self.iteration = 0
        self.snapshots = ("ref",) if self.kl.weight or self.kl.start else ()

    def couples(self, policy: Policy) -> Literal["", "groups"]:
        return "groups" if self.top_entropy < 1 else ""

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if getattr(policy, "decisions", "") not in ("", self.needs):
            raise UserError(
                f"{type(self).__name__} is an objective of text: "
                f"{type(policy).__name__} writes none"
            )
        for point in policy.path(rollout):
            if sees_whole_rows(self.surrogate) and (point.mask.sum(1) != point.num_decisions).any():
                raise UserError(
                    "this surrogate compares whole answers: it is for models that score "
                    "all tokens of an answer in one "
                    "pass (causal ones); choose ppo, cispo, sapo or reinforce"
                )
            yield point

    def loss(self, policy: Policy, point: Point) -> Tensor:
        dist = policy.dist(point)
        logp = torch.where(point.mask, dist.log_prob(point.target), 0.0)
        recorded = torch.where(point.mask, self.recorded(policy, point, logp), 0.0)
        old = point.old(logp, recorded)
        # the gate looks at what rounding makes of it
        observe("log_ratio", logp - recorded, point.current())
        loss = self.policy_loss(logp, old, point)
        if self.off_policy:
            loss = loss * off_policy(logp, point, self.off_policy)
        if self.importance_sampling:
            loss = loss * self.importance_sampling.weight(point)
        if "ref" in self.snapshots and self.kl.where == "loss":
            loss = loss + self.kl.at(self.iteration) * self._kl(policy, point, dist, logp, old)
        return (
            loss - self.bonus * self._entropy(dist, point)
            if self.bonus
            else self._watched(dist, point, loss)
        )

    def recorded(self, policy: Policy, point: Point, logp: Tensor) -> Tensor:
        """[B, L] log-probs under the weights that sampled."""
        return point.logprob

    def policy_loss(self, logp: Tensor, old: Tensor, point: Point) -> Tensor:
        """[B, L] the surrogate, on the tokens of high entropy only if so chosen."""
        watch(self.surrogate, logp, old, point)
        loss = self.surrogate(logp, old, point.advantage, point.mask)
        return loss if point.coupling is None else loss * point.coupling.weight

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return torch.where(point.mask, policy.dist(point).entropy(), 0.0)

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Keep the tokens of highest entropy of the whole step, on all processes."""
        every = all_gather_rows(measured[point.mask]).double().sort().values
        if not len(every):
            return point
        rank = (1 - self.top_entropy) * (len(every) - 1)  # the quantile by linear interpolation
        below = every[int(rank)]
        above = every[min(int(rank) + 1, len(every) - 1)]
        chosen = measured >= torch.lerp(below, above, rank % 1)
        return point.replace(coupling=TokenWeights(weight=chosen.to(measured)))

    @torch.no_grad()
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """The rewards, less the KL of every sampled sequence if that is where it goes."""
        if "ref" not in self.snapshots or self.kl.where != "reward":
            return rewards
        divergence = rollout.logprob.new_zeros(len(rollout))
        size = getattr(policy, "fixed_batch_rows", None) or len(rollout)
        for first in range(0, len(rollout), size):
            for point in policy.path(rollout[first : first + size]):
                gap = point.logprob - frozen(policy, "ref", point).log_prob(point.target)
                divergence[first : first + size] += row_sum(gap, point.mask)[:, 0]
        return Rewards(
            {**rewards, "kl": divergence}, {**rewards.weights, "kl": -self.kl.at(self.iteration)}
        )

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """After an iteration: the weight of the KL, and the entropy controller."""
        self.iteration = iteration + 1
        chosen = self.entropy
        entropy = metrics.get("entropy", float("nan"))
        if chosen.target is None or entropy != entropy:
            return
        low = entropy < chosen.target
        self.controlled = min(
            max(self.controlled + (chosen.step if low else -chosen.step), chosen.low), chosen.high
        )
        self.bonus = self.controlled if entropy <= chosen.target else 0.0
        metrics["entropy_weight"] = self.bonus

    def state_dict(self) -> dict[str, Any]:
        return {"bonus": self.bonus, "controlled": self.controlled, "iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bonus = state["bonus"]
        self.controlled = state["controlled"]
        self.iteration = state["iteration"]

    def _kl(self, policy: Policy, point: Point, dist: Any, logp: Tensor, old: Tensor) -> Tensor:
        reference = frozen(policy, "ref", point)
        if self.kl.form == "exact":
            kl = torch.where(point.mask, dist.kl(reference), 0.0)
        else:
            ref = torch.where(point.mask, reference.log_prob(point.target), 0.0)
            kl = estimate(logp, ref, self.kl.form, self.kl.bounded)
        observe("kl", kl, point.own())
        return kl * (logp - old).exp() if self.kl.corrected else kl

    def _entropy(self, dist: Any, point: Point) -> Tensor:
        entropy = torch.where(point.mask, dist.entropy(), 0.0)
        observe("entropy", entropy, point.own())
        return entropy

    def _watched(self, dist: Any, point: Point, loss: Tensor) -> Tensor:
        with torch.no_grad():
            self._entropy(dist, point)
        return loss


def watch(surrogate: Surrogate, logp: Tensor, old: Tensor, point: Point) -> None:
    """Mention the ratio, and where the surrogate has no gradient although A is not 0: clipped, by
    the sign of A."""
    observe("ratio", (logp - old).exp(), point.own())
    if point.is_replayed is not None:
        observe("reuse/ratio", (logp - old).exp(), point.mask & point.is_replayed[:, None])
    advantage = point.advantage.expand_as(logp)
    clipped = without_slope(surrogate, logp, old, point).double()
    observe("clip_fraction", clipped, point.own())
    observe("clip/high", clipped * (advantage > 0), point.own())
    observe("clip/low", clipped * (advantage < 0), point.own())


def without_slope(surrogate: Surrogate, logp: Tensor, old: Tensor, point: Point) -> Tensor:
    """[B, L] bool: tokens that are clipped, whose loss does not change with their log-prob although
    A is not 0."""
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        loss = row_sum(surrogate(leaf, old.detach(), point.advantage, point.mask), point.mask)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
    return (slope == 0) & (point.advantage.expand_as(logp) != 0)
