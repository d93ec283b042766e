"""Compares the answers of a group with one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.advantages.groups import finished, measured
from mmrl.advantages.select import ranks
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from samplers.noise import Rng


@ADVANTAGES.register("brpo")
class BRPO:
    """Compare every answer with a random one of its group, drawn in each iteration (BRPO).

    Jia et al. 2025, "Writing-Zero". 1 for an answer whose reward exceeds the pivot's by more than
    ``margin``, -1 for a lower one, 0 for equal ones and the pivot: no mean, no std. compare:
    "difference" takes the difference of the rewards instead (mmrl's addition). seed: of the draws,
    which are keyed by row names. This is for rewards of single answers. The paper asks a judge
    about each answer and the pivot: the reward ``judge_pairwise`` with method: pivot, and the
    advantage ``reinforce``.

    margin: difference of rewards that counts as equal.
    """

    def __init__(
        self,
        compare: Literal["sign", "difference"] = "sign",
        margin: Annotated[float, Ge(0)] = 0.0,
        seed: int = 0,
    ):
        self.compare = compare
        self.margin = margin
        self.seed = seed
        self.iteration = 0

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return [B, 1] advantages, NaN for samples without a reward; count the iteration."""
        double, groups = measured(rewards, rollout)
        total = double.total()
        row = rollout.row_id
        lots = Rng.of(self.seed, self.iteration, "pivot").uniform(row).to(total.device)
        self.iteration += 1
        is_pivot = groups.present & (ranks(lots, groups, row.to(total.device)) == 0)
        pivot = groups.sum(total.masked_fill(~is_pivot, 0.0))  # [P]
        lead = total - pivot[groups.index]
        beyond = torch.where(lead.abs() > self.margin, lead, 0.0)
        advantage = beyond.sign() if self.compare == "sign" else beyond
        return finished(advantage, rewards, groups.present)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
