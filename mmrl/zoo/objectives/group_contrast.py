"""Losses that contrast all good samples of a group with all bad ones at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.core.distributed import all_sum
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.objectives.kl import Refresh
from mmrl.objectives.surrogates import FAR
from mmrl.zoo.objectives.group_loss import AnchorName, GroupLoss, Samples

Positive = Annotated[float, Gt(0)]
Natural = Annotated[float, Ge(0)]


def _sides(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Return [R] bool each: good samples (A > 0), bad ones (A < 0), and rows whose group has
    both."""
    good = samples.advantage > 0
    bad = samples.advantage < 0
    sums = samples.groups.sum
    like = samples.ratio.detach()
    return good, bad, (sums(good.to(like)) > 0) & (sums(bad.to(like)) > 0)


@OBJECTIVES.register("real")
class REAL(GroupLoss):
    """Classify samples: log(1 + sum_neg e^s) + log(1 + sum_pos e^-s), s = mean log-ratio / tau
    (REAL).

    As in ms-swift. Positive samples are those with A > 0, negative ones those with A < 0; a group
    without both counts as 0 (with ``zero_variance_groups: drop`` not at all).

    tau: of the score.
    """

    def __init__(self, tau: Positive = 0.1, average: bool = True, **options: Any):
        super().__init__(average=average, **options)
        self.tau = tau

    def of_group(self, samples: Samples) -> Tensor:
        good, bad, both_sides = _sides(samples)
        score = samples.ratio / self.tau
        logs = samples.groups.log_sum_exp
        loss = softplus(logs(score, bad)) + softplus(logs(-score, good))
        return torch.where(both_sides, loss, 0.0)


@OBJECTIVES.register("multi_preference")
class MultiPreference(GroupLoss):
    """Contrast the good samples of a group with all of them: -log(sum_good w e^s / sum_all w e^s)
    (MPO).

    Gupta et al. 2024, "Multi-preference optimization: Generalizing DPO via set-level contrasts"
    (SWEPO). s = beta R to the reference; good is a reward above the group's mean d = r - mean r,
    and w = e^(alpha |d|): samples far from the mean weigh more. With one sample on either side and
    alpha 0 it is DPO. A group without both sides counts as 0.

    beta: of the log-ratio. alpha: of the weights.
    """

    def __init__(
        self,
        beta: Positive = 0.1,
        alpha: Natural = 1.0,
        anchor: AnchorName | Refresh = "ref",
        **options: Any,
    ):
        super().__init__(anchor, **options)
        self.beta = beta
        self.alpha = alpha

    def of_group(self, samples: Samples) -> Tensor:
        groups = samples.groups
        deviation = groups.centred(samples.advantage)
        score = self.beta * samples.ratio + self.alpha * deviation.abs()
        good = deviation > 0
        all_of_them = torch.ones_like(good)
        loss = groups.log_sum_exp(score, all_of_them) - groups.log_sum_exp(score, good)
        return torch.where(groups.sum(good.to(score)) > 0, loss, 0.0)


@OBJECTIVES.register("disco")
class DisCO(GroupLoss):
    """Push good samples above the hardest bad ones, with a bound on the KL to the old policy
    (DisCO).

    Li et al. 2025, "DisCO: Reinforcing large reasoning models with discriminative constrained
    optimization", the distributionally robust form: mean over good i of tau log mean over bad j of
    e^((s_j - s_i) / tau), and + beta max(0, KL - delta)^2 with KL = mean of -(log p - log p_old)
    over all decisions of the step, on all processes. score: "likelihood", s the mean log-prob
    (tau 10 in the paper), or "ratio", e to the mean log-ratio (tau 1; the paper has the arithmetic
    mean of the decisions' ratios, the geometric one is our reading). Good is A > 0, bad A < 0: the
    paper's rewards are 0 and 1.

    tau: temperature over bad samples. beta: weight of the bound. delta: KL up to which there is no
    penalty.
    """

    not_options = ("anchor", "average", "num_noise_draws", "timestep_sampler")

    def __init__(
        self,
        score: Literal["likelihood", "ratio"] = "likelihood",
        tau: Positive = 10.0,
        beta: Natural = 1000.0,
        delta: Natural = 1e-4,
    ):
        super().__init__()
        self.score = score
        self.tau = tau
        self.beta = beta
        self.delta = delta

    def of_group(self, samples: Samples) -> Tensor:
        good, bad, both_sides = _sides(samples)
        groups = samples.groups
        score = samples.logp / samples.length
        if self.score == "ratio":
            score = (samples.ratio / samples.length).clamp(-FAR, FAR).exp()
        number = groups.sum(bad.to(score)).clamp_min(1)
        rivals = self.tau * (groups.log_sum_exp(score / self.tau, bad) - number.log())
        followed = groups.sum(self._share(samples, good) * score)
        return torch.where(both_sides, rivals - followed, 0.0) + self._penalty(samples)

    def _share(self, samples: Samples, good: Tensor) -> Tensor:
        """Return [R]: the weights of the good samples of a group, of sum 1."""
        weight = good.to(samples.ratio)
        return weight / samples.groups.sum(weight).clamp_min(1)

    def _penalty(self, samples: Samples) -> Tensor:
        """Return [R]: beta max(0, KL - delta)^2, and its slope: rows of other processes count too,
        so it is written as its tangent."""
        rows = torch.ones_like(samples.ratio).sum()
        local = torch.stack([-samples.ratio.detach().sum(), samples.length.sum().to(rows), rows])
        gone, decisions, rows = all_sum(local.double()).to(samples.ratio).unbind()
        divergence = gone / decisions.clamp_min(1)
        observe("kl_old", divergence.reshape(1))
        beyond = (divergence - self.delta).clamp_min(0)
        slope = -2 * self.beta * beyond * rows / decisions.clamp_min(1)
        return self.beta * beyond.square() + slope * (samples.ratio - samples.ratio.detach())


@OBJECTIVES.register("drpo")
class DRPO(DisCO):
    """Weigh good samples among themselves in DisCO's loss, as by e^(A / temperature) (DRPO).

    Li et al. 2025, "DRPO: Efficient reasoning via decoupled reward policy optimization": the
    weights of a group's good samples sum to 1, so that a long right answer counts less, but is
    never made less likely. A of a good sample comes from a secondary reward (published: of length).

    temperature: of A. tau, beta, delta: as in ``disco``.
    """

    def __init__(self, temperature: Positive = 1.0, **options: Any):
        super().__init__(**options)
        self.temperature = temperature

    def _share(self, samples: Samples, good: Tensor) -> Tensor:
        logit = samples.advantage / self.temperature
        total = samples.groups.log_sum_exp(logit, good)
        return torch.where(good, (logit - total).exp(), 0.0)


@OBJECTIVES.register("pacs")
class PACS(GroupLoss):
    """Classify right and wrong samples by cross-entropy, with score beta (R - mean of others' R)
    (PACS).

    Li et al. 2025, "Implicit actor critic coupling via a supervised learning framework for RLVR".
    The label is A > threshold; a sample of exactly that advantage has none. With ``advantage:
    reinforce``, which leaves rewards as they are, and threshold 0.5, all-right and all-wrong groups
    are labelled too.

    beta: of the score. threshold: of the label.
    """

    def __init__(self, beta: Positive = 1.0, threshold: float = 0.0, **options: Any):
        super().__init__(**options)
        self.beta = beta
        self.threshold = threshold

    def of_group(self, samples: Samples) -> Tensor:
        groups = samples.groups
        size = groups.size(samples.ratio)
        score = self.beta * groups.centred(samples.ratio) * size / (size - 1).clamp_min(1)
        side = (samples.advantage - self.threshold).sign()  # log sigmoid(+-score)
        return softplus(-side * score) * side.abs()
