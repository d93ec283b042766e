"""Compares and weighs the prompts of each task of a mixture separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.groups import measured, named
from mmrl.advantages.presets import grpo
from mmrl.core.distributed import all_gather_json
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import path_mask
from mmrl.zoo.advantages.shaping import Underneath


@ADVANTAGES.register("strata")
def strata(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    tasks: Mapping[str, Underneath] | None = None,
    by: str = "task",
    shares: Mapping[str, float] | None = None,
    count: Literal["rows", "decisions"] = "rows",
) -> Tensor:
    """Weigh every task of a mixture by its share, however many prompts it has (CGPO).

    Xu et al. 2024, "The perfect blend: redefining RLHF with mixture of judges": the gradient is the
    sum over tasks of share x the gradient of the task's mean. So the advantages of a task are
    multiplied by its share over its part of the iteration; a task without samples has no share. by:
    the prompts' field with the task; prompts without one form a task too. shares: of the tasks, 1
    where not given; they need not add to 1. count: the unit of the loss's mean, "rows" with
    train.loss_agg_mode seq_mean_token_mean, "decisions" with token_mean. tasks: the advantage of
    some tasks; base: of the others. Each sees the rows of its tasks only. Constraints and judges of
    a task are rewards (by_task, constrain).
    """
    for task, share in (shares or {}).items():
        if share < 0:
            raise UserError(f"advantage strata: the share of {task!r} is {share}, below 0")
    double, groups = measured(named(rewards).per_row(), rollout)
    names = {
        group: str(rollout.prompts[group].get(by, "")) for group in rollout.group.unique().tolist()
    }
    task_of = [names[group] for group in rollout.group.tolist()]
    advantage = _compared(rewards, rollout, task_of, base, dict(tasks or {}))
    trained = groups.present & ~advantage.isnan().all(1)
    decisions = path_mask(rollout).sum(1).to(trained.device)
    sizes = torch.where(trained, torch.ones_like(decisions) if count == "rows" else decisions, 0)
    factor = _factors(task_of, sizes, shares or {})
    return advantage * factor.to(advantage)[:, None]


def _compared(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    task_of: list[str],
    base: Underneath,
    tasks: dict[str, Underneath],
) -> Tensor:
    """Return the advantages, each task's by its own function if it has one."""
    parts: list[tuple[Underneath, list[bool]]] = [(base, [task not in tasks for task in task_of])]
    parts += [(advantage, [task == name for task in task_of]) for name, advantage in tasks.items()]
    columns = []
    for advantage, rows in parts:
        inside = torch.tensor(rows)
        alone = {name: _only(x, inside) for name, x in named(rewards).items()}
        compared = advantage(Rewards(alone, named(rewards).weights), rollout)
        columns.append(compared.masked_fill(~inside.to(compared.device)[:, None], 0.0))
    widest = max(columns, key=lambda column: column.shape[1])
    return torch.stack([column.expand_as(widest) for column in columns]).sum(0)


def _only(x: Tensor, rows: Tensor) -> Tensor:
    """Return x, [B] or [B, K], as NaN outside the rows [B]."""
    x = x if x.is_floating_point() else x.float()
    outside = ~rows.to(x.device)
    return x.masked_fill(outside if x.ndim == 1 else outside[:, None], torch.nan)


def _factors(task_of: list[str], sizes: Tensor, shares: Mapping[str, float]) -> Tensor:
    """Return the factor of every row, [B] float64: the share of its task over the task's part of
    the iteration, over all processes."""
    pairs = zip(task_of, sizes.tolist(), strict=True)
    held: dict[str, float] = {}
    for task, size in pairs:
        held[task] = held.get(task, 0.0) + size
    totals: dict[str, float] = {}
    for task, size in sorted(all_gather_json([*held.items()], sizes.device)):
        totals[task] = totals.get(task, 0.0) + size
    relative = {task: shares.get(task, 1.0) for task, size in totals.items() if size}
    unit = sum(totals.values()) / max(sum(relative.values()), 1e-30)
    factors = {task: share * unit / totals[task] for task, share in relative.items()}
    return torch.tensor([factors.get(task, 0.0) for task in task_of], dtype=torch.float64)
