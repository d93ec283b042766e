"""The distribution over masked tokens, and over the choice of those that are revealed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmrl.core.distributions import Categorical, OverVocabulary, check_shape
from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.host import selected, spread
from samplers import unmask


@dataclass(frozen=True)
class Hidden(OverVocabulary):
    """Scores draws of the tokens at the N positions that ``where`` [B, L] holds. All results are
    [B, L], 0 elsewhere.

    ``noise`` [B, 1] is the temperature of the Gumbel noise on the confidence by which some were
    kept (MaskGIT, Chang et al. 2022). Then a decision is [B, L, 2]: token, and rank in the choice
    as ``samplers.unmask.ranked`` numbers them; without a choice (the last pass keeps all) every
    rank is L or more. KL and entropy are those of the tokens: the choice's have no closed form.
    """

    logits: Tensor  # [N, V]
    where: Tensor
    noise: Tensor | None = None
    heat: Tensor | float = 1.0  # factor of logits for confidences, [N, 1]

    def log_prob(self, decision: Tensor) -> Tensor:
        """Return the log-probs of token ids [B, L], or of tokens and their ranks [B, L, 2]."""
        ids = decision if self.noise is None else decision[..., 0]
        token = self.placed(Categorical(self.logits).log_prob(selected(ids, self.where)))
        if self.noise is None:
            return token
        confidence = token
        if isinstance(self.heat, Tensor) or self.heat != 1:
            plain = Categorical(self.logits * self.heat)
            confidence = self.placed(plain.log_prob(selected(ids, self.where)))
        return chosen(token, confidence, self.noise, decision[..., 1])

    def kl(self, reference: Hidden, by: Divergence = REVERSE) -> Tensor:
        """Compute KL(self || other), or another divergence."""
        return self.placed(Categorical(self.logits).kl(Categorical(reference.logits), by))

    def entropy(self) -> Tensor:
        return self.placed(Categorical(self.logits).entropy())

    def asks(self) -> list[Any]:
        return []

    def shown(self, asks: list[Any]) -> dict[str, Tensor]:
        return {"logits": self.logits}

    def reference(self, shown: dict[str, Tensor]) -> Hidden:
        check_shape(shown["logits"], self.logits.shape)
        return replace(self, logits=shown["logits"])

    def placed(self, values: Tensor) -> Tensor:
        return spread(values, self.where)


def chosen(token: Tensor, confidence: Tensor, noise: Tensor, rank: Tensor) -> Tensor:
    """Add the log-probs of ranks, by the log of the confidence, to those of tokens, [B, L]."""
    return token + unmask.plackett_luce(confidence / noise, rank)
