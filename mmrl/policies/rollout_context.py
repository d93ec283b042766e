"""Says what a rollout is for: what the loop and its stages ask of it besides answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mmrl.core.effects import Reads as Reads
from mmrl.core.types import Copies, Fields, Prompt


@dataclass(frozen=True, kw_only=True)
class Drafts(Fields):
    """Holds earlier answers, one to every row of a rollout, that it may begin with."""

    ids: Tensor  # [B, T] long
    mask: Tensor  # [B, T] bool: tokens of the answer; a row without any has no draft
    logprob: Tensor  # [B, T] under the weights that sampled them
    # [B, T, V] of all tokens, where rejected ones are to be replaced exactly
    full: Tensor | None = None
    lenience: Tensor  # [B] a token is kept with probability min(1, lenience p / q)
    # what was kept: [B, 2] tokens that rows kept and had, of every rollout
    accepted: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutContext:
    """Says what a rollout is for; the default is an ordinary iteration."""

    iteration: int = 0  # of the run: windows of stochastic steps move with it
    # states of paths that will be read: all, those beside decisions, or the sample alone
    reads: Reads = "path"
    # writes the ground truth to a prompt, which takes the place of one of its group
    ground_truth: Callable[[Prompt], str | None] | None = None
    # earlier answers to so many samples of each prompt, to begin from; None: nothing is known
    drafts: Callable[[Sequence[Prompt], Copies], Drafts | None] | None = None


NO_CONTEXT = RolloutContext()
