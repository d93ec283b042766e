"""Scores whether every target text is in the picture, and at its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.card import card, card_with
from rewards.images.ocr import OCR, closeness, plain, seen_frames

Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the picture
Line = tuple[str, Box]


@REWARDS.register("ocr_layout")
@card(
    media="image video",
    needs="layout",
    named={"field": "layout"},
    low=0,
    high=1,
    source="RapidOCR (PaddleOCR's models in ONNX, in its wheel); the rule is mmrl's",
    licence="Apache-2.0",
)
class OCRLayout(OCR):
    """Compare the lines read in a picture with target texts at given places.

    A prompt lists them under ``layout``: ``[{"text": "OPEN", "box": [left, top, right, bottom]}]``,
    shares of the picture from 0 to 1; without ``box`` a text may be anywhere. Lines are assigned to
    texts one to one with the largest sum; a text scores (1 - edit distance / length) * ((1 - place)
    + place * IoU), 0 without a line, and the reward is the mean. For a video, the mean over every
    fourth frame.

    Args:
        field: of a prompt, with the texts.
        place: weight of the place: 0 compares texts only, 1 multiplies by the IoU of boxes.
        threads: of the engine.
        side: see ``ocr``.
    """

    def __init__(
        self,
        field: str = "layout",
        place: Annotated[float, Ge(0), Le(1)] = 0.5,
        threads: int = -1,
        side: Annotated[int, Ge(32)] = 736,
    ):
        super().__init__(field, threads, side)
        self.place = place
        self.card = card_with(type(self), {"field": field})

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32, in 0..1."""
        pictures, broken = seen_frames(media, "ocr_layout")
        layouts = [wanted_of(prompt, self.field) for prompt in prompts]
        scores = [
            sum(layout_score(self.lines(picture), texts, self.place) for picture in row) / len(row)
            for row, texts in zip(pictures, layouts, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32).masked_fill(broken, torch.nan)

    def lines(self, picture: Any) -> list[Line]:
        """Read uint8 [H, W, 3] -> lines with any confidence, and their boxes."""
        height, width = picture.shape[:2]
        results, _ = self.engine(picture[..., ::-1].copy(), use_cls=False, text_score=0.0)
        lines = []
        for corners, text, sure in results or []:
            if float(sure) > 0:
                xs = [float(x) / width for x, _ in corners]
                ys = [float(y) / height for _, y in corners]
                lines.append((str(text), (min(xs), min(ys), max(xs), max(ys))))
        return lines


def wanted_of(prompt: Prompt, field: str) -> list[tuple[str, Box | None]]:
    """Return the texts of a prompt with their boxes. UserError if they are malformed."""
    listed = prompt.get(field)
    texts: list[tuple[str, Box | None]] = []
    for entry in listed if isinstance(listed, (list, tuple)) else ():
        text = entry.get("text") if isinstance(entry, Mapping) else None
        box = entry.get("box") if isinstance(entry, Mapping) else None
        if not isinstance(text, str) or not plain(text) or not (box is None or is_box(box)):
            texts = []
            break
        left, top, right, bottom = map(float, box or (0, 0, 1, 1))
        texts.append((text, None if box is None else (left, top, right, bottom)))
    if not texts:
        raise UserError(
            f"reward 'ocr_layout' needs under {field!r} of every prompt a list of "
            f'{{"text": "OPEN", "box": [left, top, right, bottom]}} with shares from 0 to 1; '
            f"{str(prompt.get('text', ''))[:60]!r} has {str(listed)[:80]}"
        )
    return texts


def is_box(box: Any) -> bool:
    """Tell whether four numbers are a box relative to the picture."""
    if not isinstance(box, Sequence) or isinstance(box, str) or len(box) != 4:
        return False
    if not all(isinstance(x, (int, float)) and 0 <= x <= 1 for x in box):
        return False
    return bool(box[0] < box[2] and box[1] < box[3])


def layout_score(
    lines: Sequence[Line], wanted: Sequence[tuple[str, Box | None]], place: float
) -> float:
    """Return the mean score of the target texts, each line assigned once."""
    from scipy.optimize import linear_sum_assignment

    table = [
        [
            closeness(read, text, within=False)
            * (1 - place + place * (1.0 if box is None else overlap(at, box)))
            for read, at in lines
        ]
        for text, box in wanted
    ]
    if not lines:
        return 0.0
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(sum(table[i][j] for i, j in zip(rows, columns, strict=True)) / len(wanted))


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = sum((b[2] - b[0]) * (b[3] - b[1]) for b in (one, other))
    return shared / (areas - shared) if areas > shared else 0.0
