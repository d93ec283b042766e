"""How far a policy has gone from the reference: divergences in closed form, their estimators from
the sampled decisions, the weight in force, and a reference that follows the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mmrl.core.distributed import all_sum
from mmrl.core.distributions import TINY, Dist, Gaussian, OverVocabulary
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.types import Point, Rewards, Rollout
from mmrl.core.weights import Weights
from mmrl.objectives.base import frozen
from mmrl.objectives.contracts import MovesSnapshots, Stateful
from mmrl.objectives.surrogates import row_sum
from mmrl.policies.base import Policy
from samplers.noise import Rng

KLForm = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "exact", "flow_grpo"]
Divergence = Literal["reverse", "forward", "chi2", "renyi"]
Positive = Annotated[float, Gt(0)]
# verl's bounds: of the log-ratio, and of k3
FAR = 20.0
MOST = 10.0
LEFT = 0.01  # of a decaying schedule, before it ends
STEP = 0.2  # the largest relative error of a KL that its controller follows (Ziegler et al. 2019)


@dataclass(frozen=True)
class Refresh:
    """Let the reference follow the policy: before every ``every``-th iteration it becomes decay
    times itself plus 1 - decay times the live weights (TR-DPO, Gorbatovski et al. 2024: a moving
    average). decay 0 copies them: ProRL's resets (Liu et al. 2025), hard TR-DPO. at: once, before
    this iteration, in place of every: ReMix's policy reincarnation (Liang et al. 2025). optimizer:
    its state is reset whenever the reference moves, as in ProRL."""

    every: Count = 1
    decay: Annotated[float, Ge(0), Lt(1)] = 0.0
    at: Count | None = None
    optimizer: bool = False

    def due(self, iteration: int) -> bool:
        """Tell whether the reference moves before an iteration."""
        return iteration % self.every == 0 if self.at is None else iteration == self.at


@dataclass(frozen=True)
class KL:
    """Add the KL to the reference to the loss, or take it off the reward.

    weight: of the term. form: estimator from the sampled decision, with u = log ref - log p: k1 =
    -u, k2 = u^2 / 2, k3 = e^u - u - 1 (Schulman 2020), abs = |u|; a + has the value of its
    estimator and k2's gradient, which is that of the KL at the first step (verl); exact is the KL
    of the two distributions, over the vocabulary or of two Gaussians; flow_grpo is that of
    Gaussians times the step length, as Flow-GRPO publishes it; null: exact for steps, k3 for
    tokens. corrected: times the ratio to the sampling policy, which makes value and gradient of k1
    and k3 those of the KL, at later steps too; k2, abs and + are not for it. bounded: verl's
    bounds on u (20) and k3 (10). where: "loss", or "reward": k1 of the sampled sequence is taken
    off its reward (RLOO, REINFORCE++), and the form is k1; with divergence: chi2 it is that of
    whole samples.

    divergence: "reverse" is KL(policy || reference). "forward" is KL(reference || policy) (RAPO),
    "chi2" E_ref[(p / ref)^2] - 1, of every decision, or with where: reward of whole samples, whose
    occupancy it is (Laidlaw et al. 2025, "Correlated proxies"): 2 (p / ref - 1) is taken off a
    sample's reward, which has the gradient of the chi^2, or with ``root`` of its square root (the
    paper), over the mean of all samples of the iteration, at least 1e-4. "renyi" is that of order
    ``order``. They take the form exact or null. Of tokens, forward and chi2 have an estimator with
    the true gradient, -(e^u - 1) and 2 (e^-u - 1) times that of log p. The chi2 and Renyi of steps
    are of the mean over dimensions, as the KL is.
    reweigh: the reference of a forward KL counts as ref e^(A / reweigh) at every decision (RAPO's
    reweighted reference, our reading).

    start, over: the weight goes from start to weight in ``over`` iterations. schedule: linearly, on
    half a cosine, or by decay: the remaining difference shrinks by a constant factor an iteration
    to a hundredth, then to 0, as the epsilon of an epsilon-greedy policy does (dynamic KL, GRPO-D
    of OThink-MR1, Liu et al. 2025: our reading). target: the KL a decision (of ``where: reward``, a
    sample) that is held: after every iteration the weight is multiplied by 1 + rate clip(KL /
    target - 1, -0.2, 0.2) (Ziegler et al. 2019). refresh: the reference follows the policy.
    uncertainty: name of a reward, say a variance over an ensemble's members, by which each sample's
    KL in the reward is multiplied (uncertainty-aware RLHF, Banerjee and Gopalan 2024). previous:
    share of the weight that holds the policy to its weights before the iteration's update, instead
    of to the reference: the KL-convex constraint of ReMix (Liang et al. 2025), (1 - previous)
    KL(ref) + previous KL(old).
    ref_guidance: scale of classifier-free guidance at which the reference is evaluated; null: that
    of the policy. A guided reference, with a weight that goes from start to 0, first distils
    guidance into the policy (Meng et al. 2023), then leaves it to the reward.

    order: of the Renyi divergence. root: of the chi2 of whole samples, its square root. rate: with
    ``target``: of the change.
    """

    weight: Annotated[float, Ge(0)] = 0.0
    form: KLForm | None = None
    corrected: bool = False
    bounded: bool = False
    where: Literal["loss", "reward"] = "loss"
    start: Annotated[float, Ge(0)] = 0.0
    over: Annotated[int, Ge(0)] = 0
    schedule: Literal["line", "cosine", "decay"] = "line"
    divergence: Divergence = "reverse"
    order: Positive = 2.0
    root: bool = False
    reweigh: Positive | None = None
    target: Positive | None = None
    rate: Positive = 0.1
    refresh: Refresh | None = None
    uncertainty: str | None = None
    previous: Annotated[float, Ge(0), Le(1)] = 0.0
    ref_guidance: Annotated[float, Ge(0)] | None = None

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise UserError(f"kl: weight must not be negative, it is {self.weight}")
        for wrong, sentence in (*_conflicts_of_divergence(self), *_conflicts_of_weight(self)):
            if wrong:
                raise UserError(f"kl: {sentence}")

    def at(self, iteration: int) -> float:
        """Return the weight of the schedule."""
        if iteration >= self.over:
            return self.weight
        share = iteration / self.over
        if self.schedule == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        elif self.schedule == "decay":
            share = 1 - LEFT**share
        return self.start + (self.weight - self.start) * share

    def penalty(self, log_ratio: Tensor) -> tuple[Tensor, float]:
        """Return the penalty [B] per unit of weight for samples with these log p / ref [B], whose
        mean measures the divergence, and the factor on it that gives the gradient."""
        if self.divergence == "reverse":
            return log_ratio, 1.0
        chi2 = torch.expm1(log_ratio.clamp(-FAR, FAR))
        if not self.root:
            return chi2, 2.0
        total, count = all_sum(
            torch.stack([chi2.sum(), chi2.new_tensor(float(len(chi2)))])
        ).tolist()
        return chi2, 1 / math.sqrt(max(total / max(count, 1), 1e-4))

    def whole(self) -> bool:
        """Tell whether it needs a closed form over the vocabulary other than the reverse KL."""
        closed = self.form == "exact" or self.divergence == "renyi"
        return closed and self.divergence != "reverse"

    def steered(self, factor: float, metrics: dict[str, float]) -> float:
        """Return the factor on the weight after an iteration with these metrics, given the factor
        before it."""
        measured = metrics.get("reward/kl/mean" if self.where == "reward" else "kl", math.nan)
        if self.target is None or math.isnan(measured):
            return factor
        error = min(max(measured / self.target - 1, -STEP), STEP)
        return factor * (1 + self.rate * error)

    def of(self, dist: Dist, reference: Dist, logp: Tensor, ref: Tensor) -> Tensor:
        """Return [B, L]: the divergence, or its estimator from the log-probs [B, L] of what was
        sampled; ``ref`` may be shifted, which the closed forms do not see."""
        gaussian = isinstance(dist, Gaussian)
        if self.divergence == "reverse":
            form = self.form or ("exact" if gaussian else "k3")
            if form in ("exact", "flow_grpo"):
                return dist.kl(reference)
            return estimate(logp, ref, form, self.bounded)
        estimated = self.divergence != "renyi" and self.form is None and not gaussian
        if estimated or self.reweigh is not None:
            return sampled(logp, ref, self.divergence)
        if self.divergence == "forward" and gaussian:
            return reference.kl(dist)
        if self.divergence == "forward":
            return _over_vocabulary(dist, reference, lambda p, q: (q.exp() * (q - p)).sum(-1))
        order = 2.0 if self.divergence == "chi2" else self.order
        renyi = _renyi(dist, reference, order)
        return torch.expm1(renyi) if self.divergence == "chi2" else renyi


def estimate(logp: Tensor, ref: Tensor, form: KLForm, bounded: bool = False) -> Tensor:
    """Return [B, L]: an estimator from the log-probs [B, L] of the sampled tokens."""
    if form in ("k1+", "k3+"):
        value = estimate(logp, ref, "k1" if form == "k1+" else "k3", bounded)
        slope = estimate(logp, ref, "k2", bounded)
        return slope - slope.detach() + value.detach()
    u = ref - logp
    if form == "k1":
        return -u
    if form == "abs":
        return u.abs()
    if form == "k2":
        return u.square() / 2
    u = u.clamp(-FAR, FAR) if bounded else u
    k3 = torch.expm1(u) - u
    return k3.clamp(-MOST, MOST) if bounded else k3


def sampled(logp: Tensor, ref: Tensor, divergence: Divergence) -> Tensor:
    """Return [B, L]: an unbiased estimate of the forward KL or the chi^2 from decisions the policy
    sampled, whose gradient is an unbiased one of the divergence's."""
    u = (ref - logp).detach().clamp(-FAR, FAR)
    if divergence == "forward":
        value = u * u.exp() - torch.expm1(u)
        slope = -torch.expm1(u)
    else:
        value = torch.expm1(-u)
        slope = 2 * value
    return value + slope * (logp - logp.detach())


def _renyi(dist: Dist, reference: Dist, order: float) -> Tensor:
    """Return [B, L]: the Renyi divergence of the distribution from the reference, in closed form;
    infinite where the reference is too narrow for one."""
    if not isinstance(dist, Gaussian) or not isinstance(reference, Gaussian):
        return _over_vocabulary(
            dist,
            reference,
            lambda p, q: (order * p + (1 - order) * q).logsumexp(-1) / (order - 1),
        )
    p = dist.std.clamp_min(TINY)
    q = reference.std.clamp_min(TINY)
    mixed = order * q**2 + (1 - order) * p**2
    finite = mixed > 0
    mixed = torch.where(finite, mixed, q**2)
    spread = (q / p).log() + (q**2 / mixed).log() / (2 * (order - 1))
    spread = torch.where(p == q, torch.zeros_like(p), spread)
    each = spread + order * (dist.mean - reference.mean) ** 2 / (2 * mixed)
    return dist.reduce(torch.where(finite, each, torch.inf))


def _conflicts_of_divergence(kl: KL) -> Iterator[tuple[bool, str]]:
    """Yield (whether options exclude each other, sentence) of the divergence and its form."""
    yield from (
        (
            kl.divergence != "reverse" and kl.form not in (None, "exact"),
            f"the form {kl.form} estimates the reverse KL: leave it out",
        ),
        (
            kl.divergence not in ("reverse", "chi2") and kl.where == "reward",
            "what is taken off the reward is the reverse KL or the chi2: set where: loss",
        ),
        (
            kl.root and (kl.divergence, kl.where) != ("chi2", "reward"),
            "root is of the chi2 of whole samples: set divergence: chi2 and where: reward",
        ),
        (kl.divergence == "renyi" and kl.order == 1, "order 1 is divergence: reverse"),
    )


def _conflicts_of_weight(kl: KL) -> Iterator[tuple[bool, str]]:
    """Yield (whether options exclude each other, sentence) of the rest."""
    yield from (
        (
            kl.corrected and kl.form in ("k1+", "k3+"),
            f"the form {kl.form} has the KL's whole gradient already: leave out corrected",
        ),
        (
            kl.corrected and kl.form in ("k2", "abs"),
            f"the form {kl.form} times the ratio has another gradient than the KL: use k1 or "
            "k3, or leave out corrected",
        ),
        (
            kl.corrected and kl.where == "reward",
            "what is taken off the reward is not weighed: leave out corrected",
        ),
        (
            kl.reweigh is not None and (kl.divergence, kl.form) != ("forward", None),
            "reweigh is for divergence: forward without a form",
        ),
        (
            kl.uncertainty is not None and kl.where != "reward",
            "uncertainty weighs the KL of a sample in its reward: set where: reward",
        ),
        (
            kl.previous > 0 and kl.where == "reward",
            "before the update the policy is still what it was: set where: loss",
        ),
        (
            kl.target is not None and not kl.weight,
            "target multiplies the weight: give it one to begin with, such as 0.1",
        ),
    )


def _over_vocabulary(dist: Any, reference: Any, of_logprobs: Any) -> Tensor:
    """Return [B, L]: a function of the log-probs [*, V] of all tokens, without tokens that are
    impossible under both."""
    if not isinstance(dist, OverVocabulary):
        raise UserError(
            "kl: this policy scores its tokens without keeping the whole vocabulary, of which only "
            "the reverse KL is exact: take divergence: forward or chi2 without a form, or reverse"
        )
    logits = (part.logits for part in (dist, reference))
    p, q = (x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in logits)
    impossible = p.isneginf() & q.isneginf()
    # far below every other token, and finite: inf - inf would poison the gradient
    p, q = (x.masked_fill(impossible, -1e4) for x in (p, q))
    return dist.placed(of_logprobs(p, q))


class Reference:
    """Holds the reference weights: the base model, or weights that follow the policy."""

    def __init__(self, refresh: Refresh | None = None):
        self.refresh = refresh
        # the base stays what the run is compared with
        self.name = "ref" if refresh is None else "moving"
        self.refreshed = 0  # the iteration before which it last moved

    def follow(self, weights: Weights, iteration: int) -> None:
        """Update the reference before an iteration, if due. A repeated call does nothing."""
        refresh = self.refresh
        if refresh is not None and refresh.due(iteration) and iteration > self.refreshed:
            weights.track(self.name, refresh.decay)
            self.refreshed = iteration

    def restarts(self, iteration: int) -> bool:
        """Tell whether the optimizer's state is reset in this iteration, as the reference moves
        before it."""
        moved = iteration > 0 and self.refreshed == iteration
        return moved and self.refresh is not None and self.refresh.optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"refreshed": self.refreshed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refreshed = int(state.get("refreshed", 0))


class KLTerm:
    """Holds the KL term of an objective over a run: the weight in force and the reference."""

    def __init__(self, kl: float | KL):
        self.options = kl if isinstance(kl, KL) else KL(weight=kl)
        self.reference = Reference(self.options.refresh)
        self.name = self.reference.name
        self.active = bool(self.options.weight or self.options.start)
        self.iteration = 0
        self.factor = 1.0  # on the weight, by the controller that holds a target

    @classmethod
    def of_velocities(cls, kl: float | KL, objective: str) -> KLTerm:
        """Return the term of an objective whose KL is a squared distance of velocities. Raises
        UserError for options that choose another form."""
        term = cls(kl)
        chosen = term.options
        plain = KL(
            weight=chosen.weight,
            start=chosen.start,
            over=chosen.over,
            schedule=chosen.schedule,
            target=chosen.target,
            rate=chosen.rate,
            refresh=chosen.refresh,
            ref_guidance=chosen.ref_guidance,
        )
        if chosen != plain:
            raise UserError(
                f"objective.{objective}.kl is the squared distance of velocities: it takes weight, "
                "start, over, schedule, target, rate, refresh and ref_guidance alone"
            )
        return term

    def reference_at(self, policy: Policy, point: Point) -> Dist:
        """Return the reference's distribution at a point, without gradient."""
        scale = self.options.ref_guidance
        return frozen(policy, self.name, point if scale is None else point.replace(guidance=scale))

    def in_reward(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Return the rewards minus the KL of every sampled sequence. Raises UserError if
        ``uncertainty`` names none of them."""
        divergence, factor = self.options.penalty(self._of_sequences(policy, rollout))
        doubt = self.options.uncertainty
        if doubt is not None:
            if doubt not in rewards:
                raise UserError(
                    f"kl: uncertainty names no reward of this run: {doubt!r}; there are "
                    f"{', '.join(rewards)}"
                )
            divergence = divergence * rewards[doubt].to(divergence)
        weight = -factor * self.weight()
        return Rewards({**rewards, "kl": divergence}, {**rewards.weights, "kl": weight})

    def _of_sequences(self, policy: Policy, rollout: Rollout) -> Tensor:
        """Return [N]: the log-ratio to the reference of every sample, summed over its decisions."""
        divergence = rollout.logprob.new_zeros(len(rollout))
        rollout = rollout.replace(mask=rollout.path_mask())  # of a tree, of every whole sample
        size = policy.pass_sizes.rows or len(rollout)
        for part, counts in policy.pass_sizes.chunks(len(rollout), size):
            for point in policy.path(rollout[part]):
                gap = point.recorded - self.reference_at(policy, point).log_prob(point.target)
                divergence[part] += row_sum(gap, point.mask & counts)[:, 0]
        return divergence

    def weight(self) -> float:
        """Return the weight in force."""
        return self.options.at(self.iteration) * self.factor

    def in_force(self) -> bool:
        """Tell whether the term is worth its passes: not once its weight has gone to 0."""
        return self.active and (self.weight() > 0 or self.options.target is not None)

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """Adapt the weight to the metrics of an iteration; adds it to them if it is controlled."""
        self.iteration = iteration + 1
        self.factor = self.options.steered(self.factor, metrics)
        if self.options.target is not None:
            metrics["kl_weight"] = self.weight()

    def state_dict(self) -> dict[str, Any]:
        known = {"iteration": self.iteration, "kl_factor": self.factor}
        return known | self.reference.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state.get("iteration", 0))
        self.factor = float(state.get("kl_factor", 1.0))
        self.reference.load_state_dict(state)


class Regularised(MovesSnapshots, Stateful):
    """An objective with a KL term, whose state is saved with it."""

    term: KLTerm

    def begin_iteration(self, weights: Weights, iteration: int, rng: Rng) -> None:
        if self.term.name in self.snapshots:
            self.term.reference.follow(weights, iteration)

    def restarts(self, iteration: int) -> bool:
        return self.term.reference.restarts(iteration)

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        self.term.adapt(iteration, metrics)

    def state_dict(self) -> dict[str, Any]:
        return self.term.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.term.load_state_dict(state)
