"""Defines ``detection`` and ``confidence``: boxes with labels and confidences against all objects
of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Gt, Le

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers import boxes as geometry
from rewards.answers.coords import Unscorable
from rewards.answers.grounding import spoiled, write_boxes
from rewards.answers.reading import Status, normal, worst
from rewards.answers.shapes import boxes
from rewards.answers.verifiable import Verdict, Verifiable, count_status, in_truth, true_boxes
from rewards.card import card

Threshold = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class Scene:
    """Holds N predicted and M ground-truth boxes. ``iou`` [N, M] is 0 between different labels,
    ``bare`` [N, M] is not."""

    iou: np.ndarray
    bare: np.ndarray
    confidence: np.ndarray  # [N] in 0..1; 1 where the model gave none
    predicted: list[str]  # N labels, normalised; "" if the dataset has none
    right: list[str]  # M labels
    status: Status = "ok"


def true_labels(prompt: Prompt, count: int) -> list[str] | None:
    """Return the ground-truth labels as written; None if the dataset has none."""
    value = prompt.get("labels")
    if value is None:
        return None
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise Unscorable(f'"labels" is {value!r}; expected {count}, one for each of the "boxes"')
    return [str(label) for label in value]


def see(text: str, prompt: Prompt) -> Scene | None:
    """Read the scene of an answer; None if it is unparseable. A prediction without a label matches
    no labelled box."""
    right = true_boxes(prompt)
    parsed = boxes(text)
    labels = true_labels(prompt, len(right))
    if parsed.value is None:
        return None
    rows, states = in_truth(parsed.value, prompt)
    predicted_labels = [normal(shape.label or "") if labels else "" for shape in parsed.value]
    true_names = [normal(label) for label in labels] if labels else [""] * len(right)
    same = np.array([[a == b for b in true_names] for a in predicted_labels], dtype=bool).reshape(
        len(predicted_labels), len(true_names)
    )
    confidence = np.array(
        [1.0 if s.confidence is None else s.confidence for s in parsed.value], dtype=np.float64
    )
    confidence = np.nan_to_num(confidence, nan=0.0, posinf=0.0, neginf=0.0)
    over = bool(((confidence < 0) | (confidence > 1)).any())
    status = count_status(
        worst(parsed.status, *states, "out_of_range" if over else "ok"), len(rows), len(right)
    )
    bare = (
        geometry.iou(rows, right) if len(rows) and len(right) else np.zeros((len(rows), len(right)))
    )
    return Scene(bare * same, bare, confidence.clip(0, 1), predicted_labels, true_names, status)


def matched(scene: Scene, threshold: float) -> float:
    """Compute the largest sum of IoU over one-to-one pairs of equal labels and IoU >= threshold, by
    max(N, M)."""
    scores = np.where(scene.iou >= threshold, scene.iou, 0.0)
    return float(sum(scores[pair] for pair in geometry.assign(scores)) / max(scores.shape))


def precision(scene: Scene, threshold: float) -> float:
    return geometry.hits(scene.iou, threshold) / len(scene.predicted)


def recall(scene: Scene, threshold: float) -> float:
    return geometry.hits(scene.iou, threshold) / len(scene.right)


def f1(scene: Scene, threshold: float) -> float:
    count = len(scene.predicted) + len(scene.right)
    return 2 * geometry.hits(scene.iou, threshold) / count


def mean_ap(scene: Scene, threshold: float) -> float:
    """Average over COCO's ten thresholds the mean AP of the labels, times min(1, M / N).

    Labels are those of the image and those predicted: a label that is not in the image has AP 0 (in
        COCO it costs nothing). The factor (VLM-R1's odLength) penalises spam of low confidence,
        which AP itself hardly does.
    """
    return float(np.mean([ap(scene, float(t)) for t in geometry.THRESHOLDS]))


def ap(scene: Scene, threshold: float) -> float:
    """Compute ``mean_ap`` at one IoU threshold."""
    predicted = np.array(scene.predicted)
    right = np.array(scene.right)
    names = sorted({*scene.predicted, *scene.right})
    parts = []
    for name in names:
        rows = np.flatnonzero(predicted == name)
        columns = np.flatnonzero(right == name)
        comparable = len(rows) and len(columns)
        scores = scene.iou[np.ix_(rows, columns)]
        parts.append(
            geometry.average_precision(scores, scene.confidence[rows], threshold)
            if comparable
            else 0.0
        )
    return float(np.mean(parts)) * min(1.0, len(right) / len(predicted))


def visual_rft(scene: Scene, threshold: float) -> float:
    """Score as Visual-RFT does: by falling confidence each prediction takes the best free box above
    IoU 0.5; labels are ignored."""
    order = np.argsort(-scene.confidence, kind="mergesort").tolist()
    pairs = geometry.take_in_order(scene.bare, order, threshold)
    return float(sum(scene.bare[pair] for pair in pairs) / max(scene.bare.shape))


def vlm_r1(scene: Scene, threshold: float) -> float:
    """Compute VLM-R1's weighted sum: 0.7 of the IoU of greedy pairs, 0.3 of completeness, also
    without labels."""
    pairs = geometry.take_largest(scene.bare, threshold)
    quality = sum(scene.iou[pair] for pair in pairs) / scene.bare.shape[1]
    missed, false = (1 - len(pairs) / count for count in reversed(scene.bare.shape))
    return float(0.7 * quality + 0.3 * (1 - (missed + false) / 2))


MEASURES: dict[str, Callable[[Scene, float], float]] = {
    "matched": matched,
    "f1": f1,
    "precision": precision,
    "recall": recall,
    "map": mean_ap,
    "ap": ap,
    "visual_rft": visual_rft,
    "vlm_r1": vlm_r1,
}
DEFAULTS = {"matched": 1e-9}  # IoU at which a pair counts, if not 0.5


class OfBoxes(Verifiable):
    """Base of rewards of answers that list boxes with labels and confidences."""

    def ground_truth(self, prompt: Prompt) -> str:
        right = true_boxes(prompt)
        return write_boxes(right, prompt, true_labels(prompt, len(right)), confidence=1.0)


@REWARDS.register("detection")
@card(
    media="text",
    needs="boxes",
    low=0,
    high=1,
    source="Visual-RFT (arXiv:2503.01785), VLM-R1 (arXiv:2504.07615)",
)
class Detection(OfBoxes):
    """Score labelled boxes: matched IoU, F1, mAP and the published forms. Both empty: 1; one empty:
    0.

    ``labels`` of the prompt has one label for each of ``boxes``; without it labels are ignored. A
    box with a wrong label earns nothing and counts as a false positive.

    Args:
        measure: "matched": sum of IoU over the best one-to-one pairs / max(number predicted, number
            right); "f1"; "map": COCO's mean AP, also over predicted labels that are not in the
            image, times min(1, right / predicted); "ap": the same at one threshold; "precision" and
            "recall": for monitoring, as training on either alone can be gamed; "visual_rft",
            "vlm_r1": as published (the second pays 0.3 for right places with wrong labels).
        threshold: IoU from which a pair counts; None: 0.5, and any overlap for "matched".
    """

    spatial = True

    def __init__(
        self,
        measure: Literal[
            "matched", "f1", "precision", "recall", "map", "ap", "visual_rft", "vlm_r1"
        ] = "matched",
        threshold: Threshold | None = None,
    ):
        self.measure = MEASURES[measure]
        self.threshold = DEFAULTS.get(measure, 0.5) if threshold is None else threshold

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        scene = see(text, prompt)
        if scene is None:
            return Verdict(0.0, "unparseable")
        if not scene.iou.size:
            return Verdict(float(scene.iou.shape[0] == scene.iou.shape[1]), scene.status)
        return Verdict(float(np.clip(self.measure(scene, self.threshold), 0, 1)), scene.status)

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_boxes(prompt)
        labels = true_labels(prompt, len(right))
        answers = spoiled(prompt, labels, confidence=1.0)
        if labels:
            answers["wrong labels"] = write_boxes(
                right, prompt, ["not " + label for label in labels], confidence=1.0
            )
        return answers


@REWARDS.register("confidence")
@card(
    media="text",
    needs="boxes",
    low=-1,
    high=1,
    source="after Visual-RFT (arXiv:2503.01785), confidence reward",
)
class Confidence(OfBoxes):
    """Score boxes with confidences properly: a wrong box of confidence 0 gains nothing.

    A box that matches (one to one, equal label, IoU >= threshold) with confidence c earns 1 - (1 -
    c)^2, any other loses c^2; the sum is divided by max(number predicted, number right). A box that
    is right with probability p earns 2pc - c^2 on average, the most with c = p. Unparseable answers
    have -1. No confidence given is confidence 1.

    The published reward pays c for a match and 1 - c otherwise: one wrong box with confidence 0
    scores 1 there.

    Args:
        threshold: IoU from which a box is right.
        form: "proper"; "visual_rft" as published (0..1, any overlap is a match), for comparison.
    """

    spatial = True

    def __init__(
        self, threshold: Threshold = 0.5, form: Literal["proper", "visual_rft"] = "proper"
    ):
        self.threshold = threshold
        self.published = form == "visual_rft"

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        scene = see(text, prompt)
        if scene is None:
            return Verdict(0.0 if self.published else -1.0, "unparseable")
        if not scene.iou.size and len(scene.predicted) == len(scene.right):
            return Verdict(1.0, scene.status)
        score = self._published(scene) if self.published else self._proper(scene)
        return Verdict(float(score), scene.status)

    def _proper(self, scene: Scene) -> float:
        # sure ones first
        scores = np.where(scene.iou >= self.threshold, 1.0 + scene.confidence[:, None], 0.0)
        right = np.zeros(len(scene.predicted), dtype=bool)
        right[[i for i, _ in geometry.assign(scores)]] = True
        c = scene.confidence
        return float(np.where(right, 1 - (1 - c) ** 2, -(c**2)).sum() / max(scene.iou.shape))

    def _published(self, scene: Scene) -> float:
        if not scene.predicted:
            return 0.0
        order = np.argsort(-scene.confidence, kind="mergesort").tolist()
        right = {i for i, _ in geometry.take_in_order(scene.bare, order, 0.5)}
        c = scene.confidence
        return float(np.mean([c[i] if i in right else 1 - c[i] for i in range(len(c))]))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_boxes(prompt)
        labels = true_labels(prompt, len(right))
        answers = spoiled(prompt, labels, confidence=1.0)
        if len(right):
            answers["zero confidence"] = write_boxes(right, prompt, labels, confidence=0.0)
            away = right[:1] + np.tile(10 * (right[:, 2:].max(0) - right[:, :2].min(0)), 2)
            answers["a wrong box of zero confidence"] = write_boxes(
                away, prompt, labels, confidence=0.0
            )
        return answers
