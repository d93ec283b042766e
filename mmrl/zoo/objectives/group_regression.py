"""Losses that regress differences of a group's log-ratios on those of rewards, and the offline
policy gradients related to them."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from mmrl.core.registry import OBJECTIVES
from mmrl.objectives.kl import Refresh
from mmrl.objectives.surrogates import FAR
from mmrl.zoo.objectives.group_loss import AnchorName, GroupLoss, Samples

Positive = Annotated[float, Gt(0)]


@OBJECTIVES.register("gvpo")
class GVPO(GroupLoss):
    """Minimise 1/2 sum_i ((R_i - mean R) - (r_i - mean r))^2 / (n - 1), R = beta log(p / p_old)
    (GVPO).

    Zhang et al. 2025, "GVPO: Group variance policy optimization". Use ``advantage: dr_grpo``, which
    is r - mean r. With the anchor ref it has the KL-constrained optimum of the paper for any
    sampling policy.

    beta: of the log-ratio.
    """

    def __init__(self, beta: Positive = 0.1, **options: Any):
        super().__init__(**options)
        self.beta = beta

    def of_group(self, samples: Samples) -> Tensor:
        groups = samples.groups
        size = groups.size(samples.ratio)
        error = self.beta * groups.centred(samples.ratio) - groups.centred(samples.advantage)
        return error.square() / 2 * size / (size - 1).clamp_min(1)


@OBJECTIVES.register("reg_grpo")
class RegGRPO(GroupLoss):
    """Predict the advantage by the sample's log-ratio R: (A_i - beta (R_i - mean R))^2 (Reg-GRPO).

    Park et al. 2025, DeepVideo-R1. No clip, no minimum. own_std: R is divided by its std
    (population) in the group, as the advantage is by that of the rewards (the paper), instead of
    multiplied by ``beta``; by at least ``least_std``, since R is 0 on the first step (our reading).

    beta: scale of the log-ratio. least_std: smallest std that R is divided by.
    """

    def __init__(
        self,
        beta: Positive = 1.0,
        own_std: bool = False,
        least_std: Positive = 0.1,
        **options: Any,
    ):
        super().__init__(**options)
        self.beta = beta
        self.own_std = own_std
        self.least_std = least_std

    def of_group(self, samples: Samples) -> Tensor:
        groups = samples.groups
        predicted = self.beta * groups.centred(samples.ratio)
        if self.own_std:
            centred = groups.centred(samples.ratio)
            variance = groups.sum(centred.square()) / groups.size(centred)
            predicted = centred / variance.clamp_min(self.least_std**2).sqrt()
        return (samples.advantage - predicted).square()


@OBJECTIVES.register("opmd")
class OPMD(GroupLoss):
    """REINFORCE kept near the old policy, also off-policy: -A log p + tau / 2 R^2 (OPMD).

    Kimi k1.5's form, as in Yao et al. 2025, "Group-relative REINFORCE is secretly an off-policy
    algorithm". Use ``advantage: dr_grpo``, which is r - mean r; the sequence's log-ratio R is to
    the sampling weights.

    tau: weight of R^2.
    """

    def __init__(self, tau: Positive = 1.0, **options: Any):
        super().__init__(**options)
        self.tau = tau

    def of_group(self, samples: Samples) -> Tensor:
        return -samples.advantage * samples.logp + self.tau / 2 * samples.ratio.square()


@OBJECTIVES.register("a_lol")
class ALoL(GroupLoss):
    """Train on good samples only: -sg(clip(e^R)) max(A, 0) log p, a sample as one action (A-LoL).

    Baheti et al. 2024, "Improving language models with advantage-based offline policy gradients".
    clip_range: e^R, to the base, is clipped to 1 +- this; null: no weight (their reference-free
    form). The paper subtracts the model's value estimate: the advantage ``pvpo`` with ``learned``;
    any other works too.
    """

    def __init__(
        self,
        clip_range: Positive | None = 0.9,
        anchor: AnchorName | Refresh = "ref",
        **options: Any,
    ):
        super().__init__(anchor, **options)
        self.clip_range = clip_range

    def of_group(self, samples: Samples) -> Tensor:
        weight = torch.ones_like(samples.ratio)
        if self.clip_range is not None:
            bounds = max(1 - self.clip_range, 0.0), 1 + self.clip_range
            weight = samples.ratio.detach().clamp(-FAR, FAR).exp().clamp(*bounds)
        return -weight * samples.advantage.clamp_min(0) * samples.logp
