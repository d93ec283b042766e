"""Turns rewards of single steps, [B, K], into advantages: what each decision earned by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from mmrl.advantages.groups import Groups, finished, measured, named
from mmrl.advantages.normalise import whiten
from mmrl.core.contract import called, returned
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, declared
from mmrl.core.types import Advantage, Rewards, Rollout


def by_step(advantage: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an advantage compare each decision of step rewards [B, K] with the same decision of the
    other answers.

    The reward of a whole sample counts at each of its steps; a step without a reward (NaN) is not
    trained on.
    """

    @wraps(advantage)
    def each(rewards: Rewards | Tensor, rollout: Rollout, **options: object) -> Tensor:
        rewards = named(rewards)
        if not has_steps(rewards):
            return advantage(rewards, rollout, **options)
        columns = (
            Rewards(
                {name: x[:, k] if x.ndim == 2 else x for name, x in rewards.items()},
                rewards.weights,
            )
            for k in range(steps_of(rewards, rollout))
        )
        return torch.cat([advantage(column, rollout, **options) for column in columns], 1)

    return each


def parts_of(advantage: Advantage, rewards: Rewards, rollout: Rollout) -> Tensor:
    """Return [B, 1 or K, N]: the advantages whose losses are summed, those that the method
    ``parts`` of an advantage gives, or the advantage alone."""
    parts: Callable[..., Tensor] | None = declared(advantage, "parts")
    if parts is not None:
        return parts(rewards, rollout)
    rows, decisions = rollout.mask.shape
    compared = returned(
        advantage(rewards, rollout),
        f"the advantage {called(advantage)}",
        B_1=(rows, 1),
        B_K=(rows, decisions),
    )
    return compared[..., None]


def has_steps(rewards: Rewards) -> bool:
    return any(x.ndim == 2 and rewards.weights[name] for name, x in rewards.items())


def steps_of(rewards: Rewards, rollout: Rollout) -> int:
    """Return K, the number of decisions; raise UserError if a reward has another number of
    steps."""
    count = rollout.mask.shape[1]
    for name, x in rewards.items():
        if x.ndim == 2 and x.shape[1] != count:
            raise UserError(
                f"reward {name!r} gives {x.shape[1]} steps for samples of {count} "
                f"decisions; it must give one number "
                "for each decision of the policy, NaN where there is none"
            )
    return count


@ADVANTAGES.register("process")
def process(rewards: Rewards | Tensor, rollout: Rollout, *, eps: float = 1e-4) -> Tensor:
    """Normalise rewards of steps over the group; a step's advantage sums them from there on.

    GRPO with process supervision (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.3).
    Rewards of whole samples are normalised in their group and count at every step. Several are
    added with their weights first.

    eps: added to the std.
    """
    rewards = named(rewards)
    outcome = Rewards(
        {n: x for n, x in rewards.items() if x.ndim == 1 and rewards.weights[n]}, rewards.weights
    )
    steps = Rewards(
        {n: x for n, x in rewards.items() if x.ndim == 2 and rewards.weights[n]}, rewards.weights
    )
    total = torch.zeros(len(rollout), 1, dtype=torch.float64, device=rollout.mask.device)
    if outcome or not steps:
        double, groups = measured(outcome or rewards, rollout)
        total = torch.where(
            groups.present, whiten(double.total(), groups, "group", 0, eps, "add"), torch.nan
        )[:, None]
    if steps:
        count = steps_of(steps, rollout)
        earned = steps.total().double().flatten()  # [B K]
        names, index = rollout.group.unique(return_inverse=True)
        groups = Groups(index.repeat_interleave(count), earned.isfinite(), len(names))
        ours = (
            whiten(earned, groups, "group", 0, eps, "add")
            .masked_fill(~groups.present, 0.0)
            .view(-1, count)
        )
        total = total + ours.flip(1).cumsum(1).flip(1)
        total = total.masked_fill(~groups.present.view(-1, count).any(1, keepdim=True), torch.nan)
    return finished(total, rewards, ~total.isnan())
