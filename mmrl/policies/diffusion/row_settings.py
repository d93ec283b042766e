"""Reads per-row settings of the data, with names and values as in a diffusers pipeline call:
negative prompt, guidance scale, seed, size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Copies, Prompt, per_prompt
from mmrl.policies.vlm.media import where
from samplers.noise import Rng

NEGATIVE = "negative_prompt"
GUIDANCE = "guidance_scale"
TRUE_CFG = "true_cfg_scale"  # of pipelines whose guidance_scale is an input of the network
SEED = "seed"
SIZE = "size"
NONE = -1.0  # the guidance scale of a row without its own


def has(prompts: Sequence[Prompt], name: str) -> bool:
    """Tell whether any prompt has this setting; null is none."""
    return any(prompt.get(name) is not None for prompt in prompts)


def negative_of(prompt: Prompt) -> str:
    """Return the negative prompt of a row; "": it has none. Raises UserError unless it is text."""
    value = prompt.get(NEGATIVE)
    if value is not None and not isinstance(value, str):
        raise _wrong(prompt, NEGATIVE, "a text")
    return value or ""


def size_of(prompt: Prompt) -> tuple[int, int] | None:
    """Return [height, width] of a row, one number for a square; None: it has no size. Raises
    UserError for anything else."""
    value = prompt.get(SIZE)
    if value is None:
        return None
    sides = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(sides) != 2 or not all(_whole(side) and side > 0 for side in sides):
        raise _wrong(prompt, SIZE, "pixels of a side, or [height, width]")
    return int(sides[0]), int(sides[1])


def scale_of(prompt: Prompt, name: str) -> float:
    """Return a guidance scale of a row; ``NONE``: it has none. Raises UserError."""
    value = prompt.get(name)
    if value is None:
        return NONE
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise _wrong(prompt, name, "a number that is not negative")
    return float(value)


def seed_of(prompt: Prompt) -> int | None:
    """Return the seed of a row; None: it has none. Raises UserError."""
    value = prompt.get(SEED)
    if value is None:
        return None
    if not _whole(value) or not 0 <= value < 2**63:
        raise _wrong(prompt, SEED, "a whole number that is not negative")
    return int(value)


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def _wrong(prompt: Prompt, name: str, expected: str) -> UserError:
    return UserError(
        f"{where(prompt)}: its {name} is {str(prompt[name])[:40]!r}, expected {expected}; a column "
        f"that means something else gets another name by the data's option columns, such as "
        f"{{other: {name}}}"
    )


@dataclass(frozen=True)
class Seeded(Rng):
    """Draws the initial noise of rows with a seed as pipelines do with a
    ``torch.Generator("cpu")``: the n-th sample of a prompt has the seed's n-th draw."""

    seeds: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # row -> seed, draw

    @classmethod
    def of_prompts(cls, rng: Rng, prompts: Sequence[Prompt], copies: Copies, shared: bool) -> Rng:
        """Take the seeds of prompts, whose rows ``rng`` names; ``shared``: the samples of a prompt
        share their initial noise, keyed by the prompt."""
        chosen = [seed_of(prompt) for prompt in prompts]
        if all(seed is None for seed in chosen):
            return rng
        sizes = [1] * len(prompts) if shared else per_prompt(copies, len(prompts))
        draws = [(seed, n) for seed, size in zip(chosen, sizes) for n in range(size)]
        first = rng.offset if shared else int(rng.rows(len(prompts), copies)[0])
        seeds = {first + i: (seed, n) for i, (seed, n) in enumerate(draws) if seed is not None}
        return cls(rng.key, rng.offset, rng.first_row, seeds)

    def normal(
        self,
        rows: Tensor,
        shape: tuple[int, ...] = (),
        step: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        drawn = super().normal(rows, shape, step, dtype)
        if step == 0:
            for i, row in enumerate(rows.tolist()):
                if row in self.seeds:
                    drawn[i] = _noise(*self.seeds[row], shape).to(drawn)
        return drawn


def _noise(seed: int, draw: int, shape: tuple[int, ...]) -> Tensor:
    """Return draw number ``draw`` (from 0) of noise [*shape] from a seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draw + 1):
        noise = torch.randn(shape, generator=generator)
    return noise
