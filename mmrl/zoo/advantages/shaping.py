"""Shapes another advantage: transformed rewards, a virtual answer, weights of tokens or prompts.

``base`` is the advantage that is shaped, with its own options. "Our reading": the paper has words
but no formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.advantages.groups import finished, measured, named, replaced, reward_called
from mmrl.advantages.presets import grpo
from mmrl.advantages.process import by_step
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Advantage, Rewards, Rollout

Underneath = Annotated[Advantage, ADVANTAGES]


@ADVANTAGES.register("ngrpo")
@by_step
def ngrpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    best: float = 1.0,
    virtual: Annotated[int, Ge(1)] = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Compare with the group and ``virtual`` answers of the highest possible reward (NGRPO).

    Nan et al. 2025, "NGRPO: Negative-enhanced GRPO". All-wrong groups get negative advantages;
    all-right ones get 0. Its clip is asymmetric: narrower for negative advantages.

    best: the highest possible reward. virtual: answers that have it. eps: added to the std.
    """
    double, groups = measured(rewards, rollout)
    total = double.total()
    count = groups.size() + virtual
    mean = (groups.sum(total) + virtual * best) / count  # [P]
    off = (total - mean[groups.index]).masked_fill(~groups.present, 0.0)
    square = groups.sum(off.square()) + virtual * (best - mean).square()
    std = (square / (count - 1)).sqrt()
    return finished(off / (std[groups.index] + eps), rewards, groups.present)


@ADVANTAGES.register("soft")
@by_step
def soft(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    reward: str | None = None,
    threshold: float = 0.8,
    above: Annotated[float, Ge(0)] = 0.01,
    below: Annotated[float, Gt(0)] = 1.0,
) -> Tensor:
    """Compress rewards above a threshold, stretch those below, then compare (TempSamp-R1).

    Li et al. 2025. A reward r becomes t + above log(r - t + 1) for r >= t, the threshold, and t -
    (exp(below (t - r)) - 1) / (exp(below) - 1) for r < t. Below t - 1, which no IoU reaches, the
    transform continues linearly, so that nothing explodes. reward: the one to transform (the IoU in
    the paper), before it is weighted and added to the others; null: their weighted sum.

    base: the advantage that is changed. threshold: t. above: compression above t. below: stretch
    below t.
    """
    double, groups = measured(rewards, rollout)
    shaped = _softened(reward_called(double, reward, "soft"), threshold, above, below)
    parts = replaced(double, reward, shaped, groups)
    return base(parts, rollout).to(finished(shaped, rewards, groups.present).dtype)


def _softened(reward: Tensor, threshold: float, above: float, below: float) -> Tensor:
    """Return [B] by the two branches of ``soft``, with no exponent above 0, so that nothing
    overflows."""
    over = (reward - threshold).clamp_min(0)
    under = (threshold - reward).clamp_min(0)
    near = under.clamp_max(1)
    whole = -math.expm1(-below)  # (e^b - 1) / e^b
    loss = torch.exp(below * (near - 1)) * -torch.expm1(-below * near) / whole
    beyond = below / whole * (under - near)
    return threshold + above * torch.log1p(over) - loss - beyond


@ADVANTAGES.register("temporal")
def temporal(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    strength: Annotated[float, Ge(0)] = 1.0,
) -> Tensor:
    """Give more weight to tokens at the beginning and the end of an answer (AVATAR).

    Kulkarni et al. 2025. Our reading of "U-shaped": A (1 + strength (2 t / (n - 1) - 1)^2) for
    token t of n. Returns [B, K].

    base: the advantage that is changed. strength: the weight is 1 + strength at both ends.
    """
    advantage = base(rewards, rollout)
    place = (rollout.mask.cumsum(1) - 1).to(advantage)
    last = (rollout.mask.sum(1, keepdim=True) - 1).clamp_min(1)
    return advantage * (1 + strength * (2 * place / last - 1).square())


@ADVANTAGES.register("focal")
def focal(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    most: Annotated[float, Ge(1)] = 1.5,
    spread: Literal["distributions", "decisions"] = "decisions",
) -> Tensor:
    """Weigh positions at which a group's answers differ more, from 1 to ``most`` (TW-GRPO).

    Returns [B, K].

    Dang et al. 2025, "Reinforcing video reasoning with focused thinking". The weights are the
    spread of the group at position t, scaled to [0, 1] over the group's longest answer. spread:
    "distributions" is the paper's, the mean of KL(p_i || mean of the p_j) over the answers and the
    whole vocabulary, p uniform after the end of an answer; autoregressive policies record it.
    "decisions" is the variance of the log-probs of the sampled decisions, for every policy (our
    reading; a position that an answer does not reach counts as the group's mean).

    base: the advantage that is changed. most: largest weight.
    """
    advantage = base(rewards, rollout)
    if spread == "distributions":
        return advantage * _focus(_divergence(rollout), rollout, most).to(advantage)
    names, index = rollout.group.unique(return_inverse=True)
    mask = rollout.mask.double()
    logp = torch.where(rollout.mask, rollout.logprob, 0.0).double()
    grouped = torch.zeros(len(names), mask.shape[1], dtype=torch.float64, device=mask.device)
    count = grouped.index_add(0, index, mask).clamp_min(1)
    mean = grouped.index_add(0, index, logp) / count
    size = torch.bincount(index).to(count)[:, None]
    apart_at = grouped.index_add(0, index, mask * (logp - mean[index]).square()) / size  # [P, K]
    low = apart_at.amin(1, keepdim=True)
    high = apart_at.amax(1, keepdim=True)
    weight = 1 + (most - 1) * (apart_at - low) / (high - low + 1e-8)
    return advantage * weight[index].to(advantage)


FOCUS_NEEDS = {"distributions": ("record_divergence",)}
vars(focal)["records"] = lambda options: FOCUS_NEEDS.get(options.get("spread", ""), ())


def _divergence(rollout: Rollout) -> Tensor:
    if rollout.divergence is None:
        raise UserError(
            "advantage focal: spread is 'distributions', which this policy does not record; set "
            "its option record_divergence to true if it has one, or take spread: "
            "decisions"
        )
    return rollout.divergence.double()


def _focus(spread: Tensor, rollout: Rollout, most: float) -> Tensor:
    """Scale the spread [B, K] of each group to weights of 1 to ``most`` over its positions."""
    names, index = rollout.group.unique(return_inverse=True)
    reached = torch.zeros(len(names), spread.shape[1], device=index.device)
    reached = reached.index_add(0, index, rollout.mask.to(reached))[index] > 0
    low = spread.masked_fill(~reached, torch.inf).amin(1, keepdim=True)
    high = spread.masked_fill(~reached, -torch.inf).amax(1, keepdim=True)
    scaled = (spread - low) / (high - low + 1e-8)
    return 1 + (most - 1) * scaled.masked_fill(~reached, 0.0)


@ADVANTAGES.register("pairs")
def pairs(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    key: str = "similarity",
    power: Annotated[float, Ge(0)] = 1.0,
    tasks: Sequence[str] = (),
) -> Tensor:
    """Multiply by a power of the similarity of a prompt's pair of tasks (Pair-GRPO, PairUni).

    Zheng et al. 2025, whose power is 1/2. It is applied after normalisation, which would otherwise
    cancel it. Prompts without ``key`` have weight 1. tasks: these are compared separately, so that
    no statistic of ``base``, not even one of the whole batch, mixes their rewards; every prompt's
    task must be listed.

    base: the advantage that is changed. key: field of the prompt with the similarity. power: of the
    similarity.
    """
    try:
        similarity = [float(prompt.get(key, 1.0)) for prompt in rollout.prompts]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"advantage pairs: {key!r} of a prompt must be a number: {error}"
        ) from error
    if power != 1 and min(similarity) < 0:
        raise UserError(
            f"advantage pairs: {key!r} of a prompt is {min(similarity)}; with a power it "
            f"must not be negative"
        )
    advantage = apart(base, rewards, rollout, tasks) if tasks else base(rewards, rollout)
    return advantage * torch.tensor(similarity).pow(power).to(advantage)[rollout.group][:, None]


def apart(
    of: Advantage, rewards: Rewards | Tensor, rollout: Rollout, tasks: Sequence[str]
) -> Tensor:
    """Compute the advantage ``of`` for every task separately; rows of other tasks count as
    missing."""
    task = [prompt.get("task") for prompt in rollout.prompt_per_row()]
    if strange := {task_name for task_name in task if task_name not in tasks}:
        raise UserError(
            f"advantage pairs: prompts of task {strange.pop()!r}; its option tasks names "
            f"{', '.join(tasks)}"
        )
    parts = []
    for name in tasks:  # the same on all processes, whichever tasks they have rows of
        of_task = torch.tensor(
            [task_name == name for task_name in task], device=rollout.group.device
        )
        alone = {
            k: v.masked_fill(~of_task.to(v.device), torch.nan) for k, v in named(rewards).items()
        }
        part = of(Rewards(alone, named(rewards).weights), rollout)
        parts.append((of_task.to(part.device)[:, None], part))
    combined = parts[0][1]
    for of_task, part in parts[1:]:
        combined = torch.where(of_task, part, combined)
    return combined
