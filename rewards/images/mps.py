"""Scores human preference in one dimension by MPS (Zhang et al. 2024, arXiv:2405.14705).

It is a CLIP ViT-H-14 whose picture tokens attend to the words of the prompt that are relevant to a
condition (a list of words).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.weight_files import read_tensors
from rewards.base.frames import PromptReward
from rewards.base.hf import Eyes, Preprocess, load_processor
from rewards.base.scale import factor, raw, scaling
from rewards.base.tensors import fetch
from rewards.base.truncation import of_transformers
from rewards.card import card

CLIP = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
OVERALL = (  # the condition of the published model is part of its input: it must be these words
    "light, color, clarity, tone, style, ambiance, artistry, shape, face, hair, hands, "
    "limbs, structure, instance, "
    "texture, quantity, attributes, position, number, location, word, things."
)
HEAD_WIDTH = 64
Named = Literal["logit", "cosine"]


@card(
    media="image video",
    needs="text",
    source="Kwai-Kolors/MPS, MPS_overall_checkpoint as a state_dict",
    licence="see the source",
    scaling="logit (about 5..20), cosine",
)
@REWARDS.register("mps")
class MPS(PromptReward):
    """Score a picture by MPS: scaled cosine of the prompt and a picture conditioned on it.

    For a video, the mean over its frames. The published file is a pickled module, which is not
    loaded: save its ``state_dict()`` on a machine where you trust it.

    Args:
        weights: that state_dict (``.pt`` or ``.safetensors``): a file, or ``hub id/file``.
        clip: the base CLIP, for configuration, tokenizer and image processor: hub id or folder.
        condition: words that describe the dimension to judge.
        threshold: words of the prompt below this share of the best match are not attended to (0.3
            in the published evaluation, 0.01 in training).
        scale: a published scaling by name, or a factor on the logit.
        preprocess: ``pil`` as published, ``tensor`` on floats.

    Raises:
        UserError: a missing or foreign checkpoint.
    """

    name = "mps"

    def __init__(
        self,
        weights: str = "~/.cache/mmrl/MPS_overall.safetensors",
        clip: str = CLIP,
        condition: str = OVERALL,
        threshold: float = 0.3,
        scale: float | Named = "logit",
        preprocess: Preprocess = "pil",
        **options: Any,
    ):
        super().__init__(**options)
        self.network = load_network(weights, clip).to(self.device)
        self.tokenizer = load_processor("AutoTokenizer", clip)
        self.beginning = of_transformers("mps", self.tokenizer, 77)
        self.eyes = Eyes(clip, preprocess)
        self.condition = condition
        self.threshold = threshold
        self.temperature = float(self.network.model.logit_scale.exp())
        self.scale = scaling(scale, {"logit": raw, "cosine": factor(1 / self.temperature)}, "mps")

    def score(self, pictures: Tensor, texts: list[str]) -> Tensor:
        device = self.network.model.device
        tokens, condition = (self.tokens(part).to(device) for part in (texts, [self.condition]))
        cosines = self.network(tokens, self.eyes(pictures, device), condition, self.threshold)
        return self.scale(self.temperature * cosines)

    def tokens(self, texts: list[str]) -> Tensor:
        """Tokenize N texts -> [N, 77] ids."""
        self.beginning.look(texts)
        ids: Tensor = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
        ).input_ids
        return ids


class Network(nn.Module):
    """Combines CLIP and layers by which picture tokens attend to the prompt; named as in the
    published file."""

    def __init__(self, config: Any, layers: int):
        from transformers import CLIPModel

        super().__init__()
        self.model = CLIPModel(config)
        width = config.projection_dim
        self.pairs = [(Residual(Cross(width)), Residual(Own(width))) for _ in range(layers)]
        blocks = nn.ModuleList(nn.ModuleList(pair) for pair in self.pairs)
        self.cross_model = nn.ModuleDict({"layers": blocks})

    def forward(
        self, tokens: Tensor, pixels: Tensor, condition: Tensor, threshold: float
    ) -> Tensor:
        """Map tokens [N, T], pixels [N, 3, S, S], condition [1, T] -> [N] cosines."""
        words, sentence = self.read(tokens)  # [N, T, E], [N, E]
        condition_states, _ = self.read(condition)  # [1, T, E]
        # [N, T]: best match of a word with any word of the condition
        match = (words @ condition_states.transpose(1, 2)).amax(2)
        attended = match / match.amax(1, keepdim=True) > threshold
        # [N, P + 1, E]
        image_states = self.model.visual_projection(
            self.model.vision_model(pixels).last_hidden_state
        )
        for cross, self_attention in self.pairs:
            image_states = self_attention(cross(image_states, words, attended))
        return torch.cosine_similarity(image_states[:, 0], sentence, dim=-1)

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map [N, T] ids -> projected states of all tokens [N, T, E] and of the end of the text [N,
        E]."""
        outputs = self.model.text_model(input_ids=tokens)
        project = self.model.text_projection
        return project(outputs.last_hidden_state), project(outputs.pooler_output)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, states: Tensor, *rest: Tensor) -> Tensor:
        added: Tensor = self.fn(states, *rest)
        return states + added


class Gated(nn.Module):
    """Multiplies the first half by the SiLU of the second (SwiGLU)."""

    def forward(self, states: Tensor) -> Tensor:
        value, gate = states.chunk(2, dim=-1)
        return nnf.silu(gate) * value


class Cross(nn.Module):
    """Cross-attends to the words with one key and value for all heads, parallel to a gated
    feed-forward layer (as in PaLM)."""

    def __init__(self, width: int, grow: int = 4):
        super().__init__()
        self.norm = Norm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * HEAD_WIDTH, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        inner = grow * width
        self.ff = nn.Sequential(
            nn.Linear(width, 2 * inner, bias=False), Gated(), nn.Linear(inner, width, bias=False)
        )

    def forward(self, states: Tensor, words: Tensor, attended: Tensor) -> Tensor:
        """Map states [N, P, E], words [N, T, E], attended [N, T] bool -> [N, P, E]."""
        states = self.norm(states)
        # [N, heads, P, 64]
        query = self.to_q(states).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
        key, value = (
            part[:, None].expand(-1, query.shape[1], -1, -1)
            for part in self.to_kv(words).chunk(2, dim=-1)
        )
        mask = attended[:, None, None]  # the same words for every head and picture token
        attention = nnf.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        change: Tensor = self.to_out(attention.transpose(1, 2).flatten(2)) + self.ff(states)
        return change


class Own(nn.Module):
    """Self-attends among picture tokens with rotary positions, parallel to a gated feed-forward
    layer."""

    def __init__(self, width: int, grow: int = 4):
        super().__init__()
        self.norm = Norm(width)
        # query, key, value, feed-forward
        self.parts = (width, HEAD_WIDTH, HEAD_WIDTH, 2 * grow * width)
        self.fused_attn_ff_proj = nn.Linear(width, sum(self.parts), bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_out = nn.Sequential(Gated(), nn.Linear(grow * width, width, bias=False))
        self.rotary_emb = Rotary()

    def forward(self, states: Tensor) -> Tensor:
        """Map [N, P, E] -> [N, P, E]."""
        query, key, value, inner = self.fused_attn_ff_proj(self.norm(states)).split(
            self.parts, dim=-1
        )
        # [N, heads, P, 64]
        query = self.rotary_emb.turn(query.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2))
        shape = (-1, query.shape[1], -1, -1)
        key = self.rotary_emb.turn(key)[:, None].expand(shape)
        value = value[:, None].expand(shape)
        attention = nnf.scaled_dot_product_attention(query, key, value)
        change: Tensor = self.attn_out(attention.transpose(1, 2).flatten(2)) + self.ff_out(inner)
        return change


class Rotary(nn.Module):
    """Holds the frequencies of rotary positions, a buffer in the published file."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        powers = torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH
        self.register_buffer("inv_freq", 10000.0**-powers)

    def turn(self, vectors: Tensor) -> Tensor:
        """Rotate [..., P, 64] by each position's angles (Su et al. 2021, RoPE, halves of the vector
        paired)."""
        places = torch.arange(vectors.shape[-2], device=vectors.device, dtype=torch.float32)
        angles = torch.outer(places, self.inv_freq.float())  # [P, 32]
        cos = angles.cos()
        sin = angles.sin()
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Norm(nn.Module):
    """Applies layer norm with a bias of 0, a buffer in the published file."""

    bias: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("bias", torch.zeros(width))

    def forward(self, states: Tensor) -> Tensor:
        return nnf.layer_norm(states, self.weight.shape, self.weight, self.bias)


def load_network(weights: str, clip: str) -> Network:
    """Load the network of a state_dict in float32, frozen, on the CPU."""
    config = load_processor("CLIPConfig", clip)
    file = fetch(weights, "MPS")
    tensors = {
        name: value
        for name, value in read_tensors(file).items()
        if not name.endswith("position_ids")
    }
    layers = {name.split(".")[2] for name in tensors if name.startswith("cross_model.layers.")}
    with torch.random.fork_rng(devices=[]):
        network = Network(config, len(layers))
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(
            f"{file} is not an MPS checkpoint on {clip}: {str(error).splitlines()[1].strip()}"
        ) from error
    return network.float().eval().requires_grad_(False)
