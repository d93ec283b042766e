"""Adapts Kandinsky 2.2, whose prior maps a prompt to an embedding and whose decoder maps that to an
image, to the common interface: a call that takes prompts.

The decoder is trained. The prior is frozen, and samples one embedding per row, with a random stream
keyed by prompt and row, so it acts as an encoder that does not depend on the batch.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from mmrl.policies.diffusion.library_objects import override

COMBINED = ("KandinskyV22CombinedPipeline",)
DECODERS = ("KandinskyV22Pipeline",)  # only the second stages
REMEMBERED = 1 << 14  # rows of prompts
EMBEDDINGS = ("image_embeds", "negative_image_embeds")  # the decoder's inputs from the prior
# arguments of the combined pipeline for the prior; its guidance default is diffusers'
SETTINGS = {"prior_guidance_scale": 4.0, "prior_num_inference_steps": 25}
ROWS = "row_names"  # call argument that names its rows
TEXTS = ("prompt", "negative_prompt")


class Prior:
    """Samples the embedding of a prompt, once."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.pipe.set_progress_bar_config(disable=True)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False).eval()
        self.embedding = lru_cache(REMEMBERED)(self._embedding)

    def embeddings(
        self, prompts: list[tuple[str, str | None, int]], scale: float, steps: int, place: Any
    ) -> list[Tensor]:
        """Return the embeddings [B, D] of prompts and of negative prompts, for (prompt, negative
        prompt, row) each."""
        rows = [self.embedding(*of_row, scale, steps, place) for of_row in prompts]
        if self.pipe.device.type != "cpu":
            self.pipe.to("cpu")
        return [torch.cat(column) for column in zip(*rows, strict=True)]

    @torch.no_grad()
    def _embedding(
        self,
        text: str,
        negative: str | None,
        row: int,
        scale: float,
        steps: int,
        place: torch.device,
    ) -> tuple[Tensor, ...]:
        if self.pipe.device != place:
            self.pipe.to(place)
        embeddings = self.pipe(
            prompt=text,
            negative_prompt=negative,
            guidance_scale=scale,
            num_inference_steps=steps,
            generator=generator_of(text, row),
            return_dict=False,
        )
        return tuple(embedding.to(place) for embedding in embeddings)


def generator_of(text: str, row: int) -> torch.Generator:
    """Make the random generator of a row of a prompt."""
    digest = hashlib.sha256(f"{row} {text}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def is_combined(pipe: Any) -> bool:
    """Tell whether a pipeline combines two supported others."""
    return type(pipe).__name__ in COMBINED


def decoder_with_prior(pipe: Any) -> Any:
    """Return the decoder of a combined pipeline, with a call that takes prompts and runs the
    prior."""
    prior, decoder = Prior(pipe.prior_pipe), pipe.decoder_pipe
    plain = inspect.unwrap(type(decoder).__call__)  # without the decorator that stops gradients

    def call(decoder: Any, **arguments: Any) -> Any:
        texts = [_listed(arguments.pop(name, None)) for name in TEXTS]
        scale, steps = (arguments.pop(name, value) for name, value in SETTINGS.items())
        place = decoder._execution_device
        negatives = texts[1] or [None] * len(texts[0])
        rows = arguments.pop(ROWS, None) or [0] * len(texts[0])
        prompts = list(zip(texts[0], negatives, rows, strict=True))
        embeddings = prior.embeddings(prompts, scale, steps, place)
        dtype = decoder.unet.dtype
        arguments |= {n: e.to(dtype) for n, e in zip(EMBEDDINGS, embeddings, strict=True)}
        image, *_ = plain(decoder, **arguments)
        # the decoder scales images to 0..1 for PIL and numpy, not for torch
        return (image / 2 + 0.5 if arguments.get("output_type") == "pt" else image,)

    call.__signature__ = _signature(plain)  # type: ignore[attr-defined]
    override(decoder, type(pipe).__name__, __call__=call, **{ROWS: True})
    return decoder


def _listed(texts: str | list[str] | None) -> list[Any]:
    return [texts] if isinstance(texts, str) else list(texts or [])


def _signature(plain: Any) -> inspect.Signature:
    only = Parameter.KEYWORD_ONLY
    taken = inspect.signature(plain).parameters.values()
    passed = [p for p in taken if p.name not in EMBEDDINGS and p.kind is not Parameter.VAR_KEYWORD]
    first = [Parameter(name, only, default=None) for name in TEXTS]
    last = [Parameter(name, only, default=value) for name, value in SETTINGS.items()]
    head, rest = passed[0], [p.replace(kind=only) for p in passed[1:]]
    return inspect.Signature([head, *first, *rest, *last])
