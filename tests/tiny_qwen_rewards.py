"""Tiny checkpoints of HPSv3 and VideoAlign, with the names that their published code saves."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rewards.video_align import TOKENS
from tests import tiny_vlms


def save_base(folder: Path, tokens: list[str]) -> dict[str, torch.Tensor]:
    """A tiny Qwen2-VL as a folder, and its tensors once the embeddings have grown by the tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, tools = tiny_vlms.qwen2_vl()
        for value in model.parameters():
            if value.ndim > 1:
                value.data.mul_(3.0)
        model.save_pretrained(folder)
        tools.save_pretrained(folder)
        tools.tokenizer.add_tokens(tokens, special_tokens=True)
        model.resize_token_embeddings(len(tools.tokenizer), mean_resizing=False)
    torch.save(model.state_dict(), folder / "with_tokens.pt")
    return model.state_dict()


def save_hpsv3(folder: Path) -> dict:
    """Options of an ``hpsv3`` reward."""
    tensors = {
        k: v.contiguous()
        for k, v in save_base(folder / "base", ["<|Reward|>"]).items()
        if "lm_head" not in k
    }
    generator = torch.Generator().manual_seed(1)
    for place, (rows, columns) in {0: (12, 32), 3: (8, 12), 5: (2, 8)}.items():
        tensors[f"rm_head.{place}.weight"] = (
            torch.randn(rows, columns, generator=generator) / columns**0.5
        )
        tensors[f"rm_head.{place}.bias"] = torch.randn(rows, generator=generator)
    save_file(tensors, folder / "HPSv3.safetensors")
    (folder / "instruction.txt").write_text("rate {text_prompt}: <|Reward|> now")
    return {
        "weights": str(folder / "HPSv3.safetensors"),
        "base": str(folder / "base"),
        "dtype": "float32",
        "instruction": str(folder / "instruction.txt"),
        "pixels": 28 * 28 * 4,
        "device": "cpu",
    }


def save_video_align(folder: Path) -> dict:
    """Options of a ``video_align`` reward: names of an older transformers under peft's wrapper."""
    tensors = save_base(folder / "base", TOKENS)
    generator = torch.Generator().manual_seed(2)
    wrapped = {}
    for name, value in tensors.items():
        old = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        wrapped[f"base_model.model.{old}"] = value.clone()
    adapted = "base_model.model.model.layers.0.self_attn.q_proj"
    down = torch.randn(2, 32, generator=generator)
    up = torch.randn(32, 2, generator=generator)
    whole = wrapped.pop(f"{adapted}.weight")
    wrapped[f"{adapted}.base_layer.weight"] = whole - 2.0 * up @ down  # alpha 4, rank 2
    wrapped |= {f"{adapted}.lora_A.default.weight": down, f"{adapted}.lora_B.default.weight": up}
    head = torch.randn(3, 32, generator=generator)
    wrapped["base_model.model.rm_head.weight"] = head
    torch.save(head, folder / "head.pt")
    (folder / "checkpoint-20").mkdir()
    torch.save(wrapped, folder / "checkpoint-20" / "model.pth")
    norm = {
        "VQ_mean": 0.5,
        "VQ_std": 2.0,
        "MQ_mean": 1.0,
        "MQ_std": 3.0,
        "TA_mean": -1.0,
        "TA_std": 0.5,
    }
    config = {
        "model_config": {"model_name_or_path": str(folder / "base")},
        "inference_config": norm,
        "data_config": {"num_frames": 4, "max_frame_pixels": 28 * 28 * 4},
        "peft_lora_config": {"lora_r": 2, "lora_alpha": 4, "use_rslora": False},
    }
    (folder / "model_config.json").write_text(json.dumps(config))
    (folder / "instruction.txt").write_text("judge {text_prompt}: " + " ".join(TOKENS))
    return {
        "path": str(folder),
        "base": str(folder / "base"),
        "instruction": str(folder / "instruction.txt"),
        "device": "cpu",
        "dtype": "float32",
    }
