"""A tiny text-conditional LlamaGen under its published names, and the T5 it reads captions with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from mmrl.policies.images import weights
from mmrl.policies.images.llamagen import T5
from mmrl.policies.images.llamagen_gpt import LlamaGenGPT, Shape
from mmrl.policies.images.llamagen_vq import LlamaGenVQ
from mmrl.worlds import painting
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import PainterRecipe, TextRecipe
from mmrl.worlds.scenes import CANVAS
from mmrl.worlds.text import LENGTH, teach_text, text_models
from mmrl.worlds.vq import load_vq


def build_t5(folder: Path, recipe: TextRecipe, progress: Progress) -> None:
    """A T5 encoder that tells captions apart, with its tokenizer."""
    models = text_models(recipe)
    teach_text(models, recipe, progress)
    with quiet_libraries():
        models["tokenizer_3"].save_pretrained(folder)
        models["text_encoder_3"].save_pretrained(folder)


def build_llamagen(folder: Path, vq: Path, t5: Path, recipe: PainterRecipe, progress: Progress) -> None:
    """gpt.safetensors, vq.safetensors and config.json, as the policy exports them."""
    codec = load_vq(vq)
    lessons = painting.prepare(codec.encode, recipe)
    with torch.no_grad():
        read = T5(str(t5)).encode([p["text"] for p in lessons.prompts] + [""], LENGTH, torch.device("cpu"))
    net = painting.seeded(recipe.seed, lambda: new_gpt(codec, read["text"].shape[-1], recipe))
    painting.teach(net, lambda batch: loss(net, read, batch), lessons, recipe, progress)
    weights.save(net.state_dict(), folder / "gpt.safetensors")
    weights.save(codec.state_dict(), folder / "vq.safetensors")
    (folder / "config.json").write_text(json.dumps({"size": CANVAS, "heads": recipe.heads}))


def new_gpt(codec: LlamaGenVQ, caption: int, recipe: PainterRecipe) -> LlamaGenGPT:
    vocab, grid = codec.quantize.embedding.num_embeddings, CANVAS // codec.factor
    shape = Shape(
        recipe.width, recipe.layers, recipe.heads, vocab, 0, caption, LENGTH, grid, feed=8 * recipe.width // 3
    )
    net = LlamaGenGPT(shape)
    nn.init.normal_(net.tok_embeddings.weight, std=0.3)
    nn.init.normal_(net.cls_embedding.uncond_embedding, std=caption**-0.5)
    nn.init.zeros_(net.output.weight)  # as published
    return net


def loss(net: LlamaGenGPT, read: dict[str, Tensor], batch: painting.Batch) -> Tensor:
    """Teacher forcing; without a caption the learnt text stands in its place, under the mask of a real one."""
    absent = batch.caption == len(read["text"]) - 1
    shown = torch.where(absent, batch.other, batch.caption)
    text = torch.where(absent[:, None, None], net.cls_embedding.uncond_embedding, read["text"][shown])
    hidden = net.teach({"text": text, "mask": read["mask"][shown]}, batch.ids)
    return painting.cross_entropy(net.vocabulary(hidden), batch.ids)
