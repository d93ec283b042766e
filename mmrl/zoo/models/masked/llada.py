"""LLaDA's network (Nie et al. 2025), under the names of its published weights: a bidirectional
Llama. MMaDA's is the same with more tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mmrl.core.errors import UserError

# what the published configs say, and this network is
FIXED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "block_group_size": 1,
    "rope": True,
    "alibi": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
}


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a network, by the names of LLaDA's config.json."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlp_hidden_size: int
    vocabulary: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    include_bias: bool = False
    include_qkv_bias: bool = False
    weight_tying: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], place: str) -> Sizes:
        """Read a config.json; UserError where it describes another network."""
        if experts := config.get("num_experts"):
            raise UserError(
                f"{place}: its config.json says num_experts: {experts}; of LLaDA's networks the "
                f"dense ones are read, LLaDA-MoE is not; take GSAI-ML/LLaDA-8B-Instruct, or give a "
                f"function that loads it: code: FILE.py:FUNCTION"
            )
        unlike = [key for key, value in FIXED.items() if config.get(key, value) != value]
        if unlike:
            raise UserError(
                f"{place}: its config.json says {unlike[0]}: {config[unlike[0]]!r}; of LLaDA's "
                f"networks those with {FIXED[unlike[0]]!r} are read"
            )
        try:
            width, heads = int(config["d_model"]), int(config["n_heads"])
            return cls(
                d_model=width,
                n_layers=int(config["n_layers"]),
                n_heads=heads,
                n_kv_heads=int(config.get("n_kv_heads") or heads),
                mlp_hidden_size=int(
                    config.get("mlp_hidden_size") or config.get("mlp_ratio", 4) * width
                ),
                vocabulary=int(config.get("embedding_size") or config["vocab_size"]),
                **{key: config[key] for key in OPTIONAL if config.get(key) is not None},
            )
        except KeyError as error:
            raise UserError(f"{place}: its config.json has no {error}, as LLaDA's has") from error


OPTIONAL = ("rope_theta", "rms_norm_eps", "include_bias", "include_qkv_bias", "weight_tying")


class RMSNorm(nn.Module):
    """Divides by the root mean square, in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Block(nn.Module):
    """Attends to all places, then a gated layer."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.n_heads
        width, few = sizes.d_model, sizes.d_model // sizes.n_heads * sizes.n_kv_heads
        bias, of_keys = sizes.include_bias, sizes.include_bias or sizes.include_qkv_bias
        self.attn_norm = RMSNorm(width, sizes.rms_norm_eps)
        self.q_proj = nn.Linear(width, width, of_keys)
        self.k_proj = nn.Linear(width, few, of_keys)
        self.v_proj = nn.Linear(width, few, of_keys)
        self.attn_out = nn.Linear(width, width, bias)
        self.ff_norm = RMSNorm(width, sizes.rms_norm_eps)
        self.ff_proj = nn.Linear(width, sizes.mlp_hidden_size, bias)
        self.up_proj = nn.Linear(width, sizes.mlp_hidden_size, bias)
        self.ff_out = nn.Linear(sizes.mlp_hidden_size, width, bias)

    def forward(self, x: Tensor, angle: Tensor, visible: Tensor | None) -> Tensor:
        """x [B, L, D]; angle [L, H] of each pair of dimensions; visible [B, 1, 1, L] bool."""
        z = self.attn_norm(x)
        size = x.shape[-1] // self.heads
        q, k, v = (
            layer(z).unflatten(-1, (-1, size)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(
            turned(q, angle), turned(k, angle), v, visible, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        z = self.ff_norm(x)
        added: Tensor = x + self.ff_out(functional.silu(self.ff_proj(z)) * self.up_proj(z))
        return added


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs (i, i + H / 2) of x [B, h, L, H] by their angles [L, H], in float32."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * angle.cos() + torch.cat([-second, first], -1) * angle.sin()).to(x.dtype)


class Network(nn.Module):
    """Computes logits [B, L, V] of tokens [B, L]; position i is about token i."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(sizes.vocabulary, sizes.d_model),
            "blocks": nn.ModuleList(Block(sizes) for _ in range(sizes.n_layers)),
            "ln_f": RMSNorm(sizes.d_model, sizes.rms_norm_eps),
        }
        if not sizes.weight_tying:
            parts["ff_out"] = nn.Linear(sizes.d_model, sizes.vocabulary, sizes.include_bias)
        self.transformer = nn.ModuleDict(parts)
        self.gradient_checkpointing = False

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [B, L]: the places that are seen; None: all."""
        parts: Any = self.transformer
        visible = None if mask is None else mask.bool()[:, None, None, :]
        angle = self._angles(ids.shape[1], ids.device)
        x = parts["wte"](ids)
        again = self.gradient_checkpointing and torch.is_grad_enabled()
        for block in parts["blocks"]:
            x = (
                checkpoint(block, x, angle, visible, use_reentrant=False)
                if again
                else block(x, angle, visible)
            )
        x = parts["ln_f"](x)
        if self.sizes.weight_tying:
            return functional.linear(x, parts["wte"].weight)
        logits: Tensor = parts["ff_out"](x)
        return logits

    def _angles(self, length: int, device: torch.device) -> Tensor:
        size = self.sizes.d_model // self.sizes.n_heads
        exponent = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        place = torch.arange(length, device=device, dtype=torch.float32)
        return torch.outer(place, 1 / self.sizes.rope_theta**exponent).repeat(1, 2)
