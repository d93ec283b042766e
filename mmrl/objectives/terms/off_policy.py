"""The term that masks bad answers which have become unlikely under the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt
from torch import Tensor

from mmrl.core.metrics import observe
from mmrl.core.types import Point
from mmrl.objectives.policy_loss import PolicyLoss
from mmrl.objectives.surrogates import row_mean
from mmrl.objectives.terms.base import Scored, Term, decisions_of, in_one


@dataclass
class OffPolicyMask(Term):
    """off_policy: of tokens: answers with A < 0 leave the loss when their tokens have become this
    much less likely on average, in nats."""

    off_policy: Annotated[float, Gt(0)] | None = None

    of = "tokens"
    instead: ClassVar = {
        "off_policy": "it compares answers of models that write tokens: use clip_range"
    }

    def single_paths(self) -> bool:
        return self.active()

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        yield from super().unfit(policy, loss, coupled)
        if self.active() and decisions_of(policy) == "categorical" and not in_one(policy):
            yield (
                "off_policy",
                "it compares whole answers, which are scored in several passes here: leave it out, "
                "or use importance_sampling with mode: mask",
            )

    def factor(self, at: Scored) -> Tensor | None:
        limit = self.off_policy
        return None if limit is None else off_policy(at.logp, at.point, limit)


def off_policy(logp: Tensor, point: Point, threshold: float) -> Tensor:
    """Return [B, L]: 1, or 0 for rows with A < 0 whose mean log(p_sampler / p) exceeds the
    threshold (DeepSeek-V3.2, OPSM)."""
    sampler_logprob = point.provenance.sampler_logprob
    behaviour = point.recorded if sampler_logprob is None else sampler_logprob
    far = row_mean((behaviour - logp.detach()), point.mask) > threshold
    dropped = (far & (point.advantage < 0)).expand_as(logp)
    observe("off_policy", dropped.to(logp), point.mask)
    return (~dropped).to(logp)
