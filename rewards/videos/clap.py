"""Scores how well a video's sound matches its prompt, by CLAP (Wu et al. 2023,
arXiv:2211.06687)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as nnf
from annotated_types import Ge
from torch import Tensor

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.hf import Precision, load_model, load_processor
from rewards.base.media import frames
from rewards.base.precision import own_precision
from rewards.base.prompt import texts_of
from rewards.base.truncation import of_transformers
from rewards.card import card, card_with
from rewards.videos.sound import resampled, waves_of

LONGEST = 77  # tokens of a text, as CLAP was trained


@card(
    media="video",
    needs="text",
    named={"field": "text"},
    low=-1,
    high=1,
    sound=True,
    source="laion/clap-htsat-unfused or any CLAP of transformers",
    licence="Apache-2.0 (LAION's)",
    scaling="cosine, times `scale`",
)
@REWARDS.register("clap")
class Clap:
    """Score the sound of a video by the cosine of its CLAP embedding and the prompt's.

    Channels are averaged, and resampled to the model's rate. Sounds longer than the model's input
    (10 s) are split into pieces that cover them, whose cosines are averaged; transformers'
    extractor would crop at random. Shorter ones are repeated, as published.

    Args:
        model: a CLAP of transformers, hub id or folder, with its tokenizer and feature extractor.
        field: the field of a prompt that describes the sound.
        scale: a factor on the cosine.
        batch_size: pieces of sound in one forward pass.
        device: ``auto`` is CUDA if there is one.
        dtype: of the model.

    Raises:
        UserError: the videos have no sound.
    """

    def __init__(
        self,
        model: str = "laion/clap-htsat-unfused",
        field: str = "text",
        scale: float = 1.0,
        batch_size: Annotated[int, Ge(1)] = 16,
        device: str = "auto",
        dtype: Precision = "float32",
    ):
        self.network = load_model("ClapModel", model, device, dtype)
        self.tokenizer = load_processor("AutoTokenizer", model)
        self.beginning = of_transformers("clap", self.tokenizer, LONGEST)
        self.extractor: Any = load_processor("AutoFeatureExtractor", model)
        self.field = field
        self.scale = scale
        self.batch_size = batch_size
        self.card = card_with(type(self), {"field": field})

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] with their sound -> [B] float32 on the CPU; NaN for a sound
        with a number that is not finite."""
        frames(media, "clap")
        waves, rate, broken = waves_of(media, "clap")
        heard = self.pieces(waves, rate)  # [B, pieces, samples]
        with own_precision(self.network.device.type):
            texts = self.embed_texts(texts_of(prompts, "clap", self.field))
            count = heard.shape[1]
            sounds = torch.cat(
                [self.embed_sounds(part) for part in heard.flatten(0, 1).split(self.batch_size)]
            )
        cosines = (sounds.unflatten(0, (-1, count)) * texts[:, None]).sum(-1).mean(1)
        scores: Tensor = self.scale * cosines
        return scores.cpu().masked_fill(broken, torch.nan)

    def pieces(self, waves: Tensor, rate: int) -> Tensor:
        """Resample waves [B, samples] to the model's rate, and split what is too long into equally
        long pieces with minimal overlap: [B, pieces, samples]."""
        waves = resampled(waves, rate, int(self.extractor.sampling_rate))
        length = waves.shape[1]
        most = int(self.extractor.nb_max_samples)
        count = -(-length // most)
        starts = np.linspace(0, max(length - most, 0), count).round().astype(int)
        return torch.stack([waves[:, start : start + most] for start in starts], 1)

    def embed_sounds(self, waves: Tensor) -> Tensor:
        """Embed waves [N, samples] -> [N, E] unit vectors."""
        state = np.random.get_state()  # the extractor draws random numbers, even if it need not
        features = self.extractor(
            list(waves.numpy()), sampling_rate=self.extractor.sampling_rate, return_tensors="pt"
        )
        np.random.set_state(state)
        mels = features["input_features"].to(self.network.device, self.network.dtype)
        # it marks one of a batch as long at random if none is
        longer = torch.zeros(len(mels), 1, dtype=torch.bool, device=mels.device)
        known = self.network.get_audio_features(input_features=mels, is_longer=longer)
        return nnf.normalize(known.pooler_output.float(), dim=-1)

    def embed_texts(self, texts: list[str]) -> Tensor:
        """Embed N texts -> [N, E] unit vectors; texts are truncated to 77 tokens."""
        self.beginning.look(texts)
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        known = self.network.get_text_features(**tokens.to(self.network.device))
        return nnf.normalize(known.pooler_output.float(), dim=-1)
