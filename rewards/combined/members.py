"""Provides what combined rewards share: their card, and which rows are answers to one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import MEDIA, Card, Of, card_of, method_of, pictures_of


def merged(rewards: Sequence[Reward], of: Of | None = None) -> Card:
    """Return the card of a combination: media that all judge, fields that any needs.

    ``of``: "group" if the whole compares samples although its parts do not.
    """
    cards = [card_of(reward) for reward in rewards]
    media = tuple(kind for kind in MEDIA.values() if all(kind in card.media for card in cards))
    if not media:
        raise UserError(
            "these rewards judge different media: "
            "" + " / ".join(", ".join(card.media) for card in cards)
        )
    refuse_memory(rewards)
    kinds = {card.of for card in cards} - {"sample"}
    if len(kinds) > 1 or (of in ("group", "batch") and "step" in kinds):
        raise UserError("rewards of steps and rewards of groups cannot be put together")
    kind: Of = next(iter(kinds), "sample")
    needs = tuple(dict.fromkeys(field for card in cards for field in card.needs))
    sound = any(card.sound for card in cards)
    return Card(media=media, needs=needs, pictures=pictures_of(rewards), of=of or kind, sound=sound)


def refuse_memory(rewards: Sequence[Reward]) -> None:
    """Raise UserError for a part that needs a whole iteration or keeps state over iterations: as a
    part it would miss rows or calls to ``remember``."""
    if any(card_of(reward).of == "batch" for reward in rewards):
        raise UserError(
            "a reward that sees a whole iteration, such as co_reward, cannot be a "
            "part of another reward"
        )
    if any(method_of(reward, "remember") for reward in rewards):
        raise UserError(
            "a reward that remembers earlier iterations, such as scheduled, cannot be a "
            "part of another reward; put it directly below `reward:`"
        )


def counters_of(parts: Mapping[str, Reward]) -> dict[str, float]:
    """Return the counters of the parts (a judge's requests and costs), prefixed by their names."""
    counts = {name: method_of(part, "counters") for name, part in parts.items()}
    return {
        f"{name}/{key}": number
        for name, count in counts.items()
        if count
        for key, number in count().items()
    }


def rows_of(media: Media, rows: list[int]) -> Media:
    """Return the samples ``rows``, stacked if they are tensors of one shape."""
    if isinstance(media, Tensor):
        return media[rows]
    samples = [media[row] for row in rows]
    alike = (
        all(isinstance(sample, Tensor) for sample in samples)
        and len({sample.shape for sample in samples}) == 1
    )
    return torch.stack(samples) if samples and alike else samples


def scores_of(rewards: Sequence[Reward], media: Media, prompts: list[Prompt]) -> list[Tensor]:
    """Return float32 values of each on the CPU, [B] or [B, K]; sample rewards as [B, 1] if others
    are of steps."""
    scores = [
        torch.as_tensor(reward(media, prompts)).detach().to("cpu", torch.float32)
        for reward in rewards
    ]
    if any(values.ndim == 2 for values in scores):
        scores = [values if values.ndim == 2 else values[:, None] for values in scores]
    return scores
