"""Warns once that a reward truncates prompts: text encoders like CLIP's take 77 tokens, and
silently drop the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)
SHOWN = 40  # characters of a prompt


class Beginning:
    """Watches the texts of a reward until one is longer than ``limit`` tokens.

    ``lengths`` counts the tokens of texts, not truncated.
    """

    def __init__(self, reward: str, limit: int, lengths: Callable[[list[str]], list[int]]):
        self.reward = reward
        self.limit = limit
        self.lengths = lengths
        self.told = False

    def look(self, texts: Sequence[str]) -> None:
        """Log a warning at the first texts that are too long."""
        # a token has a byte at least
        suspects = list({t for t in texts if len(t.encode(errors="replace")) + 2 > self.limit})
        if self.told or not suspects:
            return
        over = [t for t, n in zip(suspects, self.lengths(suspects)) if n > self.limit]
        if over:
            self.told = True
            log.warning(
                "%s reads the first %d tokens of a prompt: %d of %d are longer, such as %r...; "
                "what follows there does not count for the reward",
                self.reward,
                self.limit,
                sum(text in over for text in texts),
                len(texts),
                over[0][:SHOWN],
            )


def of_transformers(reward: str, tokenizer: Callable[..., Any], limit: int) -> Beginning:
    """Watch for a tokenizer of transformers."""

    def lengths(texts: list[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]

    return Beginning(reward, limit, lengths)


def of_open_clip(reward: str, tokenizer: Callable[..., Tensor], limit: int) -> Beginning:
    """Watch for a tokenizer of open_clip, which pads to its length: a text is too long if encoding
    it at twice the length changes the first half, since a truncated text ends in the end token."""

    def lengths(texts: list[str]) -> list[int]:
        short, wide = tokenizer(texts), tokenizer(texts, context_length=2 * limit)
        differs = (wide[:, : short.shape[1]] != short).any(1)
        return [limit + 1 if longer else limit for longer in differs.tolist()]

    return Beginning(reward, limit, lengths)
