"""Trains the world's tiny open_clip model on rendered scenes and their captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import ClipRecipe
from mmrl.worlds.render import render
from mmrl.worlds.scenes import CANVAS, captions, is_held_out
from mmrl.worlds.text import LENGTH, caption_labels, clip_tokenizer
from samplers.noise import Rng


def train_clip(folder: Path, recipe: ClipRecipe, progress: Progress) -> None:
    """Train by the contrastive loss (Radford et al. 2021); to learn faster, both embeddings also
    predict what the caption says.

    The folder loads with ``open_clip.create_model_and_transforms("local-dir:FOLDER")`` and
    ``get_tokenizer``. Pictures show the judge's scans; held-out captions are left out.
    """
    rng = Rng.of(recipe.seed, "clip")
    tokenizer = clip_tokenizer()
    config = _config(recipe, len(tokenizer))
    prompts = _prompts(recipe.scenes)
    images = render(prompts, rng, "judge", wobble=0.5).images
    images = (images - 0.5) / 0.5  # as the stored preprocessing does
    ids = _ids(tokenizer, prompts)
    truth = caption_labels(prompts)
    sizes = [int(column.max()) + 1 for column in truth.T]
    model, heads = _models(config, sizes, recipe)
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *heads.parameters()], recipe.lr, weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.15
    )
    for step in progress.steps("CLIP", recipe.steps, optimizer, schedule):
        rows = (
            rng.fold("rows").uniform(torch.arange(recipe.batch), (), step) * recipe.scenes
        ).long()
        loss = _loss(model, heads, sizes, images[rows], ids[rows], truth[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
    _save(folder, model, tokenizer, config)


def _prompts(scenes: int) -> list[Prompt]:
    """Repeat the captions that are not held out, to ``scenes`` prompts."""
    known = captions("single", 720) + captions("pairs", 300)
    prompts = [prompt for prompt in known if not is_held_out(prompt["text"])]
    return (prompts * (scenes // len(prompts) + 1))[:scenes]


def _ids(tokenizer: Any, prompts: list[Prompt]) -> Tensor:
    texts = [prompt["text"] for prompt in prompts]
    options = {"padding": "max_length", "max_length": LENGTH, "truncation": True}
    ids: Tensor = tokenizer(texts, **options, return_tensors="pt").input_ids
    return ids


def _loss(
    model: Any, heads: Any, sizes: list[int], images: Tensor, ids: Tensor, truth: Tensor
) -> Tensor:
    """Add the contrastive loss and the error of the heads that predict what the caption says."""
    embeddings = model.encode_image(images)
    read = model.encode_text(ids)
    logits = model.logit_scale.exp() * F.normalize(embeddings, dim=-1) @ F.normalize(read, dim=-1).T
    # a second picture with the same caption is no negative
    same = (truth[:, None] == truth[None]).all(-1).float()
    same = same / same.sum(1, keepdim=True)
    loss = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
    for head, features in zip(heads, (embeddings, read)):
        parts = head(features).split(sizes, -1)
        loss = loss + 0.3 * sum(F.cross_entropy(part, want) for part, want in zip(parts, truth.T))
    return loss


def _config(recipe: ClipRecipe, vocabulary: int) -> dict[str, Any]:
    vision = {
        "image_size": CANVAS,
        "patch_size": 4,
        "width": recipe.width,
        "layers": recipe.layers,
        "head_width": 32,
    }
    text = {
        "context_length": LENGTH,
        "vocab_size": vocabulary,
        "width": recipe.width,
        "heads": 2,
        "layers": 2,
        "hf_tokenizer_name": "this folder",
    }
    return {"embed_dim": recipe.width, "vision_cfg": vision, "text_cfg": text}


def _models(
    config: dict[str, Any], sizes: list[int], recipe: ClipRecipe
) -> tuple[Any, nn.ModuleList]:
    from open_clip.model import CLIP

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return CLIP(**config), nn.ModuleList(nn.Linear(recipe.width, sum(sizes)) for _ in range(2))


def _save(folder: Path, model: Any, tokenizer: Any, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    preprocess = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "size": [CANVAS, CANVAS],
        "interpolation": "bicubic",
    }
    whole = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(whole, indent=2))
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    tokenizer.save_pretrained(folder)
