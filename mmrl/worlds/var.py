"""A tiny VAR under its published names: a class is a digit in a colour, perhaps at a place, as captions name them."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mmrl.policies.images import weights
from mmrl.policies.images.var_net import Shape, VARNet
from mmrl.policies.images.var_vq import VARVQ
from mmrl.worlds import painting
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import PainterRecipe, VQRecipe
from mmrl.worlds.scales import build_scales
from mmrl.worlds.scenes import COLORS, PLACES, singles


def build_var(folder: Path, vq: Path, images: VQRecipe, recipe: PainterRecipe, progress: Progress) -> None:
    """var.safetensors and vae.safetensors, as the policy exports them."""
    vae = build_scales(vq, images, progress)
    lessons = painting.prepare(vae.encode, recipe)
    number = {prompt["text"]: i for i, prompt in enumerate(singles())}
    label = torch.tensor([*(number[p["text"]] for p in lessons.prompts), len(number)])  # the last is no class
    net = painting.seeded(recipe.seed, lambda: new_net(vae, len(number), images, recipe))
    painting.teach(net, lambda batch: loss(net, label, batch), lessons, recipe, progress)
    parametrize.remove_parametrizations(net.class_emb, "weight")
    weights.save(net.state_dict(), folder / "var.safetensors")
    weights.save(vae.state_dict(), folder / "vae.safetensors")


def loss(net: VARNet, label: Tensor, batch: painting.Batch) -> Tensor:
    """Teacher forcing of all scales."""
    return painting.cross_entropy(net.vocabulary(net.teach({"label": label[batch.caption]}, batch.ids)), batch.ids)


class Composed(nn.Module):
    """A class's embedding is the sum of its digit's, its colour's and its place's, so that one that was never shown
    means something too: held-out captions stay out of pre-training. After it every class has its own."""

    def __init__(self, width: int):
        super().__init__()
        sizes = 10, len(COLORS), len(PLACES) + 1
        parts = list(itertools.product(*map(range, sizes)))  # the order of ``singles``
        starts = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
        which = torch.zeros(len(parts) + 1, sum(sizes) + 1)
        which[:-1].scatter_(1, torch.tensor(parts) + starts, 1.0)
        which[-1, -1] = 1.0
        self.register_buffer("which", which)
        self.parts = nn.Parameter(0.3 * torch.randn(which.shape[1], width))

    def forward(self, weight: Tensor) -> Tensor:
        return self.which @ self.parts


def new_net(vae: VARVQ, classes: int, images: VQRecipe, recipe: PainterRecipe) -> VARNet:
    shape = Shape(recipe.width, recipe.layers, recipe.heads, images.sides, images.vocab, images.dim, classes)
    net = VARNet(shape, vae.quantize)
    for p in (net.pos_start, net.pos_1LC, net.lvl_embed.weight):
        nn.init.normal_(p, std=0.1)
    net.class_emb.weight.requires_grad_(False)
    parametrize.register_parametrization(net.class_emb, "weight", Composed(recipe.width))
    return net
