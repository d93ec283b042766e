"""Compares a picture with a reference by DINO or CLIP embeddings, and an edit by CLIP's
direction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.clip import load_clip
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import POOLER, Eyes, Precision, Preprocess, load_model
from rewards.base.prompt import picture_of, texts_of
from rewards.card import Entry, card, card_with

STILL = 1e-3  # a difference of unit embeddings below this is rounding, not an edit


def beside_reference(**fields: Any) -> Callable[[Entry], Entry]:
    """Decorate a reward with the card of a cosine between picture and reference; ``fields``:
    further arguments of ``card``."""
    return card(
        media="image video",
        needs="reference",
        pictures="reference",
        named={"field": "reference"},
        low=-1,
        high=1,
        **fields,
    )


class ReferenceReward(FrameReward):
    """Compares embeddings of a picture and its prompt's reference picture, of any size, by
    cosine."""

    field: str

    def conditions(self, prompts: list[Prompt]) -> Tensor:
        pictures = [picture_of(prompt, self.field, self.name) for prompt in prompts]
        return embed_each(pictures, self.embed)

    def score(self, pictures: Tensor, references: Tensor) -> Tensor:
        return (self.embed(pictures) * references).sum(-1)

    @abstractmethod
    def embed(self, pictures: Tensor) -> Tensor:
        """Embed [N, 3, H, W] in 0..1 -> [N, E] unit vectors."""


@beside_reference(
    source="facebook/dinov2-base or any vision model of transformers",
    licence="Apache-2.0 (DINOv2)",
)
@REWARDS.register("dino_similarity")
class DinoSimilarity(ReferenceReward):
    """Compare DINO's (v1, v2, v3) embeddings of the picture and of the prompt's reference by
    cosine.

    DreamBooth's DINO score (arXiv:2208.12242, section 4.2) with ``facebook/dino-vits16``; for a
    video, the mean over its frames.

    Args:
        model: a vision model of transformers, hub id or folder.
        field: the field of a prompt that holds the reference: a file, a PIL image or a tensor [3,
            H, W].
        pool: ``cls`` is the first token of the last layer, ``mean`` the mean over the others.
        preprocess: ``tensor`` resizes the floats, ``pil`` rounds to 8 bits and resizes with PIL.
        dtype: of the model.
    """

    name = "dino_similarity"

    def __init__(
        self,
        model: str = "facebook/dinov2-base",
        field: str = "reference",
        pool: Literal["cls", "mean"] = "cls",
        preprocess: Preprocess = "tensor",
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(**options)
        self.network = load_model("AutoModel", model, self.device, dtype, POOLER)
        self.eyes = Eyes(model, preprocess)
        self.field = field
        self.pool = pool
        self.card = card_with(type(self), {"field": field})

    def embed(self, pictures: Tensor) -> Tensor:
        """Embed [N, 3, H, W] in 0..1 -> [N, E] unit vectors."""
        pixels = self.eyes(pictures, self.network.device).to(self.network.dtype)
        hidden = self.network(pixels).last_hidden_state.float()  # [N, T, E]
        return nnf.normalize(hidden[:, 0] if self.pool == "cls" else hidden[:, 1:].mean(1), dim=-1)


@beside_reference(
    source="any open_clip model",
    licence="MIT (OpenAI's)",
)
@REWARDS.register("clip_similarity")
class ClipSimilarity(ReferenceReward):
    """Compare CLIP's embeddings of the picture and of the prompt's reference picture by cosine.

    Flow-GRPO calls it image_similarity. For a video, the mean over its frames.

    Args:
        model: an open_clip name, ``hf-hub:org/repo`` or a local folder.
        pretrained: open_clip's tag for the weights; not used for folders and hub ids.
        field: the field of a prompt that holds the reference: a file, a PIL image or a tensor [3,
            H, W].
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``.
    """

    name = "clip_similarity"

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        field: str = "reference",
        preprocess: Preprocess = "tensor",
        batch_size: BatchSize = 64,
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.clip = load_clip(model, pretrained, self.device)
        self.field = field
        self.exact = preprocess == "pil"
        self.card = card_with(type(self), {"field": field})

    def embed(self, pictures: Tensor) -> Tensor:
        return self.clip.embed_images(pictures, self.batch_size, self.exact)


@card(
    media="image video",
    needs="source source_text text",
    pictures="source",
    named={"source": "source", "source_text": "source_text", "target_text": "text"},
    low=-1,
    high=1,
    source="any open_clip model; StyleGAN-NADA, arXiv:2108.00946, equation 3",
    licence="MIT (OpenAI's)",
)
@REWARDS.register("directional_clip")
class DirectionalClip(FrameReward):
    """Directional CLIP similarity of an edit: cosine of the image and text differences.

    Gal et al. 2021 (arXiv:2108.00946), equation 3; also InstructPix2Pix's measure. Differences are
    of unit embeddings. 0 if the picture or the text did not change. For a video, the mean over its
    frames.

    Args:
        model: an open_clip name, ``hf-hub:org/repo`` or a local folder.
        pretrained: open_clip's tag for the weights; not used for folders and hub ids.
        source: field of the picture before the edit.
        source_text: field of the text that describes it.
        target_text: field of the text that describes the edited picture.
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``.
    """

    name = "directional_clip"

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        source: str = "source",
        source_text: str = "source_text",
        target_text: str = "text",
        preprocess: Preprocess = "tensor",
        batch_size: BatchSize = 64,
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.clip = load_clip(model, pretrained, self.device)
        self.source = source
        self.texts = (source_text, target_text)
        self.exact = preprocess == "pil"
        fields = {"source": source, "source_text": source_text, "target_text": target_text}
        self.card = card_with(type(self), fields)

    def conditions(self, prompts: list[Prompt]) -> Tensor:
        """Return [B, 2, E]: the source picture, and the text's direction."""
        before, after = (
            self.clip.embed_texts(texts_of(prompts, self.name, field), self.batch_size)
            for field in self.texts
        )
        pictures = [picture_of(prompt, self.source, self.name) for prompt in prompts]
        return torch.stack([embed_each(pictures, self.embed), after - before], 1)

    def score(self, pictures: Tensor, conditions: Tensor) -> Tensor:
        source, words = conditions.unbind(1)
        return torch.cosine_similarity(self.embed(pictures) - source, words, -1, STILL)

    def embed(self, pictures: Tensor) -> Tensor:
        return self.clip.embed_images(pictures, self.batch_size, self.exact)


@torch.no_grad()
def embed_each(pictures: list[Tensor], embed: Callable[[Tensor], Tensor]) -> Tensor:
    """Embed pictures [3, H, W] of different sizes -> [B, E]; equal ones (a group shares its
    reference) are embedded once."""
    keys = [(tuple(p.shape), p.numpy(force=True).tobytes()) for p in pictures]
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    embeddings = {key: embed(pictures[place][None]) for key, place in first.items()}
    return torch.cat([embeddings[key] for key in keys])
