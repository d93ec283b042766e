"""Chooses which answer is written next where one has ended: more answers than a pass has rows
(Infinite Sampling).

Wang et al. 2025, "Infinite Sampling": a group is written in micro groups whose rows are refilled
while the others go on, so that memory does not grow with the group and no row waits for the
longest. Every answer is drawn by its own random numbers: it is the same whatever writes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.core.distributed import all_sum
from samplers.noise import Rng

Refill = Literal["none", "rows", "longest", "shortest", "plan"]
EPS = 0.1  # how much longer than the shortest a plan may be, as a share
STATES = 2000  # of a plan's table
FEATURES = 16  # of a hidden state
RIDGE = 1e-2
FADING = 0.9  # of what was learnt of lengths, in every rollout


def planned(
    lengths: Sequence[float], loads: Sequence[float], eps: float = EPS, exact: bool = True
) -> list[list[int]]:
    """Deal jobs of these lengths to slots that are busy for ``loads``, so that the last ends soon;
    returns the jobs of every slot, shortest first.

    The longest goes to the slot that is free first (LPT, at most 4/3 of the shortest plan). Unless
    that is within 1 + ``eps`` of what no plan can beat, and if ``exact``, all sums of lengths that
    are rounded down to eps / (n + 1) of that bound are listed (Sahni's FPTAS, 1976), which is
    within 1 + eps of the shortest; with more than ``STATES`` of them LPT's plan stands.
    """
    order = sorted(range(len(lengths)), key=lambda job: (-lengths[job], job))
    sums = list(loads)
    slots = []
    for job in order:
        slot = min(range(len(sums)), key=lambda n: (sums[n], n))
        sums[slot] += lengths[job]
        slots.append(slot)
    total = math.fsum(loads) + math.fsum(lengths)
    longest = max(lengths, default=0.0) + min(loads)
    bound = max(total / len(loads), longest, *loads)
    if exact and max(sums) > (1 + eps) * bound:
        every = [lengths[job] for job in order]
        slots = _listed(every, loads, eps * bound, max(sums)) or slots
    plan: list[list[int]] = [[] for _ in loads]
    for job, slot in zip(order, slots, strict=True):
        plan[slot].append(job)
    return [jobs[::-1] for jobs in plan]


def _listed(
    lengths: Sequence[float], loads: Sequence[float], error: float, most: float
) -> list[int] | None:
    """Choose a slot for every job by listing the sums there can be, each at most ``most``; None:
    there are too many."""
    unit = error / (len(lengths) + 1)
    start = tuple(int(load / unit) for load in loads)
    states: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]
    states = {tuple(sorted(start)): (start, ())}  # slots with equal sums are alike
    for length in lengths:
        following: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for sums, chosen in states.values():
            for slot in {total: n for n, total in enumerate(sums)}.values():
                added = (*sums[:slot], sums[slot] + int(length / unit), *sums[slot + 1 :])
                if added[slot] * unit <= most:
                    following.setdefault(tuple(sorted(added)), (added, (*chosen, slot)))
        if len(following) > STATES:
            return None
        states = following
    return list(states[min(states, key=lambda sums: sums[-1])][1])


class Lengths:
    """Predicts how many tokens answers will still have, from the hidden state behind the prompt or
    behind the tokens so far: a ridge regression of the logarithm, learnt from those that ended."""

    def __init__(self) -> None:
        size = FEATURES + 3
        self.products = torch.zeros(size, size, dtype=torch.float64)
        self.targets = torch.zeros(size, dtype=torch.float64)
        self.fresh = [torch.zeros_like(self.products), torch.zeros_like(self.targets)]

    def features(self, hidden: Tensor, step: Tensor) -> Tensor:
        """Return [B, F] on the CPU of hidden states [B, H] behind ``step`` [B] tokens."""
        axes = Rng.of("lengths").normal(torch.arange(FEATURES), (hidden.shape[-1],))
        state = hidden.detach().float()
        state = state / state.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        projected = (state @ axes.to(state).T).double().cpu()
        count = step.double().cpu()[:, None]
        return torch.cat([projected, count.log1p(), (count == 0).double(), count * 0 + 1], 1)

    def predict(self, features: Tensor) -> list[float]:
        """Return the tokens still to come, at least 1; before anything is known, equally many."""
        if not self.products.any():
            return [1.0] * len(features)
        known = self.products + RIDGE * torch.eye(len(self.targets), dtype=torch.float64)
        values = features @ torch.linalg.solve(known, self.targets)
        predicted: list[float] = values.clamp(0.0, 20.0).expm1().clamp_min(1.0).tolist()
        return predicted

    def observe(self, features: Tensor, left: Tensor) -> None:
        """Note features [N, F] after which ``left`` [N] tokens came."""
        self.fresh[0] += features.T @ features
        self.fresh[1] += features.T @ left.double().cpu().log1p()

    def learn(self, device: torch.device | str) -> None:
        """Learn from what was noted on all processes; a collective call."""
        fresh = torch.cat([self.fresh[0].flatten(), self.fresh[1]]).to(device)
        products, targets = all_sum(fresh).cpu().split([self.products.numel(), len(self.targets)])
        if products.any():
            self.products = FADING * self.products + products.view_as(self.products)
            self.targets = FADING * self.targets + targets
        self.fresh = [torch.zeros_like(self.products), torch.zeros_like(self.targets)]

    def state_dict(self) -> dict[str, Any]:
        return {"products": self.products.tolist(), "targets": self.targets.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.products = torch.tensor(state["products"], dtype=torch.float64)
            self.targets = torch.tensor(state["targets"], dtype=torch.float64)


@dataclass
class Slots:
    """Says how many rows a pass has, and which row takes the place of one that has ended."""

    rows: int
    order: Refill
    lengths: Lengths = field(default_factory=Lengths)


class Queue:
    """Holds the rows that wait for a place, and says which is next.

    ``slots.order``: as they stand, or those whose prompt's answers have been longest, or shortest,
    on average so far; before, the first answer to a prompt none of whose answers has ended. plan:
    by a plan for the predicted lengths, which is made again, from what is predicted of the rows at
    work by their tokens so far, whenever a place is free; of a place's rows the shortest is next.
    """

    def __init__(self, prompts: list[int], slots: Slots):
        self.prompts = prompts  # of every row
        self.slots = slots
        self.order = slots.order
        self.waiting = list(range(len(prompts)))
        self.lengths: dict[int, list[int]] = {}
        self.predicted = [1.0] * len(prompts)
        self.noted: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, steps, features
        self.passes = 0
        counts: dict[int, int] = {}
        self.copy = []  # how many answers to its prompt stand before each row
        for prompt in prompts:
            self.copy.append(counts.get(prompt, 0))
            counts[prompt] = self.copy[-1] + 1

    def expect(self, hidden: Tensor) -> None:
        """Predict the lengths of all rows from the hidden states [B, H] behind their prompts."""
        if self.order == "plan":
            rows = torch.arange(len(hidden))
            features = self.slots.lengths.features(hidden, torch.zeros_like(rows))
            self.predicted = self.slots.lengths.predict(features)
            self.noted.append((rows, torch.zeros_like(rows), features))

    def note(self, at: Tensor, step: Tensor, hidden: Tensor) -> None:
        """Note the hidden states [B', H] of the rows ``at`` behind ``step`` tokens, seldom."""
        self.passes += 1
        if self.order == "plan" and self.passes & (self.passes - 1) == 0:
            features = self.slots.lengths.features(hidden, step)
            self.noted.append((at.cpu(), step.cpu(), features))

    def learn(self, lengths: Tensor) -> None:
        """Learn from the lengths [B] of all answers."""
        for rows, steps, features in self.noted:
            left = lengths.cpu()[rows] - steps
            # those that had ended were only waiting to leave
            self.slots.lengths.observe(features[left > 0], left[left > 0])

    def ended(self, rows: list[int], lengths: list[int]) -> None:
        """Learn how long answers were."""
        for row, length in zip(rows, lengths, strict=True):
            self.lengths.setdefault(self.prompts[row], []).append(length)

    def take(
        self, count: int, hidden: Tensor | None = None, step: Tensor | None = None
    ) -> list[int]:
        """Return the next rows, at most ``count``; beside them others work, whose hidden states
        [B', H] are those behind ``step`` [B'] tokens."""
        count = min(count, len(self.waiting))
        if self.order == "plan":
            self.waiting = self._planned(count, hidden, step)
        elif self.order != "rows":
            self.waiting.sort(key=self._rank)
        taken = self.waiting[:count]
        self.waiting = self.waiting[count:]
        return taken

    def _planned(self, count: int, hidden: Tensor | None, step: Tensor | None) -> list[int]:
        """Order the waiting rows: those that ``count`` free places begin with first."""
        loads = [0.0] * count
        if hidden is not None and step is not None:
            lengths = self.slots.lengths
            loads += lengths.predict(lengths.features(hidden, step))
        jobs = [self.predicted[row] for row in self.waiting]
        plan = planned(jobs, loads, exact=hidden is None) if loads else []
        first = [self.waiting[part[0]] for part in plan[:count] if part]
        rest = sorted(set(self.waiting) - set(first), key=lambda row: (-self.predicted[row], row))
        return first + rest

    def _rank(self, row: int) -> tuple[int, float, int]:
        known = self.lengths.get(self.prompts[row])
        if not known:
            return (0, float(self.copy[row]), row)
        return (1, fmean(known) * (1 if self.order == "shortest" else -1), row)
