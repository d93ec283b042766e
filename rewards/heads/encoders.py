"""Computes the frozen embeddings [B, E] of samples on which heads are fitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt
from rewards.base.clip import load_named
from rewards.base.hf import POOLER, Eyes, load_model, load_processor
from rewards.base.media import frames
from rewards.base.precision import own_precision
from rewards.base.prompt import texts_of
from rewards.card import Medium

Kind = Literal["clip", "vision", "text"]
Features = Literal["media", "media_and_text"]
Pool = Literal["mean", "last"]
NAME = "fitted_head"  # for messages


class Encoder(ABC):
    """Embeds samples by one frozen model."""

    media: tuple[Medium, ...] = ("image", "video")
    reads_prompt = False

    @abstractmethod
    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Embed B samples -> [B, E] float32, on the model's device."""


class ClipEncoder(Encoder):
    """Embeds images and videos by open_clip, a video by the mean of its frames; differentiable.
    ``media_and_text`` joins image x, prompt y and x * y."""

    def __init__(self, model: str, features: Features, batch_size: int, device: str):
        self.clip = load_named(model, device)
        self.reads_prompt = features == "media_and_text"
        self.batch_size = batch_size

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        stack = frames(cast(Tensor, media), NAME)
        flat = self.clip.embed_images(stack.flatten(0, 1), self.batch_size)
        images: Tensor = flat.unflatten(0, stack.shape[:2]).mean(1)
        if not self.reads_prompt:
            return images
        words = self.clip.embed_texts(texts_of(prompts, NAME), self.batch_size)
        return torch.cat([images, words, images * words], 1)


class VisionEncoder(Encoder):
    """Embeds images and videos by a vision model of transformers: its pooled output if it has one,
    as CLIP and SigLIP do, else the first token, as for DINO. Differentiable."""

    def __init__(self, model: str, batch_size: int, device: str):
        network = load_model("AutoModel", model, device)
        self.network: Any = getattr(network, "vision_model", network)
        self.eyes = Eyes(model)
        self.batch_size = batch_size

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        stack = frames(cast(Tensor, media), NAME)
        rows = [self.pictures(part) for part in stack.flatten(0, 1).split(self.batch_size)]
        embeddings: Tensor = torch.cat(rows).unflatten(0, stack.shape[:2]).mean(1)
        return embeddings

    def pictures(self, part: Tensor) -> Tensor:
        """Embed [N, 3, H, W] in 0..1 -> [N, E]; NaN for a picture that is not finite."""
        parameter = next(self.network.parameters())
        with own_precision(parameter.device.type):
            broken = ~part.isfinite().flatten(1).all(1).to(parameter.device)
            pixels = self.eyes(part.float().nan_to_num(0.0, 0.0, 0.0), parameter.device)
            output = self.network(pixel_values=pixels.to(parameter.dtype))
            pooled = getattr(output, "pooler_output", None)
            values: Tensor = output.last_hidden_state[:, 0] if pooled is None else pooled
            values = nnf.normalize(values.float(), dim=-1)
            return values.masked_fill(broken[:, None], torch.nan)


class TextEncoder(Encoder):
    """Embeds answers, each with its prompt, by a text model of transformers: its last hidden states
    are averaged (``mean``), or the last token's is taken (``last``)."""

    media = ("text",)
    reads_prompt = True

    def __init__(self, model: str, pool: Pool, device: str):
        self.network = load_model("AutoModel", model, device, unread=POOLER)
        self.tokenizer = load_processor("AutoTokenizer", model)
        self.pool = pool

    @torch.no_grad()
    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        if isinstance(media, Tensor):
            raise UserError(
                f"reward {NAME!r}: a text model embeds answers; images and videos need a head on "
                f"features of clip or vision"
            )
        device = next(self.network.parameters()).device
        rows = []
        with own_precision(device.type):
            for answer, prompt in zip(media, prompts, strict=True):  # unpadded: batches are alike
                text = "\n".join([str(prompt.get("text", "")), str(answer)])
                inputs = self.tokenizer(text, return_tensors="pt", truncation=True).to(device)
                hidden = self.network(**inputs).last_hidden_state[0].float()  # [T, E]
                rows.append(hidden.mean(0) if self.pool == "mean" else hidden[-1])
        embeddings = torch.stack(rows) if rows else torch.zeros(0, 1)
        return nnf.normalize(embeddings, dim=-1)


def load_encoder(
    kind: Kind,
    model: str,
    features: Features = "media",
    pool: Pool = "mean",
    batch_size: int = 64,
    device: str = "auto",
) -> Encoder:
    """Load an encoder. Raises UserError for a model that cannot be loaded, or ``media_and_text``
    without CLIP."""
    if features == "media_and_text" and kind != "clip":
        raise UserError("features: media_and_text joins a picture and its text: it needs clip")
    if kind == "clip":
        return ClipEncoder(model, features, batch_size, device)
    if kind == "vision":
        return VisionEncoder(model, batch_size, device)
    return TextEncoder(model, pool, device)
