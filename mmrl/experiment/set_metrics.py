"""Computes metrics of a held-out set that are not a mean over samples: COCO's mean average
precision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from mmrl.core.types import Prompt


def mean_ap(texts: Sequence[str], prompts: Sequence[Prompt]) -> dict[str, float]:
    """Compute ``mAP`` (IoU 0.5 to 0.95) and ``mAP50`` by pycocotools over all answers, if every
    prompt has boxes and labels.

    A predicted box without a label gets the label of the prompt if all its right boxes share one. A
    box without a confidence has 1. Empty for other prompts. Answers in a coordinate space that
    cannot be converted are left out.
    """
    if not prompts or not all(
        p.get("boxes") and len(p.get("labels") or ()) == len(p["boxes"]) for p in prompts
    ):
        return {}
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    names = sorted({str(name) for prompt in prompts for name in prompt["labels"]})
    truth = COCO()
    detections = []
    truth.dataset = {
        "info": {},
        "images": [{"id": i} for i in range(len(prompts))],
        "categories": [{"id": i, "name": name} for i, name in enumerate(names)],
        "annotations": _right(prompts, names),
    }
    for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        detections += _found(i, text, prompt, names)
    if not detections:
        return {"mAP": 0.0, "mAP50": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        judge = COCOeval(truth, truth.loadRes(detections), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {"mAP": float(judge.stats[0]), "mAP50": float(judge.stats[1])}


def _right(prompts: Sequence[Prompt], names: list[str]) -> list[dict[str, Any]]:
    from rewards.answers.verifiable import true_boxes

    rows = [
        (image, name, box)
        for image, prompt in enumerate(prompts)
        for name, box in zip(prompt["labels"], true_boxes(prompt).tolist())
    ]
    return [
        {
            "id": n + 1,
            "image_id": image,
            "category_id": names.index(str(name)),
            "iscrowd": 0,
            **_sides(box),
        }
        for n, (image, name, box) in enumerate(rows)
    ]


def _found(image: int, text: str, prompt: Prompt, names: list[str]) -> list[dict[str, Any]]:
    from rewards.answers.coords import Unscorable
    from rewards.answers.shapes import boxes
    from rewards.answers.verifiable import in_truth

    shapes = boxes(text).value or []
    only = str(prompt["labels"][0]) if len(set(map(str, prompt["labels"]))) == 1 else None
    try:
        rows, _ = in_truth(shapes, prompt)
    except Unscorable:
        return []
    detections = []
    for shape, box in zip(shapes, rows.tolist()):
        label = only if shape.label is None else str(shape.label)
        if label in names and box[2] > box[0] and box[3] > box[1]:
            score = 1.0 if shape.confidence is None else shape.confidence
            detections.append(
                {
                    "image_id": image,
                    "category_id": names.index(label),
                    "score": score,
                    **_sides(box),
                }
            )
    return detections


def _sides(box: list[float]) -> dict[str, Any]:
    width = box[2] - box[0]
    height = box[3] - box[1]
    return {"bbox": [box[0], box[1], width, height], "area": width * height}
