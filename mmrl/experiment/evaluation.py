"""Measures a policy on held-out prompts: mean reward with a confidence interval, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmrl.config.options import EvaluateOptions
from mmrl.core import distributed
from mmrl.core.files import finite
from mmrl.core.statistics import interval, is_binary, paired
from mmrl.core.types import Media, Prompt, Rewards
from mmrl.experiment.set_metrics import mean_ap
from mmrl.monitoring.diversity import diversity_of_prompts
from mmrl.policies.base import Policy, RolloutContext
from mmrl.policies.contracts import EvaluatesGreedily
from mmrl.rollout import collect
from mmrl.rollout.sizes import by_size
from mmrl.scoring import Scorer
from samplers.noise import Rng

MOST_CANDIDATES = 64  # samples held at once while the best of several are chosen
MOST_PROMPTS = 4096  # up to which evaluation.json lists every mean


def sample_in_evaluation(policy: Policy) -> None:
    """Sample also in evaluation, instead of greedy decoding."""
    if isinstance(policy, EvaluatesGreedily):
        policy.sample_in_evaluation()


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over ``n`` samples and its 95 % confidence interval; prompts are the independent
    units."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class BestOf:
    """Replaces every sample by the best of ``count``, by the single reward of ``scorer``."""

    count: int
    scorer: Scorer

    def choose(self, media: Media, prompts: Sequence[Prompt]) -> tuple[Media, list[Prompt]]:
        """Return the best of every ``count`` neighbours, which answer one prompt; the first of
        equally good ones. A reward of groups, such as a vote, sees these neighbours as a group.

        A scored sample always beats one without a score.
        """
        group = torch.arange(len(prompts)) // self.count
        marked = [{**p, "group": i} for p, i in zip(prompts, group.tolist(), strict=True)]
        scores = self.scorer(media, marked, group).per_row()
        (values,) = scores.values()
        best = values.nan_to_num(-torch.inf).view(-1, self.count).argmax(1)
        rows = torch.arange(len(best)) * self.count + best
        return taken(media, rows), [prompts[i] for i in rows.tolist()]


def taken(media: Media, rows: Tensor) -> Media:
    """Take rows of media."""
    if isinstance(media, Tensor):
        return media[rows.to(media.device)]
    return [media[i] for i in rows.tolist()]


@dataclass(frozen=True)
class Scores:
    """Holds the scores of the samples of every prompt, of all processes."""

    rewards: dict[str, Tensor]  # name -> [P, copies], NaN: could not be scored
    diversity: Tensor  # [P], mean distance of two samples; NaN if there is only one
    of_the_set: dict[str, float]  # measures of the whole set: mAP

    def plain(self) -> dict[str, Any]:
        """Return it as JSON data, null for NaN."""
        return {
            "rewards": finite({n: values.double().tolist() for n, values in self.rewards.items()}),
            "diversity": finite(self.diversity.tolist()),
        }


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    copies: int,
    seed: int,
    guidance: float | None = None,
    best: BestOf | None = None,
) -> tuple[Media, list[Prompt]]:
    """Sample this process's share, with noise keyed by ``seed``: the same before and after
    training. With ``best`` each sample is the best of several.

    Every process samples equally many, as sharded models need; the padding is discarded.
    """
    draw = partial(_sampled, policy, copies, seed, guidance, best)
    parts = by_size(policy, prompts, draw)
    media = joined([part.outcome[0] for part in parts])
    rows = [row for part in parts for row in part.outcome[1]]
    if len(parts) == 1:
        return media, rows
    order = {id(prompt): i for i, prompt in enumerate(prompts)}
    places = sorted(range(len(rows)), key=lambda i: order[id(rows[i])])
    return taken(media, torch.tensor(places)), [rows[i] for i in places]


def _sampled(
    policy: Policy,
    copies: int,
    seed: int,
    guidance: float | None,
    best: BestOf | None,
    prompts: Sequence[Prompt],
) -> tuple[Media, list[Prompt]]:
    """Sample this process's share of prompts of one size."""
    drawn = copies * (best.count if best else 1)
    rank, size = distributed.world()
    share = -(-len(prompts) // size)
    first = rank * share
    local_prompts = list(prompts[first : first + share])
    padded = [*local_prompts, *[prompts[0]] * (share - len(local_prompts))]
    # many candidates: score and drop them before drawing the next
    step = max(1, MOST_CANDIDATES // drawn) if best else share
    parts = []
    rows: list[Prompt] = []
    for start in range(0, share, step):
        with policy.evaluating(guidance):
            rng = Rng(Rng.of(seed, "evaluation").key, first + start)
            # these are not trained on
            context = RolloutContext(reads="sample")
            rollout = policy.rollout(padded[start : start + step], drawn, rng, context)
            count = len(local_prompts[start : start + step]) * drawn
            media = policy.decode(rollout)[:count]
        prompt_per_row = rollout.prompt_per_row()[:count]
        if best is not None:
            with distributed.together():
                media, prompt_per_row = best.choose(media, prompt_per_row)
        parts.append(media)
        rows += prompt_per_row
    return joined(parts), rows


def joined(parts: Sequence[Media]) -> Media:
    """Join media of the same kind, in their order."""
    if len(parts) == 1:
        return parts[0]
    shapes = {part.shape[1:] for part in parts if isinstance(part, Tensor)}
    if all(isinstance(part, Tensor) for part in parts) and len(shapes) == 1:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return [item for part in parts for item in part]


def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    options: EvaluateOptions,
    guidance: float | None = None,
) -> dict[str, Estimate]:
    """Estimate every reward under the current weights; a collective call."""
    return estimates(scores(policy, prompts, scorer, options, guidance))


def scores(
    policy: Policy,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    options: EvaluateOptions,
    guidance: float | None = None,
    best: BestOf | None = None,
) -> Scores:
    """Sample and score held-out prompts under the current weights; a collective call.

    For answers with boxes also mAP, on one process: a measure of the whole set.
    """
    chosen = list(prompts[: options.prompts])
    measure = partial(_scores, policy, scorer, options, guidance, best)
    parts = by_size(policy, chosen, measure)
    if len(parts) == 1:
        return parts[0].outcome
    order = torch.tensor([i for part in parts for i in part.places]).argsort()

    def placed(values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values))[order.to(values[0].device)]

    several = [part.outcome for part in parts]
    names = several[0].rewards
    rewards = {name: placed([each.rewards[name] for each in several]) for name in names}
    return Scores(rewards, placed([each.diversity for each in several]), {})


def _scores(
    policy: Policy,
    scorer: Scorer,
    options: EvaluateOptions,
    guidance: float | None,
    best: BestOf | None,
    prompts: Sequence[Prompt],
) -> Scores:
    """Sample and score prompts of one size."""
    copies = options.num_samples
    media, row_prompts = _sampled(policy, copies, options.seed, guidance, best, prompts)
    with distributed.together():
        local: Rewards = collect.once(scorer)(media, row_prompts)
    rewards = collect.shared(local, getattr(scorer, "weights", None))
    whole = {name: distributed.all_gather_rows(value) for name, value in rewards.per_row().items()}
    return Scores(
        {name: value.view(-1, copies) for name, value in whole.items()},
        distributed.all_gather_rows(diversity_of_prompts(media, copies)),
        _of_the_set(media, row_prompts),
    )


def _of_the_set(media: Media, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Measure texts as a whole, on one process."""
    if isinstance(media, Tensor) or distributed.world()[1] > 1:
        return {}
    return mean_ap(media, prompts) if all(isinstance(text, str) for text in media) else {}


def estimates(measured: Scores) -> dict[str, Estimate]:
    """Estimate the mean of every reward; a measure of the whole set has no bounds."""
    infinite = float("inf")
    values = next(iter(measured.rewards.values()))
    return {name: estimate(value) for name, value in measured.rewards.items()} | {
        name: Estimate(value, -infinite, infinite, values.numel())
        for name, value in measured.of_the_set.items()
    }


def estimate(values: Tensor) -> Estimate:
    """Estimate a mean from rewards [P, copies], NaN for a sample without a score. Prompts are
    clusters."""
    means = prompt_means(values)
    if not means.isfinite().any():
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    of_prompts = interval(means[None].cpu().numpy(), _binary(values))
    count = int((~values.isnan()).sum())
    return Estimate(of_prompts.mean, of_prompts.low, of_prompts.high, count)


def _binary(*scores: Tensor) -> bool:
    """Tell whether rewards [P, copies], apart from NaN, are 0 or 1."""
    return all(is_binary(each[~each.isnan()].cpu().numpy(), None) for each in scores)


def row(
    model: str, guidance: float | None, measured: Scores, base: Scores | None = None
) -> dict[str, Any]:
    """Return one row of ``evaluation.json``: mean and interval of every reward, the mean of every
    prompt and, with a ``base``, the difference to it, paired by prompts.

    What is not a number, such as the bounds of an interval over one prompt, is null. Prompt means
    are listed for up to ``MOST_PROMPTS`` prompts.
    """
    line: dict[str, Any] = {
        "model": model,
        "guidance": guidance,
        "rewards": {name: finite(asdict(e)) for name, e in estimates(measured).items()},
    }
    if base is not None:
        line["difference"] = {
            name: difference(base.rewards[name], values)
            for name, values in measured.rewards.items()
        }
    means = {name: prompt_means(values) for name, values in measured.rewards.items()}
    if all(len(values) <= MOST_PROMPTS for values in means.values()):
        line["prompt_means"] = {
            name: [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]
            for name, values in means.items()
        }
    return line


def difference(before: Tensor, after: Tensor) -> dict[str, Any]:
    """Estimate the paired difference of means over prompts, with its 95 % interval and p-value,
    from rewards [P, copies] of the same prompts and noise."""
    first, second = (prompt_means(values)[None].cpu().numpy() for values in (before, after))
    change = paired(first, second, _binary(before, after))
    numbers = {"mean": change.mean, "low": change.low, "high": change.high, "p": change.p}
    return {**finite(numbers), "prompts": change.prompts}


def prompt_means(values: Tensor) -> Tensor:
    """Average over the scored samples of a prompt: [P], NaN if there are none."""
    return values.double().nanmean(1)
