"""Compares boxes with boxes: IoU, GIoU, assignment, precision, recall and average precision, in
float64.

A box is x0, y0, x1, y1; N are predicted, M are ground truths. An inverted or empty box has area 0
and IoU 0 with everything.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # COCO's


def areas(boxes: ndarray) -> ndarray:
    """Return areas, [N, 4] -> [N]."""
    width, height = (np.clip(boxes[:, 2 + i] - boxes[:, i], 0, None) for i in (0, 1))
    products: ndarray = width * height
    return products


def overlap(a: ndarray, b: ndarray) -> tuple[ndarray, ndarray]:
    """Return the areas [N, M] of intersection and union."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    inner = np.clip(high - low, 0, None).prod(-1)
    # an inverted box overlaps nothing
    inner = inner * ((areas(a) > 0)[:, None] & (areas(b) > 0)[None])
    return inner, areas(a)[:, None] + areas(b)[None] - inner


def iou(a: ndarray, b: ndarray) -> ndarray:
    """Compute IoU: [N, 4], [M, 4] -> [N, M] in 0..1; equal boxes of any positive size have exactly
    1."""
    inner, union = overlap(a, b)
    share: ndarray = np.divide(inner, union, out=np.zeros_like(inner), where=union > 0)
    return share


def giou(a: ndarray, b: ndarray) -> ndarray:
    """Compute generalised IoU (Rezatofighi et al. 2019), [N, M] in -1..1; -1 for an inverted or
    empty box."""
    inner, union = overlap(a, b)
    low = np.minimum(a[:, None, :2], b[None, :, :2])
    high = np.maximum(a[:, None, 2:], b[None, :, 2:])
    hull = np.clip(high - low, 0, None).prod(-1)
    good = ((areas(a) > 0)[:, None] & (areas(b) > 0)[None]) & (hull > 0)
    ratio = np.divide(inner, union, out=np.zeros_like(inner), where=union > 0)
    waste = np.divide(hull - union, hull, out=np.zeros_like(inner), where=hull > 0)
    return np.where(good, ratio - waste, -1.0)


def bounded_giou(a: ndarray, b: ndarray) -> ndarray:
    """Compute (1 + GIoU) / 2 in 0..1."""
    return (1 + giou(a, b)) / 2


def inclusive_iou(a: ndarray, b: ndarray) -> ndarray:
    """Compute IoU as in VLM-R1's code: the intersection counts both border pixels, the areas in the
    union do not.

    It is wrong for boxes one pixel wide and for relative coordinates (0 for equal boxes) and kept
    for comparison only.
    """
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:] - 1, b[None, :, 2:] - 1)
    meets = (low < high).all(-1)
    inner = np.where(meets, (high - low + 1).prod(-1), 0.0)
    union = areas(a)[:, None] + areas(b)[None] - inner
    share: ndarray = np.divide(inner, union, out=np.zeros_like(inner), where=union > 0)
    return share


def assign(scores: ndarray) -> list[tuple[int, int]]:
    """Return one-to-one pairs of rows and columns with the largest sum (Hungarian algorithm),
    without pairs of score 0."""
    if not scores.size:
        return []
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores, maximize=True)
    return [(int(i), int(j)) for i, j in zip(rows, columns) if scores[i, j] > 0]


def take_in_order(scores: ndarray, order: list[int], above: float) -> list[tuple[int, int]]:
    """Assign each row, in ``order``, the best free column, if its score is more than ``above``."""
    free = list(range(scores.shape[1]))
    pairs = []
    for i in order:
        best = max(free, key=lambda j: scores[i, j], default=None)
        if best is not None and scores[i, best] > above:
            pairs.append((i, best))
            free.remove(best)
    return pairs


def take_largest(scores: ndarray, least: float) -> list[tuple[int, int]]:
    """Pair greedily: the largest score first, then the largest of the rest, down to ``least``."""
    left = scores.astype(float).copy()
    pairs = []
    while left.size and left.max() >= least:
        i, j = np.unravel_index(int(left.argmax()), left.shape)
        pairs.append((int(i), int(j)))
        left[i, :] = -np.inf
        left[:, j] = -np.inf
    return pairs


def hits(scores: ndarray, threshold: float) -> int:
    """Return the largest number of one-to-one pairs that reach ``threshold``."""
    return len(assign((scores >= threshold).astype(float)))


def average_precision(scores: ndarray, confidence: ndarray, threshold: float) -> float:
    """Compute COCO's AP of one class in one image at one IoU threshold: interpolated precision at
    101 recalls.

    Predictions are taken by falling confidence (stable); each is matched to the best free ground
    truth with IoU >= threshold.
    """
    count = scores.shape[1]
    order = np.argsort(-confidence, kind="mergesort")[:100]  # COCO counts 100 detections
    taken = np.zeros(count, dtype=bool)
    right = np.zeros(len(order), dtype=bool)
    for place, i in enumerate(order):
        free = np.where(taken, -1.0, scores[i])
        best = len(free) - 1 - int(free[::-1].argmax())  # the last of equals, as in COCO
        if free[best] >= min(threshold, 1 - 1e-10):
            taken[best] = right[place] = True
    if not right.any():
        return 0.0
    recall = right.cumsum() / count
    precision = right.cumsum() / np.arange(1, len(order) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(recall, np.linspace(0, 1, 101), side="left")
    return float(np.append(precision, 0.0)[np.minimum(at, len(order))].mean())
