"""Makes rewards of plain functions: of a batch, or of one sample at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.api.arguments import plain
from mmrl.api.isolation import live_name
from mmrl.api.media import shown_sample
from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt
from rewards.card import card_of

# names of a first parameter that takes a whole batch
PLURAL = "samples images videos texts media answers completions pictures".split()
SIGNATURES = "(samples, prompts) for a batch, or (sample) or (sample, prompt) for one at a time"


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
    """Make a ``reward`` section of what a Trainer is given: a function, a reward's name, a list of
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
    """Return ``(media, prompts) -> [B]`` for a function of the user's, by its signature.

    ``(samples, prompts)``, or one parameter whose name is a plural such as ``images``: it is called
    with the batch as rewards of mmrl are, images [B, 3, H, W] in 0..1, videos [B, F, 3, H, W] or a
    list of texts, and returns B numbers. ``(sample)`` or ``(sample, prompt)``: it is called with
    each sample, a PIL image, an ``mmrl.Video`` or a text, and returns a number; None or NaN where
    it cannot judge.
    """
    parameters = _positional(function, name)
    if _is_batch(parameters, name):
        sees_prompt = len(parameters) == 2

        def reward(media: Media, prompts: list[Prompt]) -> Any:
            return function(media, prompts) if sees_prompt else function(media)

    else:
        sees_prompt = len(parameters) == 2

        def reward(media: Media, prompts: list[Prompt]) -> Any:
            shown = [shown_sample(item) for item in media]
            pairs = zip(shown, prompts, strict=True)
            values = [
                function(item, prompt) if sees_prompt else function(item) for item, prompt in pairs
            ]
            return [float("nan") if value is None else _number(value, name) for value in values]

    reward.__name__ = reward.__qualname__ = name
    reward.__doc__ = inspect.getdoc(function) or f"Is the function {name} of a Python session."
    carrier: Any = reward
    carrier.card = card_of(function)
    return reward


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward {name!r} returned {value!r} for one sample; expected a number, or None where "
            f"it cannot judge; a function of a whole batch has the parameters (samples, prompts)"
        ) from error


def _positional(function: Callable[..., Any], name: str) -> list[str]:
    """Name the parameters that must be filled. Raises UserError if they are not one or two."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward {name!r}: its signature cannot be read; write a function of its "
            f"own around it, {SIGNATURES}"
        ) from error
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if keywords or not 1 <= len(names) <= 2:
        raise UserError(
            f"reward {name!r} takes ({', '.join([*names, *keywords])}); its parameters are "
            f"{SIGNATURES}"
        )
    return names


def _is_batch(parameters: Sequence[str], name: str) -> bool:
    """Tell by the names of the parameters whether a function takes a whole batch."""
    if len(parameters) == 1:
        return parameters[0] in PLURAL
    if parameters[1] not in ("prompt", "prompts"):
        raise UserError(
            f"reward {name!r} takes ({', '.join(parameters)}), which does not say whether it "
            f"judges a batch; name its parameters {SIGNATURES}"
        )
    return parameters[1] == "prompts"


def _name(reward: Any) -> str:
    name = getattr(reward, "__name__", type(reward).__name__)
    return "reward" if name == "<lambda>" else str(name)
