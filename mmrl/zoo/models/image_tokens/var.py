"""Trains VAR (Tian et al. 2024, arXiv 2404.02905): images of classes, one scale after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.effects import Effects
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.core.numbers import Count
from mmrl.core.registry import POLICIES
from mmrl.core.types import Copies, Point, Prompt, Rollout, per_prompt
from mmrl.policies.base import NO_CONTEXT, MediaFormat, RolloutContext
from mmrl.policies.image_tokens import checkpoints
from mmrl.policies.image_tokens.branching import grow
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.image_tokens.policy import EncodedImagePolicy
from mmrl.policies.lora import merged
from mmrl.zoo.models.image_tokens.llamagen import labels_of
from mmrl.zoo.models.image_tokens.var_net import Shape, VARNet
from mmrl.zoo.models.image_tokens.var_vq import VARVQ
from samplers.noise import Rng

Storage = Literal["float32", "bfloat16", "float16"]


@POLICIES.register("var")
class VAR(EncodedImagePolicy):
    """Trains VAR, class-conditional next-scale prediction, from published checkpoints or an
    export."""

    attention = ("attn.mat_qkv", "attn.proj")
    net: VARNet

    def __init__(
        self,
        path: str,
        vae: Annotated[str | None, Effects(chooses_weights=True)] = None,
        scale_alpha: Annotated[float, Ge(0)] = 0.0,
        branch_at: Annotated[Count | None, Effects(branches=True)] = None,
        branches: Annotated[int, Ge(2)] = 2,
        dtype: Storage = "float32",
        guidance_scale: float = 2.5,
        **options: Any,
    ):
        """Load the transformer and its VQ-VAE. path: the transformer's checkpoint, one of the
        published training (ar-ckpt-best.pth), or a folder as exported. vae: the VQ-VAE's
        checkpoint. scale_alpha: each token's loss weighs (h w)^-alpha of its scale. branch_at: the
        number of first scales that samples share, as a tree (None: none). branches: how many share
        them; ``train.group_size`` is a multiple of it. dtype: of the transformer. guidance_scale:
        at the last scale, growing from 1 at the first; it is 1 + the published cfg."""
        file, vae = _files(checkpoints.find(path), vae)
        # what the published training script saves holds both
        published = checkpoints.read(file, ("trainer", "var_wo_ddp"))
        images = checkpoints.read(checkpoints.find(vae), ("trainer", "vae_local"))
        shape = shape_of(published, str(file))
        self.vae = VARVQ.like(images, shape.sides, vae)
        # of other scales at 512 pixels
        images["quantize.ema_vocab_hit_SV"] = self.vae.quantize.ema_vocab_hit_SV
        checkpoints.load(self.vae, images, vae).requires_grad_(False)
        net = checkpoints.load(VARNet(shape, self.vae.quantize), published, file)
        net.to(torch_dtype(dtype))
        super().__init__(net, guidance_scale=guidance_scale, **options)
        self.weight = _of_scales(net.turns) ** -scale_alpha if scale_alpha else None
        if branch_at is not None and branch_at >= len(net.turns):
            raise UserError(
                f"policy.var.branch_at {branch_at}: this model has {len(net.turns)} "
                f"scales, so at most one less"
            )
        self.branch_at = branch_at
        side = self.vae.quantize.sides[-1] * self.vae.factor
        self.media = MediaFormat((side, side))
        self.branches = branches if branch_at else 1
        self.pass_sizes.multiple = self.branches

    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        labels = labels_of(prompts, self.net.shape.classes)
        return [{"label": torch.tensor([label], device=self.device)} for label in labels]

    def empty(self, inputs: Inputs) -> Inputs:
        return {"label": torch.full_like(inputs["label"], self.net.shape.classes)}

    def scales(self, guidance: float) -> Tensor:
        """Return the guidance scales [T], from 1 at the first scale to ``guidance_scale`` at the
        last: (1 + t) z_c - t z_u, t = cfg k / (K - 1)."""
        turns = self.net.turns
        steps = 1 + (guidance - 1) * torch.arange(len(turns)) / max(len(turns) - 1, 1)
        return steps.repeat_interleave(torch.tensor(turns))

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        if context.drafts and self.branch_at is not None:
            raise UserError(
                "train.stages.speculative: samples that share scales start over; leave out "
                "policy.var.branch_at"
            )
        for size in per_prompt(copies, 1):
            if size % self.branches:
                raise UserError(
                    f"train.group_size {size}: with policy.var.branches {self.branches} it must "
                    f"be a multiple of it"
                )
        return super().rollout(prompts, copies, rng, context)

    def _draw(
        self,
        cond: list[Inputs],
        group: Tensor,
        row: Tensor,
        rng: Rng,
        passes: int | None = None,
    ) -> Rollout:
        if self.branch_at is None:
            return super()._draw(cond, group, row, rng, passes)
        return grow(self, cond, group, row, rng, self.branch_at, self.branches)

    def path(self, rollout: Rollout) -> Iterator[Point]:
        """Yield the recorded decisions; one that several rows share is in the mask of one and
        counts for all of them."""
        for point in super().path(rollout):
            weight = self.weight
            if self.branch_at is not None:
                each = torch.ones(sum(self.net.turns)) if weight is None else weight
                shared = sum(self.net.turns[: self.branch_at])
                weight = torch.cat([each[:shared] * self.branches, each[shared:]])
            yield point.replace(
                weight=weight
                if weight is None
                else weight.to(point.mask.device).expand(point.mask.shape)
            )

    def pixels(self, ids: Tensor) -> Tensor:
        return self.vae.to(ids.device).decode(ids)

    def ids_of(self, pixels: Tensor) -> Tensor:
        vae = self.vae.to(pixels.device)
        return vae.encode(pixels.to(vae.quant_conv.weight.dtype))

    def export(self, folder: Path) -> None:
        """Save the transformer (adapters added to it) and the VQ-VAE under their published
        names."""
        checkpoints.save(merged(self.net), folder / "var.safetensors")
        checkpoints.save(self.vae.state_dict(), folder / "vae.safetensors")


def shape_of(published: checkpoints.Published, file: str) -> Shape:
    """Infer the architecture of a checkpoint from its shapes."""
    classes, width = checkpoints.need(published, "class_emb.weight", file).shape
    vocab = published["head.weight"].shape[0]
    latent = published["word_embed.weight"].shape[1]
    levels = checkpoints.need(published, "lvl_1L", file).flatten().tolist()
    sides = [round(levels.count(k) ** 0.5) for k in range(max(levels) + 1)]
    heads = checkpoints.need(published, "blocks.0.attn.scale_mul_1H11", file).shape[1]
    feed = published["blocks.0.ffn.fc1.weight"].shape[0]
    depth = checkpoints.count(published, "blocks.{}.")
    shared = "blocks.0.ada_gss" in published
    return Shape(width, depth, heads, sides, vocab, latent, classes - 1, feed, shared)


def _files(place: Path, vae: str | None) -> tuple[Path, str]:
    """Return the checkpoints of the transformer and the VQ-VAE. UserError if that is missing."""
    file = place / "var.safetensors" if place.is_dir() else place
    vae = vae or (str(place / "vae.safetensors") if place.is_dir() else None)
    if vae is None:
        raise UserError("policy.var.vae is missing: the VQ-VAE's checkpoint, vae_ch160v4096z32.pth")
    return file, vae


def _of_scales(turns: Sequence[int]) -> Tensor:
    """Return [T]: h w of every token's scale."""
    sizes = torch.tensor(turns)
    return sizes.repeat_interleave(sizes).float()
