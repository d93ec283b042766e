"""Advantages from the recorded entropy and self-certainty of the sampling distributions."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.advantages.groups import finished, measured, named
from mmrl.advantages.normalise import moments
from mmrl.advantages.presets import grpo
from mmrl.core.effects import Requires
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import entropy as entropy_of
from mmrl.zoo.advantages.quantities import path_mask, quantity
from mmrl.zoo.advantages.shaping import Underneath

TINY = 1e-8  # added to denominators


@ADVANTAGES.register("edge_grpo")
def edge_grpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    over: Literal["batch", "group"] = "batch",
    limit: Annotated[float, Gt(1)] | None = None,
) -> Tensor:
    """Divide by an answer's entropy, so confident answers count more, right or wrong (EDGE-GRPO).

    Zhang et al. 2025, "EDGE-GRPO: Entropy-driven GRPO with guided error correction". A mean(H) /
    H, H the mean entropy of the decisions of an answer, nats, which the policy records. over: the
    mean is over the batch, as in the published code, or over the group. limit: H / mean(H) is
    clamped to [1 / limit, limit]; null: it is not. An answer without entropy keeps A. base: of A.
    For models of tokens: the entropy of a diffusion step is that of its noise, the same for all
    samples.
    """
    _, groups = measured(rewards, rollout)
    advantage = base(rewards, rollout)
    entropy = entropy_of(rollout).to(groups.present.device)
    if over == "batch":
        mean = moments(entropy, groups.present)[0]
    else:
        mean = groups.mean(entropy)[groups.index]
    share = entropy / (mean + TINY)
    if limit is not None:
        share = share.clamp(1 / limit, limit)
    factor = torch.where(entropy > 0, 1 / (share + TINY), 1.0)
    weighted = advantage * factor[:, None].to(advantage)
    return finished(weighted, rewards, groups.present[:, None])


vars(edge_grpo)["requires"] = Requires("categorical")
vars(edge_grpo)["records"] = lambda options: ("record_entropy",)


@ADVANTAGES.register("hapo")
def hapo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    std: bool = True,
    eps: Annotated[float, Ge(0)] = 1e-6,
    limit: Annotated[float, Gt(0)] | None = 5.0,
) -> Tensor:
    """Normalise over all decisions of a group, where long answers count by their length (HAPO).

    Liu et al. 2025, "From uniform to heterogeneous": (r - mean) / (std + eps), mean and population
    std over the decisions of the group, each with the reward of its answer: the sum over a group's
    decisions is 0, as suits a mean over tokens. std: false: no division. limit: a group in which a
    value reaches it uses ``base`` instead (the published code). HAPO's other parts are the
    objective hapo and the policy's adaptive_temperature.

    base: the advantage that is changed where ``limit`` is exceeded. eps: added to the std.
    """
    double, groups = measured(rewards, rollout)
    total = double.total().masked_fill(~groups.present, 0.0)
    size = path_mask(rollout).sum(1).to(total).masked_fill(~groups.present, 0.0)
    count = groups.sum(size).clamp(min=1)
    mean = groups.sum(size * total) / count
    off = (total - mean[groups.index]).masked_fill(~groups.present, 0.0)
    normed = off
    if std:
        spread = (groups.sum(size * off.square()) / count).sqrt()
        normed = off / (spread[groups.index] + eps)
    normed = normed.masked_fill(groups.flat(total)[groups.index], 0.0)[:, None]
    if limit is not None:
        far = groups.sum((normed[:, 0].abs() >= limit).to(total))[groups.index] > 0
        plain = base(rewards, rollout).to(normed)
        normed = torch.where(far[:, None], plain, normed)
    return finished(normed, rewards, groups.present[:, None])


@ADVANTAGES.register("recorded")
def recorded(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    which: Literal[
        "self_certainty", "entropy", "surprisal", "logprob", "length"
    ] = "self_certainty",
    weight: float = 1.0,
    base: Underneath = grpo,
) -> Tensor:
    """Add a recorded quantity, such as self-certainty, to the rewards (Intuitor).

    Zhao et al. 2025, "Learning to reason without external rewards": the reward is the
    self-certainty of an answer, KL(uniform || p), nats, averaged over its tokens. It needs no text,
    so it works for image tokens too. which: or another recorded quantity. weight: of it in the sum;
    with all rewards at weight 0 it is the only one. base: the advantage of the sum.
    """
    given_rewards = named(rewards)
    value = quantity(which, rewards, rollout)
    missing = torch.stack([x.isnan() for x in given_rewards.per_row().values()]).any(0)
    value = value.masked_fill(missing, torch.nan)
    weights = {**given_rewards.weights, which: weight}
    return base(Rewards({**given_rewards, which: value}, weights), rollout)


RECORDED_BY = {"self_certainty": ("record_self_certainty",), "entropy": ("record_entropy",)}
vars(recorded)["records"] = lambda options: RECORDED_BY.get(
    options.get("which", "self_certainty"), ()
)
