"""Off-policy correction for samples of another engine or of older weights: weights and masks that
keep the gradient unbiased."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.types import Point, Rollout
from mmrl.objectives.policy_loss import PolicyLoss
from mmrl.objectives.surrogates import row_mean, row_sum
from mmrl.objectives.terms.base import Scored, Term
from samplers.noise import Rng


@dataclass(frozen=True)
class Importance:
    """Truncated importance correction: the loss times w = p_policy / p_sampler of what was sampled.

    level: token; sequence, the product over the whole sample (TRL); or geometric, the mean of the
    logarithms, which ms-swift calls sequence (it is far closer to 1: at 0.01 a token, 500 tokens
    make e^5 of a product). mode: what happens to w above ``cap`` or below ``floor``: it is
    truncated, or its decisions leave the loss (mask). Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"; Zheng et al. 2025, IcePop.

    clip_mode: with multiplicative p / p_policy, p_policy that of the start of the update, is
    clipped to [1 - low, 1 + high], times w. additive clips p / p_sampler to [w - low, w + high], as
    wide for old answers as for new ones: the mixed policy gradient of ReMix (Liang et al. 2025,
    after GePPO, Queeney et al. 2021). It is of the surrogate ppo.

    cap: largest weight. floor: smallest weight.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: Annotated[float, Gt(0)] = 3.0
    floor: Annotated[float, Ge(0)] = 0.0
    clip_mode: Literal["multiplicative", "additive"] = "multiplicative"

    def of_samples(self, rollout: Rollout) -> Rollout:
        """Add what ``weight`` needs of whole samples, whose decisions may be scored in several
        passes."""
        sampler_logprob = rollout.provenance.sampler_logprob
        if self.level == "token" or sampler_logprob is None:
            return rollout
        over_row = row_sum if self.level == "sequence" else row_mean
        gap = over_row(rollout.logprob - sampler_logprob, rollout.mask)[:, 0]
        return rollout.replace(provenance=rollout.provenance.replace(sample_log_ratio=gap))

    def weight(self, point: Point) -> Tensor:
        """Return [B, L]: the weight; 1 where the policy itself sampled."""
        sampler_logprob = point.provenance.sampler_logprob
        if sampler_logprob is None:
            return torch.ones_like(point.recorded)
        gap = point.recorded - sampler_logprob
        if self.level != "token":
            whole = point.provenance.sample_log_ratio
            assert whole is not None  # ``of_samples`` was called before
            gap = whole[:, None].expand_as(gap)
        weight = gap.clamp(max=60.0).exp()
        observe("importance", weight, point.mask)
        if self.mode == "truncate":
            return weight.clamp(self.floor, self.cap)
        return torch.where((weight >= self.floor) & (weight <= self.cap), weight, 0.0)

    def __post_init__(self) -> None:
        if not self.floor < self.cap:
            raise UserError(
                f"importance_sampling: floor {self.floor} must be less than cap {self.cap}"
            )


@dataclass
class ImportanceSampling(Term):
    """importance_sampling: correction for samples of another engine or of older weights."""

    importance_sampling: Importance | None = None

    corrects = True

    def single_paths(self) -> bool:
        sampling = self.importance_sampling
        return sampling is not None and sampling.level != "token"

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        sampling = self.importance_sampling
        if sampling is not None and sampling.clip_mode == "additive" and not loss.clips_as_ppo():
            yield "importance_sampling", "clip_mode: additive is of the surrogate ppo: choose it"

    def trained(self, rollout: Rollout, rng: Rng) -> Rollout:
        sampling = self.importance_sampling
        return rollout if sampling is None else sampling.of_samples(rollout)

    def widen(self, scale: Tensor | float, point: Point) -> Tensor | float:
        sampling = self.importance_sampling
        if sampling is None or sampling.clip_mode == "multiplicative":
            return scale
        return scale / sampling.weight(point)

    def factor(self, at: Scored) -> Tensor | None:
        sampling = self.importance_sampling
        return None if sampling is None else sampling.weight(at.point)
