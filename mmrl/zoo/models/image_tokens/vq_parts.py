"""Holds the convolutional parts that the VQ autoencoders of LlamaGen and VAR share (Esser et al.
2021, VQGAN)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class Residual(nn.Module):
    """Adds two 3x3 convolutions to a shortcut."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.norm1 = norm(inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        shortcut: Tensor = self.nin_shortcut(x)
        change: Tensor = self.conv2(F.silu(self.norm2(h)))
        return shortcut + change


class Attention(nn.Module):
    """Attends with one head over all places; ``fused`` keeps the three projections in one
    convolution, as VAR does."""

    def __init__(self, channels: int, fused: bool):
        super().__init__()
        self.norm = norm(channels)
        self.fused = fused
        if fused:
            self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        else:
            self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(x)
        parts = self.qkv(h).chunk(3, 1) if self.fused else (self.q(h), self.k(h), self.v(h))
        q, k, v = (part.flatten(2).transpose(1, 2) for part in parts)  # [B, H W, C]
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        change: Tensor = self.proj_out(attended.transpose(1, 2).reshape(x.shape))
        return x + change


class Down(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        half: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return half


class Up(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        double: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return double


def nearest(z: Tensor, codebook: Tensor) -> Tensor:
    """Return the index [n] of the codebook's entry [V, D] nearest to each z [n, D]."""
    return torch.cdist(z[None], codebook[None])[0].argmin(-1)
