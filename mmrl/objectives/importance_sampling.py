"""When another engine, or older weights, sampled: weights and masks that keep the gradient
honest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.types import Point, Rollout
from mmrl.objectives.surrogates import row_mean, row_sum


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
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: Annotated[float, Gt(0)] = 3.0
    floor: Annotated[float, Ge(0)] = 0.0
    clip_mode: Literal["multiplicative", "additive"] = "multiplicative"

    def of_samples(self, rollout: Rollout) -> Rollout:
        """Add what ``weight`` has to know of whole samples, whose decisions may be scored in
        several passes."""
        sampler_logprob = rollout.provenance.sampler_logprob
        if self.level == "token" or sampler_logprob is None:
            return rollout
        over_row = row_sum if self.level == "sequence" else row_mean
        gap = over_row(rollout.logprob - sampler_logprob, rollout.mask)[:, 0]
        return rollout.replace(provenance=rollout.provenance.replace(sample_log_ratio=gap))

    def weight(self, point: Point) -> Tensor:
        """Return [B, L]: 1 where the policy sampled by itself."""
        sampler_logprob = point.provenance.sampler_logprob
        if sampler_logprob is None:
            return torch.ones_like(point.recorded)
        gap = point.recorded - sampler_logprob
        if self.level != "token":
            whole = point.provenance.sample_log_ratio
            assert whole is not None  # ``of_samples`` went before
            gap = whole[:, None].expand_as(gap)
        weight = gap.clamp(max=60.0).exp()
        observe("importance", weight, point.mask)
        if self.mode == "truncate":
            return weight.clamp(self.floor, self.cap)
        return torch.where((weight >= self.floor) & (weight <= self.cap), weight, 0.0)

    def __post_init__(self) -> None:
        if not self.floor < self.cap:
            raise UserError(f"importance: low {self.floor} must be less than high {self.cap}")


def off_policy(logp: Tensor, point: Point, threshold: float) -> Tensor:
    """Return [B, L]: 1, or 0 for rows with A < 0 whose mean log(p_sampler / p) exceeds the
    threshold (DeepSeek-V3.2, OPSM)."""
    sampler_logprob = point.provenance.sampler_logprob
    behaviour = point.recorded if sampler_logprob is None else sampler_logprob
    far = row_mean((behaviour - logp.detach()), point.mask) > threshold
    dropped = (far & (point.advantage < 0)).expand_as(logp)
    observe("off_policy", dropped.to(logp), point.mask)
    return (~dropped).to(logp)
