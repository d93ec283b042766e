"""Builds a tiny aMUSEd: a complete diffusers folder of UVit2DModel, VQModel, a CLIP text encoder
and their scheduler."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.worlds import painting, vq_names
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import PainterRecipe, TextRecipe
from mmrl.worlds.scenes import CANVAS
from mmrl.worlds.text import teach_text, text_models, tokens
from mmrl.worlds.vq import load_vq
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ

# width, height, crop, aesthetic score: the pipeline's defaults
MICRO = (CANVAS, CANVAS, 0, 0, 6)


def build_amused(
    folder: Path, vq: Path, texts: TextRecipe, recipe: PainterRecipe, progress: Progress
) -> None:
    """Build a folder that AmusedPipeline loads."""
    from diffusers import AmusedPipeline, AmusedScheduler

    codec = load_vq(vq)
    lessons = painting.prepare(codec.encode, recipe)
    models = text_models(texts)
    teach_text(models, texts, progress)
    read = embed(models, [*(p["text"] for p in lessons.prompts), ""])
    net = painting.seeded(
        recipe.seed, lambda: new_transformer(codec, models["text_encoder"].config, recipe)
    )
    painting.teach(net, lambda batch: loss(net, read, batch), lessons, recipe, progress)
    with quiet_libraries():
        AmusedPipeline(
            vqvae=vq_names.diffusers_vq(codec, CANVAS),
            tokenizer=models["tokenizer"],
            text_encoder=models["text_encoder"],
            transformer=net,
            scheduler=AmusedScheduler(mask_token_id=net.config.vocab_size - 1),
        ).save_pretrained(folder)


@torch.no_grad()
def embed(models: dict[str, Any], texts: list[str]) -> dict[str, Tensor]:
    """Return penultimate hidden states and projected pooled state, as AmusedPipeline takes them."""
    outputs = models["text_encoder"](tokens(models, "", texts), output_hidden_states=True)
    return {"text": outputs.hidden_states[-2], "pooled": outputs.text_embeds}


def new_transformer(codec: LlamaGenVQ, text: Any, recipe: PainterRecipe) -> Any:
    from diffusers import UVit2DModel

    width = recipe.width
    vocab = codec.quantize.embedding.num_embeddings
    return UVit2DModel(
        hidden_size=width,
        cond_embed_dim=text.projection_dim,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=40,
        encoder_hidden_size=text.hidden_size,
        vocab_size=vocab + 1,
        codebook_size=vocab,
        in_channels=width,
        block_out_channels=width,
        num_res_blocks=1,
        block_num_heads=recipe.heads,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=2 * width,
        sample_size=CANVAS // codec.factor,
    )


def loss(net: Any, read: dict[str, Tensor], batch: painting.Batch) -> Tensor:
    """Return the mean cross entropy of the masked tokens, masked at a rate of cos(pi u / 2), u
    uniform (Chang et al. 2022, 2023)."""
    names = torch.arange(len(batch.ids))
    side = net.config.sample_size
    u = batch.rng.uniform(names, (batch.ids.shape[1] + 1,)).float()
    rate = (u[:, :1] * math.pi / 2).cos()
    hidden = (u[:, 1:] < rate) | (u[:, 1:] == u[:, 1:].amin(1, keepdim=True))  # at least one
    ids = torch.where(hidden, net.config.vocab_size - 1, batch.ids)
    logits = net(
        ids.view(-1, side, side),
        encoder_hidden_states=read["text"][batch.caption],
        pooled_text_emb=read["pooled"][batch.caption],
        micro_conds=torch.tensor([MICRO]).expand(len(ids), -1),
    )
    return F.cross_entropy(logits.flatten(2).transpose(1, 2)[hidden], batch.ids[hidden])
