"""Builds a tiny class-conditional LlamaGen under its published names, of the classes that VAR
paints here too."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn
from torch.nn.utils import parametrize

from mmrl.policies.image_tokens import checkpoints
from mmrl.worlds import painting
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import PainterRecipe
from mmrl.worlds.scenes import CANVAS
from mmrl.worlds.vq import load_vq
from mmrl.zoo.models.image_tokens.llamagen_gpt import ClassEmbedding, LlamaGenGPT, Shape
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ


def build_llamagen(folder: Path, vq: Path, recipe: PainterRecipe, progress: Progress) -> None:
    """Write gpt.safetensors, vq.safetensors and config.json, as the policy exports them."""
    codec = load_vq(vq)
    lessons = painting.prepare(codec.encode, recipe)
    label = painting.labels(lessons)
    net = painting.seeded(recipe.seed, lambda: new_gpt(codec, recipe))
    painting.teach(net, lambda batch: loss(net, label, batch), lessons, recipe, progress)
    parametrize.remove_parametrizations(classes(net), "weight")
    checkpoints.save(net.state_dict(), folder / "gpt.safetensors")
    checkpoints.save(codec.state_dict(), folder / "vq.safetensors")
    (folder / "config.json").write_text(json.dumps({"size": CANVAS, "heads": recipe.heads}))


def new_gpt(codec: LlamaGenVQ, recipe: PainterRecipe) -> LlamaGenGPT:
    vocab = codec.quantize.embedding.num_embeddings
    grid = CANVAS // codec.factor
    feed = 8 * recipe.width // 3
    net = LlamaGenGPT(
        Shape(
            recipe.width, recipe.layers, recipe.heads, vocab, painting.CLASSES, grid=grid, feed=feed
        )
    )
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)  # torch's own is slow to learn digits
    painting.compose(classes(net))
    return net


def classes(net: LlamaGenGPT) -> nn.Embedding:
    """Return the embedding of the classes, which this network has instead of captions."""
    assert isinstance(net.cls_embedding, ClassEmbedding)
    return net.cls_embedding.embedding_table


def loss(net: LlamaGenGPT, label: Tensor, batch: painting.Batch) -> Tensor:
    """Return the teacher-forced cross entropy."""
    return painting.cross_entropy(
        net.vocabulary(net.teach({"label": label[batch.caption]}, batch.ids)), batch.ids
    )
