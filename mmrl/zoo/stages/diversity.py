"""Measures the diversity of the answers to each prompt, or their entropy, for data sources that
need it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmrl.advantages.groups import Groups, measured
from mmrl.advantages.summary import outcomes
from mmrl.core import distributed
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rollout
from mmrl.data.base import Curriculum, Outcome
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage
from samplers.noise import Rng


@STAGES.register("diversity")
class Diversity(Stage):
    """Measures diversity or entropy of groups where the data source draws by it (VAS, DEPO); it has
    no option."""

    asked_by = "a data source that chooses by it"

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
        metrics = {}
        if "entropy" in self.prompts.measures:
            self.prompts.see("entropy", entropies_of(drawn))
        if "diversity" in self.prompts.measures:
            known = by_entry(drawn.rollout)
            self.prompts.see("diversity", known)
            metrics["diversity/group"] = sum(known.values()) / max(len(known), 1)
        if copies := self.prompts.rescoring(iteration):
            metrics["diversity/rescored"] = self._renewed(drawn, iteration, sample, copies)
        return drawn, metrics

    def _renewed(self, drawn: Drawn, iteration: int, sample: Sample, copies: int) -> float:
        """Sample answers to all prompts of the data for measurement only; return their number."""
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
    """Return how many prompts every process answers, and those of process ``rank``; padding of the
    last share has no ``entry``, so it is not recorded."""
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


def entropies_of(drawn: Drawn) -> dict[int, list[list[float]]]:
    """List [reward, mean entropy of its decisions, nats] of the answers of all processes that have
    a reward, by the ``entry`` of their prompt; a collective call."""
    rollout = drawn.rollout
    mask = rollout.path_mask()
    entropy = torch.where(mask, rollout.entropies(), 0.0).double().sum(1) / mask.sum(1).clamp(min=1)
    double, groups = measured(drawn.rewards.per_row(), rollout)
    total = double.total()
    columns = (rollout.row_id, rollout.group, groups.present, total, entropy)
    rows = [
        [row, rollout.prompts[group]["entry"], reward, value]
        for row, group, scored, reward, value in zip(*(c.tolist() for c in columns), strict=True)
        if scored and "entry" in rollout.prompts[group]
    ]
    answers: dict[int, list[list[float]]] = {}
    for _, entry, reward, value in sorted(distributed.all_gather_json(rows, total.device)):
        answers.setdefault(entry, []).append([reward, value])
    return answers


def diversity(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Measure how much the samples of a group differ, 0 to 1: names [P] of the groups, and values
    [P] float64.

    Tokens: 1 - self-BLEU. Latents: the standard deviation (sample) inside the group, the root of
    the mean over elements, at most 1.
    """
    names, index = rollout.group.unique(return_inverse=True)
    sample = rollout.sample.flatten(1)
    groups = Groups(index, torch.ones_like(index, dtype=torch.bool), len(names))
    size = groups.size()[:, None]
    if not sample.is_floating_point():
        whole = torch.ones_like(sample, dtype=torch.bool)
        shown = rollout.path_mask() if rollout.mask.shape == sample.shape else whole
        return names, 1 - groups.sum(self_bleu(sample, shown, index)) / size[:, 0]
    x = sample.double()
    mean = x.new_zeros(len(names), x.shape[1]).index_add(0, index, x) / size
    square = groups.sum((x - mean[index]).square().mean(1))
    return names, (square / (size[:, 0] - 1).clamp(min=1)).sqrt().clamp(max=1.0)


def self_bleu(tokens: Tensor, shown: Tensor, group: Tensor, orders: int = 4) -> Tensor:
    """Compute the BLEU [B] float64 of every row against the others of its group, of the tokens
    [B, T] that are ``shown``; 1 for a row without others.

    min(1, exp(1 - r / c)) (p_1 ... p_n)^(1/n), n at most ``orders`` and the row's length c: p_k is
    the share of its k-grams that another row has as often (clipped counts), with 1 added to both
    counts for k > 1 (Lin and Och 2004), and r the length of the other row nearest to c, the shorter
    of two as near. A row without tokens: 1 if all others have none, else 0.
    """
    count, width = tokens.shape
    length = shown.sum(1)
    front = (~shown).long().argsort(dim=1, stable=True)
    tokens = tokens.gather(1, front)
    shown = shown.gather(1, front)
    names = tokens.unique(return_inverse=True)[1]
    grams = names.clone()
    logs = torch.zeros(count, dtype=torch.float64, device=tokens.device)
    for order in range(1, min(orders, width) + 1):
        if order > 1:
            pairs = grams[:, :-1] * width * count + names[:, order - 1 :]
            grams = pairs.unique(return_inverse=True)[1]
        present = shown[:, order - 1 :]
        total = (length - order + 1).clamp(min=0).double()
        right = _clipped(grams, present, group).double()
        share = right / total.clamp(min=1) if order == 1 else (right + 1) / (total + 1)
        logs = logs + torch.where(length >= order, share.log(), 0.0)
    mean = (logs / length.clamp(1, orders)).exp()
    nearest = _nearest(length, group)
    brevity = (1 - nearest / length.clamp(min=1)).clamp(max=0).exp()
    score = torch.where(length > 0, brevity * mean, (nearest == 0).double())
    alone = group.bincount()[group] == 1
    return torch.where(alone, 1.0, score)


def _clipped(grams: Tensor, present: Tensor, group: Tensor) -> Tensor:
    """Count how many of the n-grams [B, N] of every row one other row of its group has too, each at
    most as often as it has it: [B] long."""
    count = len(grams)
    row = torch.arange(count, device=grams.device)[:, None].expand_as(grams)[present]
    kind = (grams * (int(group.max()) + 1) + group[:, None])[present]
    # times that every row has every n-gram of its group
    kinds = kind.unique(return_inverse=True)[1]
    entries, times = (kinds * count + row).unique(return_counts=True)
    of_kind = entries // count
    number = int(of_kind.max()) + 1 if len(of_kind) else 0
    most = times.new_zeros(number).scatter_reduce(0, of_kind, times, "amax")
    at_most = times == most[of_kind]
    holders = times.new_zeros(number).index_add(0, of_kind, at_most.long())
    rest = times.masked_fill(at_most, 0)
    second = times.new_zeros(number).scatter_reduce(0, of_kind, rest, "amax")
    elsewhere = torch.where(at_most & (holders[of_kind] == 1), second[of_kind], most[of_kind])
    shared = torch.minimum(times, elsewhere)
    right: Tensor = shared.new_zeros(count).index_add(0, entries % count, shared)
    return right


def _nearest(length: Tensor, group: Tensor) -> Tensor:
    """Find the length [B] of the other row of every row's group that is nearest to its own."""
    order = (group * (int(length.max()) + 1) + length).argsort()
    sizes = length[order].double()
    groups = group[order]
    far = sizes.new_full((1,), torch.inf)
    same = groups[1:] == groups[:-1]
    before = torch.cat([far, torch.where(same, sizes[:-1], torch.inf)])
    after = torch.cat([torch.where(same, sizes[1:], torch.inf), far])
    nearer = (sizes - before).abs() <= (after - sizes).abs()
    nearest = torch.where(nearer, before, after)
    return torch.empty_like(nearest).index_copy(0, order, nearest)
