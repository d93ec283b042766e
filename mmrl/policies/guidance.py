"""Classifier-free guidance: the scored distribution, and temporary changes of the scale."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

LogprobGuidance = Literal["guided", "guided_stopgrad_uncond", "conditional"]


def without_empty(cond: dict[str, Any]) -> dict[str, Any]:
    """Drop the condition of the empty prompt, which all rows share."""
    return {key: value for key, value in cond.items() if key != "uncond"}


class Overriding(float):
    """A guidance scale that also overrides those of rows."""


@contextmanager
def at_guidance(policy: Any, guidance: float | None) -> Iterator[None]:
    """Set another classifier-free guidance scale within the block, overriding those of rows; None:
    the policy's own."""
    before = policy.guidance_scale
    if guidance is not None:
        policy.guidance_scale = Overriding(guidance)
    try:
        yield
    finally:
        policy.guidance_scale = before


def warn_of_mismatch(logp_dist: str, guidance: float) -> None:
    """Warn where scores leave out the guidance that samples are drawn with: they then belong to
    another distribution."""
    if logp_dist == "conditional" and guidance != 1:
        warnings.warn(
            f"logprob_guidance conditional: samples are drawn with guidance {guidance:g} and "
            f"scored without it, so the "
            "gradient is not that of the sampled distribution; guided matches",
            stacklevel=3,
        )
