"""Sums rewards with weights that change during training: on a schedule, by hypervolume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import card
from rewards.combined.members import counters_of, merged, scores_of

Part = Annotated[Reward, REWARDS]
Point = tuple[float, ...]


@REWARDS.register("scheduled")
@card(
    source="[Datarus-R1](https://arxiv.org/abs/2508.13382)",
    scaling="the weighted sum of its parts",
)
class Scheduled:
    """Sum rewards with weights that move from start to end over the iterations (Datarus-R1).

    w_i(t) = start_i + (end_i - start_i) s(t), s = (1 - cos(pi min(t / iterations, 1))) / 2, or
    min(t / iterations, 1) for ``linear``: a curriculum from the form of an answer to its content.
    t counts calls in training, so a round of dynamic sampling counts as an iteration; it is saved
    in checkpoints. An evaluation uses the current weights.

    Args:
        of: the rewards.
        start: weight of each at the beginning.
        end: weight of each after ``iterations``.
        iterations: length of the schedule.
        shape: cosine or linear.
    """

    def __init__(
        self,
        of: list[Part],
        start: list[float],
        end: list[float],
        iterations: Annotated[int, Ge(1)],
        shape: Literal["cosine", "linear"] = "cosine",
    ):
        for name, weights in {"start": start, "end": end}.items():
            if len(weights) != len(of):
                raise UserError(
                    f"scheduled has {len(of)} rewards in `of` and {len(weights)} weights in "
                    f"`{name}`: one each"
                )
        self.of = list(of)
        self.start = list(start)
        self.end = list(end)
        self.iterations = iterations
        self.shape = shape
        self.card = merged(self.of)
        self.iteration = 0

    def weights(self) -> list[float]:
        """Return the weights of this iteration."""
        done = min(self.iteration / self.iterations, 1.0)
        moved = (1 - math.cos(math.pi * done)) / 2 if self.shape == "cosine" else done
        return [a + (b - a) * moved for a, b in zip(self.start, self.end, strict=True)]

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        return weighted_sum(self.weights(), scores_of(self.of, media, prompts))

    def remember(self) -> None:
        """Count an iteration."""
        self.iteration += 1

    def counters(self) -> dict[str, float]:
        return counters_of({str(i): part for i, part in enumerate(self.of)})

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])


@REWARDS.register("hypervolume")
@card(
    of="batch",
    source="[Lu et al. 2025](https://arxiv.org/abs/2509.11452)",
    scaling="0.5 to 2 times the weighted sum of its parts",
)
class Hypervolume:
    """Scale a sum of rewards up when an iteration's means extend the Pareto front (hypervolume).

    Dynamic reward weighting, hypervolume-guided (Lu et al. 2025): R = (0.5 + 1.5 tanh(dV)) sum_i
    w_i r_i, where dV is the increase, by the means (m_1 ... m_n) of this iteration over all
    processes, of the volume that earlier points dominate above ``reference``. With ``measured:
    validation``, the paper's way, the means are those of the evaluation, before training and after
    every ``train.evaluate_every`` iterations on the development half of the held-out prompts, and
    dV stays until the next; with ``training`` those of the training samples, at no extra cost. The
    front is saved in checkpoints. An advantage that divides by the group's std cancels the factor:
    use one that does not, such as ``dr_grpo``.

    Args:
        of: the rewards, higher is better, on scales of about 0..1.
        weights: of the sum; None: 1 each.
        reference: the point from which volumes are measured, at or below the worst means; None: 0,
            or with ``validation`` the means before training.
        measured: where the means are taken.
    """

    def __init__(
        self,
        of: list[Part],
        weights: list[float] | None = None,
        reference: list[float] | None = None,
        measured: Literal["training", "validation"] = "training",
    ):
        self.of = list(of)
        self.weights = [1.0] * len(of) if weights is None else list(weights)
        self.measured = measured
        self.reference: Point | None = None if reference is None else tuple(reference)
        if reference is None and measured == "training":
            self.reference = (0.0,) * len(of)
        lengths = {len(self.weights), len(of if reference is None else reference)}
        if len(of) < 2 or lengths != {len(of)}:
            raise UserError(
                f"hypervolume has {len(of)} rewards in `of`, {len(self.weights)} weights and "
                f"{len(reference or of)} numbers in `reference`: one each, of at least two rewards"
            )
        self.card = merged(self.of, of="batch")
        self.front: list[Point] = []
        self.latest: Point | None = None
        self.gain = 0.0  # dV of the last evaluation

    def __call__(
        self,
        media: Media,
        prompts: list[Prompt],
        gather: Callable[[list[list[float]]], list[list[float]]] = list,
    ) -> Tensor:
        """Score [B]; ``gather`` returns the rows of all processes."""
        scores = scores_of(self.of, media, prompts) if prompts else [torch.zeros(0)] * len(self.of)
        sums = [float(x.double().nansum()) for x in scores]
        counts = [float((~x.isnan()).sum()) for x in scores]
        columns = [math.fsum(column) for column in zip(*gather([sums + counts]))]
        totals = columns[: len(self.of)]
        present = columns[len(self.of) :]
        self.latest = None
        if all(present):
            self.latest = tuple(t / n for t, n in zip(totals, present, strict=True))
        return self.factor() * weighted_sum(self.weights, scores)

    def factor(self) -> float:
        """Return 0.5 to 2 for the last call, or for the last evaluation."""
        gain = self.gain if self.measured == "validation" else self._enlarged()
        return 0.5 + 1.5 * math.tanh(gain)

    def _enlarged(self) -> float:
        """Return the increase of the volume by the last call's means; 0 if some reward has no
        value."""
        if self.latest is None or self.reference is None:
            return 0.0
        before = hypervolume(self.front, self.reference)
        return max(hypervolume([*self.front, self.latest], self.reference) - before, 0.0)

    def remember(self) -> None:
        """Keep the means of the last training call if none dominates them."""
        if self.measured == "training":
            self._keep()
        self.latest = None

    def validated(self) -> None:
        """Use the means of the last call, an evaluation, if they count."""
        if self.measured == "validation":
            self.reference = self.latest if self.reference is None else self.reference
            self.gain = self._enlarged()
            self._keep()
        self.latest = None

    def _keep(self) -> None:
        point = self.latest
        if point is None or any(covers(earlier, point) for earlier in self.front):
            return
        self.front = [earlier for earlier in self.front if not covers(point, earlier)] + [point]

    def counters(self) -> dict[str, float]:
        return counters_of({str(i): part for i, part in enumerate(self.of)})

    def state_dict(self) -> dict[str, Any]:
        reference = None if self.reference is None else list(self.reference)
        front = [list(point) for point in self.front]
        return {"front": front, "reference": reference, "gain": self.gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.front = [tuple(point) for point in state["front"]]
        self.gain = float(state.get("gain", 0.0))
        if state.get("reference") is not None:
            self.reference = tuple(state["reference"])

    @staticmethod
    def validates(options: Mapping[str, Any]) -> bool:
        """Tell whether a reward with these options is measured in evaluations."""
        return options.get("measured") == "validation"


def weighted_sum(weights: Sequence[float], scores: Sequence[Tensor]) -> Tensor:
    """Sum values; a part of weight 0 is skipped, so its NaN does not count."""
    total = torch.zeros_like(sum(scores, torch.zeros(())))
    for weight, values in zip(weights, scores, strict=True):
        if weight:
            total = total + weight * values
    return total


def covers(better: Point, worse: Point) -> bool:
    """Tell whether a point is at least as good in every dimension."""
    return all(a >= b for a, b in zip(better, worse, strict=True))


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Return the volume that points dominate above a reference: slices along the first axis."""
    above = sorted(
        (p for p in points if all(x > r for x, r in zip(p, reference, strict=True))), reverse=True
    )
    if not above:
        return 0.0
    if len(reference) == 1:
        return above[0][0] - reference[0]
    edges = [point[0] for point in above[1:]] + [reference[0]]
    return math.fsum(
        (point[0] - edge) * hypervolume([p[1:] for p in above[: i + 1]], reference[1:])
        for i, (point, edge) in enumerate(zip(above, edges, strict=True))
        if point[0] > edge
    )
