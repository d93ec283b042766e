"""Provides what rewards made of rewards share: their card, and which rows are answers to one
prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import MEDIA, Card, Of, card_of


def merged(rewards: Sequence[Reward], of: Of | None = None) -> Card:
    """Return the card of a reward that asks all of these: media that all judge, fields that any
    needs.

    ``of``: "group" where the whole compares samples although its parts do not.
    """
    cards = [card_of(reward) for reward in rewards]
    media = tuple(kind for kind in MEDIA.values() if all(kind in card.media for card in cards))
    if not media:
        raise UserError(
            "these rewards judge different media: "
            "" + " / ".join(", ".join(card.media) for card in cards)
        )
    refuse_batch(cards)
    kinds = {card.of for card in cards} - {"sample"}
    if len(kinds) > 1 or (of == "group" and "step" in kinds):
        raise UserError("rewards of steps and rewards of groups cannot be put together")
    kind: Of = next(iter(kinds), "sample")
    needs = tuple(dict.fromkeys(field for card in cards for field in card.needs))
    return Card(media=media, needs=needs, of=of or kind)


def refuse_batch(cards: Sequence[Card]) -> None:
    """Raise UserError for a reward that must see a whole iteration, where it would see some rows or
    be left out."""
    if any(card.of == "batch" for card in cards):
        raise UserError(
            "a reward that sees a whole iteration, such as co_reward, cannot be a "
            "part of another reward"
        )


def scores_of(rewards: Sequence[Reward], media: Media, prompts: list[Prompt]) -> list[Tensor]:
    """Return float32 values of each on the CPU, [B] or [B, K]; those of samples [B, 1] if others
    are of steps."""
    scores = [
        torch.as_tensor(reward(media, prompts)).detach().to("cpu", torch.float32)
        for reward in rewards
    ]
    if any(values.ndim == 2 for values in scores):
        scores = [values if values.ndim == 2 else values[:, None] for values in scores]
    return scores
