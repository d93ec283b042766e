"""Wraps plain functions as rewards: of a batch, or of one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.api.arguments import plain
from mmrl.api.isolation import live_name
from mmrl.api.media import shown_sample
from mmrl.core.errors import UserError, called
from mmrl.scoring import signatures
from mmrl.scoring.signatures import SIGNATURES


@dataclass
class NamedRewards:
    """Holds a ``reward`` section of plain values, and the functions that it names."""

    section: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)

    def add(self, reward: Any, settings: Any) -> None:
        """Add a function, or the name of a reward; ``settings``: its weight, or its options."""
        if isinstance(reward, str):
            self.section[reward] = settings
            return
        if not callable(reward):
            raise UserError(
                f"reward: expected a function {SIGNATURES}, or a reward's name, got {reward!r}"
            )
        name = self._unused(_name(reward))
        self.live[name] = batch_reward(reward, name)
        self.section[live_name(name)] = settings

    def _unused(self, name: str) -> str:
        names = [name, *(f"{name}_{number}" for number in range(2, 100))]
        return next(each for each in names if each not in self.live)


def named(reward: Any, weights: Sequence[float] | None = None) -> NamedRewards:
    """Build a ``reward`` section from a Trainer's argument: a function, a reward's name, a list of
    these with ``weights``, or a dict, name or function -> weight or options; also name -> function.

    Raises UserError for anything else.
    """
    rewards = NamedRewards()
    if isinstance(reward, Mapping):
        if weights is not None:
            raise UserError("reward_weights belong to a list of rewards; a dict holds its weights")
        for key, value in reward.items():
            if isinstance(key, str) and callable(value):
                rewards.live[key] = batch_reward(value, key)
                rewards.section[live_name(key)] = 1.0
            else:
                rewards.add(key, plain(value))
        return rewards
    several = list(reward) if isinstance(reward, (list, tuple)) else [reward]
    shares = [1.0] * len(several) if weights is None else list(weights)
    if len(shares) != len(several):
        raise UserError(
            f"reward_weights: {len(shares)} weights for {len(several)} rewards; give one for each"
        )
    for each, share in zip(several, shares, strict=True):
        rewards.add(each, float(share))
    return rewards


def batch_reward(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``(media, prompts) -> [B]`` for a function of the user's, by its signature, as
    ``mmrl.scoring.signatures`` says; a video is shown as an ``mmrl.Video``."""
    return signatures.batch_reward(function, name, shown_sample)


def _name(reward: Any) -> str:
    name = called(reward)
    return "reward" if name == "<lambda>" else name
