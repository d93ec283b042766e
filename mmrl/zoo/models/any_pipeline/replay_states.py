"""Joins the states of a pipeline that steps several latents, such as a video and its sound, so that
a step of both is one decision, and excludes fixed latents, such as a video's first frame.

Pipelines step the sound with a copy of their scheduler. A single state stays as it is; several are
joined into one flat vector a row, in the order of ``PREPARING``. Where a pipeline steps only a part
of the latents that it prepared, the state is that part, as passed to its scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.sound import with_sound
from mmrl.zoo.models.any_pipeline.replay_times import SAME, ByState, odds_ratio, shifted

PREPARING = ("prepare_latents", "prepare_audio_latents")  # methods that make a state each


class Part(NamedTuple):
    """Says which of the latents of a row are stepped."""

    places: Tensor  # long, into the flat prepared latents
    prepared: torch.Size  # shape of those
    shape: torch.Size  # of the part


def numbered(latents: Tensor) -> Tensor:
    """Return latents of this shape [B, *] whose values are their positions in a row, in float32 or
    more, as half precision cannot represent them."""
    dtype = torch.promote_types(latents.dtype, torch.float32)
    places = torch.arange(latents[0].numel(), dtype=dtype, device=latents.device)
    return places.view(1, *latents.shape[1:]).expand_as(latents).clone()


class States:
    """Splits and joins the states that a pipeline prepares; their shapes are learned when it first
    prepares them."""

    def __init__(self, pipe: Any):
        self.pipeline = type(pipe).__name__
        self.methods = tuple(name for name in PREPARING if hasattr(pipe, name))
        self.count = max(1, len(self.methods))
        self.shapes: dict[int, torch.Size] = {}  # number of a state -> shape of a row's
        self.parts: dict[int, Part] = {}  # of states that are stepped in part
        self.ratios: dict[int, float] = {}  # number of a state -> of its odds to the first one's

    def learn(self, number: int, latents: Any) -> None:
        """Remember the shape of the latents [B, *] of a state. UserError where it was another."""
        if (self.count == 1 and not self.parts) or not isinstance(latents, Tensor):
            return
        shape = self.shapes.setdefault(number, latents.shape[1:])
        if shape != latents.shape[1:]:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it prepared latents of shape {tuple(shape)} "
                f"before and prepares {tuple(latents.shape[1:])} now; set num_frames, height and "
                "width in policy option call, so that all prompts have one size"
            )

    def relate(self, number: int, first: Tensor, times: Tensor) -> None:
        """Learn how the times [K + 1] of a state belong to those of the first. UserError where no
        shift makes the ones of the others."""
        if not ((first > 0) & (first < 1)).any() and torch.equal(first, times):
            return  # a single step does not determine it
        ratio = odds_ratio(first, times)
        known = self.ratios.get(number, ratio)
        if ratio is None or known is None or abs(ratio / known - 1) > SAME:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it steps its several latents at different "
                "times that no shift makes of each other"
            )
        self.ratios[number] = known

    def ratio(self, number: int) -> float:
        """Return the ratio of the odds of a state's time to those of the first."""
        return self.ratios.get(number, 1.0)

    def time(self, number: int, time: Tensor) -> Tensor:
        """Return the time [*] of a state where the first is at ``time`` [*]."""
        return shifted(time, self.ratio(number))

    def by_state(self) -> ByState | None:
        """Return what takes steps of states at several times; None where they have one."""
        ratios = [self.ratio(number) for number in range(self.count)]
        if all(ratio == 1 for ratio in ratios):
            return None
        sizes = [math.prod(self.shapes[number]) for number in range(self.count)]
        return ByState(sizes, ratios)

    def find(self, number: int, prepared: torch.Size, sample: Tensor) -> None:
        """Learn which numbers of the latents that were prepared, of this shape of a row's, are
        stepped, from what the pipeline handed to its scheduler where these were ``numbered``."""
        places = sample[0].round().long().flatten()
        known = bool((places >= 0).all()) and bool((places < math.prod(prepared)).all())
        alike = torch.equal(sample, sample[:1].expand_as(sample).to(sample))
        if known and alike and len(places.unique()) == len(places):
            self.parts[number] = Part(places, prepared, sample.shape[1:])
            self.shapes.pop(number, None)  # that of all of it

    def narrow(self, number: int, latents: Tensor) -> Tensor:
        """Take the part that is stepped out of prepared latents [B, *]."""
        part = self.parts.get(number)
        if part is None:
            return latents
        return latents.flatten(1)[:, part.places.to(latents.device)].view(-1, *part.shape)

    def widen(self, number: int, state: Tensor, latents: Tensor) -> Tensor:
        """Put a state [B, *] into prepared latents, in the place of the part that is stepped."""
        part = self.parts.get(number)
        if part is None:
            return state
        whole = latents.to(state.dtype).flatten(1).clone()
        whole[:, part.places.to(whole.device)] = state.flatten(1)
        return whole.view(latents.shape)

    def constants(self, state: Tensor, value: float) -> list[Tensor]:
        """Return what a pipeline shall draw so that all it draws for the latents of these states
        [B, *] is one value: it draws what it prepares, or the part of it that is stepped."""
        shapes = [split.shape[1:] for split in self.split(state)]
        shapes += [part.prepared for part in self.parts.values()]
        return [state.new_full((len(state), *shape), value) for shape in shapes]

    def join(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Join what there is of every state, each [B, *], to one state [B, *]."""
        if self.count == 1:
            return parts[0]
        return torch.cat([parts[number].flatten(1) for number in range(self.count)], 1)

    def weights(self, shares: Sequence[float]) -> Tensor:
        """Return the weight [D] of each number of a joined state, 1 on average, by which the states
        have these shares of a mean over all."""
        counts = [math.prod(self.shapes[number]) for number in range(self.count)]
        parts = [
            torch.full((count,), share * sum(counts) / count, dtype=torch.float64)
            for share, count in zip(shares, counts, strict=True)
        ]
        return torch.cat(parts)

    def split(self, state: Tensor) -> list[Tensor]:
        """Split what ``join`` has joined."""
        if self.count == 1:
            return [state]
        shapes = [self.shapes[number] for number in range(self.count)]
        parts = state.split([math.prod(shape) for shape in shapes], 1)
        # kernels round by strides: as what a pipeline prepares
        return [
            part.contiguous().view(len(part), *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]


def heard(pipe: Any, output: Any) -> Any:
    """Return what a pipeline of videos with sound gave, (videos, sound), as videos that carry their
    sound; whatever else it gave as it is."""
    videos, sound = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not isinstance(videos, Tensor) or not isinstance(sound, Tensor):
        return videos
    config = getattr(getattr(pipe, "vocoder", None), "config", {})
    # MiniMax H3 has no vocoder: the autoencoder of sounds gives waveforms
    rate = config.get("output_sampling_rate") or getattr(pipe, "audio_sampling_rate", None)
    if rate is None or sound.ndim != 3:
        raise UserError(
            f"{type(pipe).__name__} cannot be replayed: it gives a sound of shape "
            f"{tuple(sound.shape)}, and no vocoder that says its output_sampling_rate"
        )
    return with_sound(videos, sound.float(), int(rate))
