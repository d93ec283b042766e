"""Trains LlamaGen (Sun et al. 2024, arXiv 2406.06525): images of classes or texts by a Llama over
VQ tokens."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core import pretrained, weight_files
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.core.registry import POLICIES, locate
from mmrl.core.types import Prompt
from mmrl.policies.base import MediaFormat
from mmrl.policies.diffusion import prompt_lengths
from mmrl.policies.diffusion.text_encoding import Placement, PromptCache, texts_of
from mmrl.policies.image_tokens import checkpoints
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.image_tokens.policy import EncodedImagePolicy
from mmrl.policies.lora import merged
from mmrl.zoo.models.image_tokens.llamagen_gpt import ClassEmbedding, LlamaGenGPT, Shape
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ

HEADS = {3200: 32, 4096: 32}  # published widths whose heads are not of 64 numbers
PUBLISHED = 256  # pixels a side of checkpoints that do not say theirs
Storage = Literal["float32", "bfloat16", "float16"]


@POLICIES.register("llamagen")
class LlamaGen(EncodedImagePolicy):
    """Trains LlamaGen, by class or text, from published checkpoints with VQ-16 or an exported
    folder."""

    attention = ("attention.wqkv", "attention.wo")
    net: LlamaGenGPT

    def __init__(
        self,
        path: str,
        vq: Annotated[str | None, Effects(chooses_weights=True)] = None,
        size: int | None = None,
        heads: int | None = None,
        text_encoder: str = "google/flan-t5-xl",
        text_encoder_placement: Placement = "offload",
        dtype: Storage = "float32",
        guidance_scale: float = 4.0,
        cfg_interval: Annotated[int, Ge(0)] | None = None,
        **options: Any,
    ):
        """Load the transformer and its tokenizer. path: the transformer's checkpoint, one of the
        published training, or a folder as exported. vq: the tokenizer's checkpoint. size: pixels a
        side; None: what the checkpoint, its name or the folder says. cfg_interval: as the published
        option: guidance ends after that many tokens plus two; None: never. heads: None is the
        published number for its width. text_encoder: T5, for a text-conditional one.
        text_encoder_placement: where it goes after use. dtype: of the transformer."""
        place = checkpoints.find(path)
        if place.is_dir():
            vq = vq or str(place / "vq.safetensors")
            file = place / "gpt.safetensors"
            known = _config(place)
            size = size or known["size"]
            heads = heads or known["heads"]
        else:
            file = place
        if vq is None:
            raise UserError(
                "policy.llamagen.vq is missing: the tokenizer, vq_ds16_c2i.pt or vq_ds16_t2i.pt"
            )
        tokenizer = checkpoints.read(checkpoints.find(vq))
        self.vq = checkpoints.load(LlamaGenVQ.like(tokenizer, vq), tokenizer, vq).requires_grad_(
            False
        )
        published = checkpoints.read(file)
        positions = published.pop("freqs_cis", None)
        shape = shape_of(published, str(file), 0, heads)
        stated = None if place.is_dir() else _trained_at(file, positions, shape, self.vq.factor)
        self.size = size or stated or PUBLISHED
        self.media = MediaFormat((self.size, self.size))
        if self.size % self.vq.factor:
            raise UserError(
                f"policy.llamagen.size {self.size} is not a multiple of {self.vq.factor}"
            )
        net = LlamaGenGPT(replace(shape, grid=self.size // self.vq.factor))
        checkpoints.load(net, published, file).to(torch_dtype(dtype))
        self.text_encoder = text_encoder
        self.says_cuts = True  # of texts, once
        self.cfg_interval = cfg_interval
        self.texts = PromptCache(
            lambda: _T5(text_encoder, shape.caption),
            self._encode_texts,
            text_encoder_placement,
            20000,
        )
        super().__init__(net, guidance_scale=guidance_scale, **options)
        self.report.notes = () if place.is_dir() else _about_size(file, size, stated)

    def scales(self, guidance: float) -> Tensor:
        scales = super().scales(guidance)
        if self.cfg_interval is not None:  # the published loop counts from the second token
            scales[self.cfg_interval + 2 :] = 1.0
        return scales

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Take all prompts, and say which texts T5 does not read to their end."""
        if not self.net.shape.classes:
            self.report.notes += self._cut(_tokenizer(self.text_encoder), texts_of(prompts))
        return super().admit(prompts)

    def _cut(self, tokenizer: Any, texts: list[str]) -> tuple[str, ...]:
        length = self.net.shape.condition
        by = f"{length} tokens that this checkpoint reads of T5"
        lines = tuple(prompt_lengths.cut_by(tokenizer, texts, length, by))
        self.says_cuts = self.says_cuts and not lines
        return lines

    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        if self.net.shape.classes:
            return [
                {"label": torch.tensor([label], device=self.device)}
                for label in self._labels(prompts)
            ]
        encodings = self.texts(texts_of(prompts), self.device)
        return [
            {name: tensor[i : i + 1] for name, tensor in encodings.items()}
            for i in range(len(prompts))
        ]

    def _labels(self, prompts: list[Prompt]) -> list[int]:
        return labels_of(prompts, self.net.shape.classes)

    def empty(self, inputs: Inputs) -> Inputs:
        """Make the unconditional inputs: the null class, or the learnt text, where the prompt's
        mask stays, as in the published sampler."""
        embedding = self.net.cls_embedding
        if isinstance(embedding, ClassEmbedding):
            return {"label": torch.full_like(inputs["label"], self.net.shape.classes)}
        text = embedding.uncond_embedding.expand(len(inputs["text"]), -1, -1)
        return inputs | {"text": text.to(inputs["text"])}

    def pixels(self, ids: Tensor) -> Tensor:
        return self.vq.to(ids.device).decode(ids)

    def ids_of(self, pixels: Tensor) -> Tensor:
        vq = self.vq.to(pixels.device)
        return vq.encode(pixels.to(vq.quant_conv.weight.dtype))

    def _encode_texts(self, t5: _T5, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        if self.says_cuts:
            self.report.warnings += self._cut(t5.tokenizer, texts)
        return t5.encode(texts, self.net.shape.condition, device)

    def export(self, folder: Path) -> None:
        """Save the transformer (adapters added to it) and the tokenizer under their published
        names, with the settings that names do not show."""
        checkpoints.save(merged(self.net), folder / "gpt.safetensors")
        checkpoints.save(self.vq.state_dict(), folder / "vq.safetensors")
        (folder / "config.json").write_text(
            json.dumps({"size": self.size, "heads": self.net.shape.heads})
        )


class _T5:
    """Encodes texts to features as LlamaGen was trained on them, moved behind their padding."""

    def __init__(self, place: str, width: int):
        """width: of the features that the checkpoint was trained on."""
        from transformers import T5EncoderModel

        self.tokenizer = _tokenizer(place)
        try:
            self.model = pretrained.load_model(T5EncoderModel, locate(place), dtype=torch.float32)
        except UserError as error:
            raise UserError(f"policy.llamagen.text_encoder: {error}") from error
        if self.model.config.d_model != width:
            raise UserError(
                f"policy.llamagen.text_encoder {place}: its features have "
                f"{self.model.config.d_model} numbers, and the checkpoint reads {width}; take the "
                f"T5 that it was trained with (google/flan-t5-xl has 2048)"
            )

    def to(self, device: Any) -> None:
        self.model.to(device)

    def encode(self, texts: list[str], length: int, device: torch.device) -> dict[str, Tensor]:
        """Return ``text`` [n, length, features] and ``mask`` [n, length] bool."""
        batch = self.tokenizer(
            texts,
            padding="max_length",
            max_length=length,
            truncation=True,
            padding_side="right",
            return_tensors="pt",
        ).to(device)
        mask = batch["attention_mask"].bool()
        text = self.model(
            input_ids=batch["input_ids"], attention_mask=mask.long()
        ).last_hidden_state
        order = mask.long().argsort(dim=1, stable=True)  # padding first, then the words in order
        return {
            "text": text.gather(1, order[..., None].expand_as(text)),
            "mask": mask.gather(1, order),
        }


def _tokenizer(place: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return pretrained.load_processor(AutoTokenizer, locate(place))
    except UserError as error:
        raise UserError(f"policy.llamagen.text_encoder: {error}") from error


def _trained_at(file: Path, positions: Tensor | None, shape: Shape, factor: int) -> int | None:
    """Return the pixels a side at which a checkpoint was trained: by its table of positions, its
    published name, or the options that its training saved; None: nothing says it."""
    if positions is not None:
        return math.isqrt(len(positions) - shape.condition) * factor
    named = re.findall(r"(?<!\d)(?:256|384|512)(?!\d)", file.stem)
    if named:
        return int(named[-1])
    options = weight_files.settings(file)
    if isinstance(options.get("image_size"), int):
        pixels = int(options["image_size"])
        return pixels // int(options.get("downsample_size", factor)) * factor
    return None


def _about_size(file: Path, chosen: int | None, stated: int | None) -> tuple[str, ...]:
    if chosen is None and stated is None:
        return (
            f"policy.llamagen.size: neither {file.name} nor its name says at how many pixels it "
            f"was trained; {PUBLISHED} is taken",
        )
    if chosen is not None and stated is not None and chosen != stated:
        return (
            f"policy.llamagen.size: {file.name} was trained at {stated} pixels, and pictures of "
            f"{chosen} are drawn",
        )
    return ()


def shape_of(published: checkpoints.Published, file: str, grid: int, heads: int | None) -> Shape:
    """Infer the architecture of a checkpoint from its shapes; the heads from its width."""
    vocab, dim = checkpoints.need(published, "tok_embeddings.weight", file).shape
    feed = checkpoints.need(published, "layers.0.feed_forward.w1.weight", file).shape[0]
    layers = checkpoints.count(published, "layers.{}.")
    heads = heads or HEADS.get(dim, max(dim // 64, 1))
    if dim % (4 * heads):
        raise UserError(
            f"policy.llamagen.heads {heads}: the width {dim} of {file} must be a multiple of 4 "
            f"times as many"
        )
    if "cls_embedding.embedding_table.weight" in published:
        classes = published["cls_embedding.embedding_table.weight"].shape[0] - 1
        return Shape(dim, layers, heads, vocab, classes, grid=grid, feed=feed)
    condition, caption = checkpoints.need(published, "cls_embedding.uncond_embedding", file).shape
    return Shape(dim, layers, heads, vocab, 0, caption, condition, grid, feed)


def labels_of(prompts: list[Prompt], classes: int) -> list[int]:
    """Return the class of every prompt. UserError names the first that has none."""
    for i, prompt in enumerate(prompts):
        label = prompt.get("label")
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < classes:
            raise UserError(
                f"prompt {i} needs 'label', a class of 0..{classes - 1}, for this "
                f"model; it has {label!r}"
            )
    return [prompt["label"] for prompt in prompts]


def _config(folder: Path) -> dict[str, int]:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"policy.llamagen.path {folder}: no config.json; give the checkpoint's "
            f"file, or an export"
        )
    known: dict[str, int] = json.loads(file.read_text())
    absent = [key for key in ("size", "heads") if not isinstance(known.get(key), int)]
    if absent:
        raise UserError(
            f"{file} has no {' and no '.join(absent)}: it is not that of an export of this policy; "
            f"give the checkpoint's file as path, and options size and heads"
        )
    return known
