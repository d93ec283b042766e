"""Trains ImageGPT (Chen et al. 2020, "Generative pretraining from pixels"): small unconditional
images, pixel by pixel.

Every token is a pixel's colour out of 512. There is no prompt, and so no guidance: only rewards
read the prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.core import pretrained
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, locate
from mmrl.core.types import Prompt
from mmrl.policies.image_tokens import causal
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.image_tokens.policy import ImageTokenPolicy
from mmrl.policies.lora import save_model

Storage = Literal["float32", "bfloat16", "float16"]


class ImageGPTNet(causal.CausalImageNet):
    """Wraps an ImageGPTForCausalImageModeling. Inputs: ``ids`` [P, 1], the token that begins an
    image, and its mask."""

    def __init__(self, hf: Any):
        super().__init__(hf)
        self.turns = (1,) * hf.config.n_positions
        self.vocab = hf.config.vocab_size - 1
        self.hidden = hf.config.n_embd

    @property
    def decoder(self) -> Any:
        return self.hf.transformer

    @property
    def layers(self) -> int:
        layers: int = self.config.n_layer
        return layers

    def step(self, ids: Tensor, state: causal.State) -> Tensor:
        return causal.advance(self.hf.transformer, ids, state)

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        hidden: Tensor = self.hf.transformer(
            torch.cat([inputs["ids"], ids[:, :-1]], 1), use_cache=False
        ).last_hidden_state
        return hidden

    def vocabulary(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.hf.lm_head(hidden)
        return logits


@POLICIES.register("imagegpt")
class ImageGPT(ImageTokenPolicy):
    """Trains ImageGPT, unconditional, from a folder or hub id of ImageGPTForCausalImageModeling."""

    attention = ("attn.c_attn", "attn.c_proj")
    net: ImageGPTNet
    not_options = ("net", "guidance_scale", "logprob_guidance", "attention", "compile")

    def __init__(self, path: str, dtype: Storage = "float32", **options: Any):
        """Load the model. path: folder or hub id, with the clusters of its image processor. dtype:
        of the weights."""
        self.place = locate(path)
        hf, self.processor = _loaded(self.place, getattr(torch, dtype))
        side = round(hf.config.n_positions**0.5)
        clusters = getattr(self.processor, "clusters", None)
        if (
            clusters is None
            or len(clusters) != hf.config.vocab_size - 1
            or side * side != hf.config.n_positions
        ):
            raise UserError(
                f"policy.imagegpt.path {self.place}: needs {hf.config.vocab_size - 1} "
                f"colours in its image processor's "
                f"clusters and a square number of pixels; it has "
                f"{0 if clusters is None else len(clusters)} and "
                f"{hf.config.n_positions}"
            )
        self.side = side
        self.media_size = (side, side)
        # [V, 3] in -1..1
        self.clusters = torch.as_tensor(clusters, dtype=torch.float32)
        super().__init__(ImageGPTNet(hf), guidance_scale=1.0, **options)

    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        start = torch.tensor([[self.net.vocab]], device=self.device)
        return [{"ids": start, "mask": torch.ones_like(start)} for _ in prompts]

    def empty(self, inputs: Inputs) -> Inputs:
        raise UserError("imagegpt has no prompt, and so no guidance: leave it at 1")

    def pixels(self, ids: Tensor) -> Tensor:
        colours = self.clusters.to(ids.device)[ids].transpose(1, 2)
        return colours.reshape(len(ids), -1, self.side, self.side)

    def ids_of(self, pixels: Tensor) -> Tensor:
        """Return the colour nearest to every pixel."""
        colours = pixels.flatten(2).transpose(1, 2)
        return torch.cdist(colours, self.clusters.to(colours)[None]).argmin(-1)

    def export(self, folder: Path) -> None:
        """Save the whole model, or its adapter, with the image processor, as transformers reads
        it."""
        save_model(self.net.hf, folder)
        self.processor.save_pretrained(folder)


def _loaded(place: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoImageProcessor, ImageGPTForCausalImageModeling

    hf = pretrained.load_model(ImageGPTForCausalImageModeling, place, dtype=dtype)
    return hf, pretrained.load_processor(AutoImageProcessor, place)
