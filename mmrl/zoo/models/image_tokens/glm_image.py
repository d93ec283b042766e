"""Trains GLM-Image's token prior: a GLM that draws a small image and then the large one as tokens,
for a diffusion decoder.

The autoregressive part is trained, by transformers' own class; diffusers' pipeline makes pixels of
its tokens, with noise keyed by the row, which counts as part of the reward. Positions have three
axes: a text token stands at (p, p, p), the token at row i and column j of an image that begins at q
stands at (q, q + i, q + j).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.core.model_folders import folder_of
from mmrl.core.numbers import Count
from mmrl.core.registry import POLICIES, locate
from mmrl.core.types import Media, Prompt, Rollout
from mmrl.core.whole_export import restore_types
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.policies.image_tokens import causal
from mmrl.policies.image_tokens.attention import Kernel, available, of_transformers
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.image_tokens.policy import ImageTokenPolicy
from mmrl.policies.lora import Lora, ending_like, inject, save_model
from samplers.batching import chunks
from samplers.noise import Rng

Storage = Literal["float32", "bfloat16", "float16"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NOISE = 16  # step of the keyed noise that the decoder begins with


class GlmNet(causal.CausalImageNet):
    """Wraps a GlmImageForConditionalGeneration that writes images of these ``grids`` (H, W), one
    after the other."""

    offsets: Tensor  # [3, T] where every token stands, from the text's end on

    def __init__(self, hf: Any, grids: Sequence[tuple[int, int]]):
        super().__init__(hf)
        self.vocab = hf.config.vq_config.num_embeddings
        self.hidden = hf.config.text_config.hidden_size
        offsets = []
        start = 0
        for height, width in grids:
            row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            offsets.append(start + torch.stack([torch.zeros_like(row), row, column]).flatten(1))
            start += max(height, width)
        self.register_buffer("offsets", torch.cat(offsets, 1), persistent=False)
        self.turns = (1,) * self.offsets.shape[1]

    @property
    def decoder(self) -> Any:
        return self.hf.model.language_model

    def step(self, ids: Tensor, state: causal.State) -> Tensor:
        places = self.offsets[:, None, state.count : state.count + 1] + state.place[:, None]
        state.count += 1
        return causal.advance(self.decoder, ids, state, places)

    moves = False

    def extend(self, ids: Tensor, state: causal.State) -> Tensor:
        state.count = ids.shape[1] - 1
        places = self.offsets[:, None, : state.count] + state.place[:, None]
        return causal.advance(self.decoder, ids[:, :-1], state, places, every=True)

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        tokens = torch.cat([inputs["ids"], ids[:, :-1]], 1)
        mask = F.pad(inputs["mask"], (0, ids.shape[1] - 1), value=1)
        text = causal.positions(inputs["mask"])
        image = self.offsets[:, None, :-1] + text[:, -1:] + 1
        places = torch.cat([text.expand(3, -1, -1), image], 2)
        hidden: Tensor = self.decoder(
            input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False
        ).last_hidden_state
        return hidden[:, inputs["ids"].shape[1] - 1 :]

    def vocabulary(self, hidden: Tensor) -> Tensor:
        """Compute the logits of image tokens alone: the head also has tokens for the beginnings and
        ends of images."""
        return F.linear(hidden, self.hf.lm_head.weight[: self.vocab])

    def add_adapter(self, config: Any) -> None:
        inject(self.hf, config)


@POLICIES.register("glm_image")
class GlmImage(ImageTokenPolicy):
    """Trains GLM-Image's token prior, text to image, from a folder or hub id of a
    GlmImagePipeline."""

    attention = PROJECTIONS
    # its tokens come from an encoder that the published folder does not have
    not_options = ("net", "guidance_scale", "logprob_guidance", "compile")
    net: GlmNet

    def __init__(
        self,
        path: str,
        size: Count | tuple[Count, Count] = 1024,
        steps: Count = 50,
        decoder_guidance: Annotated[float, Ge(1)] = 1.5,
        dtype: Storage = "float32",
        attention: Kernel = "auto",
        lora: Lora | int | None = None,
        **options: Any,
    ):
        """Load the model. path: folder or hub id. size: pixels, one side or [height, width],
        multiples of 32. steps, decoder_guidance: of the diffusion decoder, which is not trained.
        dtype: of the weights. attention: the kernel. lora: adapters in the language model."""
        self.place = locate(path)
        height, width = (size, size) if isinstance(size, int) else size
        if height % 32 or width % 32:
            raise UserError(
                f"policy.glm_image.size {size}: height and width must be multiples of 32"
            )
        self.size = (height, width)
        self.steps = steps
        self.decoder_guidance = decoder_guidance
        kind = torch_dtype(dtype)
        hf, self.processor, self.renderer = _loaded(
            self.place, kind, of_transformers(available(attention))
        )
        self.pad = self.processor.tokenizer.pad_token_id
        # the large one first
        grids = [tuple(grid[1:]) for grid in self._encoded("x")["image_grid_thw"].tolist()]
        self.large = grids[0]
        if lora is not None:
            lora = Lora(lora) if isinstance(lora, int) else lora
            lora = Lora(lora.rank, lora.alpha, _targets(hf, lora.targets or PROJECTIONS))
        super().__init__(
            GlmNet(hf, grids[::-1]), guidance_scale=1.0, attention=attention, lora=lora, **options
        )
        if lora is None:
            hf.model.visual.requires_grad_(False)
            hf.model.vqmodel.requires_grad_(False)

    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        return [
            {"ids": self._encoded(text)["input_ids"].to(self.device)} for text in texts_of(prompts)
        ]

    def collate(self, cond: list[Inputs]) -> Inputs:
        return causal.padded(cond, self.pad)

    def empty(self, inputs: Inputs) -> Inputs:
        raise UserError("glm_image draws its tokens without guidance: leave it at 1")

    def pixels(self, ids: Tensor) -> Tensor:
        raise self._cannot("decodes tokens together with their prompt only")

    @torch.no_grad()
    def decode(self, rollout: Rollout) -> Media:
        """Decode the large images' tokens, each repeated four times as the diffusion decoder takes
        them; its noise is keyed by row."""
        height, width = self.large
        ids = rollout.sample[:, -height * width :].view(-1, height, width)
        ids = ids.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
        pipeline = self.renderer.to(self.device)
        texts = texts_of(rollout.prompt_per_row())
        images_by_part = []
        shape = (
            pipeline.transformer.config.in_channels,
            *(side // pipeline.vae_scale_factor for side in self.size),
        )
        noise = Rng.of("glm_image").normal(rollout.row_id, shape, NOISE, pipeline.transformer.dtype)
        for part in chunks(len(ids), self.pass_sizes.rows or len(ids)):
            with torch.autocast(ids.device.type, enabled=False):
                images = pipeline(
                    prompt=texts[part],
                    height=self.size[0],
                    width=self.size[1],
                    prior_token_ids=ids[part],
                    latents=noise[part],
                    num_inference_steps=self.steps,
                    guidance_scale=self.decoder_guidance,
                    output_type="pt",
                ).images
            images_by_part.append(images.float().clamp(0, 1))
        return torch.cat(images_by_part)

    def export(self, folder: Path) -> None:
        """Save the language model, or its adapter, as the folder's ``vision_language_encoder``,
        with the processor."""
        part = "vision_language_encoder"
        save_model(self.net.hf, folder / part)
        if (base := folder_of(self.place, part)) is not None:
            restore_types(folder / part, base)
        self.processor.save_pretrained(folder / "processor")

    def _encoded(self, text: str) -> Any:
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        return self.processor.apply_chat_template(
            [turn],
            tokenize=True,
            target_h=self.size[0],
            target_w=self.size[1],
            return_dict=True,
            return_tensors="pt",
        )


def _targets(hf: nn.Module, ends: Sequence[str]) -> list[str]:
    """Name the language model's linear layers that end like one of ``ends``."""
    linear = [
        n
        for n, m in hf.named_modules()
        if isinstance(m, nn.Linear) and ".language_model." in f".{n}"
    ]
    return ending_like(linear, ends, "language model")


def _loaded(place: str, dtype: torch.dtype, attention: str) -> tuple[Any, Any, Any]:
    from diffusers import GlmImagePipeline
    from transformers import AutoProcessor, GlmImageForConditionalGeneration

    hf = pretrained.load_model(
        GlmImageForConditionalGeneration,
        place,
        subfolder="vision_language_encoder",
        dtype=dtype,
        attn_implementation=attention,
    )
    processor = pretrained.load_processor(AutoProcessor, place, subfolder="processor")
    absent = {"vision_language_encoder": None, "processor": None}
    pipeline = pretrained.load_pipeline(GlmImagePipeline, place, dtype, absent)
    pipeline.set_progress_bar_config(disable=True)
    return hf, processor, pipeline
