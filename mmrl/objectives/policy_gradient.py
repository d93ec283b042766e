"""The policy gradient on any decisions: a paper's surrogate of ratio and advantage, with a KL, an
entropy bonus, corrections, and a choice of decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.config.unfit import capabilities_of, unsuited
from mmrl.core.distributed import all_sum
from mmrl.core.distributions import Dist, Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES, SURROGATES
from mmrl.core.types import Point, Renoised, Rewards, Rollout, Surrogate, Transition
from mmrl.objectives.base import Tangent, frozen
from mmrl.objectives.chord import Supervision
from mmrl.objectives.decisions import (
    OF_BOTH,
    OF_STEPS,
    OF_TOKENS,
    WHOLE,
    RowTable,
    TokenWeights,
    of_high_entropy,
    one_pass,
    subset,
    written_by_others,
)
from mmrl.objectives.entropy import Entropy
from mmrl.objectives.forward_process.base import mean_square, noised, positive, velocity
from mmrl.objectives.importance_sampling import Importance, off_policy
from mmrl.objectives.kl import KL, KLTerm, Regularised
from mmrl.objectives.surrogates import (
    Width,
    bounds_of,
    clipped,
    outside,
    ppo,
    sees_whole_rows,
    summed,
    without_slope,
)
from mmrl.objectives.timestep_samplers import uniform
from mmrl.policies.base import Policy, Reads
from samplers.noise import Rng

Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Le(1)]


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
    reads: ClassVar[Reads] = "decisions"
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
        self.of_rows = sees_whole_rows(surrogate)
        weighs_rows = importance_sampling is not None and importance_sampling.level != "token"
        self.single_paths = self.of_rows or weighs_rows or off_policy is not None
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
        if decisions == "mixed" and (self.kl.form == "flow_grpo" or self.kl.whole()):
            yield "kl", "its form and divergence are of one kind of decisions: use reverse"
        yield from self._unfit_of_rows(policy, decisions)

    def _unfit_of_rows(self, policy: Any, decisions: str) -> Iterator[tuple[str, str]]:
        """Yield what does not go with whole samples, or with samples scored in several passes."""
        if self.shaping is not None and self.of_rows:
            yield "shaping", "it is of single decisions: choose ppo or another that is"
        if self.off_policy is not None and decisions == "categorical" and not _in_one(policy):
            yield (
                "off_policy",
                "it compares whole answers, which are scored in several passes here: leave it out, "
                "or use importance_sampling with mode: mask",
            )
        mixed = decisions == "mixed" and self.of_rows
        if mixed or (self._in_parts(policy) and self.couples(policy) != "rows"):
            yield "surrogate", f"it {WHOLE}"

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
        if self.single_paths and rollout.edge_id is not None:
            raise UserError(
                "the objective looks at whole samples, which share the steps of a tree: leave out "
                "the policy's option tree, or choose ppo, cispo, sapo, spo or reinforce, without "
                "off_policy and with importance_sampling of level token"
            )
        if self.importance_sampling is not None:
            rollout = self.importance_sampling.of_samples(rollout)
        for point in policy.path(self.trained_share(rollout, rng)):
            if self.of_rows and self.couples(policy) != "rows" and not one_pass(point):
                raise UserError(f"this surrogate {WHOLE}")
            yield point
        if self._imitates(policy):
            yield from self._imitated(policy, rollout, rng)

    def trained_share(self, rollout: Rollout, rng: Rng) -> Rollout:
        """Leave only decisions that are trained on, ``timestep_fraction`` of every row's."""
        if self.timestep_fraction == 1:
            return rollout
        by_chance = rng if self.timestep_selection == "random" else None
        mask = subset(rollout.mask, self.timestep_fraction, by_chance, rollout.row_id)
        return rollout.replace(mask=mask)

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
            loss = summed(surrogate, logp, old, credit, point.mask)
            stopped = without_slope(surrogate, logp, old, credit, point.mask)
        # KL of the weights that sampled to those of now, by (rho - 1) - log rho
        observe(
            "kl_behavior",
            (logp - old).expm1() - (logp - old),
            point.mask & ~written_by_others(point)[:, None],
        )
        if self.shaping is not None:
            share = torch.sigmoid(logp - old - math.log(self.shaping))  # rho / (rho + gamma)
            guided = -self._bounded(point.advantage) * share
            loss = torch.where(written_by_others(point)[:, None], guided, loss)
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
        return self.of_rows and not _in_one(policy)

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
            return of_high_entropy(point, measured, self.top_entropy)
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

    def _with_shares(self, point: Point) -> Point:
        """Say how much a decision counts, so that the supervised loss and the other are means over
        their own decisions, those of all processes."""
        expert = written_by_others(point)[:, None]
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
        expert = written_by_others(point)[:, None]
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
        return self.term.in_reward(policy, rollout, rewards)

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
            weight = dist.row_std("weighs by a step's noise", "leave timestep_weighting out")
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


def _in_one(policy: Any) -> bool:
    """Tell whether one pass scores all decisions of a sample, as far as the policy says."""
    can = capabilities_of(policy)
    return can is None or (can.decisions != "gaussian" and can.one_pass)
