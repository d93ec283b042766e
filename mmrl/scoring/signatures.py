"""Calls custom functions as rewards, by the names and the number of their parameters: the same in a
file, on the command line, in YAML and in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt
from rewards.card import card_of

# names of a parameter that takes the samples of a whole batch, and of one that takes one sample
BATCH = "media samples images videos texts answers completions responses pictures".split()
SINGLE = "sample image video text answer completion response picture".split()
SIGNATURES = (
    "(samples, prompts) or (samples) for a batch, (sample) or (sample, prompt) for one at a time; "
    "samples may be called media, images, videos, texts, answers or completions"
)


def by_signature(reward: Any, name: str) -> Any:
    """Wrap a user's plain function as ``(media, prompts) -> [B]``; anything else, and a function
    that has this form already, is returned as it is."""
    function = reward.func if isinstance(reward, partial) else reward
    if not inspect.isfunction(function):
        return reward
    names = needed(reward)
    if names is None or not (len(names) == 1 or len(names) == 2 and all(map(role, names))):
        return reward
    if names in (["media", "prompts"], ["samples", "prompts"]):
        return reward
    return batch_reward(reward, name)


def role(name: str) -> str:
    """Return what a parameter of this name takes; "" if the name does not tell."""
    if name in ("prompt", "prompts"):
        return name
    return "batch" if name in BATCH else "single" if name in SINGLE else ""


def needed(function: Any) -> list[str] | None:
    """Name the required parameters; None if some are keyword-only or none can be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    empty = [p for p in parameters if p.default is p.empty]
    if any(p.kind is p.KEYWORD_ONLY for p in empty):
        return None
    return [p.name for p in empty if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def picture(item: Any) -> Any:
    """Turn an image [3, H, W] in 0..1 into a PIL image, a video into a list of them; a text stays
    as it is."""
    from PIL import Image

    if not isinstance(item, Tensor):
        return item
    if item.ndim == 4:
        return [picture(frame) for frame in item]
    pixels = (item.detach().cpu().float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    return Image.fromarray(pixels.to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def batch_reward(
    function: Callable[..., Any], name: str, shown: Callable[[Any], Any] = picture
) -> Callable[..., Any]:
    """Return ``(media, prompts) -> [B]`` for a function of the user's, by its signature.

    ``(samples, prompts)``, or one parameter whose name is a plural such as ``images``: it is called
    with the batch as built-in rewards are, images [B, 3, H, W] in 0..1, videos [B, F, 3, H, W] or a
    list of texts, and returns B numbers. ``(sample)`` or ``(sample, prompt)``: it is called with
    each sample, as ``shown`` turns it (a PIL image, the frames of a video, a text), and returns a
    number; None where it does not apply. Both may be async.
    """
    roles = _roles(function, name)
    single = "single" in roles or "prompt" in roles
    call = _caller(function, roles)
    reward: Any
    if inspect.iscoroutinefunction(function):
        reward = _awaited(call, single, shown)
    else:

        def reward(media: Media, prompts: list[Prompt]) -> Any:
            if not single:
                return call(media, prompts)
            pairs = zip(media, prompts, strict=True)
            return [number(call(shown(item), prompt), name) for item, prompt in pairs]

    reward.__name__ = reward.__qualname__ = name
    reward.__doc__ = inspect.getdoc(function) or f"Is the function {name} of a Python session."
    reward.card = card_of(function.func if isinstance(function, partial) else function)
    reward.is_single = single and inspect.iscoroutinefunction(function)
    batched: Callable[..., Any] = reward
    return batched


def _roles(function: Callable[..., Any], name: str) -> list[str]:
    """Tell what each parameter of a reward is, by its name. UserError where that is unclear."""
    names = needed(function)
    if names is None or not 1 <= len(names) <= 2:
        raise UserError(
            f"reward {name!r} takes ({', '.join(names or ['...'])}); its parameters are "
            f"{SIGNATURES}"
        )
    roles = [role(each) for each in names]
    if len(roles) == 1 and not roles[0]:
        roles = ["single"]
    if len(roles) == 2 and not roles[0] and roles[1] in ("prompt", "prompts"):
        roles[0] = "single" if roles[1] == "prompt" else "batch"
    samples = [each for each in roles if each in ("batch", "single")]
    if len(samples) != 1 or not all(roles):
        raise UserError(
            f"reward {name!r} takes ({', '.join(names)}), which does not say whether it judges a "
            f"batch; name its parameters {SIGNATURES}"
        )
    return roles


def _caller(function: Callable[..., Any], roles: Sequence[str]) -> Callable[[Any, Any], Any]:
    """Return a call with samples and prompts in the order that the function wants."""
    if len(roles) == 1:
        return lambda samples, prompts: function(samples)
    if roles[0].startswith("prompt"):
        return lambda samples, prompts: function(prompts, samples)
    return lambda samples, prompts: function(samples, prompts)


def _awaited(call: Callable[..., Any], single: bool, shown: Callable[[Any], Any]) -> Any:
    async def reward(media: Media, prompts: list[Prompt]) -> Any:
        if not single:
            return await call(media, prompts)
        pairs = zip(media, prompts, strict=True)
        return [await call(shown(item), prompt) for item, prompt in pairs]

    return reward


def number(value: Any, name: str) -> Any:
    """Return what a function of one sample may return: a number, None, or sub-scores."""
    if value is None or isinstance(value, dict):
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward {name!r} returned {value!r} for one sample; expected a number, or None where "
            f"it does not apply; a function of a whole batch has the parameters (samples, prompts)"
        ) from error
