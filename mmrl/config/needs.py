"""Compares what rewards need with the data and the policy before a model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.config.values import Place
from mmrl.core.registry import Plugin
from mmrl.policies.capabilities import capabilities_of

if TYPE_CHECKING:
    from rewards.card import Card

SHOWN = 8  # fields of the data named in a message


def wrong_media(rewards: Mapping[str, Plugin], policy: object) -> Iterator[tuple[str, str]]:
    """List (reward, sentence) for rewards that do not judge the policy's medium.

    ``policy``: the class or the object; its capability ``makes`` is "image", "video" or "text",
    None if unknown.
    """
    can = capabilities_of(policy)
    makes = None if can is None else can.makes
    for name, reward in rewards.items():
        media = _card(reward).media
        if _card(reward).sound and can is not None and not can.sound:
            yield name, "it judges the sound of videos, and this policy makes none; leave it out"
        if makes is not None and makes not in media:
            yield (
                name,
                (
                    f"it judges {' or '.join(media)}, but the policy makes {makes}; use a "
                    f"reward of {makes}s"
                ),
            )


def missing_fields(
    rewards: Mapping[str, Plugin], fields: Collection[str]
) -> Iterator[tuple[str, str]]:
    """List (reward, sentence) for rewards that need a field which the data source never has."""
    for name, reward in rewards.items():
        for field in _card(reward).needs:
            if field not in fields:
                yield name, _sentence(field, "the prompts have none", fields)


def without_gradient(rewards: Mapping[str, Plugin]) -> Iterator[tuple[str, str]]:
    """List (reward, sentence) for rewards that do not declare a gradient, which the objective
    needs."""
    why = (
        "it has no gradient, which this objective follows; take one that docs/rewards.md "
        "calls differentiable, declare "
        "your own with @card(differentiable=True), or only measure it (monitor: true)"
    )
    yield from ((name, why) for name, reward in rewards.items() if not _card(reward).differentiable)


def refusals(place: Place, unfit: Iterable[tuple[str, str]]) -> list[str]:
    """Say which rewards of a section cannot be used, why, and how to choose others on the command
    line."""
    override = f"{place}={'{}' if len(place.path) > 1 else '{my_reward.py:score: 1}'}"
    return [
        (place / name).say(f"reward {name!r} cannot be used: {why}; without it: {override}")
        for name, why in unfit
    ]


def without_memory(rewards: Mapping[str, Plugin]) -> Iterator[tuple[str, str]]:
    """List (reward, sentence) for rewards that keep state over training, if nothing updates it."""
    from rewards.card import method_of

    why = (
        "it remembers the iterations of training, which a reward of evaluate.reward never sees; "
        "put it below `reward:` with weight 0, where it is measured too"
    )
    yield from ((name, why) for name, reward in rewards.items() if method_of(reward, "remember"))


def missing_values(
    rewards: Mapping[str, Plugin], prompts: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """List (reward, sentence) for rewards that need a field which some prompts lack."""
    for name, reward in rewards.items():
        for field in _card(reward).needs:
            bare = [prompt for prompt in prompts if prompt.get(field) is None]
            if bare:
                first = repr(str(bare[0].get("text", bare[0]))[:60])
                yield (
                    name,
                    _sentence(
                        field,
                        f"{len(bare)} of {len(prompts)} prompts have none, {first} first",
                        bare[0],
                    ),
                )


def _sentence(field: str, lack: str, fields: Collection[str]) -> str:
    known = ", ".join(list(fields)[:SHOWN]) or "nothing"
    return (
        f"it needs the field {field!r} of every prompt, but {lack} (fields there: "
        f"{known}); add it to the data, "
        f'in a .jsonl file: {{"text": "...", "{field}": ...}}'
    )


def _card(reward: Plugin) -> Card:
    from rewards.card import card_of  # its package imports every reward

    return card_of(reward)
