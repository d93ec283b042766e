"""Chooses how a supervised loss is mixed with the policy's own: CHORD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor


@dataclass(frozen=True)
class Supervision:
    """Adds the supervised loss of answers that somebody else wrote: (1 - mu) L_RL + mu L_SFT, each
    a mean over its own decisions (with ``train.loss_agg_mode: token_mean``).

    Zhang et al. 2025, "On-policy RL meets off-policy experts: Harmonizing supervised fine-tuning
    and reinforcement learning via dynamic weighting" (CHORD). mu rises in ``warmup_iterations``
    iterations from 0 to ``peak`` and falls in ``decay_iterations`` on a half cosine to ``valley``;
    a step of the paper is an iteration, one batch of samples, as in the authors' code. phi: every
    token's loss is weighed by p (1 - p), p the policy's own probability of it, without its gradient
    (CHORD-phi, with mu constant: valley as peak).

    Of flow and diffusion models nobody knows the steps to somebody else's picture: their supervised
    loss is that of objective ``sft``, the mean square of the output less its target at fresh noise,
    one even draw of a time a picture.
    """

    peak: Annotated[float, Ge(0), Le(1)] = 0.9
    valley: Annotated[float, Ge(0), Le(1)] = 0.05
    warmup_iterations: Annotated[int, Ge(0)] = 0
    decay_iterations: Annotated[int, Ge(0)] = 200
    phi: bool = False

    def mu(self, iteration: int) -> float:
        """Return the weight of the supervised loss in an iteration, counted from 0."""
        if iteration < self.warmup_iterations:
            return self.peak * iteration / self.warmup_iterations
        if iteration >= self.warmup_iterations + self.decay_iterations:
            return self.valley
        share = (iteration - self.warmup_iterations) / self.decay_iterations
        return self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * share)) / 2

    def loss(self, logp: Tensor) -> Tensor:
        """Return [B, L]: -log p, or with ``phi`` weighed."""
        if not self.phi:
            return -logp
        p = logp.detach().exp()
        return -p * (1 - p) * logp
