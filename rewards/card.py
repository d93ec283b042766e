"""Describes a reward: what it judges, the prompt fields it needs, its range, the source of its
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

Medium = Literal["image", "video", "text"]
Of = Literal["sample", "group", "step", "batch"]
PICTURES = ("images", "image")  # fields with a prompt's pictures
MEDIA: dict[str, Medium] = {"image": "image", "video": "video", "text": "text"}
Entry = TypeVar("Entry", bound=Callable[..., Any])


@dataclass(frozen=True)
class Card:
    """Describes a reward. ``of``: a "sample" reward judges each sample alone and returns [B]; a
    "group" reward needs whole groups (rows of one prompt adjacent) and returns [B]; a "step" reward
    returns [B, K]; a "batch" reward sees all samples of an iteration in one call on every process,
    even one without rows, with a third argument that gathers the rows of all processes, and returns
    [B]. ``low``, ``high``: the range, None is open. ``needs``: fields that every prompt must have.
    ``pictures``: fields that hold a picture or its file name: ``remote`` sends them along, and a
    server accepts no file names. ``named``: option -> the field that it renames. ``sound``: it
    judges the sound of videos, ``mmrl.core.media.sound``. ``source``: of the weights or the
    definition. ``scaling``: in words, if several are in use."""

    media: tuple[Medium, ...] = ("image", "video", "text")
    needs: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    low: float | None = None
    high: float | None = None
    of: Of = "sample"
    differentiable: bool = False
    sound: bool = False
    source: str = ""
    licence: str = ""
    scaling: str = ""


def card(
    *,
    media: str = "image video text",
    needs: str = "",
    pictures: str = "",
    named: Mapping[str, str] | None = None,
    **fields: Any,
) -> Callable[[Entry], Entry]:
    """Decorate a reward with its card: ``@card(media="image video", needs="text", low=-1, high=1,
    licence="MIT")``, names split at blanks.

    ``named={"field": "reference"}``: the option ``field`` names the prompt field that replaces
    ``reference``. An object whose options change what it needs may override the card with an
    attribute ``card``.
    """

    def declare(entry: Entry) -> Entry:
        carrier: Any = entry  # a class or a function, which take attributes
        carrier.card = Card(
            media=tuple(MEDIA[word] for word in media.split()),
            needs=tuple(needs.split()),
            pictures=tuple(pictures.split()),
            named=tuple((named or {}).items()),
            **fields,
        )
        return entry

    return declare


def card_of(reward: Callable[..., Any]) -> Card:
    """Return the card of a reward, its class, or the function under a partial; without a card, it
    may see everything."""
    card = getattr(reward, "card", None) or getattr(getattr(reward, "func", None), "card", None)
    return card if isinstance(card, Card) else Card()


def method_of(reward: Any, name: str) -> Callable[..., Any] | None:
    """Return a method that a reward may have, such as ``remember``, ``counters``, ``causes`` or
    ``ground_truth``; None if it has none."""
    method = getattr(reward, name, None)
    return method if callable(method) else None


def card_with(reward: Callable[..., Any], options: Mapping[str, Any]) -> Card:
    """Return the card of a class or function with these options: fields that they name replace the
    defaults."""
    known = card_of(reward)
    renamed = {need: str(options[option]) for option, need in known.named if option in options}
    return replace(
        known,
        needs=tuple(renamed.get(need, need) for need in known.needs),
        pictures=tuple(renamed.get(field, field) for field in known.pictures),
    )


def pictures_of(rewards: Iterable[Callable[..., Any]]) -> tuple[str, ...]:
    """Return the picture fields of these rewards, each once."""
    return tuple(dict.fromkeys(field for reward in rewards for field in card_of(reward).pictures))


def described(reward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a placeholder with the card of a reward with these options, before it is built."""
    carrier: Any = partial(reward)
    carrier.card = card_with(reward, options)
    return carrier  # type: ignore[no-any-return]


class Sums(NamedTuple):
    """Holds sum and count of a sub-score's values that live on other processes."""

    total: float = 0.0
    number: float = 0.0

    def plus(self, other: Sums) -> Sums:
        return Sums(self.total + other.total, self.number + other.number)
