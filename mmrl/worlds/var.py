"""Builds a tiny VAR under its published names: a class is a digit in a colour, perhaps at a place,
as captions name them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.nn.utils import parametrize

from mmrl.policies.image_tokens import checkpoints
from mmrl.worlds import painting
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import PainterRecipe, VQRecipe
from mmrl.worlds.scales import build_scales
from mmrl.zoo.models.image_tokens.var_net import Shape, VARNet
from mmrl.zoo.models.image_tokens.var_vq import VARVQ


def build_var(
    folder: Path, vq: Path, images: VQRecipe, recipe: PainterRecipe, progress: Progress
) -> None:
    """Write var.safetensors and vae.safetensors, as the policy exports them."""
    vae = build_scales(vq, images, progress)
    lessons = painting.prepare(vae.encode, recipe)
    label = painting.labels(lessons)
    net = painting.seeded(recipe.seed, lambda: new_net(vae, images, recipe))
    painting.teach(net, lambda batch: loss(net, label, batch), lessons, recipe, progress)
    parametrize.remove_parametrizations(net.class_emb, "weight")
    checkpoints.save(net.state_dict(), folder / "var.safetensors")
    checkpoints.save(vae.state_dict(), folder / "vae.safetensors")


def loss(net: VARNet, label: Tensor, batch: painting.Batch) -> Tensor:
    """Return the cross entropy of all scales, teacher forced."""
    return painting.cross_entropy(
        net.vocabulary(net.teach({"label": label[batch.caption]}, batch.ids)), batch.ids
    )


def new_net(vae: VARVQ, images: VQRecipe, recipe: PainterRecipe) -> VARNet:
    shape = Shape(
        recipe.width,
        recipe.layers,
        recipe.heads,
        images.sides,
        images.vocab,
        images.dim,
        painting.CLASSES,
    )
    net = VARNet(shape, vae.quantize)
    for p in (net.pos_start, net.pos_1LC, net.lvl_embed.weight):
        nn.init.normal_(p, std=0.1)
    painting.compose(net.class_emb)
    return net
