"""Tells data sources that ask for it how much the answers to each prompt differ."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.groups import Groups
from mmrl.core import distributed
from mmrl.core.registry import STAGES
from mmrl.core.types import Rollout
from mmrl.data.prompts import Curriculum
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage


@STAGES.register("diversity")
class Diversity(Stage):
    """Measures the diversity of groups where the data draws by it (VAS); no option asks for it."""

    def __init__(self, prompts: Curriculum):
        self.prompts = prompts

    @classmethod
    def build(cls, setup: Setup) -> Diversity | None:
        prompts = setup.prompts
        if isinstance(prompts, Curriculum) and prompts.wants_diversity:
            return cls(prompts)
        return None

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        names, values = diversity(drawn.rollout)
        entries = [drawn.rollout.prompts[g].get("entry", -1) for g in names.tolist()]
        table = torch.stack([torch.tensor(entries).to(values), values], 1)
        rows = distributed.all_gather_rows(table).tolist()
        known = {int(entry): value for entry, value in rows if entry >= 0}
        self.prompts.see_diversity(known)
        mean = sum(known.values()) / max(len(known), 1)
        return drawn, {"diversity/group": mean}


def diversity(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Measure how much the samples of a group differ, 0 to 1: names [P] of the groups, and values
    [P] float64.

    Tokens: the share of distinct pairs of neighbours among all pairs of the group (distinct-2).
    Latents: the standard deviation (sample) inside the group, the root of the mean over elements,
    at most 1.
    """
    names, index = rollout.group.unique(return_inverse=True)
    sample = rollout.sample.flatten(1)
    if not sample.is_floating_point():
        return names, _distinct(sample, rollout.mask, index, len(names))
    groups = Groups(index, torch.ones_like(index, dtype=torch.bool), len(names))
    x = sample.double()
    size = groups.size()[:, None]
    mean = x.new_zeros(len(names), x.shape[1]).index_add(0, index, x) / size
    square = groups.sum((x - mean[index]).square().mean(1))
    return names, (square / (size[:, 0] - 1).clamp(min=1)).sqrt().clamp(max=1.0)


def _distinct(tokens: Tensor, mask: Tensor, index: Tensor, groups: int) -> Tensor:
    shown = mask if mask.shape == tokens.shape else torch.ones_like(tokens, dtype=torch.bool)
    pairs = torch.stack([index[:, None].expand_as(tokens[:, 1:]), tokens[:, :-1], tokens[:, 1:]], 2)
    pairs = pairs[shown[:, :-1] & shown[:, 1:]]
    total = torch.bincount(pairs[:, 0], minlength=groups)
    distinct = torch.bincount(pairs.unique(dim=0)[:, 0], minlength=groups)
    return distinct.double() / total.clamp(min=1)
