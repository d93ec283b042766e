"""The right answer as one member of a group (TempSamp-R1): who writes it down, and what is left
without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mmrl.core.errors import UserError, suggest
from mmrl.core.types import Media, Prompt, Rewards, Rollout
from mmrl.policies.base import Policy

Writer = Callable[[Prompt], str | None]


def writer(name: str, rewards: Mapping[str, Any], policy: Policy) -> Writer:
    """What writes the right answer to a prompt: the reward of this name, or the prompt's field of
    this name.

    None where the reward cannot say it, or the prompt has none. Raises UserError if the policy
    writes no answers that could be given to it, or the reward knows no right answers.
    """
    if not policy.capabilities.ground_truth:
        raise UserError(
            f"train.ground_truth_rollout: {type(policy).__name__} takes no answers of "
            f"others; it is for vlm"
        )
    if name not in rewards:
        return lambda prompt: None if prompt.get(name) is None else str(prompt[name])
    reward = getattr(rewards[name], "reward", rewards[name])  # without what is done around it
    write = getattr(reward, "right_answer", None)
    if write is None:
        able = [
            known_name
            for known_name, candidate in rewards.items()
            if hasattr(getattr(candidate, "reward", candidate), "right_answer")
        ]
        raise UserError(
            f"train.ground_truth_rollout: reward {name!r} cannot write down a right "
            f"answer; {suggest(name, able)}"
        )
    return lambda prompt: _written(write, prompt)


def _written(write: Writer, prompt: Prompt) -> str | None:
    from rewards.vision.coords import Unscorable

    try:
        return write(prompt)
    except Unscorable:
        return None


def sampled_only(
    media: Media, rollout: Rollout, rewards: Rewards
) -> tuple[Media, Rollout, Rewards]:
    """Without the answers that were given, and those of earlier iterations: what metrics look
    at."""
    foreign_rows = [
        rows
        for rows in (rollout.is_ground_truth, rollout.is_replayed)
        if rows is not None and rows.any()
    ]
    if not foreign_rows:
        return media, rollout, rewards
    sampled_rows = ~torch.stack(foreign_rows).any(0)
    sampled_media = [
        item for item, is_sampled in zip(media, sampled_rows.tolist(), strict=True) if is_sampled
    ]
    return (
        sampled_media,
        rollout[sampled_rows],
        Rewards({name: value[sampled_rows] for name, value in rewards.items()}, rewards.weights),
    )
