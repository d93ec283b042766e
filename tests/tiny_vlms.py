"""Tiny vision-language models with random weights, one a family, as folders that the real classes
load.

``folder(name)`` builds a family once a test session: model, processor and chat template, saved and
to be reloaded by ``AutoModelForImageTextToText`` and ``AutoProcessor``, as a downloaded checkpoint
would be.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIDE = 56  # pixels of a tile, in patches of 14
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 14,
}
PAD = "<|pad|>"
BOS = "<|bos|>"
END = "<|im_end|>"


def template(image: str, video: str = "") -> str:
    """A chat template in the style of ChatML, with a family's own placeholders."""
    part = (
        "{%- if part.type == 'image' -%}"
        + image
        + "{%- elif part.type == 'video' -%}"
        + video
        + "{%- else -%}{{- part.text -}}{%- endif -%}"
    )
    return (
        "{%- for message in messages -%}<|im_start|>{{- message.role -}}:{%- if "
        "message.content is string -%}"
        "{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
        + part
        + "{%- endfor -%}{%- "
        "endif -%}"
        "<|im_end|>{%- endfor -%}{%- if add_generation_prompt "
        "-%}<|im_start|>assistant:{%- endif -%}"
    )


def tokenizer(special: list[str], **names: str) -> Any:
    """One token a byte; ``names`` are special tokens that the processors look up by attribute."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    wanted = dict.fromkeys([PAD, BOS, "<|im_start|>", END, *special])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in wanted])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        extra_special_tokens=names,
        padding_side="left",
        model_max_length=100_000,
    )


def text_config(tok: Any, **more: Any) -> dict[str, Any]:
    size = (len(tok) + 31) // 32 * 32
    ids = {
        "pad_token_id": tok.pad_token_id,
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
    }
    return TEXT | {"vocab_size": size} | ids | more


def ids(tok: Any, **tokens: str) -> dict[str, int]:
    return {name: tok.convert_tokens_to_ids(token) for name, token in tokens.items()}


# --------------------------------------------------------------------------------------------------
# Qwen's families

QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}


def _qwen_template() -> str:
    wrap = "<|vision_start|>{}<|vision_end|>"
    return template(wrap.format("<|image_pad|>"), wrap.format("<|video_pad|>"))


def _qwen2(processor: str, model: str, config: str, vision: dict[str, Any]) -> tuple:
    import transformers as hf

    tok = tokenizer(list(QWEN.values()), **QWEN)
    pixels = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
    parts = hf.Qwen2VLImageProcessor(**pixels), tok, hf.Qwen2VLVideoProcessor(**pixels)
    made = getattr(hf, processor)(*parts, chat_template=_qwen_template())
    settings = getattr(hf, config)(
        text_config=text_config(tok, rope_parameters=ROPE),
        vision_config=vision,
        **ids(tok, **QWEN_IDS),
    )
    return getattr(hf, model)(settings), made


def qwen2_vl() -> tuple:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    return _qwen2("Qwen2VLProcessor", "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", vision)


def qwen2_5_vl() -> tuple:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 112,
    }
    return _qwen2(
        "Qwen2_5_VLProcessor", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", vision
    )


def qwen3_vl() -> tuple:
    import transformers as hf

    tok = tokenizer(list(QWEN.values()), **QWEN)
    image = hf.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=32 * 32 * 9)
    video = hf.Qwen3VLVideoProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 32})
    made = hf.Qwen3VLProcessor(
        image,
        tok,
        video,
        chat_template=_qwen_template().replace(
            "<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>"
        ),
    )
    rope = ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = hf.Qwen3VLConfig(
        text_config=text_config(tok, head_dim=8, rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **ids(tok, **QWEN_IDS),
    )
    return hf.Qwen3VLForConditionalGeneration(config), made


# --------------------------------------------------------------------------------------------------
# LLaVA's kin


def _clip(**more: Any) -> dict[str, Any]:
    return TOWER | {"model_type": "clip_vision_model", "projection_dim": 32} | more


def llava() -> tuple:
    import transformers as hf

    tok = tokenizer(["<image>"], image_token="<image>")
    image = hf.CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    made = hf.LlavaProcessor(
        image,
        tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )
    config = hf.LlavaConfig(
        text_config=text_config(tok, model_type="llama"),
        vision_config=_clip(),
        image_seq_length=16,
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
    )
    return hf.LlavaForConditionalGeneration(config), made


PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


def llava_next() -> tuple:
    import transformers as hf

    tok = tokenizer(["<image>"], image_token="<image>")
    image = hf.LlavaNextImageProcessor(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=PINPOINTS,
    )
    made = hf.LlavaNextProcessor(
        image,
        tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )
    config = hf.LlavaNextConfig(
        text_config=text_config(tok, model_type="llama"),
        vision_config=_clip(),
        image_seq_length=16,
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
    )
    return hf.LlavaNextForConditionalGeneration(config), made


def llava_onevision() -> tuple:
    import transformers as hf

    tok = tokenizer(["<image>", "<video>"], image_token="<image>", video_token="<video>")
    square = {"height": SIDE, "width": SIDE}
    image = hf.LlavaOnevisionImageProcessor(size=square, image_grid_pinpoints=PINPOINTS)
    video = hf.LlavaOnevisionVideoProcessor(size=square)
    made = hf.LlavaOnevisionProcessor(
        image,
        tok,
        video,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template("<image>", "<video>"),
    )
    config = hf.LlavaOnevisionConfig(
        text_config=text_config(tok, model_type="qwen2"),
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        video_token_index=tok.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return hf.LlavaOnevisionForConditionalGeneration(config), made


# -----------------------------------------------------------------------------------------
# Idefics3, SmolVLM, InternVL

IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
IDEFICS += [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
SPLIT = {
    "size": {"longest_edge": 2 * SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "do_image_splitting": True,
}


def _idefics_config(tok: Any) -> dict[str, Any]:
    return {
        "text_config": text_config(tok, model_type="llama"),
        "vision_config": TOWER,
        "scale_factor": 2,
        "image_token_id": tok.convert_tokens_to_ids("<image>"),
    }


def idefics3() -> tuple:
    import transformers as hf

    tok = tokenizer(IDEFICS)
    image = hf.Idefics3ImageProcessor(**SPLIT)
    made = hf.Idefics3Processor(image, tok, image_seq_len=4, chat_template=template("<image>"))
    return hf.Idefics3ForConditionalGeneration(hf.Idefics3Config(**_idefics_config(tok))), made


def smolvlm() -> tuple:
    import transformers as hf

    tok = tokenizer(
        IDEFICS,
        fake_image_token=IDEFICS[0],
        image_token="<image>",
        end_of_utterance_token="<end_of_utterance>",
        global_image_token="<global-img>",
    )
    side = {"longest_edge": SIDE}
    video = hf.SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=8, fps=1)
    made = hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**SPLIT),
        tok,
        video,
        image_seq_len=4,
        chat_template=template("<image>", "<video>"),
    )
    return hf.SmolVLMForConditionalGeneration(hf.SmolVLMConfig(**_idefics_config(tok))), made


def internvl() -> tuple:
    import transformers as hf

    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tok = tokenizer(list(names.values()), **names)
    square = {"height": SIDE, "width": SIDE}
    image = hf.GotOcr2ImageProcessor(
        size=square, min_patches=1, max_patches=4, crop_to_patches=True
    )
    made = hf.InternVLProcessor(
        image,
        tok,
        hf.InternVLVideoProcessor(size=square),
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>", "<video>"),
    )
    config = hf.InternVLConfig(
        text_config=text_config(tok, model_type="qwen2"),
        vision_config=TOWER | {"image_size": [SIDE, SIDE], "patch_size": [14, 14]},
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return hf.InternVLForConditionalGeneration(config), made


# --------------------------------------------------------------------------------------------------
# Google's families


def gemma3() -> tuple:
    import transformers as hf

    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tok = tokenizer(list(names.values()), **names)
    image = hf.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}, image_seq_length=4)
    made = hf.Gemma3Processor(
        image, tok, chat_template=template("<start_of_image>"), image_seq_length=4
    )
    config = hf.Gemma3Config(
        text_config=text_config(
            tok,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        **ids(
            tok,
            boi_token_index="<start_of_image>",
            eoi_token_index="<end_of_image>",
            image_token_index="<image_soft_token>",
        ),
    )
    return hf.Gemma3ForConditionalGeneration(config), made


def paligemma() -> tuple:
    import transformers as hf

    tok = tokenizer(["<image>"], image_token="<image>")
    image = hf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    image.image_seq_length = 16
    made = hf.PaliGemmaProcessor(image, tok)
    config = hf.PaliGemmaConfig(
        text_config=text_config(tok, model_type="gemma", head_dim=8),
        vision_config=TOWER
        | {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": 32,
            "num_image_tokens": 16,
        },
        projection_dim=32,
        image_token_index=tok.convert_tokens_to_ids("<image>"),
    )
    return hf.PaliGemmaForConditionalGeneration(config), made


# --------------------------------------------------------------------------------------------------
# Mllama, Janus


def mllama() -> tuple:
    import transformers as hf

    tok = tokenizer(["<|image|>"], image_token="<|image|>")
    image = hf.MllamaImageProcessor(size={"height": SIDE, "width": SIDE}, max_image_tiles=4)
    made = hf.MllamaProcessor(image, tok, chat_template=template("<|image|>"))
    config = hf.MllamaConfig(
        text_config=text_config(
            tok,
            num_hidden_layers=3,
            cross_attention_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": SIDE,
            "patch_size": 14,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
            "supported_aspect_ratios": [
                [1, 1],
                [1, 2],
                [1, 3],
                [1, 4],
                [2, 1],
                [2, 2],
                [3, 1],
                [4, 1],
            ],
        },
        image_token_index=tok.convert_tokens_to_ids("<|image|>"),
    )
    return hf.MllamaForConditionalGeneration(config), made


def janus() -> tuple:
    import transformers as hf

    names = {
        "image_token": "<image_placeholder>",
        "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tok = tokenizer(list(names.values()), **names)
    image = hf.JanusImageProcessor(size={"height": SIDE, "width": SIDE}, min_size=14)
    made = hf.JanusProcessor(
        image, tok, num_image_tokens=16, chat_template=template("<image_placeholder>")
    )
    config = hf.JanusConfig(
        text_config=text_config(tok, model_type="llama"),
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": 14,
            "mlp_ratio": 2,
            "projection_dim": 32,
            "depth": 2,
            "num_image_tokens": 16,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 32,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 32,
            "num_hidden_layers": 2,
            "image_token_embed_dim": 32,
        },
        image_token_id=tok.convert_tokens_to_ids("<image_placeholder>"),
    )
    return hf.JanusForConditionalGeneration(config), made


BUILDERS: dict[str, Callable[[], tuple]] = {
    build.__name__: build
    for build in (
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        internvl,
        llava,
        llava_next,
        llava_onevision,
        idefics3,
        smolvlm,
        gemma3,
        paligemma,
        mllama,
        janus,
    )
}
VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "smolvlm")
ONE_IMAGE = ("paligemma",)  # exactly one image a prompt


@lru_cache(maxsize=1)
def _session() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tiny-vlms-")


@cache
def folder(name: str) -> Path:
    """The saved folder of a family, built at the first call."""
    path = Path(_session().name) / name
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, processor = BUILDERS[name]()
        _wake(model)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@torch.no_grad()
def _wake(model: torch.nn.Module) -> None:
    """Larger random weights, none zero: with the usual tiny ones, and gates and projections that
    start at zero, an image would hardly change an answer, and a test of its influence would prove
    nothing."""
    for name, p in model.named_parameters():
        if p.dim() >= 2 or not p.any():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() >= 2 and "embed" not in name else 0.5)


def image(width: int, height: int, seed: int = 0) -> Any:
    from PIL import Image

    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def video(frames: int, width: int = 56, height: int = 56, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
