"""Scores every step of an answer and the whole answer in one reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt, Reward
from rewards.card import card
from rewards.combined.members import counters_of, merged, scores_of

Part = Annotated[Reward, REWARDS]


@REWARDS.register("hierarchical")
@card(
    media="text",
    source="[Datarus-R1](https://arxiv.org/abs/2508.13382)",
    scaling="that of its parts, which must be alike",
)
class Hierarchical:
    r"""Score the steps of an answer and the whole answer (Datarus-R1's hierarchical reward).

    R = share * mean_k step(s_k) + (1 - share) * whole(answer). The non-empty pieces between matches
    of ``split`` are the steps s_k, at most ``most``, neighbours joined if there are more; an answer
    without steps has 0 for them. The paper's model judges whether a step is sound and whether all
    cohere; here any reward of texts, such as a judge, scores each with its prompt. How steps
    combine is our reading: the mean, or with ``weakest`` the minimum.

    Args:
        step: the reward of a step.
        whole: the reward of the answer; None: ``step``, applied to all of it.
        share: of the steps in the whole.
        split: regular expression between steps: a blank line, or a closing tag of ReAct's.
        context: a step is shown with all the text before it, so that it can be judged.
        how: mean or weakest step.
        most: steps of an answer that are scored, which bounds a judge's cost.
    """

    def __init__(
        self,
        step: Part,
        whole: Part | None = None,
        share: Annotated[float, Ge(0), Le(1)] = 0.5,
        split: str = r"\n\s*\n|</(?:step|thought|action|observation)>",
        context: bool = False,
        how: Literal["mean", "weakest"] = "mean",
        most: Annotated[int, Ge(1)] = 16,
    ):
        try:
            self.split = re.compile(split)
        except re.error as error:
            raise UserError(f"hierarchical: split is not a regular expression: {error}") from error
        self.step = step
        self.whole = step if whole is None else whole
        self.share = share
        self.context = context
        self.weakest = how == "weakest"
        self.most = most
        self.card = merged([self.step, self.whole])
        if self.card.of != "sample" or "text" not in self.card.media:
            raise UserError(
                "hierarchical: its parts must be rewards of texts that judge each sample alone"
            )

    def __call__(self, media: Sequence[str], prompts: list[Prompt]) -> Tensor:
        """Score [B]; all steps of all answers are scored in one call."""
        if isinstance(media, Tensor):
            raise UserError("reward 'hierarchical' judges texts, not images or videos")
        steps = [self.steps_of(str(text)) for text in media]
        rows = [row for row, pieces in enumerate(steps) for _ in pieces]
        flat = [piece for pieces in steps for piece in pieces]
        (whole,) = scores_of([self.whole], list(media), prompts)
        sound = torch.zeros(len(prompts))
        if flat:
            (values,) = scores_of([self.step], flat, [prompts[row] for row in rows])
            index = torch.tensor(rows)
            how = "amin" if self.weakest else "mean"
            sound = sound.scatter_reduce(0, index, values, how, include_self=False)
        return self.share * sound + (1 - self.share) * whole

    def steps_of(self, text: str) -> list[str]:
        """Return the steps of an answer, each with the text before it if that is shown."""
        pieces = []
        start = 0
        for match in self.split.finditer(text):
            pieces.append((start, match.end()))
            start = match.end()
        pieces.append((start, len(text)))
        pieces = [(a, b) for a, b in pieces if self.split.sub("", text[a:b]).strip()]
        size = -(-len(pieces) // self.most) or 1
        joined = [(group[0][0], group[-1][1]) for group in in_groups(pieces, size)]
        return [text[0 if self.context else a : b].strip() for a, b in joined]

    def counters(self) -> dict[str, float]:
        return counters_of({"step": self.step, "whole": self.whole})


def in_groups(pieces: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    """Split into groups of ``size`` neighbours, the last may be smaller."""
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]
