"""Defines ``grounding`` and ``referring``, which compare boxes by matched IoU, without labels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers import boxes as geometry
from rewards.answers.notations import Shape
from rewards.answers.reading import final, worst
from rewards.answers.shapes import boxes
from rewards.answers.verifiable import (
    Verdict,
    Verifiable,
    in_answer,
    in_truth,
    matched,
    tagged,
    true_boxes,
)
from rewards.card import card

Threshold = Annotated[float, Ge(0), Le(1)]
OVERLAPS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "iou": geometry.iou,
    "giou": geometry.bounded_giou,
    "inclusive": geometry.inclusive_iou,
}


def write_boxes(
    rows: Any, prompt: Prompt, labels: Any = None, confidence: float | None = None
) -> str:
    """Write boxes in the space of the ground truths as the policy should answer with them."""
    entries = []
    for i, row in enumerate(rows):
        entry: dict[str, Any] = {"bbox_2d": in_answer(row, prompt)}
        if labels is not None:
            entry["label"] = labels[i]
        if confidence is not None:
            entry["confidence"] = confidence
        entries.append(entry)
    return tagged(json.dumps(entries))


def spoiled(prompt: Prompt, labels: Any = None, confidence: float | None = None) -> dict[str, str]:
    """Derive wrong answers from the right boxes: among many others, inverted, one missing, none."""
    right = true_boxes(prompt)
    if not len(right):
        return {"a box where none is": write_boxes([[0, 0, 1, 1]], prompt, ["thing"], confidence)}
    low = right[:, :2].min(0)
    high = right[:, 2:].max(0)
    rng = np.random.default_rng(0)
    corner = low + rng.random((20, 2)) * (high - low)
    spam = np.concatenate([corner, corner + (0.05 + 0.5 * rng.random((20, 2))) * (high - low)], 1)
    names = (
        list(labels) + [labels[i % len(labels)] for i in range(20)] if labels is not None else None
    )
    turned = right[:, [2, 3, 0, 1]]
    return {
        "spam of 20 boxes": write_boxes(np.concatenate([right, spam]), prompt, names, confidence),
        "inverted": write_boxes(turned, prompt, labels, confidence),
        "no boxes": tagged("[]"),
    }


@REWARDS.register("grounding")
@card(
    media="text",
    needs="boxes",
    low=0,
    high=1,
    source="Visual-RFT (arXiv:2503.01785), IoU reward",
    licence="Apache-2.0",
)
class Grounding(Verifiable):
    """Match the boxes of the answer by IoU, labels ignored: 1 for exactly the right ones.

    Predicted and right boxes are paired one to one so that the sum of IoU is largest (Hungarian
    algorithm; Visual-RFT pairs greedily); reward = sum / max(number predicted, number right). Extra
    boxes never pay: some subset of the right size always scores as much or more. Both empty: 1; one
    empty: 0.

    Args:
        overlap: "iou"; "giou": (1 + GIoU) / 2, which has a slope even if boxes do not overlap.
        threshold: None: continuous; t: a pair counts 1 from this overlap on and 0 below.
    """

    spatial = True

    def __init__(self, overlap: Literal["iou", "giou"] = "iou", threshold: Threshold | None = None):
        self.overlap = OVERLAPS[overlap]
        self.threshold = threshold

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = true_boxes(prompt)

        def scores(rows: np.ndarray) -> np.ndarray:
            values: np.ndarray = self.overlap(rows, right) * (geometry.areas(rows) > 0)[:, None]
            return values if self.threshold is None else (values >= self.threshold).astype(float)

        return matched(boxes(text), prompt, len(right), scores)

    def ground_truth(self, prompt: Prompt) -> str:
        return write_boxes(true_boxes(prompt), prompt)

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        return spoiled(prompt)


@REWARDS.register("referring")
@card(
    media="text",
    needs="boxes",
    low=0,
    high=1,
    source="VLM-R1 (arXiv:2504.07615), REC reward",
    licence="Apache-2.0",
)
class Referring(Grounding):
    """Compare the one box of the answer with the right one by IoU; several boxes are no answer.

    Args:
        overlap, threshold: as in ``grounding``.
        form: "exact"; "vlm_r1" as published, for comparison: the first ``[int, int, int, int]`` of
            the answer, whatever follows it, and a pixel convention that gives equal boxes 0 if they
            are one pixel wide or relative.
    """

    def __init__(
        self,
        overlap: Literal["iou", "giou"] = "iou",
        threshold: Threshold | None = None,
        form: Literal["exact", "vlm_r1"] = "exact",
    ):
        super().__init__(overlap, threshold)
        self.published = form == "vlm_r1"
        if self.published:
            self.overlap = OVERLAPS["inclusive"]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        if not self.published:
            parsed = boxes(text)
            if parsed.value is not None and len(parsed.value) > 1:
                return Verdict(0.0, worst(parsed.status, "wrong_count"))
            return super().judge(text, prompt)
        first = re.search(r"\[(\d+),\s*(\d+),\s*(\d+),\s*(\d+)\]", final(text).value)
        if not first:
            return Verdict(0.0, "unparseable")
        rows, states = in_truth([Shape(tuple(float(v) for v in first.groups()))], prompt)
        score = float(self.overlap(rows, true_boxes(prompt)[:1]).max(initial=0.0))
        return Verdict(
            score if self.threshold is None else float(score >= self.threshold), states[0]
        )
