"""Scores whether a text is in the picture by its edit distance from an OCR engine's output (Liu et
al. 2025, Flow-GRPO, arXiv:2505.05470, section 5.1)."""

from __future__ import annotations

import re
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.media import frames, to_uint8
from rewards.base.prompt import field_of
from rewards.card import card, card_with

EVERY = 4  # every n-th frame of a video is read
LINES = 32  # pictures of one pass of the recogniser
QUOTED = re.compile(r'"([^"]*)"')


@card(
    media="image video",
    needs="text",
    named={"field": "text"},
    low=0,
    high=1,
    source="RapidOCR (PaddleOCR's models in ONNX, in its wheel); Flow-GRPO's rule",
    licence="Apache-2.0",
)
@REWARDS.register("ocr")
class OCR:
    """Compare the text read by OCR with the target text: 1 - edit distance / length.

    Spaces and case are ignored. An image that contains the whole target scores 1, whatever else it
    shows; the distance is at most the length. In a video every fourth frame is read, without that
    exception, and the frames with a score above 0 are averaged (0 if there is none).

    Flow-GRPO read with PaddleOCR; this engine runs its models of version 4 on the CPU. A failure of
    the engine does not score 0: the exception goes to the trainer, which leaves the sample out.

    Args:
        field: in ``text``, the target is the part in double quotes; any other field holds the
            target itself.
        threads: of the engine.
        side: smaller pictures are upscaled to this many pixels on the shorter side before
            detection; less is faster and misses small text.
        detect: False where a picture is one line of text: the recogniser alone reads it, in
            batches, at a fraction of the time.

    Raises:
        UserError: RapidOCR is not installed; a prompt without a target.
    """

    def __init__(
        self,
        field: str = "text",
        threads: int = -1,
        side: Annotated[int, Ge(32)] = 736,
        detect: bool = True,
    ):
        try:
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            raise UserError(
                "reward 'ocr' needs an OCR engine: pip install 'multimodal-rl[ocr]'"
            ) from error
        batch = {} if detect else {"rec_batch_num": LINES}
        self.engine = RapidOCR(intra_op_num_threads=threads, det_limit_side_len=side, **batch)
        self.field = field
        self.detect = detect
        self.card = card_with(type(self), {"field": field})

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32, in 0..1."""
        pictures, broken = seen_frames(media, "ocr")
        targets = [target_of(prompt, self.field) for prompt in prompts]
        score = of_image if media.ndim == 4 else of_video
        read = self.read if self.detect else self.read_lines
        texts = read(pictures.reshape(-1, *pictures.shape[2:]))
        rows = [texts[i : i + pictures.shape[1]] for i in range(0, len(texts), pictures.shape[1])]
        scores = [score(row, target) for row, target in zip(rows, targets, strict=True)]
        return torch.tensor(scores, dtype=torch.float32).masked_fill(broken, torch.nan)

    def read(self, pictures: Any) -> list[str]:
        """Read uint8 [N, H, W, 3] -> N texts: all lines with any confidence, in reading order,
        joined."""
        texts = []
        for picture in pictures:
            # expects BGR
            lines, _ = self.engine(picture[..., ::-1].copy(), use_cls=False, text_score=0.0)
            texts.append("".join(text for _, text, sure in lines or [] if float(sure) > 0))
        return texts

    def read_lines(self, pictures: Any) -> list[str]:
        """Read uint8 [N, H, W, 3], each one line of text."""
        lines, _ = self.engine.text_rec([picture[..., ::-1].copy() for picture in pictures])
        return [text for text, *_ in lines]


def of_image(texts: list[str], target: str) -> float:
    return closeness(texts[0], target, within=True)


def of_video(texts: list[str], target: str) -> float:
    scores = [closeness(text, target, within=False) for text in texts]
    legible = [score for score in scores if score > 0]
    return sum(legible) / len(legible) if legible else 0.0


def seen_frames(media: Tensor, reward: str) -> tuple[Any, Tensor]:
    """Prepare images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 for OCR: uint8 [B, frames, H,
    W, 3], every EVERY-th frame, and [B] whether a sample is not finite."""
    stack = frames(media, reward)
    broken = ~stack.isfinite().flatten(1).all(1).cpu()
    whole = stack.nan_to_num(0.0, 0.0, 0.0)[:, ::EVERY]
    return to_uint8(whole).permute(0, 1, 3, 4, 2).numpy(), broken


def target_of(prompt: Prompt, field: str) -> str:
    """Return the text that should be in the picture."""
    text: str = field_of(prompt, field, "ocr")
    if field != "text":
        return text
    quoted = QUOTED.search(text)
    if not quoted or not plain(quoted[1]):
        raise UserError(
            f"reward 'ocr': no text in double quotes in the prompt {text[:80]!r}; write: "
            f'a sign that says "OPEN", or '
            "name the field that holds the target with `field`"
        )
    return quoted[1]


def closeness(read: str, target: str, within: bool) -> float:
    """Return 1 - distance / length of the target; ``within``: it may be a part of what was read."""
    from rapidfuzz.distance import Levenshtein

    read = plain(read)
    target = plain(target)
    distance = (
        0 if within and target in read else min(Levenshtein.distance(read, target), len(target))
    )
    return 1 - distance / len(target)


def plain(text: str) -> str:
    return text.replace(" ", "").lower()
