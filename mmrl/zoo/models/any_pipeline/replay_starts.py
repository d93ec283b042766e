"""Handles pipelines that edit a picture or a video: they encode it, mix it with noise, and skip the
first steps, by their argument ``strength``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmrl.zoo.models.any_pipeline.replay_scheduler import Timetable

POSTERIOR = "DiagonalGaussianDistribution"  # what autoencoders of diffusers encode to
NEAR = 8  # frames of a call's stack


def observe(pipe: Any, begins: Callable[[int], None]) -> bool:
    """Let ``begins(steps)`` be called with the number of steps that a call of the pipeline takes,
    where the pipeline says it (``get_timesteps``). Returns whether it does."""
    plain = getattr(pipe, "get_timesteps", None)
    if plain is None:
        return False

    def observed(*args: Any, **kwargs: Any) -> Any:
        outcome = plain(*args, **kwargs)
        begins(len(outcome[-2]))  # beside their number
        return outcome

    pipe.__dict__["get_timesteps"] = observed
    return True


def once(prepare: Callable[..., Any], state: Callable[[], Any]) -> Callable[..., Any]:
    """Leave a pipeline's preparation out where it makes nothing but latents, which ``state()`` is
    put in the place of; None: they are needed."""
    makes_latents_alone = False

    def prepared(*args: Any, **kwargs: Any) -> Any:
        nonlocal makes_latents_alone
        known = state()
        if makes_latents_alone and known is not None:
            return known
        latents = prepare(*args, **kwargs)
        makes_latents_alone = isinstance(latents, Tensor)
        return latents

    return prepared


def later(table: Timetable, skipped: int) -> Timetable:
    """Leave the first steps out of a timetable."""
    return Timetable(table.times[skipped:], table.timesteps[skipped:])


def in_posterior() -> bool:
    """Tell whether numbers are drawn for an autoencoder's latents of what it encodes: they are as
    many as the noise that these are mixed with, and are drawn before it."""
    frame = inspect.currentframe()
    for _ in range(NEAR):
        frame = frame.f_back if frame is not None else None
        if frame is not None and type(frame.f_locals.get("self")).__name__ == POSTERIOR:
            return True
    return False
