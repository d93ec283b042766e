"""Builds a tiny Qwen2.5-VL of the real classes, with its processor, and runs the supervised warm-up
that precedes any reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmrl.worlds.asking import vocabulary
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import PATCH, VLMRecipe

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKS = tuple("[](){}<>/,.:;?!'\"_-")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_vlm(folder: Path, recipe: VLMRecipe, progress: Progress) -> None:
    """Make, warm up and save a folder that AutoProcessor and AutoModelForImageTextToText load."""
    from mmrl.worlds.warmup import teach_answers, teach_eyes

    reads = processor()
    model = new_model(recipe, reads.tokenizer)
    teach_eyes(model, reads, recipe, progress)
    teach_answers(model, reads, recipe, progress)
    with quiet_libraries():
        model.eval().save_pretrained(folder)
        reads.save_pretrained(folder)


def tokenizer() -> Any:
    """Make a tokenizer with one token for every word, number and mark of the world; upper case is
    read as lower; the rest is unknown."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = dict.fromkeys(["<unk>", *MARKS, "user", "assistant", "system", *vocabulary()])
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    marks = pre_tokenizers.Split(Regex(r"[^\w\s]|_"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def processor() -> Any:
    """Make a Qwen2_5_VLProcessor that leaves pictures of this world at their size: one token per
    patch, one time step per frame."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    shape = {"patch_size": PATCH, "merge_size": 1, "temporal_patch_size": 1}
    size = {"shortest_edge": 16 * PATCH**2, "longest_edge": 64 * PATCH**2}
    clip = {"shortest_edge": 16 * PATCH**2, "longest_edge": 512 * PATCH**2}
    image = Qwen2VLImageProcessor(size=size, **shape)
    video = Qwen2VLVideoProcessor(
        size=clip, do_sample_frames=False, cap_pixels_per_frame=False, **shape
    )
    return Qwen2_5_VLProcessor(image, tokenizer(), video, chat_template=TEMPLATE)


def _vision(recipe: VLMRecipe) -> dict[str, Any]:
    """Return the options of the vision tower: full attention, one token per patch."""
    return {
        "depth": recipe.vision_layers,
        "hidden_size": recipe.width,
        "num_heads": recipe.heads,
        "intermediate_size": 2 * recipe.width,
        "out_hidden_size": recipe.width,
        "patch_size": PATCH,
        "spatial_merge_size": 1,
        "temporal_patch_size": 1,
        "window_size": 16 * PATCH,
        "tokens_per_second": 1,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10.0},
        "fullatt_block_indexes": list(range(recipe.vision_layers)),
    }


def _text(recipe: VLMRecipe, words: Any) -> dict[str, Any]:
    width = recipe.width
    heads = recipe.heads
    third = width // heads // 2
    section = [third - 2 * (third * 3 // 8), third * 3 // 8, third * 3 // 8]
    return {
        "vocab_size": -(-len(words) // 8) * 8,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": section},
    }


def new_model(recipe: VLMRecipe, words: Any) -> Any:
    """Make a Qwen2_5_VLForConditionalGeneration with random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {
        name: words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image_token_id", "image_pad"),
            ("video_token_id", "video_pad"),
            ("vision_start_token_id", "vision_start"),
            ("vision_end_token_id", "vision_end"),
        )
    }
    config = Qwen2_5_VLConfig(
        text_config=_text(recipe, words),
        vision_config=_vision(recipe),
        initializer_range=0.08,
        tie_word_embeddings=True,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    return model
