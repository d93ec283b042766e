"""Builds token models on the meta device, in their published sizes.

Sizes: Chen et al. 2025 (Janus-Pro, table 1), Nie et al. 2025 (LLaDA, table 1), Yang et al. 2025
(MMaDA), Patil et al. 2024 (aMUSEd), Sun et al. 2024 (LlamaGen, table 1), Tian et al. 2024 (VAR),
Zhu et al. 2025 (InternVL3), checkpoints named in the defaults of transformers' configurations, and
the config files of their weights (LLaDA2.0: in its authors' repository dFactory).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import pretrained


def _janus(width: int, layers: int, heads: int, feed: int) -> nn.Module:
    from transformers import JanusConfig, JanusForConditionalGeneration

    from mmrl.zoo.models.unified.net import UnifiedNet

    text = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": feed,
        "vocab_size": 102400,
    }
    config = JanusConfig(
        text_config=text,
        tie_word_embeddings=False,
        vision_config={"projection_dim": width},
        vq_config={"projection_dim": width, "image_token_embed_dim": width},
    )
    return UnifiedNet(JanusForConditionalGeneration(config))


def _llada(vocab: int) -> nn.Module:
    """Build LLaDA's layers: those of a Llama, with bidirectional attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    net: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            intermediate_size=12288,
            vocab_size=vocab,
        )
    )
    return net


def _fuse(attention: Any) -> None:
    """Fuse queries, keys and values into one layer, as in LLaDA2's code."""
    names = ("q_proj", "k_proj", "v_proj")
    sizes = [getattr(attention, name).out_features for name in names]
    width = attention.q_proj.in_features
    attention.query_key_value = nn.Linear(width, sum(sizes), bias=False)
    waiting: list[Tensor] = []

    def query(x: Tensor) -> Tensor:
        first: Tensor
        first, *waiting[:] = attention.query_key_value(x).split(sizes, -1)
        return first

    for name in names:
        delattr(attention, name)
    attention.q_proj = query
    attention.k_proj = attention.v_proj = lambda _: waiting.pop(0)


def _llada2(layers: int, width: int, heads: int, feed: int, expert: int) -> nn.Module:
    """Build LLaDA2's layers: those of a GLM-4.5, with the same expert routing, except for the fused
    projections."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=157184,
        hidden_size=width,
        intermediate_size=feed,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        use_qk_norm=True,
        moe_intermediate_size=expert,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=1,
    )
    net: nn.Module = Glm4MoeForCausalLM(config)
    for layer in net.get_submodule("model.layers").children():
        _fuse(layer.self_attn)
    return net


def _internvl() -> nn.Module:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    text = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 151674,
    }
    config = InternVLConfig(text_config=text, tie_word_embeddings=False)
    net: nn.Module = InternVLForConditionalGeneration(config)
    return net


def _qwen3_5_moe() -> nn.Module:
    """Build Qwen3.5-35B-A3B, with transformers' default sizes, except for the output width of its
    vision tower."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    config = Qwen3_5MoeConfig(vision_config={"out_hidden_size": 2048})
    net: nn.Module = Qwen3_5MoeForConditionalGeneration(config)
    return net


def _amused() -> nn.Module:
    from diffusers import UVit2DModel

    net: nn.Module = UVit2DModel(sample_size=16)
    return net


def _llamagen(**sizes: int) -> nn.Module:
    from mmrl.zoo.models.image_tokens.llamagen_gpt import LlamaGenGPT, Shape

    return LlamaGenGPT(Shape(**sizes))


def _var(depth: int) -> nn.Module:
    from mmrl.zoo.models.image_tokens.var_net import Shape, VARNet
    from mmrl.zoo.models.image_tokens.var_vq import VARVQ

    return VARNet(Shape(width=64 * depth, depth=depth, heads=depth), VARVQ().quantize)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "deepseek-community/Janus-Pro-1B": partial(_janus, 2048, 24, 16, 5632),
    "deepseek-community/Janus-Pro-7B": partial(_janus, 4096, 30, 32, 11008),
    "GSAI-ML/LLaDA-8B-Instruct": partial(_llada, 126464),
    "GSAI-ML/LLaDA-8B-Base": partial(_llada, 126464),
    "inclusionAI/LLaDA2.0-mini": partial(_llada2, 20, 2048, 16, 5120, 512),
    "Gen-Verse/MMaDA-8B-Base": partial(_llada, 134656),
    "OpenGVLab/InternVL3-8B-hf": _internvl,
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5_moe,
    "amused/amused-256": _amused,
    "hub:peizesun/llamagen_c2i/c2i_L_384.pt": partial(
        _llamagen, dim=1024, layers=24, heads=16, grid=24
    ),
    "hub:peizesun/llamagen_t2i/t2i_XL_stage1_256.pt": partial(
        _llamagen, dim=1280, layers=36, heads=20, classes=0, condition=120
    ),
    "hub:FoundationVision/var/var_d16.pth": partial(_var, 16),
}


def on_meta(path: str) -> nn.Module | None:
    """Build a known model without memory for its weights; None if unknown."""
    make = MODELS.get(path)
    if make is None:
        return None
    with torch.device("meta"):
        return make()


def of_folder(folder: Path, entry: Any) -> nn.Module | None:
    """Build the network of a local transformers folder from its config file; None if its config is
    of another library or a newer version."""
    import transformers

    from mmrl.policies.vlm.policy import VLM
    from mmrl.zoo.models.image_tokens.janus import Janus
    from mmrl.zoo.models.masked.masked_lm import MaskedLM

    is_janus = isinstance(entry, type) and issubclass(entry, Janus)
    is_masked = isinstance(entry, type) and issubclass(entry, MaskedLM)
    is_vlm = isinstance(entry, type) and issubclass(entry, VLM)
    if not (is_janus or is_vlm or is_masked) or not isfile(folder / "config.json"):
        return None
    try:
        config = pretrained.load_processor(transformers.AutoConfig, folder, local_files_only=True)
        auto: Any = transformers.AutoModelForImageTextToText
        auto = transformers.AutoModelForMaskedLM if is_masked else auto
        with torch.device("meta"):
            net: nn.Module = pretrained.from_config(auto, config)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return entry.wrapper(net) if is_janus else net
