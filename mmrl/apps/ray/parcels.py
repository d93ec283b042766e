"""Packs samples for transport to a worker and unpacks them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmrl.core.types import Completion, Media, Prompt

FACTS = (
    "tokens",
    "finished",
    "logprob",
    "self_certainty",
    "question_gain",
    "last_logprob",
    "limit",
)


@dataclass(frozen=True)
class Parcel:
    """Holds the samples of one call of a reward, for transport."""

    media: Any
    prompts: list[dict[str, Any]]


def packed(media: Media, prompts: Sequence[Prompt], rows: slice, spelled: bool) -> Parcel:
    """Pack the samples ``rows``; ``spelled``: also the texts up to each token of an answer, which
    rewards of steps read."""
    part = media[rows]
    if isinstance(part, Tensor):
        # a copy: a view would send the whole batch
        return Parcel(part.detach().cpu().clone(), list(prompts[rows]))
    return Parcel([_folded(item, spelled) for item in part], list(prompts[rows]))


def opened(parcel: Parcel) -> tuple[Media, list[Prompt]]:
    """Return samples and prompts as the arguments of a reward."""
    if isinstance(parcel.media, Tensor):
        return parcel.media, parcel.prompts
    return [_unfolded(item) for item in parcel.media], parcel.prompts


def _folded(item: Any, spelled: bool) -> Any:
    """Convert a completion, which holds a function, to plain data."""
    if not isinstance(item, Completion):
        return item
    texts = item.spell() if spelled and item.spell is not None else None
    return Folded(str(item), {name: getattr(item, name) for name in FACTS}, texts)


def _unfolded(item: Any) -> Any:
    if not isinstance(item, Folded):
        return item
    facts = dict(item.facts)
    later = {name: facts.pop(name) for name in ("question_gain", "last_logprob")}
    texts = item.texts
    spell = None if texts is None else lambda: list(texts)
    completion = Completion(item.text, **facts, spell=spell)
    for name, value in later.items():
        setattr(completion, name, value)
    return completion


class Folded:
    """Holds a completion for transport."""

    def __init__(self, text: str, facts: dict[str, Any], texts: list[str] | None):
        self.text = text
        self.facts = facts
        self.texts = texts
