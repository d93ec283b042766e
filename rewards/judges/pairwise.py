"""Rewards by a judge that compares the samples of a prompt, each pair in both orders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt
from rewards.base.groups import groups_of
from rewards.card import card
from rewards.judges.question import Question, Unreadable
from rewards.judges.samples import (
    Frames,
    Judged,
    Model,
    OnFailure,
    kind_of,
    sample_pictures,
    shown_of,
)
from rewards.judges.templates import PAIRS, find


@REWARDS.register("judge_pairwise")
@card(
    needs="text",
    of="group",
    source="the judge's; UnifiedReward: arXiv 2503.05236, Pref-GRPO: arXiv 2508.20751",
    licence="the judge's",
    scaling="win rate 0..1, Bradley-Terry strengths around 0, or -1, 0, 1 against a pivot",
)
class Pairwise(Judged):
    """Compute a sample's win rate in its group by a judge that sees each pair in both orders.

    The chance that i beats j is the mean of both orders, so that position bias cancels: a judge
    that sees only the position gives one half. A pair with an unanswered order does not count; a
    sample without pairs is NaN.

    Args:
        model: who judges: ``{server: {url: ...}}`` or ``{local: {path: ...}}``.
        template: ``pair`` (answers 1 or 2, with probabilities where the model gives them),
            ``unified_reward``, ``unified_reward_think`` (reasons and scores by dimension first),
            or a file, with ``{{ first }}`` and ``{{ second }}``.
        pattern: regular expression whose group 1 is 1 or 2, for a file; None: the answer is 1 or 2.
        method: ``win_rate``: mean chance over the pairs; ``bradley_terry``: strengths s with P(i
            beats j) = sigmoid(s_i - s_j), MAP under a normal prior, mean 0 in each group;
            ``pivot``: 1 or -1 for a sample that is better or worse than a pivot of its group, 0 for
            a draw and for the pivot (BRPO, Jia et al. 2025, "Writing-Zero"): the pivot is drawn by
            a hash of prompt and samples, so that size - 1 pairs are judged. Use it with the
            advantage ``reinforce``, without mean and std, as in the paper.
        opponents: pairs per sample, an even number; None: all others.
        frames: frames shown of a video, evenly spaced.
        tokens: maximum of an answer; None: the template's, 2048 if it reasons, else 512.
        on_failure: ``nan`` leaves pairs without an answer out, ``stop`` raises.

    Raises:
        UserError: a group of one, which has nothing to compare.
    """

    name = "judge_pairwise"

    def __init__(
        self,
        model: Model,
        template: str = "pair",
        pattern: str | None = None,
        method: Literal["win_rate", "bradley_terry", "pivot"] = "win_rate",
        opponents: Annotated[int, Ge(2)] | None = None,
        frames: Frames = 4,
        tokens: Annotated[int, Ge(1)] | None = None,
        on_failure: OnFailure = "nan",
    ):
        super().__init__(model, frames, on_failure)
        if opponents is not None and opponents % 2:
            raise UserError(
                f"opponents {opponents}: every sample meets as many on both sides, so "
                f"an even number"
            )
        if opponents is not None and method == "pivot":
            raise UserError(
                "judge_pairwise: with method: pivot every sample meets the pivot alone; leave out "
                "opponents"
            )
        patterns = None if pattern is None else {"better": pattern}
        self.template = find(template, PAIRS, patterns=patterns, tokens=tokens)
        self.method = method
        self.opponents = opponents
        self.card = self.needing(self.template)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score B samples, grouped by prompt -> [B] float32 on the CPU."""
        pictures = sample_pictures(media, self.frames, self.name)
        groups = [
            [row for row in group if pictures[row] is not None] for group in adjacent(prompts)
        ]
        if self.method == "pivot":
            pairs = [pair for group in groups for pair in with_pivot(media, prompts, group)]
        else:
            pairs = [pair for group in groups for pair in pairings(group, self.opponents)]
        orders = [order for i, j in pairs for order in ((i, j), (j, i))]
        answers = self.answers(
            [self._question(media, prompts[i], pictures, i, j) for i, j in orders]
        )
        beats: dict[tuple[int, int], float] = {}  # (i, j) -> chance that i beats j
        for (i, j), forth, back in zip(pairs, answers[::2], answers[1::2], strict=True):
            if forth is not None and back is not None:
                # exactly one half where both orders got the same answer
                beats[i, j] = 0.5 + (forth["1"] - back["1"]) / 2
        return self._values(len(prompts), groups, beats)

    def _values(
        self, count: int, groups: Sequence[list[int]], beats: dict[tuple[int, int], float]
    ) -> Tensor:
        values = torch.full((count,), torch.nan)
        if self.method == "pivot":
            for (row, pivot), chance in beats.items():
                values[row] = float((chance > 0.5) - (chance < 0.5))
                values[pivot] = 0.0
            return values
        for group in groups:
            inside = {pair: chance for pair, chance in beats.items() if pair[0] in group}
            met = [row for row in group if any(row in pair for pair in inside)]
            if met:
                wins = {(met.index(i), met.index(j)): chance for (i, j), chance in inside.items()}
                measure = win_rates if self.method == "win_rate" else strengths
                values[met] = measure(wins, len(met)).float()
        return values

    def _question(
        self, media: Any, prompt: Prompt, pictures: Sequence[Any], i: int, j: int
    ) -> Question:
        if isinstance(media, Tensor):
            sides = pictures
            shown: dict[str, Any] = {"kind": kind_of(media)}
        else:
            sides = [str(text) for text in media]
            shown = shown_of(media, i, [], prompt)
        parts = self.template.parts(prompt, {**shown, "first": sides[i], "second": sides[j]})
        if not self.template.patterns:
            return Question(parts, choices=("1", "2"), tokens=16)
        return Question(
            parts, read=self._read, tokens=self.template.tokens, tagged=self.template.tagged
        )

    def _read(self, text: str) -> dict[str, float]:
        """Read the first sample's chance from the last conclusion in the text; one half for a
        draw."""
        verdicts = list(re.finditer(self.template.patterns["better"], text, re.I))
        if not verdicts:
            raise Unreadable("it does not say which is better")
        if self.template.tagged and len({verdict[1] for verdict in verdicts}) > 1:
            raise Unreadable("it says that both are better")
        winner = verdicts[-1][1]
        if winner not in ("1", "2", None):
            raise Unreadable(f"it names {winner!r}, neither 1 nor 2")
        return {"1": {"1": 1.0, "2": 0.0, None: 0.5}[winner]}


def adjacent(prompts: Sequence[Prompt]) -> list[list[int]]:
    """List the rows of each prompt, which are adjacent. Raises UserError for a group of one."""
    groups = groups_of(prompts)
    if lone := next((group for group in groups if len(group) < 2), None):
        raise UserError(
            "reward 'judge_pairwise' compares samples of one prompt and needs at least "
            "two of each, next to each other "
            f"(train.group_size, evaluate.num_samples); the prompt "
            f"{prompts[lone[0]].get('text', '')!r} has one"
        )
    return groups


def pairings(group: Sequence[int], opponents: int | None) -> list[tuple[int, int]]:
    """List every pair, or a ring in which each meets ``opponents / 2`` neighbours on both sides."""
    size = len(group)
    if opponents is None or opponents >= size - 1:
        return [(group[i], group[j]) for i in range(size) for j in range(i + 1, size)]
    return [
        (group[i], group[(i + step) % size])
        for step in range(1, opponents // 2 + 1)
        for i in range(size)
    ]


def with_pivot(
    media: Media, prompts: Sequence[Prompt], group: Sequence[int]
) -> list[tuple[int, int]]:
    """Pair every row of a group with a pivot drawn by a hash of prompt and samples: the same one on
    any number of processes, another one in the next iteration."""
    if not group:
        return []
    known = hashlib.sha256(str(prompts[group[0]].get("text", "")).encode())
    for row in group:
        sample = media[row]
        shown = sample.detach().cpu() if isinstance(sample, Tensor) else None
        known.update(str(sample).encode() if shown is None else shown.float().numpy().tobytes())
    pivot = group[int.from_bytes(known.digest()[:8], "big") % len(group)]
    return [(row, pivot) for row in group if row != pivot]


def win_rates(wins: dict[tuple[int, int], float], count: int) -> Tensor:
    """Return the mean chance [count] of winning over each one's pairs, float64."""
    won = torch.zeros(count, dtype=torch.float64)
    met = torch.zeros(count, dtype=torch.float64)
    for (i, j), chance in wins.items():
        won[i] += chance
        won[j] += 1 - chance
        met[i] += 1
        met[j] += 1
    return won / met


def strengths(
    wins: dict[tuple[int, int], float], count: int, prior: float = 0.1, steps: int = 50
) -> Tensor:
    """Return Bradley-Terry strengths (1952) [count], float64, mean 0: Newton's method on the
    log-posterior.

    sum p log sigmoid(s_i - s_j) + (1 - p) log sigmoid(s_j - s_i) - prior / 2 |s|^2; the prior keeps
    the strength of one that always wins finite.
    """
    s = torch.zeros(count, dtype=torch.float64)
    first, second = (torch.tensor([pair[side] for pair in wins]) for side in (0, 1))
    chance = torch.tensor(list(wins.values()), dtype=torch.float64)
    eye = torch.eye(count, dtype=torch.float64)
    edges = eye[first] - eye[second]  # [pairs, count]
    for _ in range(steps):
        p = torch.sigmoid(edges @ s)
        gradient = edges.T @ (chance - p) - prior * s
        step = torch.linalg.solve(
            edges.T @ ((p * (1 - p))[:, None] * edges) + prior * eye, gradient
        )
        s = s + step
        if step.abs().max() < 1e-10:
            break
    return s - s.mean()
