"""Builds Qwen2.5-VL models with random weights for speed measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "fullatt_block_indexes": [1],
        },
        "rope": [2, 3, 3],
    },
    # vLLM attends on a CPU with heads of 32 and more
    "tiny32": {
        "text": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 320,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "fullatt_block_indexes": [1],
        },
        "rope": [4, 6, 6],
    },
    # sizes at which matrix products dominate
    "small": {
        "text": {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "fullatt_block_indexes": [1],
        },
        "rope": [8, 12, 12],
    },
    "3b": {
        "text": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        "vision": {
            "depth": 32,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": 3420,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "rope": [16, 24, 24],
    },
}


def build(size: str, folder: Path, **text: Any) -> Path:
    """Build and save a Qwen2.5-VL of random weights with a tokenizer of one token per byte;
    ``text`` changes options of its language model."""
    import torch
    import transformers as hf

    from tests.fixtures import tiny_vlms

    chosen = SIZES[size]
    tok = tiny_vlms.tokenizer(list(tiny_vlms.QWEN.values()), **tiny_vlms.QWEN)
    pixels = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 4096}
    parts = hf.Qwen2VLImageProcessor(**pixels), tok, hf.Qwen2VLVideoProcessor(**pixels)
    processor = hf.Qwen2_5_VLProcessor(*parts, chat_template=tiny_vlms.template("qwen2_vl"))
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": chosen["rope"]}
    special = {
        f"{name}_token_id": getattr(tok, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    config = hf.Qwen2_5_VLConfig(
        text_config=chosen["text"]
        | text
        | {"rope_parameters": rope, "tie_word_embeddings": True}
        | special,
        vision_config=chosen["vision"]
        | {"out_hidden_size": chosen["text"]["hidden_size"], "window_size": 112},
        tie_word_embeddings=True,
        **tiny_vlms.ids(tok, **tiny_vlms.QWEN_IDS),
    )
    torch.manual_seed(0)
    with torch.device("cuda" if size == "3b" and torch.cuda.is_available() else "cpu"):
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    model.to(torch.bfloat16 if size == "3b" else torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
