"""Tells data sources that ask for it how much the answers to each prompt differ."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmrl.advantages.groups import Groups
from mmrl.advantages.summary import outcomes
from mmrl.core import distributed
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rollout
from mmrl.data.prompts import Curriculum, Outcome
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage
from samplers.noise import Rng


@STAGES.register("diversity")
class Diversity(Stage):
    """Measures the diversity of groups where the data draws by it (VAS); no option asks for it."""

    def __init__(self, prompts: Curriculum, seed: int = 0):
        self.prompts = prompts
        self.seed = seed

    @classmethod
    def build(cls, setup: Setup) -> Diversity | None:
        prompts = setup.prompts
        if not isinstance(prompts, Curriculum):
            return None
        if prompts.measures or prompts.rescoring(0):
            return cls(prompts, setup.options.seed)
        return None

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        known = by_entry(drawn.rollout)
        self.prompts.see("diversity", known)
        mean = sum(known.values()) / max(len(known), 1)
        metrics = {"diversity/group": mean}
        if copies := self.prompts.rescoring(iteration):
            metrics["diversity/rescored"] = self._renewed(drawn, iteration, sample, copies)
        return drawn, metrics

    def _renewed(self, drawn: Drawn, iteration: int, sample: Sample, copies: int) -> float:
        """Let the policy answer all prompts of the data, only to be measured; returns how many."""
        rng = Rng.of(self.seed, iteration, "rescoring")
        rank, size = distributed.world()
        share, local = share_of(list(self.prompts), rank, size)
        width = distributed.largest(len(drawn.rollout.prompts), drawn.rollout.group.device)
        results: list[Outcome] = []
        known: dict[int, float] = {}
        for first in range(0, share, width):
            stream = replace(rng, offset=rank * share + first)
            part = sample(local[first : first + width], stream, copies)
            results += outcomes(part.rewards, part.rollout)
            known |= by_entry(part.rollout)
        self.prompts.renew(results, known)
        return float(len(results))


def share_of(prompts: list[Prompt], rank: int, size: int) -> tuple[int, list[Prompt]]:
    """Return how many prompts every process answers, and those of process ``rank``; what fills the
    last share has no ``entry``, so that nothing is learnt of it."""
    share = -(-len(prompts) // size)
    local = prompts[rank * share : (rank + 1) * share]
    filler = {key: value for key, value in prompts[0].items() if key != "entry"}
    return share, [*local, *[filler] * (share - len(local))]


def by_entry(rollout: Rollout) -> dict[int, float]:
    """Return the diversity of the groups of all processes by the ``entry`` of their prompt."""
    names, values = diversity(rollout)
    entries = [rollout.prompts[g].get("entry", -1) for g in names.tolist()]
    table = torch.stack([torch.tensor(entries).to(values), values], 1)
    rows = distributed.all_gather_rows(table).tolist()
    return {int(entry): value for entry, value in rows if entry >= 0}


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
