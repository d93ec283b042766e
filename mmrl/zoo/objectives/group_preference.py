"""Losses on pairs of a better and a worse sample of a group, and one on single samples (KTO)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.core.distributed import all_sum
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.objectives.kl import Refresh
from mmrl.objectives.surrogates import FAR, clip
from mmrl.zoo.objectives.group_loss import AnchorName, GroupLoss, Samples

Positive = Annotated[float, Gt(0)]
Natural = Annotated[float, Ge(0)]
Pairing = Literal["best_worst", "all"]


class _Pairwise(GroupLoss):
    """``of_pair``: [N] the loss of a pair; a group's loss is the mean over its pairs, 0 if it has
    none."""

    def __init__(
        self,
        pairs: Pairing = "best_worst",
        sft: Natural = 0.0,
        anchor: AnchorName | Refresh = "old",
        **options: Any,
    ):
        """Take the options of all losses of pairs. pairs: the best and the worst sample of a group,
        or all pairs of different advantage. sft: weight of -log p of the better one (RPO, Liu et
        al. 2024, "Provably mitigating overoptimization in RLHF")."""
        super().__init__(anchor, **options)
        self.pairs = pairs
        self.sft = sft

    @abstractmethod
    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        """Compute the losses [N] of pairs from the log-ratios of both and how much the better
        one's advantage is larger."""

    def scores(self, samples: Samples) -> Tensor:
        """Return [R]: one score for each sample, compared in pairs."""
        return samples.ratio

    def of_group(self, samples: Samples) -> Tensor:
        better, worse = _all(samples) if self.pairs == "all" else _best_worst(samples)
        ratio = self.scores(samples)
        gap = samples.advantage[better] - samples.advantage[worse]
        loss = self.of_pair(ratio[better], ratio[worse], gap) - self.sft * samples.logp[better]
        if len(loss):
            observe("group/right", (ratio[better] > ratio[worse]).double())
        groups = samples.groups
        group = groups.index[better]
        total = ratio.new_zeros(groups.count).index_add(0, group, loss)
        count = ratio.new_zeros(groups.count).index_add(0, group, torch.ones_like(loss))
        return (total / count.clamp_min(1))[groups.index]


def _best_worst(samples: Samples) -> tuple[Tensor, Tensor]:
    """Return [N], [N]: rows of the highest and of the lowest advantage of each group, the first
    ones where several are equal; groups of equal advantages make no pair."""
    groups = samples.groups
    advantage = samples.advantage
    place = torch.arange(len(advantage), device=advantage.device)
    high = groups.extreme(advantage, "amax")
    low = groups.extreme(advantage, "amin")
    rows = []
    for bound in (high, low):
        candidate = place.masked_fill(advantage != bound[groups.index], len(place))
        rows.append(groups.extreme(candidate.double(), "amin").long())
    differ = (high > low).nonzero()[:, 0]
    return rows[0][differ], rows[1][differ]


def _all(samples: Samples) -> tuple[Tensor, Tensor]:
    """Return [N], [N]: the rows of all pairs of one group with different advantages, the better one
    first."""
    index = samples.groups.index
    advantage = samples.advantage
    pairs = (index[:, None] == index) & (advantage[:, None] > advantage)
    better, worse = pairs.nonzero().unbind(1)
    return better, worse


@OBJECTIVES.register("rebel")
class REBEL(_Pairwise):
    """Regress differences of rewards on those of log-ratios: ((R_i - R_j) / eta - (r_i - r_j))^2
    (REBEL).

    Gao et al. 2024, "REBEL: Reinforcement learning via regressing relative rewards", eq. 6, for
    text and images. Use ``advantage: dr_grpo``, whose differences are those of the rewards.
    ``pairs: all`` uses every pair of different rewards instead of the best and the worst; with
    ``train.group_size: 2``, as published, they are the same.

    eta: rewards are divided by it.
    """

    def __init__(self, eta: Positive = 1.0, **options: Any):
        super().__init__(**options)
        self.eta = eta

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        return ((better - worse) / self.eta - gap).square()


@OBJECTIVES.register("dpo")
class DPO(_Pairwise):
    """Prefer the better of two samples: -log sigmoid(beta (R_w - R_l)), R to the reference (DPO).

    Rafailov et al. 2023, on pairs of the group, whose log-ratios are sums over tokens, revealed
    tokens or steps of the path (for a flow, D3PO has one comparison a step instead, diffusion_dpo
    one a denoising error). With ``sft`` it is RPO (Liu et al. 2024); with an anchor that follows
    the policy, ``anchor: {every: 1, decay: 0.99}``, TR-DPO (Gorbatovski et al. 2024). External
    preference pairs replace the samples with ``train.preferences``, or are added by
    ``demonstrations: {number: 2, own_baseline: true}``. label_smoothing: the assumed share e of
    flipped pairs: (1 - e) L(w, l) + e L(l, w) (Mitchell 2023, conservative DPO). robust: its
    unbiased form, ((1 - e) L(w, l) - e L(l, w)) / (1 - 2 e) (Chowdhury et al. 2024, "Provably
    robust DPO").

    beta: weight of the reference.
    """

    def __init__(
        self,
        beta: Positive = 0.1,
        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
        robust: bool = False,
        anchor: AnchorName | Refresh = "ref",
        **options: Any,
    ):
        super().__init__(anchor=anchor, **options)
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.robust = robust

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        margin = self.beta * (better - worse)
        noise = self.label_smoothing
        if not noise:
            return softplus(-margin)
        right, wrong = softplus(-margin), softplus(margin)
        if self.robust:
            return ((1 - noise) * right - noise * wrong) / (1 - 2 * noise)
        return (1 - noise) * right + noise * wrong


@OBJECTIVES.register("simpo")
class SimPO(_Pairwise):
    """Prefer by mean log-probs, without a reference: -log sigmoid(beta (l_w - l_l) - gamma)
    (SimPO).

    Meng et al. 2024, "SimPO: Simple preference optimization with a reference-free reward"; l is
    log p over the number of decisions, gamma the margin wanted. With ``sft`` it is CPO-SimPO.

    beta: of the mean log-probs. gamma: the margin wanted.
    """

    # densities of steps have no natural scale to compare by
    requires = replace(GroupLoss.requires, decisions="categorical")
    not_options = ("anchor", "average")

    def __init__(self, beta: Positive = 2.0, gamma: Natural = 1.0, **options: Any):
        super().__init__(anchor="old", average=True, **options)
        self.beta = beta
        self.gamma = gamma

    def scores(self, samples: Samples) -> Tensor:
        return samples.logp

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        return softplus(self.gamma - self.beta * (better - worse))


@OBJECTIVES.register("orpo")
class ORPO(_Pairwise):
    """Prefer by odds, plus the likelihood of the better: -log p_w - lambda log sigmoid(log odds
    ratio) (ORPO).

    Hong et al. 2024, "ORPO: Monolithic preference optimization without reference model"; p is the
    geometric mean of the probabilities of an answer's decisions, odds are p / (1 - p).

    weight: lambda.
    """

    requires = replace(GroupLoss.requires, decisions="categorical")  # odds are of tokens
    not_options = ("anchor", "average", "sft")

    def __init__(self, weight: Positive = 0.1, **options: Any):
        super().__init__(anchor="old", average=True, sft=1.0, **options)
        self.weight = weight

    def scores(self, samples: Samples) -> Tensor:
        return samples.logp

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        return self.weight * softplus(_log_odds(worse) - _log_odds(better))


def _log_odds(logp: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p < 0; p is clamped below 1."""
    logp = logp.clamp(max=-1e-7)
    return logp - (-logp.expm1()).log()


@OBJECTIVES.register("kto")
class KTO(GroupLoss):
    """Make good answers likelier and bad ones less likely, without pairs, by prospect theory (KTO).

    Ethayarajh et al. 2024, "KTO: Model alignment as prospect theoretic optimization": lambda_D (1 -
    sigmoid(beta (R - z))) of good answers, lambda_U (1 - sigmoid(beta (z - R))) of bad ones, R
    to the reference. An answer is good if its advantage is positive, bad if it is negative; with
    ``train.preferences.label`` the data has the labels, so no pairs are needed. z is the mean R of
    all rows of the optimizer step, at least 0 and without gradient, as in Diffusion-KTO (Li et al.
    2024); the paper uses answers to other questions, which would have to be scored too.
    desirable_weight, undesirable_weight: lambda_D, lambda_U.

    beta: of the log-ratio.
    """

    requires = replace(GroupLoss.requires, unpaired=True)

    def __init__(
        self,
        beta: Positive = 0.1,
        desirable_weight: Positive = 1.0,
        undesirable_weight: Positive = 1.0,
        anchor: AnchorName | Refresh = "ref",
        **options: Any,
    ):
        super().__init__(anchor=anchor, **options)
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def of_group(self, samples: Samples) -> Tensor:
        ratio = samples.ratio
        counted = samples.advantage != 0
        sums = torch.stack([(ratio.detach() * counted).sum(), counted.to(ratio).sum()])
        total, count = all_sum(sums).unbind()
        mean = (total / count.clamp_min(1)).clamp_min(0)
        is_good = samples.advantage > 0
        if len(ratio):
            observe("kto/right", ((ratio > mean) == is_good).double(), counted)
        good = is_good.to(ratio)
        side = 2 * good - 1
        weight = self.desirable_weight * good + self.undesirable_weight * (1 - good)
        loss: Tensor = weight * (1 - (side * self.beta * (ratio - mean)).sigmoid()) * counted
        return loss


@OBJECTIVES.register("ipo")
class IPO(_Pairwise):
    """Regress the margin of a pair to 1 / (2 tau): (R_w - R_l - 1 / (2 tau))^2 (IPO).

    Azar et al. 2023, "A general theoretical paradigm to understand learning from human
    preferences", eq. 17, whose preference is 0 or 1. ``average`` takes means over decisions, as TRL
    does. psi: the paper's Psi where preferences are probabilities: p(i > j) = sigmoid((A_i - A_j) /
    temperature), over the samples of the group; the margin is then (f_i - f_j) / tau, f_i the mean
    of Psi(p(i > j)) over j (eq. 7). identity: IPO's own; logit: Psi = log p / (1 - p), the
    regularised reward of RLHF and DPO; sampled: eq. 17, the limit of identity for rewards that only
    rank.

    tau: of the wanted margin. temperature: of ``psi``.
    """

    def __init__(
        self,
        tau: Positive = 0.1,
        psi: Literal["sampled", "identity", "logit"] = "sampled",
        temperature: Positive = 1.0,
        anchor: AnchorName | Refresh = "ref",
        **options: Any,
    ):
        super().__init__(anchor=anchor, **options)
        self.tau = tau
        self.psi = psi
        self.temperature = temperature

    def of_group(self, samples: Samples) -> Tensor:
        if self.psi != "sampled":
            samples = replace(samples, advantage=self._standing(samples))
        return super().of_group(samples)

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        margin = 1 / (2 * self.tau) if self.psi == "sampled" else gap / self.tau
        return (better - worse - margin).square()

    def _standing(self, samples: Samples) -> Tensor:
        """Return [R]: the mean of Psi(p(i > j)) over the samples j of i's group, itself
        included."""
        index = samples.groups.index
        logit = (samples.advantage[:, None] - samples.advantage) / self.temperature
        value = logit if self.psi == "logit" else logit.sigmoid()
        members = (index[:, None] == index).to(value)
        mean: Tensor = (value * members).sum(1) / members.sum(1)
        return mean


@OBJECTIVES.register("copg")
class CoPG(_Pairwise):
    """Contrast the regularised rewards of two samples: -(r_i - r_j) D + beta / 2 D^2 (CoPG).

    D = R_i - R_j to the reference. Flet-Berliac et al. 2024, "Contrastive policy gradient": the
    gradient is that of log p, with the regularised reward r - beta R of the other sample as the
    baseline, so that no importance weights are needed for off-policy samples; IPO is the case of
    rewards that only rank. Use ``advantage: dr_grpo``.

    beta: weight of the reference.
    """

    def __init__(
        self,
        beta: Positive = 0.1,
        pairs: Pairing = "all",
        anchor: AnchorName | Refresh = "ref",
        **options: Any,
    ):
        super().__init__(pairs, anchor=anchor, **options)
        self.beta = beta

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        margin = better - worse
        return self.beta / 2 * margin.square() - gap * margin


@OBJECTIVES.register("p3o")
class P3O(_Pairwise):
    """Weigh the policy gradient of a pair by half its reward difference, and clip (P3O).

    Wu et al. 2023, "Pairwise proximal policy optimization". clip: "separate" clips the ratio of
    each sample, e^R with (r_i - r_j) / 2 and with its negative; "joint" that of the pair, e^(R_i -
    R_j). Which ratio is clipped is our reading of the paper's two variants; on the first step both
    are its pairwise policy gradient. clip_range: how far a ratio may leave 1.
    """

    def __init__(
        self,
        clip: Literal["separate", "joint"] = "separate",
        clip_range: Positive = 0.2,
        pairs: Pairing = "all",
        **options: Any,
    ):
        super().__init__(pairs, **options)
        self.clip = clip
        self.clip_range = clip_range

    def of_pair(self, better: Tensor, worse: Tensor, gap: Tensor) -> Tensor:
        if self.clip == "joint":
            return self._clipped(better - worse, gap / 2)
        return self._clipped(better, gap / 2) + self._clipped(worse, -gap / 2)

    def _clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return clip(log_ratio.clamp(-FAR, FAR).exp(), advantage, self.clip_range, None)
