"""At which states masked diffusion is scored: those it visited, or finished samples with tokens
masked again.

An estimator is ``(policy, rollout, rng) -> points`` of all rows, with the weight of every decision
in ``estimator_weight``. Only ``trajectory`` gives the exact gradient of the expected reward, where
``path`` scores exactly; the others estimate it from states that the sampler did not visit, each
with its published masks and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Draws
from mmrl.core.registry import ESTIMATORS, bound_options, unbound
from mmrl.core.sharding import sharded
from mmrl.core.types import Point, Rollout
from mmrl.policies.contracts import Remasks
from samplers.noise import Rng

# (policy, rollout, rng, epoch); epoch: which of several over the rollout; None: there is only one
Estimator = Callable[[Remasks, Rollout, Rng, int | None], list[Point]]
Share = Annotated[float, Gt(0), Le(1)]
Fields = Literal["uniform", "fading"]
MOST = 0.999  # the largest rate of MaskGRPO's published code


@ESTIMATORS.register("trajectory")
def trajectory(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    passes: Count | None = None,
) -> list[Point]:
    """Score the passes of the sampler itself, which is exact.

    ``passes``: score only this many of a row's T passes, drawn at random, weighted T / passes."""
    points = list(policy.path(rollout))
    if passes is None or passes >= len(points):
        return points
    chosen = rng.uniform(rollout.row_id, (len(points),)).argsort(1).argsort(1) < passes  # [B, T]
    return [
        p.replace(
            mask=p.mask & chosen[:, t, None],
            estimator_weight=p.recorded.new_full((len(p), 1), len(points) / passes),
        )
        for t, p in enumerate(points)
    ]


vars(trajectory)["visits_only"] = True  # hides no token again


@ESTIMATORS.register("tracerl")
def tracerl(
    policy: Remasks, rollout: Rollout, rng: Rng, epoch: int | None = None, *, shrink: Count = 8
) -> list[Point]:
    """Score slices of the stored reveal order, ``shrink`` passes each (TraceRL, Wang et al. 2025).

    A slice's tokens are scored with it and all later ones hidden. With shrink 1 this is
    ``trajectory`` of the emerge sampler.

    shrink: passes of the sampler in a slice.
    """
    part = rollout.tokens.commit_step // shrink
    return [policy.at(rollout, hide=part >= s, score=part == s) for s in range(int(part.max()) + 1)]


@ESTIMATORS.register("d1")
def d1(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    prompt: Annotated[float, Gt(-1e-9), Le(1)] = 0.15,
) -> list[Point]:
    """Score in one pass with the answer and a random share of the prompt hidden (diffu-GRPO, Zhao
    et al. 2025).

    prompt: share of the prompt that is hidden.
    """
    cond = (
        policy.corrupted(rollout.cond, prompt, rng.fold("prompt")) if prompt > 0 else rollout.cond
    )
    return [
        policy.at(
            rollout.replace(cond=cond),
            hide=torch.ones_like(rollout.tokens.commit_step, dtype=torch.bool),
        )
    ]


@ESTIMATORS.register("mask_grpo")
def mask_grpo(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    low: Share = 0.8,
    updates: Count = 6,
    draws: Draws = 1,
    field: Fields = "uniform",
    fixed: bool = True,
) -> list[Point]:
    """Hide tokens at rates from ``low`` to 1: images 0.8, text 0.6 and fading (MaskGRPO, Ma et al.
    2025).

    The rates are low + (1 - low) n / updates; each optimizer step uses ``draws`` of them. With
    several epochs every row sees each rate once, from low to high as published, before one is
    repeated; with one epoch they are drawn at random. field: "fading" hides late tokens more often
    than early ones. fixed: false repeats a defect of the published code, whose loss mask is the sum
    of the masks of all rates, so that visible tokens are trained on too.

    low: smallest rate. updates: number of rates. draws: rates of an optimizer step.
    """
    rates = [min(low + (1 - low) * (n + 1) / updates, MOST) for n in range(updates)]
    masks = [
        _hidden(rng.fold("mask", n), rollout, torch.tensor(rate), field)
        for n, rate in enumerate(rates)
    ]
    points = [policy.at(rollout, hide=masks[n]) for n in _due(epoch, rng, updates, draws)]
    if fixed:
        return points
    count = torch.stack(masks).sum(0).to(rollout.logprob)  # [B, L]
    share = count * (count > 0).sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp_min(1)
    alive = rollout.mask.any(1)[:, None]
    return [p.replace(mask=(count > 0) & alive, estimator_weight=share) for p in points]


@ESTIMATORS.register("uni_grpo")
def uni_grpo(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    updates: Count = 4,
    draws: Draws = 1,
) -> list[Point]:
    """Average over tokens hidden at random rates (UniGRPO of MMaDA, Yang et al. 2025).

    The first rate is uniform in (0, 1), the others are evenly spaced from it to 1, ``updates`` in
    all; each optimizer step uses ``draws`` random ones.

    updates: number of rates. draws: rates of an optimizer step.
    """
    first = rng.fold("first").uniform(rollout.row_id)  # [B]
    rates = [
        first + (1 - first) * n / max(updates - 1, 1)
        for n in rng.permutation(updates, step=1)[:draws].tolist()
    ]
    points = [
        policy.at(rollout, _hidden(rng.fold("mask", n), rollout, rate))
        for n, rate in enumerate(rates)
    ]
    return _means(points)


@ESTIMATORS.register("schedule_matched")
def schedule_matched(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    passes: Count | None = None,
) -> list[Point]:
    """Score tokens hidden at the sampler's own rates k_t, weighted (k_t - k_t+1) / k_t.

    This is what the passes would score if the order were drawn from its prior. ``passes``: score
    only this many of the T passes, drawn at random, weighted T / passes."""
    steps = len(policy.rates) - 1
    chosen = range(steps) if passes is None else rng.permutation(steps, step=1)[:passes].tolist()
    points = []
    for t in chosen:
        now = policy.rates[t].item()
        then = policy.rates[t + 1].item()
        point = policy.at(rollout, _hidden(rng.fold("mask", t), rollout, torch.tensor(now)))
        weight = (now - then) / now * steps / len(chosen)
        points.append(
            point.replace(estimator_weight=rollout.logprob.new_full((len(point), 1), weight))
        )
    return points


@ESTIMATORS.register("coupled")
def coupled(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    low: Annotated[float, Gt(-1e-9), Le(1)] = 0.1,
    high: Share = 0.9,
    draws: Draws = 1,
) -> list[Point]:
    """Score every token once by a random mask and its complement (DiffuCoder, Gong et al. 2025).

    low, high: bounds of the share that is hidden. draws: pairs of masks.
    """
    _ascending("coupled", low, high)
    points = []
    for n in range(draws):
        rate = low + (high - low) * rng.fold("rate", n).uniform(rollout.row_id)
        hide = _hidden(rng.fold("mask", n), rollout, rate)
        points += [policy.at(rollout, hide), policy.at(rollout, ~hide)]
    return points


@ESTIMATORS.register("random")
def random(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    low: Annotated[float, Gt(-1e-9), Le(1)] = 0.1,
    high: Share = 0.9,
    draws: Draws = 1,
) -> list[Point]:
    """Hide tokens at a rate between ``low`` and ``high``, the plain counterpart of ``coupled``.

    low, high: bounds of the rate. draws: rates of a row.
    """
    _ascending("random", low, high)
    rates = [low + (high - low) * rng.fold("rate", n).uniform(rollout.row_id) for n in range(draws)]
    return [
        policy.at(rollout, _hidden(rng.fold("mask", n), rollout, rate))
        for n, rate in enumerate(rates)
    ]


@ESTIMATORS.register("udm_grpo")
def udm_grpo(
    policy: Remasks,
    rollout: Rollout,
    rng: Rng,
    epoch: int | None = None,
    *,
    starts: Count = 3,
    window: Count = 3,
) -> list[Point]:
    """Score finished tokens, masked again at ``window`` adjacent early rates of the sampler
    (UDM-GRPO).

    UDM-GRPO trains discrete flows with uniform noise; here the noise is masking. As there, the
    action of every step is the finished sample, states come from the forward process, the first of
    the adjacent steps is drawn from ``starts``, and a step's loss is the mean over its tokens. The
    ratio is per token here, of their mean there.

    starts: steps that may be the first. window: adjacent steps.
    """
    first = int(rng.permutation(starts)[0])
    steps = len(policy.rates) - 1
    chosen = range(min(first, steps - 1), min(first + window, steps))
    rates = [policy.rates[t] for t in chosen]
    return _means(
        [
            policy.at(rollout, _hidden(rng.fold("mask", n), rollout, rate))
            for n, rate in enumerate(rates)
        ]
    )


@ESTIMATORS.register("sepo")
def sepo(policy: Remasks, rollout: Rollout, rng: Rng, epoch: int | None = None) -> list[Point]:
    """Compare with the samples one token away, in L passes (SEPO, Zekri and Boulle 2025).

    With q_i = p(x_i | all others) the concrete score of a neighbour y is s_y = q_i(y_i) / q_i(x_i),
    and the gradient of the marginal is -sum_y pi_y grad log s_y, pi the self-normalised s. Over all
    neighbours and x itself that is sum_i w_i grad log q_i with w_i = (1 / q_i) / (1 + sum_j (1 /
    q_j - 1)): no neighbour need be sampled.
    """
    if sharded(policy.net):
        raise UserError(
            "the estimator sepo makes as many passes as a process has rows, and processes that "
            "share weights must make the same: launch copies, or use another estimator"
        )
    commit_step = rollout.tokens.commit_step
    length = commit_step.shape[1]
    points = [
        policy.at(
            rollout,
            torch.arange(length, device=commit_step.device).expand_as(commit_step) == i,
        )
        for i in range(length)
    ]
    with torch.no_grad():
        size = policy.pass_sizes.rows or len(rollout)
        token_logprobs = [
            torch.cat([policy.dist(p).log_prob(p.target)[:, i] for p in point.split(size)])
            for i, point in enumerate(points)
        ]
    odds = (-torch.stack(token_logprobs, 1)).exp()  # [B, L] 1 / q_i
    weight = odds / (1 + (odds - 1).sum(1, keepdim=True))
    return [point.replace(estimator_weight=weight) for point in points]


def fading(rate: Tensor, length: int) -> Tensor:
    """Return [B or 1, L]: probability that a token stays visible, min(1, 2 (1 - r) (1 - n / (L -
    1))) (MaskGRPO, text): early tokens stay more often, the last never. Cut at 1, so more than r is
    hidden where r < 1/2."""
    place = torch.arange(length, device=rate.device) / max(length - 1, 1)
    return (2 * (1 - rate.reshape(-1, 1)) * (1 - place)).clamp(max=1)


def _ascending(name: str, low: float, high: float) -> None:
    if low >= high:
        raise UserError(f"the estimator {name} needs low < high, not {low} and {high}")


def _hidden(rng: Rng, rollout: Rollout, rate: Tensor, field: Fields = "uniform") -> Tensor:
    """Return [B, L] bool: hidden at a rate [] or [B], the same under all weights."""
    draw = rng.uniform(rollout.row_id, (rollout.tokens.commit_step.shape[1],))
    rate = rate.to(draw)
    return draw > fading(rate, draw.shape[1]) if field == "fading" else draw < rate.reshape(-1, 1)


def _due(epoch: int | None, rng: Rng, updates: int, draws: int) -> list[int]:
    """Choose the ``draws`` of the rates 0 to ``updates`` - 1 for this epoch; random ones if there
    is only one epoch."""
    if epoch is None:
        return rng.permutation(updates, step=1)[:draws].tolist()
    return [(epoch * draws + i) % updates for i in range(min(draws, updates))]


def _means(points: list[Point]) -> list[Point]:
    """Weigh points so that ``seq_mean_token_mean`` is the mean over points of the mean over each
    point's decisions."""
    total = sum(point.mask.sum(1, keepdim=True) for point in points)
    return [
        p.replace(estimator_weight=total / (len(points) * p.mask.sum(1, keepdim=True).clamp_min(1)))
        for p in points
    ]


# passes for every sample
SEVERAL = (trajectory, tracerl, schedule_matched, coupled, udm_grpo, sepo)


def several_passes(estimator: Estimator) -> bool:
    """Tell whether a sample's tokens are known to be scored in more than one pass."""
    plain = unbound(estimator)
    chosen = bound_options(estimator)
    if plain is schedule_matched and chosen.get("passes") == 1:
        return False
    return plain in SEVERAL or chosen.get("draws", 1) > 1
