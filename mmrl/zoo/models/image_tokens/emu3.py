"""Trains Emu3 (Wang et al. 2024, arXiv 2409.18869) as an image generator, by transformers' own
classes.

An image is H rows of W tokens, each row closed by an end token. Row ends are known, so they are no
decisions: they go through the network with the token before them, are never drawn and never scored.
Everything else may only be a visual token, in sampling and in the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.core.numbers import Count
from mmrl.core.registry import POLICIES, locate
from mmrl.core.types import Prompt
from mmrl.policies.base import MediaFormat
from mmrl.policies.contracts import KeepsWhole
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.policies.image_tokens import causal
from mmrl.policies.image_tokens.attention import Kernel, available, of_transformers
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.image_tokens.policy import EncodedImagePolicy
from mmrl.policies.lora import Lora, ending_like, inject, save_model

Storage = Literal["float32", "bfloat16", "float16"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Emu3Net(causal.CausalImageNet):
    """Wraps an Emu3ForConditionalGeneration that reads text and writes the visual tokens of H x W
    images by their number."""

    visual: Tensor  # [V] token id of every code

    def __init__(self, hf: Any, grid: tuple[int, int]):
        super().__init__(hf)
        self.grid = grid
        self.turns = (1,) * (grid[0] * grid[1])
        mapping = hf.vocabulary_mapping
        ids = torch.tensor([mapping.img2bpe[code] for code in range(len(mapping.img2bpe))])
        self.register_buffer("visual", ids, persistent=False)
        self.adjacent = bool((ids.diff() == 1).all())
        self.first = int(ids[0])
        self.end: int = mapping.eol_token_id
        self.vocab = len(ids)
        self.hidden = hf.config.text_config.hidden_size

    @property
    def decoder(self) -> Any:
        return self.hf.model.text_model

    def step(self, ids: Tensor, state: causal.State) -> Tensor:
        """Return hidden states of the next token; a row's last token and its end go through the
        network together."""
        state.count += 1
        tokens = self.visual[ids]
        if state.count % self.grid[1] == 0:
            tokens = F.pad(tokens, (0, 1), value=self.end)
        return causal.advance(self.decoder, tokens, state)

    def columns(self, count: int) -> int:
        return count + count // self.grid[1]

    def extend(self, ids: Tensor, state: causal.State) -> Tensor:
        height, width = self.grid
        state.count = len(self.turns) - 1
        tokens = F.pad(self.visual[ids].view(-1, height, width), (0, 1), value=self.end)
        hidden = causal.advance(self.decoder, tokens.flatten(1)[:, :-2], state, every=True)
        decided = torch.arange(1, hidden.shape[1] + 1, device=ids.device) % (width + 1) != width
        return hidden[:, decided]

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        height, width = self.grid
        rows = F.pad(self.visual[ids].view(-1, height, width), (0, 1), value=self.end).flatten(1)
        tokens = torch.cat([inputs["ids"], rows[:, :-2]], 1)
        mask = F.pad(inputs["mask"], (0, rows.shape[1] - 2), value=1)
        hidden: Tensor = self.decoder(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=causal.positions(mask),
            use_cache=False,
        ).last_hidden_state[:, inputs["ids"].shape[1] - 1 :]
        # what follows is a row's end
        decided = torch.arange(hidden.shape[1], device=ids.device) % (width + 1) != width
        return hidden[:, decided]

    def vocabulary(self, hidden: Tensor) -> Tensor:
        weight: Tensor = self.hf.lm_head.weight
        first = self.first
        return F.linear(
            hidden, weight[first : first + self.vocab] if self.adjacent else weight[self.visual]
        )

    def add_adapter(self, config: Any) -> None:
        inject(self.hf, config)


@POLICIES.register("emu3")
class Emu3(EncodedImagePolicy, KeepsWhole):
    """Trains Emu3-Gen, text to image, from a folder or hub id of Emu3ForConditionalGeneration."""

    attention = PROJECTIONS
    not_options = ("net", "compile")
    net: Emu3Net

    def __init__(
        self,
        path: str,
        size: Count = 720,
        ratio: str = "1:1",
        negative: str = "",
        suffix: str = "",
        dtype: Storage = "float32",
        attention: Kernel = "auto",
        lora: Lora | int | None = None,
        guidance_scale: float = 3.0,
        **options: Any,
    ):
        """Load the model. path: folder or hub id. size: pixels, the square root of the area. ratio:
        width to height. negative: the unconditional prompt, what the image should not be. suffix:
        words behind every prompt. dtype: of the weights. attention: the kernel. lora: adapters in
        the text model."""
        self.place = locate(path)
        hf, self.processor = _loaded(
            self.place, torch_dtype(dtype), of_transformers(available(attention))
        )
        self.suffix = suffix
        self.shape = {"ratio": _ratio(ratio), "image_area": size * size}
        encoding = self._ids(negative)
        self.negative = encoding["input_ids"]
        self.pad = self.processor.tokenizer.pad_token_id
        self.grid = _grid(encoding, self.pad, size, self.place)
        lora = None if lora is None else _in_text_model(hf, lora)
        super().__init__(
            Emu3Net(hf, self.grid),
            lora=lora,
            guidance_scale=guidance_scale,
            attention=attention,
            **options,
        )
        factor = hf.model.vqmodel.vision_spatial_factor
        self.media = MediaFormat((self.grid[0] * factor, self.grid[1] * factor))
        if lora is None:
            hf.model.vqmodel.requires_grad_(False)

    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        texts = texts_of(prompts)
        return [
            {"ids": self._ids(text + self.suffix)["input_ids"].to(self.device)} for text in texts
        ]

    def collate(self, cond: list[Inputs]) -> Inputs:
        # so that both prompts share a pass
        least = self.negative.shape[1] if self.guidance_scale != 1 else 0
        return causal.padded(cond, self.pad, least)

    def empty(self, inputs: Inputs) -> Inputs:
        """Encode the negative prompt, followed by the same size and start of an image."""
        rows, length = inputs["ids"].shape
        short = max(0, length - self.negative.shape[1])
        negative = {
            "ids": self.negative.to(self.device),
            "mask": torch.ones_like(self.negative).to(self.device),
        }
        fill = {"ids": self.pad, "mask": 0}
        return {
            name: F.pad(negative[name], (short, 0), value=fill[name]).expand(rows, -1)
            for name in negative
        }

    @property
    def unsharded(self) -> list[nn.Module]:
        return [self.net.hf.model.vqmodel]

    def pixels(self, ids: Tensor) -> Tensor:
        vq = self.net.hf.model.vqmodel
        image_processor = self.processor.image_processor
        x: Tensor = vq.decode(ids.view(-1, *self.grid))
        mean, std = (
            torch.tensor(v, device=x.device, dtype=x.dtype)[:, None, None]
            for v in (image_processor.image_mean, image_processor.image_std)
        )
        return 2 * (x * std + mean) - 1

    def ids_of(self, pixels: Tensor) -> Tensor:
        vq = self.net.hf.model.vqmodel
        processor = self.processor.image_processor
        mean, std = (
            torch.tensor(v, device=pixels.device, dtype=pixels.dtype)[:, None, None]
            for v in (processor.image_mean, processor.image_std)
        )
        sizes = torch.tensor([pixels.shape[-2:]] * len(pixels))
        codes = vq.encode((pixels / 2 + 0.5 - mean) / std, sizes).image_tokens
        return torch.stack([code.flatten() for code in codes])

    def export(self, folder: Path) -> None:
        """Save the whole model, or its adapter, with the processor, as transformers reads it."""
        save_model(self.net.hf, folder)
        self.processor.save_pretrained(folder)

    def _ids(self, text: str) -> Any:
        return self.processor(
            text=[text], return_for_image_generation=True, return_tensors="pt", **self.shape
        )


def _ratio(ratio: str) -> str:
    sides = ratio.split(":")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise UserError(f"policy.emu3.ratio {ratio!r}: write width:height, such as 4:3")
    return ratio


def _grid(encoding: Any, pad: int | None, size: int, place: str) -> tuple[int, int]:
    height, width = (int(n) for n in encoding["image_sizes"][0])
    if min(height, width) < 1 or pad is None:
        raise UserError(
            f"policy.emu3.size {size} is smaller than a token, or {place} names no padding token"
        )
    return height, width


def _in_text_model(hf: Any, lora: Lora | int) -> Lora:
    """Return adapters of these sizes, named as layers of the text model."""
    lora = Lora(lora) if isinstance(lora, int) else lora
    return Lora(lora.rank, lora.alpha, _targets(hf, lora.targets or PROJECTIONS))


def _targets(hf: nn.Module, ends: Sequence[str]) -> list[str]:
    """Name the text model's linear layers that end like one of ``ends``."""
    linear = [
        n for n, m in hf.named_modules() if isinstance(m, nn.Linear) and ".text_model." in f".{n}"
    ]
    return ending_like(linear, ends, "text model")


def _loaded(place: str, dtype: torch.dtype, attention: str) -> tuple[Any, Any]:
    from transformers import AutoProcessor, Emu3ForConditionalGeneration

    hf = pretrained.load_model(
        Emu3ForConditionalGeneration, place, dtype=dtype, attn_implementation=attention
    )
    return hf, pretrained.load_processor(AutoProcessor, place)
