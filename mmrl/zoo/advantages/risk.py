"""Learns from the lower tail of the scores of bundles of prompts (RiskPO)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mmrl.advantages.groups import finished, measured
from mmrl.core.distributed import all_gather_rows
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout

TINY = 1e-6  # added to denominators


@ADVANTAGES.register("riskpo")
class RiskPO:
    """Maximise the value at risk of bundles of prompts, weighing the lower tail more (RiskPO).

    Ren et al. 2025, "RiskPO: Risk-based policy optimization". The k-th answers of ``bundle``
    prompts are one trial with the score x, the sum of their rewards; all get its advantage ((min(x,
    u) - u) clipped at l - u) / (high - low) + tail min(x - l, 0) / low, over 1 + tail, and with
    ``std`` over the sample std of the bundle's trials (1 where these are equal). l and u are the
    quantiles ``low`` and ``high`` of x: of the bundle's trials (batch), tracked over iterations by
    steps of ``rate`` times (quantile - share of trials below) (track), or the mean of both (mix).

    Prompts are bundled in the order of their rows over all processes; answers beyond the size of
    the smallest group of a bundle have advantage 0. centred: subtract the mean of the bundle, which
    leaves the expected gradient unchanged; the published advantage is never above 0.

    bundle: prompts of a trial. low, high: quantiles between which a score counts plainly. tail:
    weight of the part below ``low``. quantiles: of the bundle's trials (batch), tracked (track), or
    the mean of both (mix). rate: of the tracking. std: divide by the std of the bundle's trials.
    """

    def __init__(
        self,
        bundle: Annotated[int, Ge(1)] = 5,
        low: Annotated[float, Gt(0), Lt(1)] = 0.2,
        high: Annotated[float, Gt(0), Le(1)] = 0.8,
        tail: Annotated[float, Ge(0)] = 1.5,
        quantiles: Literal["batch", "track", "mix"] = "mix",
        rate: Annotated[float, Gt(0)] = 0.1,
        std: bool = True,
        centred: bool = False,
    ):
        if low >= high:
            raise UserError(f"riskpo: low = {low} must be less than high = {high}")
        self.bundle = bundle
        self.low = low
        self.high = high
        self.tail = tail
        self.quantiles = quantiles
        self.rate = rate
        self.std = std
        self.centred = centred
        self.tracked: list[float] = []  # the lower and the upper quantile of earlier iterations

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return [B, 1] advantages, NaN for samples without a reward; advance the quantiles."""
        double, groups = measured(rewards, rollout)
        total = double.total()
        row = rollout.row_id.to(total.device)
        first = torch.full_like(groups.size(), torch.iinfo(torch.long).max).scatter_reduce(
            0, groups.index[groups.present], row[groups.present], "amin"
        )
        keys = torch.stack([first[groups.index], row], 1)[groups.present]  # group, row
        keys = all_gather_rows(keys).cpu()
        score = all_gather_rows(total[groups.present]).cpu()
        order = keys[:, 1].argsort()
        order = order[keys[order, 0].argsort(stable=True)]  # by group, then by row
        advantage = torch.zeros_like(score)
        advantage[order] = self._of_bundles(score[order], keys[order, 0])
        # one row has one name over all processes
        names, place = keys[:, 1].sort()
        slot = torch.searchsorted(names, row.cpu()).clamp(max=max(len(names) - 1, 0))
        if not len(names):
            return finished(torch.zeros_like(total), rewards, groups.present)
        return finished(advantage[place[slot]].to(total), rewards, groups.present)

    def state_dict(self) -> dict[str, Any]:
        return {"tracked": self.tracked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tracked = [float(value) for value in state["tracked"]]

    def _of_bundles(self, score: Tensor, group: Tensor) -> Tensor:
        """Return the advantages of rows that are sorted by group, and track the quantiles."""
        advantage = torch.zeros_like(score)
        counts = group.unique_consecutive(return_counts=True)[1].tolist()
        rows = torch.arange(len(score)).split(counts)
        every = []
        for i in range(0, len(rows), self.bundle):
            members = rows[i : i + self.bundle]
            trials = torch.stack(
                [r[: min(map(len, members))] for r in members]
            )  # [prompts, trials]
            x = score[trials].sum(0)
            every.append(x)
            advantage[trials] = self._of_trials(x).expand_as(trials)
        if every:
            self._track(torch.cat(every))
        return advantage

    def _of_trials(self, x: Tensor) -> Tensor:
        """Return the advantages of the trials of one bundle from their scores."""
        levels = x.new_tensor([self.low, self.high])
        ends = x.quantile(levels)
        if self.tracked and self.quantiles != "batch":
            tracked = x.new_tensor(self.tracked)
            ends = tracked if self.quantiles == "track" else (tracked + ends) / 2
        lower, upper = ends
        middle = (x.clamp(max=upper) - upper).clamp(min=float(lower - upper))
        value: Tensor = middle / (self.high - self.low)
        below = (x - lower).clamp(max=0) / self.low
        value = (value + self.tail * below) / (1 + self.tail)
        if self.centred:
            value = value - value.mean()
        if self.std:
            differ = len(x) > 1 and bool(x.max() > x.min())
            value = value / ((x.std() if differ else 1.0) + TINY)
        return value

    def _track(self, x: Tensor) -> None:
        """Move the quantiles towards those of the scores; start from these."""
        levels = x.new_tensor([self.low, self.high])
        if not self.tracked:
            self.tracked = x.quantile(levels).tolist()
            return
        now = x.new_tensor(self.tracked)
        share = (x[:, None] < now).double().mean(0)
        self.tracked = (now + self.rate * (levels - share)).sort().values.tolist()
