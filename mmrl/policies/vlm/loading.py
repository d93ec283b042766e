"""Loads a vision-language model and its processor from a folder or hub id; UserError for what
cannot be loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmrl.core import pretrained
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.policies.lora import ALL_LINEAR, Lora, ending_like
from mmrl.policies.quantization import Quantization, quantize
from mmrl.policies.vlm.families import modules_of
from mmrl.policies.vlm.vision import pack_vision_attention

# transformers lists audio models along with vision models
HEARING = ("phi4_multimodal",)
# models that also speak; only their thinkers write text
SPEAKING = {
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}


def load_model(place: str, dtype: str, attention: str, quantization: Quantization | None) -> Any:
    """Load the model at ``place``, with the weights' ``dtype`` and an attention of transformers or
    xformers.

    Raises UserError for a model that cannot be loaded, or not trained here.
    """
    config = _config_of(place)
    hf = pretrained.load_model(
        _kind_of(config, place),
        place,
        dtype=dtype if dtype == "auto" else torch_dtype(dtype),
        attn_implementation=_by_part(config, _plain(attention)),
    )
    if hf.config.is_encoder_decoder:
        raise UserError(
            f"policy.vlm.path {place}: {hf.config.model_type} has an encoder for the "
            f"question and a decoder "
            "for the answer; vlm is for models that go on with one sequence, such as "
            "Qwen2.5-VL or LLaVA"
        )
    if not hf.can_generate():
        raise UserError(
            f"policy.vlm.path {place}: {hf.config.model_type} writes no text; vlm is for models "
            "that answer in text, such as Qwen2.5-VL or LLaVA"
        )
    quantize(hf, quantization)
    if attention in ("sdpa", "xformers"):
        pack_vision_attention(hf, xformers=attention == "xformers")
    return hf


def auto_class(place: str) -> str:
    """Name the class of transformers that loads the model at ``place``."""
    name: str = _kind_of(_config_of(place), place).__name__
    return name


def load_processor(place: str) -> Any:
    """Load the processor at ``place``, with its tokenizer and chat template."""
    from transformers import AutoProcessor

    return pretrained.load_processor(AutoProcessor, place)


def text_adapters(hf: nn.Module, lora: Lora | int | None) -> Lora | None:
    """Return the adapter options with their targets resolved: linear layers of the language model
    by default or for all-linear, and those that match a regular expression."""
    if isinstance(lora, int):
        lora = Lora(lora)
    if lora is None or not (lora.targets is None or isinstance(lora.targets, str)):
        return lora
    language = modules_of(hf, "language")
    if lora.targets in (None, ALL_LINEAR):
        return Lora(lora.rank, lora.alpha, ending_like(language, ALL_LINEAR, "language model"))
    linears = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear)]
    targets = ending_like(linears, lora.targets, type(hf).__name__)
    return Lora(lora.rank, lora.alpha, targets)


def _config_of(place: str) -> dict[str, Any]:
    """Return the configuration file at ``place``; empty where there is none, which loading the
    model reports."""
    from transformers import PreTrainedConfig

    try:
        written: dict[str, Any] = PreTrainedConfig.get_config_dict(place)[0]
    except (OSError, ValueError):
        return {}
    return written


def _kind_of(config: dict[str, Any], place: str) -> Any:
    """Return the class of transformers that loads the model at ``place``."""
    from transformers import AutoModelForImageTextToText

    kind = config.get("model_type")
    if kind in SPEAKING:
        raise UserError(
            f"policy.vlm.path {place}: {kind} also speaks; save its thinker by itself, with "
            f"transformers' {SPEAKING[kind]}, and give that folder"
        )
    if kind not in HEARING:
        return AutoModelForImageTextToText
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM


def _by_part(config: dict[str, Any], attention: str) -> dict[str, str]:
    """Return the attention of every part by its name, "" for the whole. Audio towers keep their
    class's own: Gemma 4's has no other."""
    parts = [name for name in config if name.endswith("_config") and name != "audio_config"]
    return dict.fromkeys(["", *parts], attention)


def _plain(attention: str) -> str:
    """Return transformers' name of the attention for unpacked passes. Raises UserError if xformers
    is chosen and cannot run."""
    if attention != "xformers":
        return attention
    if not xformers_runs():
        raise UserError(
            "policy option attention = xformers needs a CUDA device and the package xformers, "
            "built for this torch and CUDA (pip install xformers; python -m xformers.info shows "
            "which kernels load); use sdpa"
        )
    return "sdpa"


def xformers_runs() -> bool:
    """Tell whether xformers' attention runs here: a build for another CUDA imports without it."""
    try:
        from xformers.ops import memory_efficient_attention

        x = torch.zeros(1, 8, 1, 32, device="cuda", dtype=torch.bfloat16)
        memory_efficient_attention(x, x, x)
    except (ImportError, NotImplementedError, RuntimeError, AssertionError):
        return False  # torch without CUDA raises an AssertionError
    return True
