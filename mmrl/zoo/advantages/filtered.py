"""Excludes rows or whole groups from another advantage, before or after they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.advantages.groups import Groups, measured, named
from mmrl.advantages.presets import grpo
from mmrl.advantages.select import ranks
from mmrl.core.distributed import all_gather_json, all_sum
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import quantity
from mmrl.zoo.advantages.shaping import Underneath
from samplers.noise import Rng

Prefer = Literal["highest", "lowest", "ends", "best_and_random"]
Kind = Literal["flat", "right", "wrong"]
TINY = 1e-12  # a smaller spread counts as zero


@ADVANTAGES.register("filtered")
class Filtered:
    """Compare only the best k of each group by any quantity, and drop flat groups (GFPO).

    Shrivastava et al. 2025, "Sample more to think less": GFPO has ``{by: length, prefer: lowest}``
    or ``{by: reward_per_token}``. Shen and Zhang 2024, "Policy filtration in RLHF": PF-PPO has
    ``{statistics: all}`` with the best row, the best and a random one, or the best and the worst.
    GTPO has ``{by: surprisal, at_most: 0.7}``.

    base: the advantage of the rows kept. by: "reward" (the weighted sum), "reward_per_token",
    "length", "logprob", "surprisal" (mean -log p, nats), "entropy", "self_certainty", or a reward,
    of any weight. at_least, at_most: rows outside are dropped. keep: how many of the others are
    kept in each group; a list: by the difficulty of the prompt, hardest first, in quantiles of the
    mean rewards of the last ``memory`` groups (GFPO's adaptive difficulty: [8, 8, 6, 4]). prefer:
    which are kept; ends: half best, half worst, the odd one best; best_and_random: the best and
    random others, keyed by ``seed``. actual: a reward (weight 0 is fine), such as of a unit test,
    for which ``by`` is a proxy: then PF-PPO chooses among ``strategies`` the one whose rows have
    had the highest R^2 so far between the two; ``prefer`` holds until R^2 is known. statistics:
    base sees the rows kept, or all. outside: rows dropped are not trained on, or have advantage 0
    (the GFPO paper).

    drop_groups: groups that are not trained on: flat (std of the rewards at most ``flat_std``),
    right (no reward below ``right``: NGRPO keeps all-wrong groups) and wrong (all below it).

    strategies: the ``prefer``s that ``actual`` chooses from. flat_std: std of a group's rewards up
    to which it is flat. right: a reward from which on an answer is right. memory: groups whose mean
    rewards are remembered for quartiles. seed: of random choices.
    """

    def __init__(
        self,
        base: Underneath = grpo,
        by: str = "reward",
        keep: Annotated[int, Ge(1)] | Sequence[Annotated[int, Ge(1)]] | None = None,
        prefer: Prefer = "highest",
        at_least: float | None = None,
        at_most: float | None = None,
        actual: str | None = None,
        strategies: Sequence[Prefer] = ("highest", "ends", "best_and_random"),
        statistics: Literal["kept", "all"] = "kept",
        outside: Literal["drop", "zero"] = "drop",
        drop_groups: Sequence[Kind] = (),
        flat_std: Annotated[float, Ge(0)] = 0.0,
        right: float = 1.0,
        memory: Annotated[int, Ge(1)] = 10_000,
        seed: int = 0,
    ):
        _check(keep, actual, strategies)
        self.base = base
        self.by = by
        self.actual = actual
        self.strategies = tuple(strategies)
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
        # strategy -> count, sums of x, y, x^2, y^2, x y over the rows that it would have kept
        self.sums: dict[str, list[float]] = {}

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the advantages of base, [B, 1] or [B, K], NaN or 0 for rows dropped; count the
        iteration."""
        rewards = named(rewards)
        double, groups = measured(rewards.per_row(), rollout)
        total = double.total()
        stays = ~self._dropped(total, groups)[groups.index] & groups.present
        value = quantity(self.by, rewards, rollout)
        truth = None if self.actual is None else quantity(self.actual, rewards, rollout)
        chosen = stays & self._rows(value, truth, total, groups, rollout)
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
        sums = {name: list(values) for name, values in self.sums.items()}
        return {"iteration": self.iteration, "means": self.means, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        self.means = [float(mean) for mean in state["means"]]
        self.sums = {name: list(values) for name, values in state.get("sums", {}).items()}

    def r_squared(self, strategy: str) -> float:
        """Return R^2 between ``by`` and ``actual`` over the rows a strategy has kept so far; -1
        where one of them does not vary."""
        count, x, y, xx, yy, xy = self.sums.get(strategy, [0.0] * 6)
        across = (count * xx - x * x) * (count * yy - y * y)
        return (count * xy - x * y) ** 2 / across if across > TINY else -1.0

    def _dropped(self, total: Tensor, groups: Groups) -> Tensor:
        """Tell which groups [P] are dropped."""
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

    def _rows(
        self,
        value: Tensor,
        truth: Tensor | None,
        total: Tensor,
        groups: Groups,
        rollout: Rollout,
    ) -> Tensor:
        """Tell which rows [B] are kept by their value [B]; those without a value are not."""
        within = groups.present & ~value.isnan()
        if self.at_least is not None:
            within = within & (value >= self.at_least)
        if self.at_most is not None:
            within = within & (value <= self.at_most)
        if self.keep is None:
            return within
        count = self._counts(total, groups, rollout)[groups.index]  # [B]
        inside = Groups(groups.index, within, groups.count)
        if truth is None:
            return within & self._preferred(self.prefer, value, inside, count, rollout.row_id)
        rows_of = {
            name: within & self._preferred(name, value, inside, count, rollout.row_id)
            for name in dict.fromkeys([*self.strategies, self.prefer])
        }
        for name in self.strategies:
            self._measure(name, value, truth, rows_of[name])
        best = max(self.strategies, key=self.r_squared)
        return rows_of[best if self.r_squared(best) >= 0 else self.prefer]

    def _measure(self, strategy: str, value: Tensor, truth: Tensor, rows: Tensor) -> None:
        """Add the rows that a strategy would keep to its sums, over all processes."""
        known = rows & truth.isfinite() & value.isfinite()
        x, y = (torch.where(known, column, 0.0) for column in (value, truth))
        sums = torch.stack([known.to(x), x, y, x * x, y * y, x * y]).sum(1)
        before = self.sums.get(strategy, [0.0] * 6)
        self.sums[strategy] = [a + b for a, b in zip(before, all_sum(sums).tolist(), strict=True)]

    def _preferred(
        self, prefer: Prefer, value: Tensor, groups: Groups, count: Tensor, row: Tensor
    ) -> Tensor:
        """Mark [B] the ``count`` [B] preferred rows of each group."""
        rank = ranks(value, groups, row)
        size = groups.size()[groups.index]
        if prefer == "lowest":
            return rank < count
        if prefer == "ends":
            return (rank < count // 2) | (rank >= size - (count - count // 2))
        if prefer == "best_and_random":
            lots = Rng.of(self.seed, self.iteration, "filtered").uniform(row).to(value.device)
            rank = ranks(lots.masked_fill(rank == size - 1, torch.inf), groups, row)
        return rank >= size - count

    def _counts(self, total: Tensor, groups: Groups, rollout: Rollout) -> Tensor:
        """Return how many rows [P] are kept in each group; remember the groups' mean rewards."""
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


def _check(
    keep: int | Sequence[int] | None, actual: str | None, strategies: Sequence[Prefer]
) -> None:
    if not isinstance(keep, int | None) and not keep:
        raise UserError("advantage filtered: keep is an empty list; give a number, or null")
    if actual is not None and (keep is None or not strategies):
        raise UserError(
            "advantage filtered: actual chooses which rows stay; say with keep how many, and "
            "name strategies"
        )
