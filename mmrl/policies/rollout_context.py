"""The purpose of a rollout: what the loop and its stages need besides answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mmrl.core.effects import Reads as Reads
from mmrl.core.types import Copies, Fields, Prompt


@dataclass(frozen=True, kw_only=True)
class Drafts(Fields):
    """Holds earlier answers, one per row of a rollout, as drafts."""

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
    """The purpose of a rollout; the default is an ordinary training iteration."""

    iteration: int = 0  # of the run: windows of stochastic steps move with it
    # states of paths to store: all, those around decisions, or only the sample
    reads: Reads = "path"
    # writes a prompt's ground truth, which replaces one answer of its group
    ground_truth: Callable[[Prompt], str | None] | None = None
    # drafts for that many samples of each prompt; None: there are none
    drafts: Callable[[Sequence[Prompt], Copies], Drafts | None] | None = None


NO_CONTEXT = RolloutContext()
