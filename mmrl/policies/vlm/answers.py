"""The distribution over the tokens of answers, as objectives see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.host import selected, spread
from mmrl.core.types import Point
from mmrl.policies.vlm.scores import Scored
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.policy import VLM


class AnswerTokens:
    """Independent categorical draws at the L positions of B answers, known through their hidden
    states [N, H] only.

    ``log_prob`` of the point's own tokens comes with the forward pass; everything else is computed
    when it is asked for, under the weights of that time. All results are [B, L] and 0 outside
    ``where``.
    """

    def __init__(self, policy: VLM, point: Point, where: Tensor, hidden: Tensor, scored: Scored):
        self.policy = policy
        self.target = point.target
        self.where = where
        self.hidden = hidden
        self.scored = scored
        self.warp = policy.warp
        self.snapshot = policy.weights.current

    def log_prob(self, ids: Tensor) -> Tensor:
        """[B, L] of token ids [B, L] that share their prefixes with the tokens scored."""
        if ids is self.target or torch.equal(ids, self.target):
            return self._spread(self.scored.logprob)
        return self._spread(
            self._head("rescore", selected(ids, self.where), self.warp, False).logprob
        )

    def entropy(self) -> Tensor:
        """[B, L] of the warped distribution."""
        if self.scored.entropy is None:
            self.policy.entropies = True  # from now on with the forward pass
            self.scored = self._head("rescore", selected(self.target, self.where), self.warp, True)
        return self._spread(self.scored.entropy)

    def kl(self, other_tokens: AnswerTokens) -> Tensor:
        """[B, L] KL(self || other), exact, over the whole vocabulary.

        At the temperature of sampling, but without top-k and top-p: truncated supports differ, and
        then it is infinite.
        """
        whole = Warp(temperature=self.warp.temperature or 1.0, suppressed=self.warp.suppressed)
        with torch.no_grad():
            reference = other_tokens._head("full", whole)
        return self._spread(self._head("kl", reference, whole))

    def _head(self, work: str, *arguments: object) -> Tensor | Scored:
        """A pass of the head alone, under the weights that made the hidden states."""
        with self.policy.weights.using(self.snapshot):
            return self.policy.active()(work, self.hidden, *arguments)

    def _spread(self, values: Tensor) -> Tensor:
        return spread(values, self.where)
