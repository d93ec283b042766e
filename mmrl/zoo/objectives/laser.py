"""LaSeR: the policy learns to judge its answers by the token after their last one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.decisions import behind, judged
from mmrl.core.distributed import all_sum
from mmrl.core.distributions import Dist
from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point, Rewards, Rollout
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.terms import OF_TOKENS, KLPenalty
from mmrl.policies.base import Policy
from mmrl.policies.contracts import ScoresItself


@dataclass(frozen=True)
class Answers:
    """Holds the distributions of a row's L decisions, of L + 1 that one pass scored."""

    dist: Dist
    judged: Point

    def log_prob(self, ids: Tensor) -> Tensor:
        """Return the log-probs [B, L] of token ids [B, L]."""
        length = ids.shape[1]
        whole = torch.where(self.judged.mask[:, :length], ids, self.judged.target[:, :length])
        last = self.judged.target[:, length:]
        target = torch.cat([whole, last], 1)
        # the token after an answer judges it
        at = self.judged.mask.sum(1, keepdim=True) - 1
        target = target.scatter(1, at, self.judged.target.gather(1, at))
        return self.dist.log_prob(target)[:, :length]

    def entropy(self) -> Tensor:
        """Return the entropies [B, L]."""
        return self.dist.entropy()[:, :-1]

    def kl(self, reference: Any, by: Divergence = REVERSE) -> Tensor:
        raise UserError(
            "objective laser: kl has an exact form for the last token only; use form: k3"
        )


@OBJECTIVES.register("laser")
class LaSeR(PolicyGradient):
    """Policy gradient that also learns to judge each answer by one token after it (LaSeR).

    Yang et al. 2025, "LaSeR: Reinforcement learning with last-token self-rewarding". Adds weight
    times the mean over answers of w (scale (log p(z | question, answer) - reference) - r)^2, in the
    same pass: z is the policy's token self_score, r the outcome, and w balances right and wrong
    answers, (right + wrong) / (2 right) and / (2 wrong) of the iteration. outcome: the reward r;
    null: the weighted sum. right: an answer is right from this reward on. reference: log p of z
    under the base model, nats. balanced: false: w is 1. The mean over answers is that of
    train.loss_agg_mode: seq_mean_token_mean. The reward last_token is this verdict; together with
    the outcome, in advantage group with combine: aggregate, it is the paper's mixture. Others as in
    policy_gradient.

    weight: of the loss of the verdict. scale: of the log-prob.
    """

    requires = replace(PolicyGradient.requires, decisions="one pass", proportional=False)
    term_types = OF_TOKENS

    def __init__(
        self,
        weight: Annotated[float, Ge(0)] = 0.1,
        scale: Annotated[float, Gt(0)] = 0.1,
        reference: float = -23.0,
        outcome: str | None = None,
        right: float = 0.5,
        balanced: bool = True,
        **options: Any,
    ):
        super().__init__(**options)
        self.weight = weight
        self.scale = scale
        self.reference = reference
        self.outcome = outcome
        self.right = right
        self.balanced = balanced
        none = torch.zeros(0, dtype=torch.float64)
        self.rows = none.long()  # [B] of the iteration, sorted
        self.targets = torch.stack([none, none])  # [2, B] r and w

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        yield from super().unfit(policy)
        if self.term(KLPenalty).options.form == "exact":
            yield "kl", "it has an exact form for the last token only; use form: k3"
        judges = isinstance(policy, ScoresItself) and policy.self_score_id is not None
        if not isinstance(policy, type) and not judges:
            yield (
                "weight",
                "the policy has no token that judges its answers; set policy.vlm.self_score to one "
                "that answers do not need",
            )

    @torch.no_grad()
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Remember each answer's reward; the rewards are those of policy_gradient."""
        per_row = rewards.per_row()
        if self.outcome is not None and self.outcome not in per_row:
            raise UserError(
                f"objective laser: outcome is {self.outcome!r}, and there is no such reward; there "
                f"are {', '.join(per_row)}"
            )
        value = per_row.total() if self.outcome is None else per_row[self.outcome]
        value = value.to(rollout.row_id.device).double()
        known = value.isfinite()
        good = known & (value >= self.right)
        counts = all_sum(torch.stack([good.sum(), (known & ~good).sum()]).double())
        share = counts.sum() / (2 * counts.clamp(min=1))
        weight = torch.where(good, share[0], share[1])
        weight = weight if self.balanced else torch.ones_like(weight)
        self.rows, order = rollout.row_id.sort()
        self.targets = torch.stack([value.nan_to_num(0.0), weight * known])[:, order]
        return super().shaped(policy, rollout, rewards)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        token = policy.self_score_id if isinstance(policy, ScoresItself) else None
        if token is None:  # ``unfit`` says so where a run is made
            return super().loss(policy, point)
        longer = judged(point, token)
        dist = policy.dist(longer)
        loss = self.loss_at(policy, point, Answers(dist, longer))
        logprob = behind(point.mask, dist.log_prob(longer.target))
        size = point.mask.sum(1)
        verdict = self.scale * (logprob - self.reference)
        outcome, weight = self._targets(point.row_id).to(verdict)
        error = weight * (verdict - outcome).square()
        at = (size - 1).clamp(min=0)[:, None]
        # the loss is averaged over an answer's tokens, so its last one carries all of them
        share = (self.weight * error * size)[:, None]
        observe("laser/verdict", verdict[:, None], point.mask.any(1, keepdim=True))
        observe("laser/error", error[:, None], point.mask.any(1, keepdim=True))
        return loss.scatter_add(1, at, share.to(loss))

    def _targets(self, row_id: Tensor) -> Tensor:
        """Look up r and w [2, B] of rows; 0 of rows that the iteration does not have."""
        if not len(self.rows):
            return self.targets.new_zeros(2, len(row_id)).to(row_id.device)
        place = torch.searchsorted(self.rows, row_id).clamp(max=len(self.rows) - 1)
        found_there = self.rows[place] == row_id
        return torch.where(found_there, self.targets[:, place], 0.0)
