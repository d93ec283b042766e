"""The policy gradient on any decisions: a paper's surrogate of ratio and advantage, with a KL, an
entropy bonus, corrections, and a choice of decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.config.unfit import capabilities_of, unsuited
from mmrl.core.distributed import all_gather_rows, all_sum, largest
from mmrl.core.distributions import Dist, Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES, SURROGATES, options
from mmrl.core.types import Fields, Point, Renoised, Rewards, Rollout, Surrogate, Transition
from mmrl.objectives.base import Tangent, frozen
from mmrl.objectives.forward_process.base import mean_square, noised, positive, velocity
from mmrl.objectives.importance_sampling import Importance, off_policy
from mmrl.objectives.kl import KL, KLTerm, Regularised
from mmrl.objectives.surrogates import (
    Width,
    both_sides,
    outside,
    ppo,
    row_sum,
    sees_whole_rows,
    summed,
)
from mmrl.objectives.timestep_samplers import uniform
from mmrl.policies.base import Policy
from samplers.noise import Rng

Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Le(1)]
# options that say nothing about the other kind of decisions, and what to do instead
OF_TOKENS = {
    "entropy": "the noise of a step is not trained, nor is its entropy: leave it out",
    "off_policy": "it compares answers of models that write tokens: use clip_range",
    "top_entropy": "the entropy of a step is that of its noise: use timestep_fraction",
    "shaping": "the steps that lead to somebody else's picture are not known: leave it out",
}
OF_STEPS = {
    "timestep_fraction": "tokens have no time: use top_entropy",
    "timestep_selection": "tokens have no time: use top_entropy",
    "timestep_weighting": "noise is for flow and diffusion models: use top_entropy",
}
OF_BOTH = "a sample of this policy has tokens and steps of a picture: leave it out"
WHOLE = (
    "compares whole samples, which are scored in several passes here: choose the surrogate ppo, "
    "cispo, sapo, spo or reinforce"
)


@dataclass(frozen=True)
class Entropy:
    """Chooses an entropy bonus: the loss minus weight times the entropy of the token's
    distribution.

    With ``target`` (nats a token) the weight adapts (He et al. 2025, Skywork-OR1, section 4): after
    every iteration it rises by ``step`` if the mean entropy was below the target and falls by it
    otherwise, within [low, high]; and it is 0 for as long as the entropy is above the target.
    """

    weight: Annotated[float, Ge(0)] = 0.0
    target: Positive | None = None
    step: Positive = 5e-3
    low: Annotated[float, Ge(0)] = 0.0
    high: Positive = 1.0


@dataclass(frozen=True)
class Supervision:
    """Adds the supervised loss of answers that somebody else wrote: (1 - mu) L_RL + mu L_SFT, each
    a mean over its own decisions (with ``train.loss_agg_mode: token_mean``).

    Zhang et al. 2025, "On-policy RL meets off-policy experts: Harmonizing supervised fine-tuning
    and reinforcement learning via dynamic weighting" (CHORD). mu rises in ``warmup_iterations``
    iterations from 0 to ``peak`` and falls in ``decay_iterations`` on a half cosine to ``valley``;
    a step of the paper is an iteration, one batch of samples, as in the authors' code. phi: every
    token's loss is weighed by p (1 - p), p the policy's own probability of it, without its gradient
    (CHORD-phi, with mu constant: valley as peak).

    Of flow and diffusion models nobody knows the steps to somebody else's picture: their supervised
    loss is that of objective ``sft``, the mean square of the output less its target at fresh noise,
    one even draw of a time a picture.
    """

    peak: Annotated[float, Ge(0), Le(1)] = 0.9
    valley: Annotated[float, Ge(0), Le(1)] = 0.05
    warmup_iterations: Annotated[int, Ge(0)] = 0
    decay_iterations: Annotated[int, Ge(0)] = 200
    phi: bool = False

    def mu(self, iteration: int) -> float:
        """Return the weight of the supervised loss in an iteration, counted from 0."""
        if iteration < self.warmup_iterations:
            return self.peak * iteration / self.warmup_iterations
        if iteration >= self.warmup_iterations + self.decay_iterations:
            return self.valley
        share = (iteration - self.warmup_iterations) / self.decay_iterations
        return self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * share)) / 2

    def loss(self, logp: Tensor) -> Tensor:
        """Return [B, L]: -log p, or with ``phi`` weighed."""
        if not self.phi:
            return -logp
        p = logp.detach().exp()
        return -p * (1 - p) * logp


@dataclass(frozen=True, kw_only=True)
class TokenWeights(Fields):
    """Holds how much every token's policy gradient counts."""

    weight: Tensor  # [B, L]


@OBJECTIVES.register("policy_gradient")
class PolicyGradient(Regularised):
    """Follow the policy gradient on any decisions: GRPO, Flow-GRPO, DanceGRPO, DAPO, GSPO ...

    surrogate: the loss of ratio and advantage, one a paper. clip_range: of its ratio, one number or
    [low, high], in place of the surrogate's own clip_low and clip_high. advantage_clip: bound on
    |A|. kl: weight of the KL to the reference, or all its choices. behavior_policy: the weights
    that sample.

    sft: the supervised loss of answers that others wrote, ``train.demonstrations`` (CHORD).
    shaping: gamma of -A rho / (rho + gamma), the loss of such answers and of guided ones
    (``train.refinement``), which is not clipped: LUFFY (0.1), RGR-GRPO. importance_sampling:
    correction for another engine, or for older weights, that sampled.

    Of tokens: entropy: weight of a bonus, or all its choices. off_policy: answers with A < 0 leave
    the loss when their tokens have become this much less likely on average, in nats. top_entropy:
    only this share of the step's tokens, those of highest entropy, has a policy gradient (Wang et
    al. 2025, "Beyond the 80/20 rule").

    Of steps of flow and diffusion models: timestep_fraction, timestep_selection: how much of every
    row's decisions is trained on, and which. timestep_weighting: "noise" multiplies the loss of a
    step by the noise injected there, so that the early, decisive steps count more (TempFlow-GRPO,
    He et al. 2025; its code is not public).

    Surrogates of whole samples see all decisions of a row, in however many passes they are scored.
    """

    # looks at decisions on the path: a sampler without noise has none
    visits = True
    reads = "decisions"
    follows_path = True
    proportional = True
    mixes = True

    def __init__(
        self,
        surrogate: Annotated[Surrogate, SURROGATES] = ppo,
        clip_range: float | tuple[float, float] | None = None,
        advantage_clip: Width | None = None,
        kl: Annotated[float, Ge(0)] | KL = 0.0,
        entropy: Annotated[float, Ge(0)] | Entropy = 0.0,
        importance_sampling: Importance | None = None,
        off_policy: Positive | None = None,
        top_entropy: Share = 1.0,
        timestep_fraction: Share = 1.0,
        timestep_selection: Literal["first", "random"] = "first",
        timestep_weighting: Literal["even", "noise"] = "even",
        behavior_policy: str = "live",
        sft: Supervision | None = None,
        shaping: Positive | None = None,
    ):
        self.sft = sft
        self.shaping = shaping
        self.scales = (1.0, 1.0)  # of own decisions and of pictures of others, in this step
        self.surrogate = surrogate if clip_range is None else clipped(surrogate, clip_range)
        self.clip_bounds = bounds_of(self.surrogate)
        self.clip_range = clip_range
        self.advantage_clip = advantage_clip
        self.term = KLTerm(kl)
        self.kl = self.term.options
        self.entropy = entropy if isinstance(entropy, Entropy) else Entropy(weight=entropy)
        self.importance_sampling = importance_sampling
        self.off_policy = off_policy
        self.top_entropy = top_entropy
        self.timestep_fraction = timestep_fraction
        self.timestep_selection = timestep_selection
        self.timestep_weighting = timestep_weighting
        self.behavior_policy = behavior_policy
        # the weight in force
        self.bonus = self.entropy.weight if self.entropy.target is None else 0.0
        self.controlled = self.entropy.weight  # what the controller has arrived at
        self.snapshots = (self.term.name,) if self.term.active else ()
        if self.term.active and self.kl.previous:
            self.snapshots = (self.term.name, "old")
        self.single_paths = sees_whole_rows(surrogate)
        bound = 1.0 if advantage_clip is None else advantage_clip
        positive("policy gradient", advantage_clip=bound)
        if not 0 < timestep_fraction <= 1:
            raise UserError(f"timestep_fraction must lie in (0, 1], not {timestep_fraction}")

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        chosen = {
            "entropy": self.entropy != Entropy(),
            "importance_sampling": self.importance_sampling is not None,
            "off_policy": self.off_policy is not None,
            "top_entropy": self.top_entropy < 1,
            "sft": self.sft is not None,
            "shaping": self.shaping is not None,
            "timestep_fraction": self.timestep_fraction < 1,
            "timestep_selection": self.timestep_selection != "first",
            "timestep_weighting": self.timestep_weighting != "even",
        }
        can = capabilities_of(policy)
        decisions = "" if can is None else can.decisions
        of_both = dict.fromkeys((*OF_TOKENS, *OF_STEPS), OF_BOTH)
        reasons: dict[str, str] = {
            "gaussian": OF_TOKENS,
            "categorical": OF_STEPS,
            "mixed": of_both,
        }.get(decisions, {})
        yield from ((name, why) for name, why in reasons.items() if chosen[name])
        if decisions == "categorical" and self.kl.form == "flow_grpo":
            yield "kl", "the form flow_grpo is for flow models; use k3 or exact"
        if can is not None and can.makes == "text" and self.kl.ref_guidance is not None:
            yield "kl", "ref_guidance is for models with classifier-free guidance: leave it out"
        one_by_one = decisions == "categorical" and not getattr(can, "remaskable", False)
        if one_by_one and self.kl.whole():
            yield (
                "kl",
                f"the divergence {self.kl.divergence} is not exact over tokens that are scored "
                "one by one; use forward or chi2 without a form, or reverse",
            )
        sampling = self.importance_sampling
        if sampling is not None and sampling.clip_mode == "additive" and not self.clips_as_ppo():
            yield "importance_sampling", "clip_mode: additive is of the surrogate ppo: choose it"
        if self.sft is not None and self.sft.phi and decisions == "gaussian":
            yield "sft", "phi weighs tokens by their probability: leave phi out"
        if self.sft is not None and (self._in_parts(policy) or self.top_entropy < 1):
            yield "sft", "it needs a loss of single decisions: choose ppo without top_entropy"
        if self.shaping is not None and self.single_paths:
            yield "shaping", "it is of single decisions: choose ppo or another that is"
        mixed = decisions == "mixed" and self.single_paths
        if mixed or (self._in_parts(policy) and self.couples(policy) != "rows"):
            yield "surrogate", f"it {WHOLE}"
        if decisions == "mixed" and (self.kl.form == "flow_grpo" or self.kl.whole()):
            yield "kl", "its form and divergence are of one kind of decisions: use reverse"

    def clips_as_ppo(self) -> bool:
        """Tell whether the clip is PPO's, which may be as wide as the decision's weight says."""
        return getattr(self.surrogate, "func", self.surrogate) is ppo

    def extra_terms(self) -> str:
        chosen = {
            "kl": self.term.active and self.kl.where == "loss",
            "entropy": self.entropy != Entropy(),
            "sft": self.sft is not None,
            "top_entropy": self.top_entropy < 1,
        }
        return next((name for name, is_set in chosen.items() if is_set), "")

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if why := unsuited(type(self), policy):
            raise UserError(why)
        in_parts = self._in_parts(policy)
        if in_parts and rollout.edge_id is not None:
            raise UserError(
                "this surrogate compares whole samples, which share the steps of a tree: leave out "
                "the policy's option tree, or choose ppo, cispo, sapo, spo or reinforce"
            )
        if self.timestep_fraction < 1:
            by_chance = rng if self.timestep_selection == "random" else None
            chosen = subset(rollout.mask, self.timestep_fraction, by_chance, rollout.row_id)
            rollout = rollout.replace(mask=chosen)
        for point in policy.path(rollout):
            if self.single_paths and self.couples(policy) != "rows" and not one_pass(point):
                raise UserError(f"this surrogate {WHOLE}")
            yield point
        if self._imitates(policy):
            yield from self._imitated(policy, rollout, rng)

    def _imitated(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterator[Point]:
        """Return re-noised states of pictures that somebody else made."""
        expert = rollout.provenance.is_ground_truth
        rows = None if expert is None else rollout[expert & rollout.alive()]
        if rows is not None and len(rows):
            yield from noised(policy, rows, rng.fold("imitation"), uniform, 1)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        if self.sft is not None and isinstance(point.step, Renoised):
            imitation = mean_square(velocity(policy.dist(point)) - point.target)
            observe("sft/loss", imitation, point.mask)
            return self.scales[1] * self.sft.mu(self.term.iteration) * imitation
        return self.loss_at(policy, point, policy.dist(point))

    def loss_at(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        """Compute the loss [B, L] of the decisions at a point from their distributions."""
        logp, recorded = self._log_probs(policy, point, dist)
        old = point.old(logp, recorded)
        # the gate looks at what rounding makes of it
        observe("log_ratio", logp - recorded, point.current())
        loss = self.policy_loss(logp, old, point)
        weight = self._weight(point, dist, logp)
        loss = loss if weight is None else loss * weight
        if self.sft is not None:
            loss = self._supervised(self.sft, loss, logp, point)
        if self.term.in_force() and self.kl.where == "loss":
            loss = loss + self.term.weight() * self._kl(policy, point, dist, logp, old)
        if isinstance(dist, Gaussian):
            return loss
        return (
            loss - self.bonus * self._entropy(dist, point)
            if self.bonus
            else self._watched(dist, point, loss)
        )

    def policy_loss(self, logp: Tensor, old: Tensor, point: Point) -> Tensor:
        """Return [B, L]: the surrogate, or its tangent where ``couple`` took it over whole rows."""
        surrogate = self._clipping(point)
        if isinstance(point.coupling, Tangent):
            stopped = (point.coupling.slope == 0) & (point.advantage != 0)
            loss = point.coupling.value + point.coupling.slope * (logp - logp.detach())
        else:
            credit = self._credit(point)
            stopped = without_slope(surrogate, logp, old, credit, point.mask)
            loss = summed(surrogate, logp, old, credit, point.mask)
        # KL of the weights that sampled to those of now, by (rho - 1) - log rho
        observe(
            "kl_behavior",
            (logp - old).expm1() - (logp - old),
            point.mask & ~_expert(point)[:, None],
        )
        if self.shaping is not None:
            share = torch.sigmoid(logp - old - math.log(self.shaping))  # rho / (rho + gamma)
            guided = -self._bounded(point.advantage) * share
            loss = torch.where(_expert(point)[:, None], guided, loss)
        self._watch((logp - old).exp(), stopped.double(), point)
        return loss * point.coupling.weight if isinstance(point.coupling, TokenWeights) else loss

    # Surrogates of whole samples and shares of a step's tokens, which need more than one pass.

    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        if self.top_entropy < 1:
            return "groups"
        if self.sft is not None and not self._imitates(policy):
            return "rows"
        return "rows" if self._in_parts(policy) else ""

    def _imitates(self, policy: Policy) -> bool:
        """Tell whether pictures of others are learnt at fresh noise."""
        return self.sft is not None and policy.capabilities.decisions == "gaussian"

    def weigh(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """Scale decisions on the path and pictures of others to means over their own numbers, of
        all processes."""
        if self.sft is None:
            return
        device = masks[0][0].device if masks else None
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for mask, renoised in masks:
            counts[int(renoised)] += mask.sum()
        decisions, pictures = all_sum(counts).tolist()
        total = decisions + pictures
        self.scales = (total / max(decisions, 1), total / max(pictures, 1))

    def _in_parts(self, policy: Any) -> bool:
        """Tell whether the surrogate needs whole rows, which this policy scores in several
        passes."""
        can = capabilities_of(policy)
        several = can is not None and (can.decisions == "gaussian" or not can.one_pass)
        return self.single_paths and several

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, L]: entropies; or [B, 3 L] log-probs, old ones, and weights in the mean of the
        loss."""
        if self.sft is not None:
            return torch.zeros_like(point.recorded[:, :1])
        dist = policy.dist(point)
        if self.top_entropy < 1:
            return torch.where(point.mask, dist.entropy(), 0.0)
        logp, recorded = self._log_probs(policy, point, dist)
        weight = point.mask.to(logp)
        for factor in (self._weight(point, dist, logp), point.weight, point.estimator_weight):
            weight = weight if factor is None else weight * factor
        return torch.cat([logp, point.old(logp, recorded), weight], 1)

    def couple(self, point: Point, measured: Tensor) -> Point:
        if self.top_entropy < 1:
            return self._of_high_entropy(point, measured)
        if self.sft is not None:
            return self._with_shares(point)
        logp, old, weight = measured.chunk(3, 1)
        credit = self._credit(point)
        credit = credit.expand(logp.shape + credit.shape[2:])
        rows = RowTable(point.row_id)
        mask = rows.spread(point.mask)
        with torch.enable_grad():
            leaf = rows.spread(logp).detach().requires_grad_()
            loss = summed(self.surrogate, leaf, rows.spread(old), rows.spread(credit), mask)
            total = torch.where(mask, loss * rows.spread(weight), 0.0).sum()
            (slope,) = torch.autograd.grad(total, leaf)
        slope = torch.where(weight > 0, rows.collect(slope) / weight, 0.0)
        return point.replace(coupling=Tangent(value=rows.collect(loss.detach()), slope=slope))

    def _of_high_entropy(self, point: Point, measured: Tensor) -> Point:
        """Keep the tokens of highest entropy of the whole step, on all processes."""
        every = all_gather_rows(measured[point.mask]).double().sort().values
        if not len(every):
            return point
        rank = (1 - self.top_entropy) * (len(every) - 1)  # the quantile by linear interpolation
        below = every[int(rank)]
        above = every[min(int(rank) + 1, len(every) - 1)]
        chosen = measured >= torch.lerp(below, above, rank % 1)
        return point.replace(coupling=TokenWeights(weight=chosen.to(measured)))

    def _with_shares(self, point: Point) -> Point:
        """Say how much a decision counts, so that the supervised loss and the other are means over
        their own decisions, those of all processes."""
        expert = _expert(point)[:, None]
        counts = torch.stack([(point.mask & ~expert).sum(), (point.mask & expert).sum()])
        counts = all_sum(counts).to(point.recorded)
        scale = counts.sum() / counts.clamp_min(1)
        weight = torch.where(expert, scale[1], scale[0]).expand_as(point.mask)
        return point.replace(coupling=TokenWeights(weight=weight))

    def _supervised(self, sft: Supervision, loss: Tensor, logp: Tensor, point: Point) -> Tensor:
        """Return [B, L]: (1 - mu) of the policy loss, mu of the supervised one on answers of
        others."""
        mu = sft.mu(self.term.iteration)
        if isinstance(point.step, Transition):
            return self.scales[0] * (1 - mu) * loss
        expert = _expert(point)[:, None]
        imitation = sft.loss(logp)
        observe("sft/loss", imitation, point.mask & expert)
        if isinstance(point.coupling, TokenWeights):
            imitation = imitation * point.coupling.weight
        return torch.where(expert, mu * imitation, (1 - mu) * loss)

    # The KL in the reward, and weights that change from one iteration to the next.

    @torch.no_grad()
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Return the rewards, less the KL of every sampled sequence if that is where it goes."""
        if not self.term.active or self.kl.where != "reward":
            return rewards
        divergence = rollout.logprob.new_zeros(len(rollout))
        rollout = rollout.replace(mask=rollout.path_mask())  # of a tree, of every whole sample
        size = policy.fixed_batch_rows or len(rollout)
        count = largest(-(-len(rollout) // size), divergence.device)  # groups may have grown
        for first in range(0, count * size, size):
            rows = rollout[first : first + size] if first < len(rollout) else rollout[:size]
            for point in policy.path(rows):
                reference = self.term.reference_at(policy, point)
                gap = point.recorded - reference.log_prob(point.target)
                if first < len(rollout):
                    divergence[first : first + size] += row_sum(gap, point.mask)[:, 0]
        divergence, factor = self.kl.penalty(divergence)
        if self.kl.uncertainty is not None:
            if self.kl.uncertainty not in rewards:
                raise UserError(
                    f"kl: uncertainty names no reward of this run: {self.kl.uncertainty!r}; there "
                    f"are {', '.join(rewards)}"
                )
            divergence = divergence * rewards[self.kl.uncertainty].to(divergence)
        weight = -factor * self.term.weight()
        return Rewards({**rewards, "kl": divergence}, {**rewards.weights, "kl": weight})

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """Adapt the weight of the KL and the entropy controller after an iteration."""
        super().adapt(iteration, metrics)
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
        return super().state_dict() | {"bonus": self.bonus, "controlled": self.controlled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.bonus = state["bonus"]
        self.controlled = state["controlled"]

    # Parts of the loss.

    def recorded(self, policy: Policy, point: Point, logp: Tensor) -> Tensor:
        """Return [B, L]: log-probs under the weights that sampled."""
        return point.recorded

    def _log_probs(self, policy: Policy, point: Point, dist: Dist) -> tuple[Tensor, Tensor]:
        """Return [B, L]: log-probs now and those recorded, 0 where nothing is trained on."""
        logp = torch.where(point.mask, dist.log_prob(point.target), 0.0)
        return logp, torch.where(point.mask, self.recorded(policy, point, logp), 0.0)

    def _advantage(self, point: Point) -> Tensor:
        return self._bounded(point.advantage)

    def _clip_scale(self, point: Point) -> Tensor | float:
        """Return what the clip of the ratio is multiplied by: the policy's own factor, and what the
        sampling policy's share makes it wider."""
        scale = 1.0 if point.clip_scale is None else point.clip_scale
        sampling = self.importance_sampling
        if sampling is None or sampling.clip_mode == "multiplicative":
            return scale
        return scale / sampling.weight(point)

    def _clipping(self, point: Point) -> Surrogate:
        """Return the surrogate with the clip of these decisions."""
        scale = self._clip_scale(point)
        if isinstance(scale, float):
            return self.surrogate
        bounds = zip(("clip_low", "clip_high"), self.clip_bounds, strict=True)
        wider: dict[str, Any] = {name: bound * scale for name, bound in bounds}
        return partial(self.surrogate, **wider)

    def _credit(self, point: Point) -> Tensor:
        """Return the advantage, or its parts, whose losses are summed."""
        return self._bounded(point.credit())

    def _bounded(self, advantage: Tensor) -> Tensor:
        most = self.advantage_clip
        return advantage if most is None else advantage.clamp(-most, most)

    def _weight(self, point: Point, dist: Dist, logp: Tensor) -> Tensor | None:
        """Return what the policy loss is multiplied by, [B, 1] or [B, L]; None: 1."""
        weight = None
        if self.timestep_weighting == "noise":
            if not isinstance(dist, Gaussian):
                raise UserError(f"timestep_weighting {OF_STEPS['timestep_weighting']}")
            weight = dist.std.flatten(1)[:, :1]
        if self.off_policy:
            weight = off_policy(logp, point, self.off_policy)
        if self.importance_sampling:
            factor = self.importance_sampling.weight(point)
            weight = factor if weight is None else weight * factor
        return weight

    def _kl(self, policy: Policy, point: Point, dist: Dist, logp: Tensor, old: Tensor) -> Tensor:
        reference = self.term.reference_at(policy, point)
        kl = self._far(reference, point, dist, logp)
        observe("kl", kl, point.sampled_mask())
        if self.kl.previous:
            gone = self._far(frozen(policy, "old", point), point, dist, logp)
            observe("kl_old", gone, point.sampled_mask())
            kl = torch.lerp(kl, gone, self.kl.previous)
        if self.kl.form == "flow_grpo":
            if not isinstance(point.step, Transition):
                raise UserError("kl: the form flow_grpo is for flow models; use exact")
            kl = kl * (point.step.time - point.step.next_time)[:, None]
        if not self.kl.corrected:
            return kl
        ratio = (logp - old).exp()
        # the gradient of the other estimators is whole already
        return kl * (ratio if self.kl.divergence == "reverse" else ratio.detach())

    def _far(self, reference: Dist, point: Point, dist: Dist, logp: Tensor) -> Tensor:
        """Return [B, L]: the divergence from a snapshot's distribution."""
        ref = torch.where(point.mask, reference.log_prob(point.target), 0.0)
        if self.kl.reweigh is not None:
            ref = ref + torch.where(point.mask, self._advantage(point) / self.kl.reweigh, 0.0)
        return torch.where(point.mask, self.kl.of(dist, reference, logp, ref), 0.0)

    def _entropy(self, dist: Any, point: Point) -> Tensor:
        entropy = torch.where(point.mask, dist.entropy(), 0.0)
        observe("entropy", entropy, point.sampled_mask())
        return entropy

    def _watched(self, dist: Any, point: Point, loss: Tensor) -> Tensor:
        with torch.no_grad():
            self._entropy(dist, point)
        return loss

    def _watch(self, ratio: Tensor, stopped: Tensor, point: Point) -> None:
        """Mention the ratio, and the share of decisions that are clipped: outside ``clip_range``,
        or where none is set those ``stopped`` [B, L]; these also by the sign of A."""
        observe("ratio", ratio, point.sampled_mask())
        is_replayed = point.provenance.is_replayed
        if is_replayed is not None:
            observe("reuse/ratio", ratio, point.mask & is_replayed[:, None])
        advantage = point.advantage.expand_as(ratio)
        stated = self.clip_range is not None and isinstance(self._clip_scale(point), float)
        beyond = outside(ratio, *self.clip_bounds).double() if stated else stopped
        observe("clip_fraction", beyond, point.sampled_mask())
        observe("clip/high", stopped * (advantage > 0), point.sampled_mask())
        observe("clip/low", stopped * (advantage < 0), point.sampled_mask())


def _expert(point: Point) -> Tensor:
    """Tell which rows somebody else wrote, [B] bool."""
    rows = point.provenance.is_ground_truth
    return torch.zeros_like(point.row_id, dtype=torch.bool) if rows is None else rows


class RowTable:
    """Lays all points of a step out row by row, so that a row's decisions stand side by side."""

    def __init__(self, row_id: Tensor):
        _, self.row = row_id.unique(return_inverse=True)
        count = self.row.bincount()
        order = self.row.argsort(stable=True)
        place = torch.arange(len(order), device=order.device)
        self.visit = torch.empty_like(order)
        self.visit[order] = place - (count.cumsum(0) - count)[self.row[order]]
        self.shape = (len(count), int(count.max()))

    def spread(self, x: Tensor) -> Tensor:
        """Lay x [B, L, *] out by rows, [R, V L, *]: V visits a row, zeros where a row has fewer."""
        table = x.new_zeros(*self.shape, *x.shape[1:])
        table[self.row, self.visit] = x
        return table.flatten(1, 2)

    def collect(self, table: Tensor) -> Tensor:
        """Collect points [B, L] back from rows [R, V L]."""
        visits: Tensor = table.unflatten(1, (self.shape[1], -1))
        return visits[self.row, self.visit]


def clipped(surrogate: Surrogate, clip_range: float | tuple[float, float]) -> Surrogate:
    """Return the surrogate with this range of its ratio. UserError where it has one, or takes
    none."""
    sides = dict(zip(("clip_low", "clip_high"), both_sides(clip_range), strict=True))
    if min(sides.values()) <= 0:
        raise UserError(f"clip_range must be greater than 0, it is {clip_range}")
    plain = getattr(surrogate, "func", surrogate)
    if not set(sides) <= set(options(plain)):
        raise UserError(f"the surrogate {plain.__name__} clips no ratio: leave out clip_range")
    if set(sides) & set(getattr(surrogate, "keywords", {})):
        raise UserError(
            f"clip_range and clip_low, clip_high of the surrogate {plain.__name__} are the same: "
            "keep one of them"
        )
    return partial(surrogate, **sides)


def bounds_of(surrogate: Surrogate) -> tuple[float, float]:
    """(low, high): how far a surrogate lets the ratio leave 1; infinite where it says nothing."""
    plain = getattr(surrogate, "func", surrogate)
    chosen = {name: p.default for name, p in options(plain).items()}
    chosen |= getattr(surrogate, "keywords", {})
    low, high = chosen.get("clip_low"), chosen.get("clip_high")
    low = torch.inf if low is None else low
    return low, low if high is None else high


def one_pass(point: Point) -> bool:
    """Tell whether the point holds all decisions of its rows."""
    return not (point.mask.sum(1) != point.num_decisions).any()


def without_slope(
    surrogate: Surrogate, logp: Tensor, old: Tensor, credit: Tensor, mask: Tensor
) -> Tensor:
    """Return [B, L] bool: decisions that are clipped, whose loss does not change with their
    log-prob although A, or a part of it, is not 0."""
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        loss = row_sum(summed(surrogate, leaf, old.detach(), credit, mask), mask)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
    moves = (credit != 0).flatten(2).any(2) if credit.ndim > 2 else credit != 0
    return (slope == 0) & moves.expand_as(logp)


def subset(mask: Tensor, fraction: float, rng: Rng | None, row: Tensor) -> Tensor:
    """Return [B, K] bool: int(n * fraction), at least one, of the n decisions of each row, the
    first or (with rng) random."""
    order = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if rng is not None:
        order = rng.uniform(row, (mask.shape[1],))
    # [B, K] place among the row's own
    rank = torch.where(mask, order.double(), torch.inf).argsort(1).argsort(1)
    count = mask.sum(1, keepdim=True)
    # int(n * fraction), despite 0.3 * 10 < 3
    keep = (count.double() * fraction + 1e-9).floor().clamp_min(1)
    return mask & (rank < keep)
