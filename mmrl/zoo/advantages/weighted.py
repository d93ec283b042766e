"""Weighs group advantages by the prompt's certainty, noise or difficulty.

These are estimated from q, the share of right answers in the group: rewards are 0 or 1, or an
answer is right from the reward ``right`` on.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from mmrl.advantages.group import group
from mmrl.advantages.groups import (
    Groups,
    finished,
    in_range,
    measured,
    replaced,
    reward_called,
)
from mmrl.advantages.normalise import moments
from mmrl.advantages.presets import grpo
from mmrl.advantages.process import by_step
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import length as length_of
from mmrl.zoo.advantages.quantities import quantity
from mmrl.zoo.advantages.shaping import Underneath

TINY = 1e-8  # added to denominators


@ADVANTAGES.register("bnpo")
@by_step
def bnpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    low: float = 0.0,
    high: float = 1.0,
    limit: Annotated[float, Gt(0)] = 1e6,
) -> Tensor:
    """Divide by a Beta density of the group's mean, fitted to all groups of the batch (BNPO).

    Xiao et al. 2025, "BNPO: Beta normalization policy optimization". (r - p) / f(p; alpha, beta),
    p the mean of the group, alpha = max(1, 1 + a / 3), beta = max(1, 1 + b / 3), and a, b the
    Beta distribution with the mean and sample variance of p over the groups. Each reward is
    normalised separately, then they are summed with their weights (the paper's decomposition: equal
    weights that add to 1). low, high: the bounds of a reward, mapped to 0 and 1 first. limit:
    largest 1 / f. Where p does not vary, or there is one group, alpha = beta = 1.
    """
    double, groups = measured(rewards, rollout)
    total = torch.zeros_like(double.total())
    for name, x in in_range(double, groups, low, high, "bnpo").items():
        scale = _beta_scale(groups.mean(x), groups.size() > 0, limit)
        lead = (groups.centred(x) * scale[groups.index]).masked_fill(
            groups.flat(x)[groups.index], 0.0
        )
        total = total + double.weights[name] * lead
    return finished(total, rewards, groups.present)


def _beta_scale(p: Tensor, scored: Tensor, limit: float) -> Tensor:
    """Return 1 / f(p) [P] by the moments of p over all processes, at most ``limit``."""
    mean, variance = moments(p, scored, ddof=1)
    varies = variance > TINY
    strength = torch.where(varies, mean * (1 - mean) / variance.clamp(min=TINY) - 1, 0.0)
    alpha = (1 + strength * mean / 3).clamp(min=1)
    beta = (1 + strength * (1 - mean) / 3).clamp(min=1)
    constant = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    density = constant + torch.xlogy(alpha - 1, p) + torch.xlogy(beta - 1, 1 - p)
    return (-density).exp().clamp(max=limit)


@ADVANTAGES.register("mapo")
@by_step
def mapo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    right: float | None = None,
    eps: Annotated[float, Gt(0)] = 1e-6,
) -> Tensor:
    """Mix the z-score with the percent deviation from the mean, for certain groups (MAPO).

    "MAPO: Mixed advantage policy optimization" (2025). (1 - lambda) A + lambda (r - mean) / mean,
    lambda = 1 - 4 q (1 - q): the percent deviation dominates in groups with nearly all answers
    right or wrong. A: of ``base``. right: an answer is right from this reward on; null: q is the
    group's mean reward, within [0, 1]. eps: added to the mean; of a negative mean, which the paper
    does not treat, the absolute value is taken (our reading).

    base: the advantage A.
    """
    double, groups = measured(rewards, rollout)
    total = double.total()
    q = groups.mean(total if right is None else (total >= right).to(total)).clamp(0, 1)
    certain = (1 - 4 * q * (1 - q))[groups.index]
    mean = groups.mean(total).abs()[groups.index]
    percent = (groups.centred(total) / (mean + eps)).masked_fill(
        groups.flat(total)[groups.index], 0.0
    )
    mixed = (1 - certain)[:, None] * base(rewards, rollout) + (certain * percent)[:, None]
    return finished(mixed, rewards, groups.present[:, None])


@ADVANTAGES.register("noise_aware")
@by_step
def noise_aware(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = group,
    noise: Annotated[float, Ge(0), Lt(0.5)] = 0.1,
    right: float = 0.5,
) -> Tensor:
    """Weigh groups by how well right and wrong are distinguished under noise (stable S-GRPO).

    Shen et al. 2025, "Mitigating think-answer mismatch". For 0/1 rewards that are flipped with
    probability ``noise``; w = (1 - 2 noise) sqrt(t (1 - t) / (q (1 - q))), where t = (q - noise) /
    (1 - 2 noise) within [0, 1] is the true share of right answers: w times the observed z-score is
    closest to the true one. A group whose answers nearly all agree may differ by noise alone and
    has weight 0. base: its std must be that of the group. right: an answer is right from this
    reward on.

    noise: probability that a reward is flipped.
    """
    double, groups = measured(rewards, rollout)
    q = groups.mean((double.total() >= right).double())
    t = ((q - noise) / (1 - 2 * noise)).clamp(0, 1)
    spread = (q * (1 - q)).clamp(min=TINY)
    weight = (1 - 2 * noise) * (t * (1 - t) / spread).sqrt()
    weighted = base(rewards, rollout) * weight[groups.index][:, None]
    return finished(weighted, rewards, groups.present[:, None])


@ADVANTAGES.register("grpo_lead")
@by_step
def grpo_lead(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    right: float = 0.5,
    length: Annotated[float, Ge(0)] | None = None,
    low: Annotated[float, Ge(0)] = 0.4,
    high: Annotated[float, Ge(0)] = 1.5,
    center: float = 0.75,
    slope: float = 10.0,
) -> Tensor:
    """Give more weight to right answers to hard prompts and wrong ones to easy ones (GRPO-LEAD).

    Zhang and Zuo 2025, "GRPO-LEAD". A w(q) for A > 0, A w(1 - q) else, with w(x) = low + (high -
    low) / (1 + exp(slope (x - center))). base: of A. right: an answer is right from this reward
    on. length: alpha of the paper's length-dependent reward, which replaces the rewards: exp(-
    length z) for right answers, z their number of decisions standardised among the right ones of
    the group (population std), -1 for wrong ones; null: the rewards as they are.

    low: smallest weight. high: largest weight. center: share of right answers at which the weight
    is in the middle. slope: of the change there.
    """
    double, groups = measured(rewards, rollout)
    total = double.total()
    correct = (total >= right) & groups.present
    q = groups.mean(correct.to(total))[groups.index]
    scored: Rewards | Tensor = rewards
    if length is not None:
        solved = Groups(groups.index, correct, groups.count)
        size = length_of(rollout).to(total.device)
        z = solved.centred(size) / (solved.variance(size, 0).sqrt()[groups.index] + TINY)
        shaped = torch.where(correct, torch.exp(-length * z), -1.0)
        scored = replaced(double, None, shaped, groups)
    advantage = base(scored, rollout)
    share = torch.where(advantage > 0, q[:, None], 1 - q[:, None])
    weight = low + (high - low) / (1 + torch.exp(slope * (share - center)))
    return finished(advantage * weight, rewards, groups.present[:, None])


@ADVANTAGES.register("drpo")
@by_step
def drpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    reward: str | None = None,
    right: float = 0.5,
    temperature: Annotated[float, Gt(0)] = 1.0,
) -> Tensor:
    """Compare right answers by other rewards among themselves only (DRPO's decoupled reward).

    Li et al. 2025, "DRPO: Efficient reasoning via decoupled reward policy optimization". The
    advantage of right (1) or wrong (0) by ``base``, times n exp(s / temperature) / sum over the n
    right answers of the group for a right one; s is the weighted sum of the other rewards, such as
    one of length. So a right answer is never made less likely for being long. reward: an answer is
    right if this one is at least ``right``; null: the weighted sum, and s is 0. The paper puts
    these weights into the loss of DisCO; as weights of an advantage they are our reading.

    base: the advantage of right and wrong. right: a reward above it is right. temperature: of the
    other rewards; larger: more alike.
    """
    double, groups = measured(rewards, rollout)
    correct = reward_called(double, reward, "drpo") >= right
    solved = Groups(groups.index, groups.present & correct, groups.count)
    side = torch.zeros_like(double.total())
    if reward is not None:
        side = side + sum(double.weights[n] * x for n, x in double.items() if n != reward)
    side = side / temperature
    top = solved.extremes(side)[1][groups.index]
    power = torch.exp((side - top).masked_fill(~solved.present, 0.0))
    weight = torch.where(correct, power / solved.mean(power)[groups.index], 1.0)
    outcome = replaced(double, None, correct.to(side), groups)
    weighted = base(outcome, rollout) * weight[:, None]
    return finished(weighted, rewards, groups.present[:, None])


@ADVANTAGES.register("asymre")
@by_step
def asymre(rewards: Rewards | Tensor, rollout: Rollout, *, shift: float = -0.1) -> Tensor:
    """Subtract the mean of the group plus a shift, so that good answers count more (AsymRE).

    Arnal et al. 2025, "Asymmetric REINFORCE for off-policy reinforcement learning": r - (mean +
    shift). shift, in units of reward: negative for rows of older policies; 0 is Dr. GRPO.

    shift: in units of reward; negative for rows of older policies; 0 is Dr. GRPO.
    """
    double, groups = measured(rewards, rollout)
    total = double.total()
    centred = groups.centred(total).masked_fill(groups.flat(total)[groups.index], 0.0)
    return finished(centred - shift, rewards, groups.present)


@ADVANTAGES.register("copo")
class COPO:
    """Compare consistent groups with other prompts, and mixed groups internally (COPO).

    Han et al. 2025, "COPO: Consistency-aware policy optimization". The loss is w loss(A) + (1 - w)
    loss(A'), each with its own clip of the ratio, A' = (mean of the group - mean of the groups) /
    (their std + eps), w = 1 / (1 + exp(-sharpness (H - center))), where H, nats, is the entropy of
    the outcomes in the group. frequency: a reward (of any weight, also 0) that is the share of the
    group with the same answer, such as answer_frequency: outcomes are answers (the paper); samples
    without an answer share one outcome. null, for images, which have no answer to compare: an
    outcome is a reward, rounded to multiples of ``width`` (0: exact; our reading). Losses without a
    ratio, and advantages that have this as base, see w A + (1 - w) A'. center is half the maximal
    entropy of two outcomes (our reading). base: of A.

    width: of an outcome: rewards within it are one; 0: equal rewards. center: entropy at which w is
    1/2, nats. sharpness: of the change there. eps: added to the std.
    """

    def __init__(
        self,
        base: Underneath = grpo,
        frequency: str | None = None,
        width: Annotated[float, Ge(0)] = 0.0,
        center: float = 0.35,
        sharpness: float = 3.0,
        eps: Annotated[float, Gt(0)] = 1e-4,
    ):
        self.base = base
        self.frequency = frequency
        self.width = width
        self.center = center
        self.sharpness = sharpness
        self.eps = eps

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        return self.parts(rewards, rollout).sum(-1)

    def parts(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return [B, 1 or K, 2]: w A and (1 - w) A', whose losses are summed."""
        return by_step(self._parts)(rewards, rollout)

    def _parts(self, rewards: Rewards, rollout: Rollout) -> Tensor:
        double, groups = measured(rewards, rollout)
        total = double.total()
        means = groups.mean(total)
        mean, variance = moments(means, groups.size() > 0)
        differ = variance > TINY**2 * (1 + mean**2)  # up to rounding
        apart = torch.where(differ, (means - mean) / (variance.sqrt() + self.eps), 0.0)
        if self.frequency is not None:
            share = quantity(self.frequency, rewards, rollout).to(total)
            entropy = _answer_entropy(share, groups)
        else:
            entropy = _outcome_entropy(
                (total / self.width).round() if self.width else total, groups
            )
        local = torch.sigmoid(self.sharpness * (entropy - self.center))
        within = local[groups.index][:, None] * self.base(rewards, rollout)
        across = ((1 - local) * apart)[groups.index][:, None].to(within).expand_as(within)
        parts = torch.stack([within, across], -1)
        return finished(parts, rewards, groups.present[:, None, None])


def _answer_entropy(share: Tensor, groups: Groups) -> Tensor:
    """Return the entropy [P], nats, of answers of which each row has the ``share`` [B] of its
    group, 0 without an answer: the mean of -log of the shares."""
    none = groups.mean((share <= 0).to(share))[groups.index]
    share = torch.where(share <= 0, none, share).masked_fill(~groups.present, 1.0)
    return groups.mean(-share.log())


def _outcome_entropy(outcome: Tensor, groups: Groups) -> Tensor:
    """Return the entropy [P], nats, of the outcomes [B] of each group."""
    index = groups.index[groups.present]
    pairs = torch.stack([index.to(outcome), outcome[groups.present]], 1)
    kinds, counts = pairs.unique(dim=0, return_counts=True)
    owner = kinds[:, 0].long()
    share = counts.to(outcome) / groups.size().clamp(min=1)[owner]
    return -outcome.new_zeros(groups.count).index_add(0, owner, torch.xlogy(share, share))
