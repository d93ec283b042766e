"""Scores human preference by HPSv3 (Ma et al. 2025, arXiv:2508.03789): Qwen2-VL-7B with a small
head."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from torch import Tensor

from mmrl.core.registry import REWARDS
from mmrl.core.weight_files import read_tensors
from rewards.base.frames import BatchSize, PromptReward
from rewards.base.hf import Precision, Preprocess, to_pil
from rewards.base.qwen_reward import chats, load_network, load_tools, read_instruction
from rewards.base.scale import factor, raw, scaling
from rewards.base.tensors import fetch
from rewards.card import card

TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28  # every picture has this many, or a little fewer
SOURCE = "github.com/MizzenAI/HPSv3"
Named = Literal["mu", "unirl"]
SCALES = {"mu": raw, "unirl": factor(1 / 15)}


@card(
    media="image video",
    needs="text",
    source="MizzenAI/HPSv3, HPSv3.safetensors on Qwen/Qwen2-VL-7B-Instruct",
    licence="MIT (code); weights: see the model card",
    scaling="mu (the published score), unirl = mu / 15",
)
@REWARDS.register("hpsv3")
class HPSv3(PromptReward):
    """Score a picture by HPSv3: the mean predicted by a head on Qwen2-VL at the token
    ``<|Reward|>``.

    The head also predicts the log of a standard deviation, which, as published, is not used. For a
    video, the mean over its frames.

    Args:
        weights: ``HPSv3.safetensors``: a file, or ``hub id/file``.
        base: the base model, for configuration, tokenizer and processor: hub id or folder.
        instruction: the published prompt as a text file (its instruction and what follows it), with
            ``{text_prompt}`` and ``<|Reward|>`` in it; it belongs to the weights and is not part of
            mmrl.
        scale: a published scaling by name, or a factor on mu.
        pixels: of a picture after resizing; as published, the same for all.
        preprocess: ``pil`` as published, ``tensor`` on floats.
        dtype: of the model; bfloat16 as published. The head is float32.

    Raises:
        UserError: a missing or foreign checkpoint, a missing instruction.
    """

    name = "hpsv3"

    def __init__(
        self,
        weights: str = "MizzenAI/HPSv3/HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        instruction: str = "~/.cache/mmrl/hpsv3.txt",
        scale: float | Named = "mu",
        pixels: Annotated[int, Ge(28 * 28)] = PIXELS,
        preprocess: Preprocess = "pil",
        batch_size: BatchSize = 8,
        dtype: Precision = "bfloat16",
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.instruction = read_instruction(instruction, [TOKEN], SOURCE, "hpsv3")
        self.tools, tokens = load_tools(base, [TOKEN], preprocess == "pil")
        self.network = load_network(
            read_tensors(fetch(weights, "HPSv3")), base, tokens, dtype, self.device
        )
        self.scale = scaling(scale, SCALES, "hpsv3")
        self.exact = preprocess == "pil"
        self.size = {"shortest_edge": pixels, "longest_edge": pixels}

    def score(self, pictures: Tensor, texts: list[str]) -> Tensor:
        return self.scale(self.network(self.batch(pictures, texts))[:, 0, 0])

    def batch(self, pictures: Tensor, texts: list[str]) -> dict[str, Tensor]:
        """Prepare [N, 3, H, W] in 0..1 and N texts as model inputs."""
        instructions = [self.instruction.replace("{text_prompt}", text) for text in texts]
        options = {"size": self.size} | ({} if self.exact else {"do_rescale": False})
        inputs = self.tools(
            text=chats(self.tools, "image", instructions),
            images=to_pil(pictures) if self.exact else list(pictures),
            padding=True,
            return_tensors="pt",
            images_kwargs=options,
        )
        batch: dict[str, Tensor] = inputs.to(self.network.device)
        return batch
