"""Builds VAR's multi-scale residual VQ-VAE (Tian et al. 2024, arXiv 2404.02905), under its
published names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.image_tokens.checkpoints import Published, count, need
from mmrl.zoo.models.image_tokens.vq_parts import Attention, Down, Residual, Up, nearest, norm

SHARED = 4  # convolutions that all scales share


class _Level(nn.Module):
    """Stacks the residual blocks of one resolution, attention after each at the lowest."""

    def __init__(self, inside: int, outside: int, depth: int, attention: bool):
        super().__init__()
        self.block = nn.ModuleList(
            Residual(outside if i else inside, outside) for i in range(depth)
        )
        self.attn = nn.ModuleList(
            Attention(outside, fused=True) for _ in range(depth if attention else 0)
        )
        self.downsample: nn.Module = nn.Identity()  # replaced where there is a next level
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            x = self.attn[i](x) if len(self.attn) else x
        x = self.upsample(self.downsample(x))
        return x


class _Middle(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.block_1 = Residual(channels, channels)
        self.block_2 = Residual(channels, channels)
        self.attn_1 = Attention(channels, fused=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return output


class _Encoder(nn.Module):
    def __init__(self, ch: int, mult: Sequence[int], depth: int, z: int):
        super().__init__()
        widths = [ch, *(ch * m for m in mult)]
        last = len(mult) - 1
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.down = nn.ModuleList(
            _Level(widths[i], widths[i + 1], depth, i == last) for i in range(len(mult))
        )
        for i, level in enumerate(self.down[:-1]):
            level.downsample = Down(widths[i + 1])
        self.mid = _Middle(widths[-1])
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], z, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        output: Tensor = self.conv_out(F.silu(self.norm_out(self.mid(x))))
        return output


class _Decoder(nn.Module):
    """Decodes latents; levels are numbered by resolution, the highest first, and run in reverse."""

    def __init__(self, ch: int, mult: Sequence[int], depth: int, z: int):
        super().__init__()
        widths = [ch * m for m in mult]
        last = len(mult) - 1
        self.conv_in = nn.Conv2d(z, widths[-1], 3, padding=1)
        self.mid = _Middle(widths[-1])
        inside = [*widths[1:], widths[-1]]
        self.up = nn.ModuleList(
            _Level(inside[i], widths[i], depth + 1, i == last) for i in range(len(mult))
        )
        for i, level in enumerate(self.up):
            if i:
                level.upsample = Up(widths[i])
        self.norm_out = norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        output: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return output


class _Shared(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.qresi_ls = nn.ModuleList(nn.Conv2d(dim, dim, 3, padding=1) for _ in range(SHARED))

    def forward(self, h: Tensor, which: int) -> Tensor:
        output: Tensor = self.qresi_ls[which](h)
        return output


class Quantizer(nn.Module):
    """Represents images as residuals at growing scales: f = sum over k of
    phi_k(up(codebook[ids_k]))."""

    ema_vocab_hit_SV: Tensor  # a statistic of its training

    def __init__(self, vocab: int, dim: int, sides: Sequence[int]):
        super().__init__()
        self.sides = tuple(sides)
        self.embedding = nn.Embedding(vocab, dim)
        self.quant_resi = _Shared(dim)
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(sides), vocab))

    def blank(self, rows: int) -> Tensor:
        """Return zeros [B, D, p, p] of the last scale."""
        weight = self.embedding.weight
        return weight.new_zeros(rows, weight.shape[1], self.sides[-1], self.sides[-1])

    def add(self, f: Tensor, ids: Tensor, k: int) -> Tensor:
        """Add the residual of scale k, of ids [B, p_k^2], to f [B, D, p, p]."""
        h: Tensor = self.embedding(ids).transpose(1, 2).unflatten(2, (self.sides[k], self.sides[k]))
        if k < len(self.sides) - 1:
            h = F.interpolate(h, size=f.shape[2:], mode="bicubic")
        smooth: Tensor = self.quant_resi(h, shared(len(self.sides))[k])
        return f + 0.5 * h + 0.5 * smooth

    def at_scale(self, f: Tensor, k: int) -> Tensor:
        """Shrink f to the input of scale k, [B, p_k^2, D]."""
        return (
            F.interpolate(f, size=(self.sides[k], self.sides[k]), mode="area")
            .flatten(2)
            .transpose(1, 2)
        )

    def split(self, ids: Tensor) -> Iterator[Tensor]:
        """Split ids [B, T] by scale."""
        return iter(ids.split([side * side for side in self.sides], 1))


class VARVQ(nn.Module):
    """Maps images [B, 3, H, W] in -1..1 to ids [B, T] of all scales and back."""

    def __init__(
        self,
        sides: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
        vocab: int = 4096,
        z: int = 32,
        ch: int = 160,
        mult: Sequence[int] = (1, 1, 2, 2, 4),
        depth: int = 2,
    ):
        super().__init__()
        self.factor = 2 ** (len(mult) - 1)  # pixels along a side for one latent
        self.encoder = _Encoder(ch, mult, depth, z)
        self.decoder = _Decoder(ch, mult, depth, z)
        self.quantize = Quantizer(vocab, z, sides)
        self.quant_conv = nn.Conv2d(z, z, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(z, z, 3, padding=1)

    def encode(self, images: Tensor) -> Tensor:
        """Return ids [B, T]: at every scale the entries nearest to the remaining residual."""
        quantize = self.quantize
        rest = self.quant_conv(self.encoder(images))
        f = torch.zeros_like(rest)
        ids = []
        for k in range(len(quantize.sides)):
            z = quantize.at_scale(rest - f, k)
            ids.append(nearest(z.flatten(0, 1), quantize.embedding.weight).view(z.shape[:2]))
            f = quantize.add(f, ids[-1], k)
        return torch.cat(ids, 1)

    def decode(self, ids: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in -1..1 of ids [B, T]."""
        f = self.quantize.blank(len(ids))
        for k, part in enumerate(self.quantize.split(ids)):
            f = self.quantize.add(f, part, k)
        images: Tensor = self.decoder(self.post_quant_conv(f))
        return images.clamp(-1, 1)

    @classmethod
    def like(cls, weights: Published, sides: Sequence[int], file: str) -> VARVQ:
        """Build the architecture that fits a checkpoint, inferred from its shapes, with the
        transformer's scales."""
        ch = need(weights, "encoder.conv_in.weight", file).shape[0]
        levels = count(weights, "encoder.down.{}.")
        depth = count(weights, "encoder.down.0.block.{}.")
        mult = [
            weights[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] // ch for i in range(levels)
        ]
        vocab, z = need(weights, "quantize.embedding.weight", file).shape
        return cls(sides, vocab, z, ch, mult, depth)


def shared(scales: int) -> list[int]:
    """Return which of the shared convolutions each scale uses: the nearest tick. In float64, since
    ties are decided by rounding and checkpoints were trained with this rounding."""
    ticks = np.linspace(1 / 3 / SHARED, 1 - 1 / 3 / SHARED, SHARED)
    return [int(np.argmin(np.abs(ticks - k / max(scales - 1, 1)))) for k in range(scales)]
