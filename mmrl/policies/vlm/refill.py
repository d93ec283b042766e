"""Chooses the next answer for a row whose answer has ended, with more answers than rows (Infinite
Sampling).

Wang et al. 2025, "Infinite Sampling": a group is sampled in micro groups whose rows are refilled
while the others continue, so that memory does not grow with the group and no row waits for the
longest. Every answer has its own random numbers, so it does not depend on the other rows.
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
EPS = 0.1  # relative excess of a plan over the shortest one
STATES = 2000  # of a plan's table
FEATURES = 16  # of a hidden state
RIDGE = 1e-2
FADING = 0.9  # decay of the length statistics per rollout


def planned(
    lengths: Sequence[float], loads: Sequence[float], eps: float = EPS, exact: bool = True
) -> list[list[int]]:
    """Schedule jobs of these lengths on slots that are busy for ``loads``, minimising the makespan;
    returns the jobs of every slot, shortest first.

    The longest goes to the slot that is free first (LPT, at most 4/3 of the optimum). Unless that
    is within 1 + ``eps`` of the lower bound, and if ``exact``, all sums of lengths rounded down to
    eps / (n + 1) of that bound are enumerated (Sahni's FPTAS, 1976), which is within 1 + eps of the
    optimum; with more than ``STATES`` sums LPT's plan is kept.
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
    """Choose a slot for every job by enumerating the possible sums, each at most ``most``; None:
    there are too many."""
    unit = error / (len(lengths) + 1)
    start = tuple(int(load / unit) for load in loads)
    states: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]
    states = {tuple(sorted(start)): (start, ())}  # slots with equal sums are interchangeable
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
    """Predicts the remaining tokens of answers from the last hidden state of prompt or answer so
    far: ridge regression of the logarithm, fitted to finished answers."""

    def __init__(self) -> None:
        size = FEATURES + 3
        self.products = torch.zeros(size, size, dtype=torch.float64)
        self.targets = torch.zeros(size, dtype=torch.float64)
        self.fresh = [torch.zeros_like(self.products), torch.zeros_like(self.targets)]

    def features(self, hidden: Tensor, step: Tensor) -> Tensor:
        """Return features [B, F] on the CPU of hidden states [B, H] after ``step`` [B] tokens."""
        axes = Rng.of("lengths").normal(torch.arange(FEATURES), (hidden.shape[-1],))
        state = hidden.detach().float()
        state = state / state.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        projected = (state @ axes.to(state).T).double().cpu()
        count = step.double().cpu()[:, None]
        return torch.cat([projected, count.log1p(), (count == 0).double(), count * 0 + 1], 1)

    def predict(self, features: Tensor) -> list[float]:
        """Return the remaining tokens, at least 1; a constant before any fit."""
        if not self.products.any():
            return [1.0] * len(features)
        known = self.products + RIDGE * torch.eye(len(self.targets), dtype=torch.float64)
        values = features @ torch.linalg.solve(known, self.targets)
        predicted: list[float] = values.clamp(0.0, 20.0).expm1().clamp_min(1.0).tolist()
        return predicted

    def observe(self, features: Tensor, left: Tensor) -> None:
        """Record features [N, F] followed by ``left`` [N] tokens."""
        self.fresh[0] += features.T @ features
        self.fresh[1] += features.T @ left.double().cpu().log1p()

    def learn(self, device: torch.device | str) -> None:
        """Fit to the records of all processes; a collective call."""
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
    """Sets how many rows a pass has, and which row replaces one that has ended."""

    rows: int
    order: Refill
    lengths: Lengths = field(default_factory=Lengths)


class Queue:
    """Queue of the waiting rows.

    ``slots.order``: in order, or prompts with the longest, or shortest, answers on average so far,
    after one answer of each prompt without a finished one. plan: by a schedule of the predicted
    lengths, made again whenever a row is free from predictions for the active rows by their tokens
    so far; the shortest of a slot's rows is next.
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
        self.copy = []  # how many answers to its prompt precede each row
        for prompt in prompts:
            self.copy.append(counts.get(prompt, 0))
            counts[prompt] = self.copy[-1] + 1

    def expect(self, hidden: Tensor) -> None:
        """Predict the lengths of all rows from the last hidden states [B, H] of their prompts."""
        if self.order == "plan":
            rows = torch.arange(len(hidden))
            features = self.slots.lengths.features(hidden, torch.zeros_like(rows))
            self.predicted = self.slots.lengths.predict(features)
            self.noted.append((rows, torch.zeros_like(rows), features))

    def note(self, at: Tensor, step: Tensor, hidden: Tensor) -> None:
        """Record the hidden states [B', H] of the rows ``at`` after ``step`` tokens, at some steps
        only."""
        self.passes += 1
        if self.order == "plan" and self.passes & (self.passes - 1) == 0:
            features = self.slots.lengths.features(hidden, step)
            self.noted.append((at.cpu(), step.cpu(), features))

    def learn(self, lengths: Tensor) -> None:
        """Learn from the lengths [B] of all answers."""
        for rows, steps, features in self.noted:
            left = lengths.cpu()[rows] - steps
            # ended rows were only waiting for compaction
            self.slots.lengths.observe(features[left > 0], left[left > 0])

    def ended(self, rows: list[int], lengths: list[int]) -> None:
        """Update the lengths of finished answers."""
        for row, length in zip(rows, lengths, strict=True):
            self.lengths.setdefault(self.prompts[row], []).append(length)

    def take(
        self, count: int, hidden: Tensor | None = None, step: Tensor | None = None
    ) -> list[int]:
        """Return the next rows, at most ``count``; the active rows have hidden states [B', H] after
        ``step`` [B'] tokens."""
        count = min(count, len(self.waiting))
        if self.order == "plan":
            self.waiting = self._planned(count, hidden, step)
        elif self.order != "rows":
            self.waiting.sort(key=self._rank)
        taken = self.waiting[:count]
        self.waiting = self.waiting[count:]
        return taken

    def _planned(self, count: int, hidden: Tensor | None, step: Tensor | None) -> list[int]:
        """Order the waiting rows: first those that start in the ``count`` free places."""
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
