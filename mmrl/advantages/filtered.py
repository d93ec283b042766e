"""Leaves rows or whole groups out of another advantage, before or after they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.advantages.groups import Groups, measured, named
from mmrl.advantages.presets import grpo
from mmrl.advantages.quantities import quantity
from mmrl.advantages.select import ranks
from mmrl.advantages.shaping import Underneath
from mmrl.core.distributed import all_gather_json
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from samplers.noise import Rng

Prefer = Literal["highest", "lowest", "ends", "best_and_random"]
Kind = Literal["flat", "right", "wrong"]


@ADVANTAGES.register("filtered")
class Filtered:
    """Compare only the best k of a group by any quantity, and only groups that teach (GFPO).

    Shrivastava et al. 2025, "Sample more to think less" (GFPO: by: length, prefer: lowest, or by:
    reward_per_token). Shen and Zhang 2024, "Policy filtration in RLHF" (PF-PPO: statistics: all
    with prefer: highest and keep: 1, best_and_random and keep: 2, or ends and keep: 2). GTPO's
    filter: by: surprisal, at_most: 0.7.

    base: the advantage of the rows that stay. by: "reward" (the weighted sum), "reward_per_token",
    "length", "logprob", "surprisal" (mean -log p, nats), "entropy", "self_certainty",
    or a reward, of any weight. at_least, at_most: rows beyond leave. keep: so many of the others
    stay in each group; a list of numbers: by the difficulty of the prompt, hardest first, in equal
    shares of the mean rewards of the last ``memory`` groups (GFPO's adaptive difficulty: [8, 8, 6,
    4]). prefer: which stay; ends: half best, half worst, the odd one best; best_and_random: the
    best and others by lot, keyed by ``seed``. statistics: base sees the rows that stay, or all.
    outside: rows left out leave training, or count with advantage 0 (the GFPO paper).

    drop_groups: groups that leave training: flat (std of the rewards at most ``flat_std``), right
    (no reward below ``right``: NGRPO keeps all-wrong groups) and wrong (all below it).
    """

    def __init__(
        self,
        base: Underneath = grpo,
        by: str = "reward",
        keep: Annotated[int, Ge(1)] | Sequence[Annotated[int, Ge(1)]] | None = None,
        prefer: Prefer = "highest",
        at_least: float | None = None,
        at_most: float | None = None,
        statistics: Literal["kept", "all"] = "kept",
        outside: Literal["drop", "zero"] = "drop",
        drop_groups: Sequence[Kind] = (),
        flat_std: Annotated[float, Ge(0)] = 0.0,
        right: float = 1.0,
        memory: Annotated[int, Ge(1)] = 10_000,
        seed: int = 0,
    ):
        if not isinstance(keep, int | None) and not keep:
            raise UserError("advantage filtered: keep is an empty list; give a number, or null")
        self.base = base
        self.by = by
        self.keep = keep
        self.prefer = prefer
        self.at_least = at_least
        self.at_most = at_most
        self.statistics = statistics
        self.outside = outside
        self.drop_groups = tuple(drop_groups)
        self.flat_std = flat_std
        self.right = right
        self.memory = memory
        self.seed = seed
        self.iteration = 0
        self.means: list[float] = []  # mean rewards of earlier groups, the latest last

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the advantages of base, [B, 1] or [B, K], NaN or 0 for rows left out; count the
        iteration."""
        rewards = named(rewards)
        double, groups = measured(rewards.per_row(), rollout)
        total = double.total()
        stays = ~self._dropped(total, groups)[groups.index] & groups.present
        chosen = stays & self._rows(quantity(self.by, rewards, rollout), total, groups, rollout)
        self.iteration += 1
        if self.statistics == "all":
            advantage = self.base(rewards, rollout)
        else:
            parts = {name: _masked(x, chosen) for name, x in rewards.items()}
            advantage = self.base(Rewards(parts, rewards.weights), rollout)
        advantage = _masked(advantage, chosen)
        if self.outside == "zero":
            advantage = advantage.masked_fill((stays & ~chosen)[:, None], 0.0)
        return advantage

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        self.means = [float(mean) for mean in state["means"]]

    def _dropped(self, total: Tensor, groups: Groups) -> Tensor:
        """Tell which groups [P] leave training."""
        low, high = groups.extremes(total)
        kinds = {
            "flat": (low >= high) | (groups.variance(total, 0).sqrt() <= self.flat_std),
            "right": low >= self.right,
            "wrong": high < self.right,
        }
        dropped = torch.zeros_like(low, dtype=torch.bool)
        for kind in self.drop_groups:
            dropped = dropped | kinds[kind]
        return dropped

    def _rows(self, value: Tensor, total: Tensor, groups: Groups, rollout: Rollout) -> Tensor:
        """Tell which rows [B] stay by their value [B]; those without a value do not."""
        within = groups.present & ~value.isnan()
        if self.at_least is not None:
            within = within & (value >= self.at_least)
        if self.at_most is not None:
            within = within & (value <= self.at_most)
        if self.keep is None:
            return within
        count = self._counts(total, groups, rollout)[groups.index]  # [B]
        return within & self._preferred(
            value, Groups(groups.index, within, groups.count), count, rollout.row_id
        )

    def _preferred(self, value: Tensor, groups: Groups, count: Tensor, row: Tensor) -> Tensor:
        """Mark [B] the ``count`` [B] preferred rows of each group."""
        rank = ranks(value, groups, row)
        size = groups.size()[groups.index]
        if self.prefer == "lowest":
            return rank < count
        if self.prefer == "ends":
            return (rank < count // 2) | (rank >= size - (count - count // 2))
        if self.prefer == "best_and_random":
            lots = Rng.of(self.seed, self.iteration, "filtered").uniform(row).to(value.device)
            rank = ranks(lots.masked_fill(rank == size - 1, torch.inf), groups, row)
        return rank >= size - count

    def _counts(self, total: Tensor, groups: Groups, rollout: Rollout) -> Tensor:
        """Return how many rows [P] stay in each group; remember the groups' mean rewards."""
        if not isinstance(self.keep, Sequence):
            return torch.full_like(groups.size(), self.keep or 0)
        mean = groups.mean(total)
        first = torch.full_like(groups.size(), torch.iinfo(torch.long).max).scatter_reduce(
            0, groups.index, rollout.row_id.to(total.device), "amin"
        )
        scored = groups.size() > 0
        pairs = zip(first[scored].tolist(), mean[scored].tolist(), strict=True)
        # by row, so that the memory is the same on any number of processes
        latest = [value for _, value in sorted(all_gather_json([*pairs], total.device))]
        self.means = (self.means + latest)[-self.memory :]
        counts = torch.tensor(self.keep, device=total.device)
        if not self.means:
            return counts[:1].expand(groups.count)
        shares = torch.arange(1, len(self.keep), dtype=torch.float64) / len(self.keep)
        bounds = torch.tensor(self.means, dtype=torch.float64).quantile(shares).to(total.device)
        return counts[(mean[:, None] > bounds).sum(1)]


def _masked(x: Tensor, rows: Tensor) -> Tensor:
    """Return x, [B] or [B, K], as NaN outside the rows [B], integers as float32."""
    x = x if x.is_floating_point() else x.float()
    mask = rows.to(x.device)
    return x.masked_fill(~(mask if x.ndim == 1 else mask[:, None]), torch.nan)
