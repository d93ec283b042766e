"""Trains Janus and Janus-Pro (Wu et al. 2024; Chen et al. 2025) as image generators, by
transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.effects import CHOOSES_WEIGHTS
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.core.registry import POLICIES, locate
from mmrl.core.sharding import whole_blocks
from mmrl.core.types import Prompt
from mmrl.policies.base import MediaFormat
from mmrl.policies.contracts import KeepsWhole
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.policies.image_tokens import causal
from mmrl.policies.image_tokens.attention import Kernel, available, of_transformers
from mmrl.policies.image_tokens.kv_cache import Rooms
from mmrl.policies.image_tokens.network import ImageNet, Inputs, widened
from mmrl.policies.image_tokens.policy import EncodedImagePolicy
from mmrl.policies.lora import Lora, ending_like, inject, save_model
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.families import modules_of
from mmrl.zoo.models.image_tokens import llama

Storage = Literal["float32", "bfloat16", "float16"]
# parts that receive no gradient
UNDERSTANDING = ("model.vision_model.", "model.aligner.", "model.vqmodel.", "lm_head.")
GENERATION = ("model.generation_embeddings.", "model.generation_aligner.", "model.generation_head.")


@dataclass
class _State:
    """Holds the decoding state of B rows."""

    rooms: Rooms
    padding: Tensor | None  # [B, n] bool, False where the prompt is padded; None: nowhere
    rope: llama.Rope  # of all tokens to come
    done: int = 0  # tokens read since the prompt


class JanusNet(ImageNet):
    """Wraps a JanusForConditionalGeneration that reads text and writes image tokens."""

    token: Callable[..., Tensor]

    def __init__(self, hf: Any):
        super().__init__()
        self.hf = hf
        quantizer = hf.model.vqmodel.quantize
        self.turns = (1,) * (quantizer.quant_state_dims[0] * quantizer.quant_state_dims[1])
        self.vocab = hf.config.vq_config.num_embeddings
        self.hidden = hf.config.text_config.hidden_size
        # accelerate wraps these one by one
        self._no_split_modules = whole_blocks(hf)
        self.token = llama.token

    @property
    def config(self) -> Any:
        return self.hf.config

    def begin(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, _State]:
        model = self.hf.model.language_model
        mask = inputs["mask"]
        cache = caches.recorded(self.config.text_config.num_hidden_layers)
        places = causal.positions(mask)
        hidden = model(
            input_ids=inputs["ids"],
            attention_mask=mask,
            position_ids=places,
            **caches.cache_kwargs(cache),
        ).last_hidden_state[:, -1:]
        extra = len(self.turns) - 1
        rooms = Rooms.after(caches.key_values(cache), rows, mask.shape[1] + extra)
        padding = None if bool(mask.all()) else mask[rows].bool()
        rope = llama.rotations(model, hidden, places[rows, -1] + 1, extra)
        return hidden[rows], _State(rooms, padding, rope)

    def step(self, ids: Tensor, state: _State) -> Tensor:
        x = self.hf.prepare_embeddings_for_image_generation(ids)
        at = state.done
        rope = tuple(part[:, :, at : at + 1] for part in state.rope)
        state.done += 1
        x = widened(x, state.rooms.rows)
        place = state.rooms.next(1, self.fixed)
        mask = state.rooms.attention_mask(place, state.padding)
        return self.token(
            self.hf.model.language_model, x, rope, mask, place, state.rooms.layers, self.kernel
        )

    def extend(self, ids: Tensor, state: _State) -> Tensor:
        x = self.hf.prepare_embeddings_for_image_generation(ids[:, :-1])
        place = slice(state.rooms.length, state.rooms.length + x.shape[1])
        state.rooms.length = place.stop
        mask = state.rooms.causal_mask(place, state.padding)
        state.done = x.shape[1]
        model = self.hf.model.language_model
        return llama.token(model, x, state.rope, mask, place, state.rooms.layers, self.kernel)

    def back(self, state: _State, rows: slice | Tensor, count: int, ids: Tensor) -> _State:
        length = state.rooms.length - (len(self.turns) - 1 - count)
        padding = None if state.padding is None else state.padding[rows]
        cos, sin = (part if len(part) == 1 else part[rows] for part in state.rope)
        return _State(state.rooms.back(rows, length), padding, (cos, sin), count)

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        text = self.hf.get_input_embeddings()(inputs["ids"])
        image = self.hf.prepare_embeddings_for_image_generation(ids[:, :-1])
        mask = F.pad(inputs["mask"], (0, image.shape[1]), value=1)
        hidden: Tensor = self.hf.model.language_model(
            inputs_embeds=torch.cat([text, image], 1),
            attention_mask=mask,
            position_ids=causal.positions(mask),
            use_cache=False,
        ).last_hidden_state
        return hidden[:, text.shape[1] - 1 :]

    def lift(self, hidden: Tensor) -> Tensor:
        head = self.hf.model.generation_head
        lifted: Tensor = head.activation_fn(head.proj_out(hidden))
        return lifted

    def affine(self, lifted: Tensor) -> Tensor:
        logits: Tensor = self.hf.model.generation_head.vision_head(lifted)
        return logits

    def vocabulary(self, hidden: Tensor) -> Tensor:
        return self.affine(self.lift(hidden))

    def codes(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] in -1..1 to ids [B, T]: the codebook entry of the highest
        cosine similarity to the latent, as the model was trained."""
        vq = self.hf.model.vqmodel
        z = vq.quant_conv(vq.encoder(pixels.to(vq.quant_conv.weight.dtype)))
        flat = F.normalize(z.permute(0, 2, 3, 1).flatten(0, 2).float(), dim=-1)
        book = F.normalize(vq.quantize.embedding.weight.float(), dim=-1)
        return (flat @ book.T).argmax(-1).view(len(pixels), -1)

    def enable_gradient_checkpointing(self) -> None:
        caches.recompute(self.hf.model.language_model)

    def add_adapter(self, config: Any) -> None:
        inject(self.hf, config)


@POLICIES.register("janus")
class Janus(EncodedImagePolicy, KeepsWhole):
    """Trains Janus and Janus-Pro, text to image, from a folder or hub id of
    JanusForConditionalGeneration."""

    wrapper: type[JanusNet] = JanusNet
    idle: tuple[str, ...] = UNDERSTANDING  # parameters that no decision depends on
    net: JanusNet

    def __init__(
        self,
        path: str,
        dtype: Storage = "float32",
        attention: Kernel = "auto",
        train: Annotated[Literal["language", "generation"], CHOOSES_WEIGHTS] = "language",
        lora: Lora | int | None = None,
        **options: Any,
    ):
        """Load the model. path: folder or hub id. dtype: of the weights. attention: auto, xformers,
        sdpa or flash (the package flash-attn). train: the language model alone, or with it
        embeddings, aligner and head of image tokens. lora: adapters in the language model."""
        self.place = locate(path)
        hf, self.processor = _loaded(
            self.place, torch_dtype(dtype), of_transformers(available(attention))
        )
        if isinstance(lora, int):
            lora = Lora(lora)
        if lora is not None:
            lora = Lora(lora.rank, lora.alpha, _targets(hf, lora.targets))
        super().__init__(self.wrapper(hf), attention=attention, lora=lora, **options)
        if lora is None:
            frozen = self.idle if train == "generation" else self.idle + GENERATION
            for name, p in hf.named_parameters():  # a tied head goes by the name of the embedding
                p.requires_grad_(not name.startswith(frozen))
        self.bos, self.pad, self.start = self._special()
        vq = hf.config.vq_config
        factor = 2 ** (len(vq.channel_multiplier) - 1)
        height, width = (side * factor for side in hf.model.vqmodel.quantize.quant_state_dims)
        self.media = MediaFormat((height, width))

    def _special(self) -> tuple[int, int, int]:
        """Look up the ids of the first token, of padding, and of the token after which an image
        begins."""
        generation = self.net.hf.generation_config
        tok = self.processor.tokenizer
        start = (getattr(generation, "generation_kwargs", None) or {}).get("boi_token_id")
        ids = (
            tok.bos_token_id if generation.bos_token_id is None else generation.bos_token_id,
            tok.pad_token_id if generation.pad_token_id is None else generation.pad_token_id,
            tok.convert_tokens_to_ids(self.processor.image_start_token) if start is None else start,
        )
        if None in ids:
            raise UserError(
                f"policy.janus.path {self.place}: its tokenizer names no first, "
                f"padding or image token"
            )
        return ids

    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        encodings = []
        for text in texts_of(prompts):
            turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            rendered = self.processor.apply_chat_template(turn, add_generation_prompt=True)
            ids = self.processor(text=[rendered], generation_mode="image", return_tensors="pt")[
                "input_ids"
            ]
            encodings.append({"ids": ids.to(self.device)})
        return encodings

    def collate(self, cond: list[Inputs]) -> Inputs:
        return causal.padded(cond, self.pad)

    def empty(self, inputs: Inputs) -> Inputs:
        """Make the unconditional inputs as in the model's training: every token but the first and
        the image's start is padding that is attended to."""
        ids = inputs["ids"]
        return inputs | {"ids": torch.where((ids == self.bos) | (ids == self.start), ids, self.pad)}

    @property
    def unsharded(self) -> list[nn.Module]:
        return [self.net.hf.model.vqmodel]

    def pixels(self, ids: Tensor) -> Tensor:
        images: Tensor = self.net.hf.model.vqmodel.decode(ids)
        return images

    def ids_of(self, pixels: Tensor) -> Tensor:
        return self.net.codes(pixels)

    def export(self, folder: Path) -> None:
        """Save the whole model, or its adapter, with the processor, as transformers reads it."""
        save_model(self.net.hf, folder)
        self.processor.save_pretrained(folder)


def _targets(hf: nn.Module, ends: Sequence[str] | None) -> list[str]:
    """Name the language model's linear layers that end like one of ``ends``; all for None."""
    names = [name for name in modules_of(hf, "language") if ".language_model." in name]
    return ending_like(names, ends, "language model")


def _loaded(place: str, dtype: torch.dtype, attention: str) -> tuple[Any, Any]:
    from transformers import AutoProcessor, JanusForConditionalGeneration

    hf = pretrained.load_model(
        JanusForConditionalGeneration, place, dtype=dtype, attn_implementation=attention
    )
    return hf, pretrained.load_processor(AutoProcessor, place)
