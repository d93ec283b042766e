"""Is the picture like a given one: cosine of DINO's or CLIP's image embeddings, and CLIP's
direction of an edit."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as nnf
from annotated_types import Ge
from torch import Tensor

from mmrl.core.registry import REWARDS
from rewards._clip import load_clip
from rewards._frames import each_frame
from rewards._hf import Eyes, Precision, Preprocess, load_model
from rewards._prompt import picture_of, texts_of
from rewards.card import card

STILL = 1e-3  # a difference of unit embeddings below this is rounding, not an edit


@card(
    media="image video",
    needs="reference",
    low=-1,
    high=1,
    source="facebook/dinov2-base or any vision model of transformers",
    licence="Apache-2.0 (DINOv2)",
)
@REWARDS.register("dino_similarity")
class DinoSimilarity:
    """Cosine between the embeddings of the picture and of the prompt's reference picture by DINO
    (v1, v2, v3).

    DreamBooth's DINO score (arXiv:2208.12242, section 4.2) with ``facebook/dino-vits16``; of a
    video, the mean over its frames.

    Args: model: a vision model of transformers, hub id or folder. field: the field of a prompt that
        holds the reference: a file, a PIL image or a tensor [3, H, W]. pool: ``cls`` is the first
        token of the last layer, ``mean`` the mean over the others. preprocess: ``tensor`` resizes
        the floats, ``pil`` rounds to 8 bits and resizes with PIL. batch_size: pictures in one
        forward pass. device: ``auto`` is CUDA if there is one. dtype: of the model.
    """

    def __init__(
        self,
        model: str = "facebook/dinov2-base",
        field: str = "reference",
        pool: Literal["cls", "mean"] = "cls",
        preprocess: Preprocess = "tensor",
        batch_size: Annotated[int, Ge(1)] = 32,
        device: str = "auto",
        dtype: Precision = "float32",
    ):
        self.network = load_model("AutoModel", model, device, dtype)
        self.eyes = Eyes(model, preprocess)
        self.field = field
        self.pool = pool
        self.batch_size = batch_size
        self.card = replace(type(self).card, needs=(field,))

    def __call__(self, media: Tensor, prompts: list[dict]) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        return to_references(
            media, prompts, self.field, "dino_similarity", self.batch_size, self.embed
        )

    def embed(self, pictures: Tensor) -> Tensor:
        """[N, 3, H, W] in 0..1 -> [N, E] unit vectors."""
        pixels = self.eyes(pictures, self.network.device).to(self.network.dtype)
        hidden = self.network(pixels).last_hidden_state.float()  # [N, T, E]
        return nnf.normalize(hidden[:, 0] if self.pool == "cls" else hidden[:, 1:].mean(1), dim=-1)


@card(
    media="image video",
    needs="reference",
    low=-1,
    high=1,
    source="any open_clip model",
    licence="MIT (OpenAI's)",
)
@REWARDS.register("clip_similarity")
class ClipSimilarity:
    """Compare CLIP's embeddings of the picture and of the prompt's reference picture by cosine.

    Flow-GRPO calls it image_similarity. Of a video, the mean over its frames.

    Args: model: an open_clip name, ``hf-hub:org/repo`` or a local folder. pretrained: open_clip's
        tag for the weights; not used for folders and hub ids. field: the field of a prompt that
        holds the reference: a file, a PIL image or a tensor [3, H, W]. preprocess: ``tensor`` or
        ``pil``, see ``ClipScore``. batch_size: pictures in one forward pass. device: ``auto`` is
        CUDA if there is one.
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        field: str = "reference",
        preprocess: Preprocess = "tensor",
        batch_size: Annotated[int, Ge(1)] = 64,
        device: str = "auto",
    ):
        self.clip = load_clip(model, pretrained, device)
        self.field = field
        self.exact = preprocess == "pil"
        self.batch_size = batch_size
        self.card = replace(type(self).card, needs=(field,))

    def __call__(self, media: Tensor, prompts: list[dict]) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32 on the CPU."""

        def embed(pictures: Tensor) -> Tensor:
            return self.clip.embed_images(pictures, self.batch_size, self.exact)

        return to_references(media, prompts, self.field, "clip_similarity", self.batch_size, embed)


@card(
    media="image video",
    needs="source source_text text",
    low=-1,
    high=1,
    source="any open_clip model; StyleGAN-NADA, arXiv:2108.00946, equation 3",
    licence="MIT (OpenAI's)",
)
@REWARDS.register("directional_clip")
class DirectionalClip:
    """Did the edit go where the words went: cosine of picture - source and text - source text in
    CLIP space.

    Gal et al. 2021 (arXiv:2108.00946), equation 3; also InstructPix2Pix's measure. Differences are
    of unit embeddings. 0 where the picture or the text did not change at all. Of a video, the mean
    over its frames.

    Args:
        model: an open_clip name, ``hf-hub:org/repo`` or a local folder.
        pretrained: open_clip's tag for the weights; not used for folders and hub ids.
        source: field of the picture before the edit.
        source_text: field of the text that describes it.
        target_text: field of the text that describes the wanted picture.
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``.
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        source: str = "source",
        source_text: str = "source_text",
        target_text: str = "text",
        preprocess: Preprocess = "tensor",
        batch_size: Annotated[int, Ge(1)] = 64,
        device: str = "auto",
    ):
        self.clip = load_clip(model, pretrained, device)
        self.source = source
        self.texts = (source_text, target_text)
        self.exact = preprocess == "pil"
        self.batch_size = batch_size
        self.card = replace(type(self).card, needs=(source, source_text, target_text))

    def __call__(self, media: Tensor, prompts: list[dict]) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        before, after = (
            self.clip.embed_texts(texts_of(prompts, "directional_clip", field), self.batch_size)
            for field in self.texts
        )
        sources = embed_each(
            [picture_of(p, self.source, "directional_clip") for p in prompts], self.embed
        )

        def score(pictures: Tensor, rows: list[int]) -> Tensor:
            return torch.cosine_similarity(
                self.embed(pictures) - sources[rows], (after - before)[rows], -1, STILL
            )

        return each_frame(media, "directional_clip", self.batch_size, score)

    def embed(self, pictures: Tensor) -> Tensor:
        return self.clip.embed_images(pictures, self.batch_size, self.exact)


def to_references(
    media: Tensor, prompts: list[dict], field: str, reward: str, batch_size: int, embed
) -> Tensor:
    """[B] mean cosine between a sample's frames and its prompt's reference; references of any size,
    each seen once."""
    references = embed_each([picture_of(prompt, field, reward) for prompt in prompts], embed)

    def score(pictures: Tensor, rows: list[int]) -> Tensor:
        return (embed(pictures) * references[rows]).sum(-1)

    return each_frame(media, reward, batch_size, score)


@torch.no_grad()
def embed_each(pictures: list[Tensor], embed) -> Tensor:
    """Pictures [3, H, W] of different sizes -> [B, E]; equal ones (a group has one reference) are
    embedded once."""
    keys = [(tuple(p.shape), p.numpy(force=True).tobytes()) for p in pictures]
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    embeddings = {key: embed(pictures[place][None]) for key, place in first.items()}
    return torch.cat([embeddings[key] for key in keys])
