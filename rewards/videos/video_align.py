"""Scores by VideoAlign's VideoReward (Liu et al. 2025, arXiv:2501.13918): visual quality, motion
quality and text alignment of a video by Qwen2-VL, each read at its own token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from mmrl.core.weight_files import read_tensors
from rewards.base.hf import Precision
from rewards.base.media import frames, to_uint8
from rewards.base.precision import own_precision
from rewards.base.prompt import texts_of
from rewards.base.qwen_reward import chats, load_network, load_tools, read_instruction
from rewards.card import card

PARTS = ("VQ", "MQ", "TA")
TOKENS = [f"<|{part}_reward|>" for part in PARTS]
LEAST_PIXELS = 128 * 28 * 28  # of a frame, unless the checkpoint's limit is lower
SOURCE = "github.com/KwaiVGI/VideoAlign"


@card(
    media="video",
    needs="text",
    source="KwaiVGI/VideoReward (checkpoint folder) on Qwen/Qwen2-VL-2B-Instruct",
    licence="see the source",
    scaling="(part - mean) / std with the checkpoint's model_config.json; overall is the sum of "
    "the three",
)
@REWARDS.register("video_align")
class VideoAlign:
    """Score a video by VideoReward: visual quality, motion quality, text alignment or their sum.

    An image counts as a video of two equal frames. Frames are sampled evenly at the rate of the
    checkpoint's ``data_config``, an even number: ``fps`` is the frame rate of the videos.

    Args:
        path: the checkpoint's folder: ``model_config.json`` and ``checkpoint-*/model.pth`` (or
            ``model.safetensors``).
        fps: frames a second of the videos to judge, the model's own: Wan 16, HunyuanVideo 24,
            CogVideoX 8.
        base: the base Qwen2-VL, for configuration, tokenizer and processor; None: as named in the
            checkpoint.
        instruction: the published prompt as a text file, with ``{text_prompt}`` and the tokens
            ``<|VQ_reward|>``, ``<|MQ_reward|>``, ``<|TA_reward|>``; it belongs to the weights and
            is not part of mmrl.
        part: which score.
        normalize: as published, by mean and deviation; else the raw head.
        batch_size: videos in one forward pass.
        device: ``auto`` is CUDA if there is one.
        dtype: of the model; bfloat16 as published. The head is float32.

    Raises:
        UserError: a missing or foreign checkpoint, a missing instruction.
    """

    def __init__(
        self,
        path: str,
        fps: Annotated[float, Gt(0)],
        base: str | None = None,
        instruction: str = "~/.cache/mmrl/video_align.txt",
        part: Literal["overall", "VQ", "MQ", "TA"] = "overall",
        normalize: bool = True,
        batch_size: Annotated[int, Ge(1)] = 4,
        device: str = "auto",
        dtype: Precision = "bfloat16",
    ):
        file, config = find(path)
        base = base or config["model_config"]["model_name_or_path"]
        self.instruction = read_instruction(instruction, TOKENS, SOURCE, "video_align")
        self.tools, tokens = load_tools(base, TOKENS, exact=False)
        # as published: the limit per frame applies
        self.tools.video_processor.cap_pixels_per_frame = False
        alpha = alpha_of(config.get("peft_lora_config", {}))
        self.network = load_network(read_tensors(file), base, tokens, dtype, device, alpha)
        self.data = config.get("data_config", {})
        self.parts = PARTS if part == "overall" else (part,)
        self.norm = config.get("inference_config") if normalize else None
        self.fps = fps
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] or images [B, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        stack = frames(media, "video_align")
        texts = texts_of(prompts, "video_align")
        broken = ~stack.isfinite().flatten(1).all(1).cpu()
        stack = stack[:, self.chosen(stack.shape[1])].nan_to_num(0.0, 0.0, 0.0)
        scores = []
        with own_precision(media.device.type):
            for start in range(0, len(stack), self.batch_size):
                part = slice(start, start + self.batch_size)
                scores.append(self.read(stack[part], texts[part]).cpu())
        return torch.cat(scores).masked_fill(broken, torch.nan)

    def chosen(self, count: int) -> Tensor:
        """Return the indices of the frames used, of ``count``."""
        frames = self.data.get("num_frames") or count / self.fps * (self.data.get("fps") or 2.0)
        even = max(2, 2 * round(min(frames, count) / 2))
        return torch.linspace(0, count - 1, even).round().long()

    def read(self, videos: Tensor, texts: list[str]) -> Tensor:
        """Score [N, F, 3, H, W] and N texts -> [N]."""
        # [N, 3]: each part at its own token
        scores = self.network(self.batch(videos, texts)).diagonal(dim1=1, dim2=2)
        total = torch.zeros(len(scores), device=scores.device)
        for place, name in enumerate(PARTS):
            if name in self.parts:
                mean, std = (
                    (self.norm[f"{name}_{k}"] for k in ("mean", "std")) if self.norm else (0.0, 1.0)
                )
                total = total + (scores[:, place] - mean) / std
        return total

    def batch(self, videos: Tensor, texts: list[str]) -> dict[str, Tensor]:
        instructions = [self.instruction.replace("{text_prompt}", text) for text in texts]
        most = self.data.get("max_frame_pixels") or 448 * 448
        size = {"shortest_edge": min(LEAST_PIXELS, most), "longest_edge": most}
        inputs = self.tools(
            text=chats(self.tools, "video", instructions),
            videos=list(to_uint8(videos)),
            padding=True,
            return_tensors="pt",
            videos_kwargs={"size": size, "do_sample_frames": False},
        )
        batch: dict[str, Tensor] = inputs.to(self.network.device)
        return batch


def find(path: str) -> tuple[Path, dict[str, Any]]:
    """Find the weights file (of the last step if there are several) and the configuration of a
    checkpoint folder."""
    folder = Path(path).expanduser()
    config = folder / "model_config.json"
    if not config.is_file():
        raise UserError(
            f"reward 'video_align': no {config}; give the folder of the checkpoint, "
            f"{SOURCE} says where"
        )
    steps = sorted(folder.glob("checkpoint-*"), key=lambda place: int(place.name.split("-")[1]))
    for place in (*reversed(steps), folder):
        for name in ("model.safetensors", "model.pth"):
            if (place / name).is_file():
                return place / name, json.loads(config.read_text())
    raise UserError(
        f"reward 'video_align': {folder} holds no checkpoint-*/model.pth and no model.safetensors"
    )


def alpha_of(lora: dict[str, Any]) -> float:
    """Return the adapters' alpha, scaled for rank-stabilised ones, which divide by the root of the
    rank."""
    alpha = float(lora.get("lora_alpha", 1.0))
    return alpha * lora["lora_r"] ** 0.5 if lora.get("use_rslora") else alpha
