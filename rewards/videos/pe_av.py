"""Scores the match of a video's sound and pictures, by PE-AV (Vyas et al. 2025, "Pushing the
Frontier of Audiovisual Perception with Large-Scale Multimodal Correspondence Learning")."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.hf import Precision, load_model, load_processor
from rewards.base.media import frames, to_uint8
from rewards.base.precision import own_precision
from rewards.base.prompt import texts_of
from rewards.base.truncation import Beginning, of_transformers
from rewards.card import card, card_of
from rewards.videos.sound import resampled, waves_of

Pair = Literal["audio_video", "audio_text", "video_text", "audio_video_text"]
# of transformers' output: the two embeddings that are compared
EMBEDDINGS: dict[Pair, tuple[str, str]] = {
    "audio_video": ("audio_embeds", "video_embeds"),
    "audio_text": ("audio_embeds", "text_audio_embeds"),
    "video_text": ("video_embeds", "text_video_embeds"),
    "audio_video_text": ("audio_video_embeds", "text_audio_video_embeds"),
}
LONGEST = 512  # tokens of a text that are read
log = logging.getLogger(__name__)


@card(
    media="video",
    low=-1,
    high=1,
    sound=True,
    source="facebook/pe-av-large or any PE-AV of transformers",
    licence="Apache-2.0 (Meta's)",
    scaling="cosine, times `scale`",
)
@REWARDS.register("pe_av")
class PeAv:
    """Score a video with its sound by the cosine of two PE-AV embeddings.

    Both are embedded in one pass, as transformers' PeAudioVideoModel does: frames by the model's
    video processor, which may leave some out (``num_frames`` or ``fps`` of its configuration), and
    the sound, channels averaged, at the model's rate, as a whole. The model compares them by the
    product without norms, scaled and shifted, for a sigmoid; the cosine is bounded.

    Args:
        model: a PE-AV of transformers, hub id or folder, with its tokenizer, feature extractor and
            video processor.
        pair: what is compared: the sound with the pictures, either of them with the text, or both
            with the text.
        field: the field of a prompt that a pair with text reads.
        scale: a factor on the cosine.
        batch_size: videos in one forward pass.
        device: ``auto`` is CUDA if there is one.
        dtype: of the model.

    Raises:
        UserError: the videos have no sound.
    """

    def __init__(
        self,
        model: str = "facebook/pe-av-large",
        pair: Pair = "audio_video",
        field: str = "text",
        scale: float = 1.0,
        batch_size: Annotated[int, Ge(1)] = 4,
        device: str = "auto",
        dtype: Precision = "float32",
    ):
        if pair not in EMBEDDINGS:
            raise UserError(f"pe_av: unknown pair {pair!r}; known: {', '.join(EMBEDDINGS)}")
        self.network = load_model("PeAudioVideoModel", model, device, dtype)
        self.extractor: Any = load_processor("AutoFeatureExtractor", model)
        self.videos: Any = load_processor("AutoVideoProcessor", model)
        self.pair: Pair = pair
        self.reads_text = "text" in pair
        self.tokenizer: Any = None
        self.beginning: Beginning | None = None
        if self.reads_text:
            self.tokenizer = load_processor("AutoTokenizer", model)
            self.beginning = of_transformers("pe_av", self.tokenizer, LONGEST)
        self.names_frames = "video" in pair  # once, if frames are left out
        self.field = field
        self.scale = scale
        self.batch_size = batch_size
        self.card = replace(card_of(type(self)), needs=(field,) if self.reads_text else ())

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] with their sound -> [B] float32 on the CPU; NaN for a sound
        or a picture with a number that is not finite."""
        frames(media, "pe_av")
        waves, rate, broken = waves_of(media, "pe_av")
        pictures = media.detach()
        broken |= ~pictures.flatten(1).isfinite().all(1).cpu()
        fps = media.shape[1] / (waves.shape[1] / rate)
        waves = resampled(waves, rate, int(self.extractor.sampling_rate))
        texts = texts_of(prompts, "pe_av", self.field) if self.reads_text else []
        if self.beginning is not None:
            self.beginning.look(texts)
        with own_precision(self.network.device.type):
            cosines = torch.cat(
                [
                    self.cosines(
                        pictures[first : first + self.batch_size].nan_to_num(0.0),
                        fps,
                        waves[first : first + self.batch_size],
                        texts[first : first + self.batch_size],
                    )
                    for first in range(0, len(media), self.batch_size)
                ]
            )
        return (self.scale * cosines).masked_fill(broken, torch.nan)

    def cosines(self, pictures: Tensor, fps: float, waves: Tensor, texts: list[str]) -> Tensor:
        """Compare videos [N, F, 3, H, W] in 0..1 at a frame rate, waves [N, samples] at the model's
        rate and N texts, or none -> [N] float32 on the CPU."""
        known = self.network(**self.inputs(pictures, fps, waves, texts))
        left, right = (known[name].float() for name in EMBEDDINGS[self.pair])
        return torch.cosine_similarity(left, right, dim=-1).cpu()

    def inputs(
        self, pictures: Tensor, fps: float, waves: Tensor, texts: list[str]
    ) -> dict[str, Tensor]:
        """Prepare the model's inputs by its processors."""
        count = pictures.shape[1]
        metadata = {"fps": fps, "total_num_frames": count, "duration": count / fps}
        pixels = self.videos(
            list(to_uint8(pictures)),
            video_metadata=[dict(metadata) for _ in pictures],
            return_tensors="pt",
        )
        sampled = pixels["pixel_values_videos"].shape[1]
        if self.names_frames and sampled < count:
            self.names_frames = False
            log.warning(
                "pe_av sees %d of the %d frames of a clip, as its video processor chooses them "
                "(num_frames or fps of its configuration); the others do not count for the reward",
                sampled,
                count,
            )
        samples = self.extractor(
            list(waves.float().numpy()),
            sampling_rate=self.extractor.sampling_rate,
            return_tensors="pt",
        )
        inputs = {"pixel_values_videos": pixels["pixel_values_videos"], **samples}
        if texts:
            inputs |= self.tokenizer(
                texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            )
            inputs.pop("token_type_ids", None)
        device, dtype = self.network.device, self.network.dtype
        return {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in inputs.items()
        }
