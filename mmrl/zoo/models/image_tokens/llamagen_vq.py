"""Builds LlamaGen's image tokenizer (Sun et al. 2024, arXiv 2406.06525), under its published names:
VQ-16, VQ-8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.image_tokens.checkpoints import Published, count, need
from mmrl.zoo.models.image_tokens.vq_parts import Attention, Down, Residual, Up, nearest, norm


class _Level(nn.Module):
    """Stacks the residual blocks of one resolution, attention after each at the lowest, and the
    resampling to the next."""

    def __init__(
        self, inside: int, outside: int, depth: int, attention: bool, move: type[nn.Module] | None
    ):
        super().__init__()
        self.res = nn.ModuleList(Residual(outside if i else inside, outside) for i in range(depth))
        self.attn = nn.ModuleList(
            Attention(outside, fused=False) for _ in range(depth if attention else 0)
        )
        name = "downsample" if move is Down else "upsample"
        if move is not None:
            self.add_module(name, move(outside))
        self.move = name if move is not None else None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            x = self.attn[i](x) if len(self.attn) else x
        return getattr(self, self.move)(x) if self.move else x


def _middle(channels: int) -> nn.ModuleList:
    return nn.ModuleList(
        [
            Residual(channels, channels),
            Attention(channels, fused=False),
            Residual(channels, channels),
        ]
    )


class _Encoder(nn.Module):
    def __init__(self, ch: int, mult: Sequence[int], depth: int, z: int):
        super().__init__()
        widths = [ch, *(ch * m for m in mult)]
        last = len(mult) - 1
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            _Level(widths[i], widths[i + 1], depth, i == last, None if i == last else Down)
            for i in range(len(mult))
        )
        self.mid = _middle(widths[-1])
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], z, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for part in (*self.conv_blocks, *self.mid):
            x = part(x)
        output: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return output


class _Decoder(nn.Module):
    def __init__(self, ch: int, mult: Sequence[int], depth: int, z: int):
        super().__init__()
        widths = [ch * m for m in reversed(mult)]
        self.conv_in = nn.Conv2d(z, widths[0], 3, padding=1)
        self.mid = _middle(widths[0])
        self.conv_blocks = nn.ModuleList(
            _Level(
                widths[max(i - 1, 0)], width, depth + 1, i == 0, None if i == len(mult) - 1 else Up
            )
            for i, width in enumerate(widths)
        )
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for part in (*self.mid, *self.conv_blocks):
            x = part(x)
        output: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return output


class _Quantizer(nn.Module):
    def __init__(self, vocab: int, dim: int, used: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        if used:
            self.register_buffer("codebook_used", torch.zeros(used))  # a statistic of its training

    def codebook(self) -> Tensor:
        """Return the codebook [V, D], its entries of length 1."""
        return F.normalize(self.embedding.weight, dim=-1)


class LlamaGenVQ(nn.Module):
    """Maps images [B, 3, H, W] in -1..1 to ids and back; a latent is ``factor`` pixels wide."""

    def __init__(
        self,
        vocab: int = 16384,
        dim: int = 8,
        z: int = 256,
        ch: int = 128,
        mult: Sequence[int] = (1, 1, 2, 2, 4),
        depth: int = 2,
        used: int = 65536,
    ):
        super().__init__()
        self.factor = 2 ** (len(mult) - 1)
        self.encoder = _Encoder(ch, mult, depth, z)
        self.decoder = _Decoder(ch, mult, depth, z)
        self.quantize = _Quantizer(vocab, dim, used)
        self.quant_conv = nn.Conv2d(z, dim, 1)
        self.post_quant_conv = nn.Conv2d(dim, z, 1)

    def encode(self, images: Tensor) -> Tensor:
        """Return ids [B, T], row by row."""
        z = self.quant_conv(self.encoder(images))
        flat = F.normalize(z.permute(0, 2, 3, 1).flatten(0, 2), dim=-1)
        return nearest(flat, self.quantize.codebook()).view(len(images), -1)

    def decode(self, ids: Tensor) -> Tensor:
        """Return images [B, 3, H, W] of the ids [B, T] of a square."""
        side = round(ids.shape[1] ** 0.5)
        z = self.quantize.codebook()[ids].transpose(1, 2).unflatten(2, (side, side))
        images: Tensor = self.decoder(self.post_quant_conv(z))
        return images

    @classmethod
    def like(cls, weights: Published, file: str) -> LlamaGenVQ:
        """Build the architecture that fits a checkpoint, inferred from its shapes."""
        ch = need(weights, "encoder.conv_in.weight", file).shape[0]
        levels = count(weights, "encoder.conv_blocks.{}.")
        mult = [
            weights[f"encoder.conv_blocks.{i}.res.0.conv1.weight"].shape[0] // ch
            for i in range(levels)
        ]
        vocab, dim = need(weights, "quantize.embedding.weight", file).shape
        used = (
            weights["quantize.codebook_used"].numel() if "quantize.codebook_used" in weights else 0
        )
        z = weights["post_quant_conv.weight"].shape[0]
        depth = count(weights, "encoder.conv_blocks.0.res.{}.")
        return cls(vocab, dim, z, ch, mult, depth, used)
