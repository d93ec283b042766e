"""Trains aMUSEd (Patil et al. 2024): masked image modelling with a U-ViT over the codes of a
VQ-GAN, and every model in its folder format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmrl.core.errors import UserError
from mmrl.core.host import on_host, sent
from mmrl.core.libraries import torch_dtype
from mmrl.core.registry import POLICIES
from mmrl.core.types import Media, Prompt, Rollout
from mmrl.policies.base import MediaFormat, Precision
from mmrl.policies.contracts import EncodesMedia, Exports
from mmrl.policies.demonstrations import encoded, placed_rows
from mmrl.policies.diffusion import diffusers_folder, prompt_lengths
from mmrl.policies.diffusion.text_encoding import Placement, PromptCache, texts_of
from mmrl.policies.image_tokens.attention import Kernel, available
from mmrl.policies.lora import TWO_ATTENTIONS, adapters_of
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.zoo.models.masked import uvit
from samplers.batching import chunks


@POLICIES.register("amused")
class Amused(MaskedDiffusion, EncodesMedia, Exports):
    """Trains aMUSEd from a folder or hub id of an AmusedPipeline (UVit2DModel, VQModel, CLIP)."""

    capabilities = replace(MaskedDiffusion.capabilities, makes="image")
    attention = TWO_ATTENTIONS
    net: Any  # a UVit2DModel of diffusers

    def __init__(
        self,
        path: str,
        size: int | tuple[int, int] | None = None,
        schedule: Literal["cosine", "linear"] | None = None,
        aesthetic: Annotated[float, Ge(0)] = 6.0,
        dtype: Precision = "float32",
        text_encoder_placement: Placement = "offload",
        text_cache: int = 20000,
        attention: Kernel = "auto",
        **options: Any,
    ):
        """Load a model folder. path: folder, hub id or world:NAME. size: pixels, one side or
        [height, width]; None: the size the model was trained at. schedule: None is the folder's
        own. aesthetic: the aesthetic score of the micro-conditioning. dtype: of the frozen
        weights. text_encoder_placement: where the text encoder goes after use. text_cache: number
        of cached prompts. attention: the kernel; auto is torch's own choice."""
        from diffusers import AmusedScheduler, UVit2DModel, VQModel

        self.place = diffusers_folder.resolve(path, "AmusedPipeline")
        self.compute = torch_dtype(dtype)
        net = diffusers_folder.load_part(UVit2DModel, self.place, "transformer", self.compute)
        uvit.share_texts(net, available(attention))
        self.vae = (
            diffusers_folder.load_part(VQModel, self.place, "vqvae").requires_grad_(False).eval()
        )
        scheduler = diffusers_folder.load_part(AmusedScheduler, self.place, "scheduler").config
        self.grid = self._grid(net.config, size)  # [h, w] tokens
        self.aesthetic = aesthetic
        self.texts = PromptCache(
            self.load_texts, self.encode_texts, text_encoder_placement, text_cache
        )
        length = self.grid[0] * self.grid[1]
        schedule = schedule or scheduler.masking_schedule
        super().__init__(net, length, scheduler.mask_token_id, schedule=schedule, **options)

    def _grid(self, config: Any, size: int | tuple[int, int] | None) -> tuple[int, int]:
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        even = 2 if config.downsample else 1
        size = config.sample_size * factor if size is None else size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        for side in sides:
            if side < factor * even or side % (factor * even):
                raise UserError(f"policy option size {side} is not a multiple of {factor * even}")
        self.micro = (sides[1], sides[0])  # the pipeline's order: width first
        self.media = MediaFormat((sides[0], sides[1]))
        return sides[0] // factor, sides[1] // factor

    def load_texts(self) -> Any:
        from diffusers import AmusedPipeline

        return diffusers_folder.load_without(
            AmusedPipeline, self.place, self.compute, ["transformer", "vqvae"]
        )

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Take all prompts, and say which texts CLIP does not read to their end."""
        lines = prompt_lengths.cut(self.place, texts_of(prompts), None)
        self.says_cuts = self.says_cuts and not lines
        self.report.notes += tuple(line for line in lines if line not in self.report.notes)
        return super().admit(prompts)

    says_cuts = True  # of texts, once

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return penultimate hidden states and the projected pooled state, as AmusedPipeline takes
        them."""
        limit = pipe.tokenizer.model_max_length
        if self.says_cuts:
            by = f"{limit} tokens that CLIP reads"
            lines = list(prompt_lengths.cut_by(pipe.tokenizer, texts, limit, by))
            self.report.warnings += lines
            self.says_cuts = not lines
        ids = pipe.tokenizer(
            texts,
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=limit,
        ).input_ids.to(device)
        encoding = pipe.text_encoder(ids, return_dict=True, output_hidden_states=True)
        return {"text": encoding.hidden_states[-2], "pooled": encoding.text_embeds}

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        cond = self.texts(texts_of(prompts), self.device)
        return cond | {"uncond": self.texts([""], self.device)}

    def prepare(self, prompts: list[Prompt]) -> None:
        if self.texts.placement == "release":
            self.texts(["", *dict.fromkeys(texts_of(prompts))], self.device)

    def logits(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        return self._run(ids, cond["text"], cond["pooled"]).flatten(2).transpose(1, 2)

    def places(
        self, ids: Tensor, cond: Any, rows: Tensor, where: Tensor, scale: float | None
    ) -> Tensor:
        used, index = (
            sent(part, rows.device) for part in on_host(rows).unique(return_inverse=True)
        )
        with uvit.asking(self.net, where, scale):
            return self._run(ids, cond["text"][used], cond["pooled"][rows], index)

    def _run(self, ids: Tensor, text: Tensor, pooled: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return logits [B, V, h, w], of texts of every row or by ``rows`` [B]."""
        micro = sent(torch.tensor([[*self.micro, 0, 0, self.aesthetic]]), ids.device).expand(
            len(ids), -1
        )
        logits: Tensor = self.active()(
            ids.view(-1, *self.grid),
            encoder_hidden_states=self.cast(text),
            pooled_text_emb=self.cast(pooled),
            micro_conds=self.cast(micro),
            cross_attention_kwargs=None if rows is None else {"rows": rows},
        )
        return logits

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert to the type the network computes in."""
        return tensor.to(self.dtype if self.dtype == torch.float64 else self.compute)

    @torch.no_grad()
    def decode(self, rollout: Rollout) -> Media:
        """Decode to images [B, 3, H, W] in 0..1."""
        vae = self.vae.to(self.device)
        parts = chunks(len(rollout), self.pass_sizes.rows or len(rollout))
        return torch.cat([self._pixels(vae, rollout.sample[part]) for part in parts])

    def answer_ids(self, answers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        samples, present = encoded(self, answers)
        blank = torch.full((len(answers), self.length), self.mask_id, device=self.device)
        return placed_rows(samples, present, blank), present

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        """Encode to codes [B, L], row by row."""
        return codes_of(self.vae.to(self.device), media)

    def _pixels(self, vae: Any, ids: Tensor) -> Tensor:
        shape = (len(ids), *self.grid, vae.config.latent_channels)
        images: Tensor = vae.decode(
            ids.view(-1, *self.grid), force_not_quantize=True, shape=shape
        ).sample
        return images.clamp(0, 1)

    def enable_gradient_checkpointing(self) -> None:
        """Checkpoint every transformer layer; UVit2DModel's own checkpointing passes keywords that
        its closure rejects."""
        for layer in self.net.transformer_layers:
            layer.forward = _recomputed(layer.forward)

    def export(self, folder: Path) -> None:
        """Write LoRA weights for ``pipe.transformer.load_lora_adapter(file, prefix=None)``, or the
        whole pipeline."""
        from diffusers import AmusedPipeline

        if adapters_of(self.net):
            self.net.save_lora_adapter(folder)
        else:
            diffusers_folder.save_full(AmusedPipeline, self.place, self.net, folder)


def codes_of(vae: Any, media: Tensor) -> Tensor:
    """Return the codes [B, L] that a VQModel of diffusers gives pictures [B, 3, H, W] in 0..1."""
    latents = vae.encode(media.to(vae.dtype)).latents
    codes: Tensor = vae.quantize(latents)[2][2]
    return codes.view(len(media), -1)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` so that its activations are recomputed in the backward pass."""

    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return run
