"""Geometry of boxes against torchvision, pycocotools and brute force; coordinate spaces; spam."""

from __future__ import annotations

import contextlib
import io
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import Grounding, Referring
from rewards.answers import boxes as geometry

SIDE = st.floats(0.01, 300, allow_nan=False)
BOX = st.tuples(SIDE, SIDE, SIDE, SIDE).map(lambda v: [v[0], v[1], v[0] + v[2], v[1] + v[3]])
BOXES = st.lists(BOX, min_size=1, max_size=5)
SPACES = ["original", "resized", "rel1000", "rel1"]
SIZES = {
    "original": (640.0, 333.0),
    "resized": (476.0, 252.0),
    "rel1000": (1000.0, 1000.0),
    "rel1": (1.0, 1.0),
}


def random_boxes(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 60, (count, 2))
    return np.concatenate([corner, corner + rng.uniform(1, 50, (count, 2))], 1)


@pytest.mark.parametrize("seed", range(3))
def test_iou_and_giou_equal_torchvision(seed):
    from torchvision.ops import box_iou, generalized_box_iou

    a = random_boxes(40, seed)
    b = random_boxes(30, seed + 10)
    ours = torch.from_numpy(a)
    theirs = torch.from_numpy(b)
    assert np.allclose(geometry.iou(a, b), box_iou(ours, theirs).numpy(), atol=1e-12)
    assert np.allclose(geometry.giou(a, b), generalized_box_iou(ours, theirs).numpy(), atol=1e-12)


def test_assignment_is_the_best_of_all_and_no_worse_than_greedy(subtests):
    for seed in range(12):
        with subtests.test(seed=seed):
            a = random_boxes(2 + seed % 4, seed)
            b = random_boxes(5 - seed % 3, 100 + seed)
            scores = geometry.iou(a, b)
            total = sum(scores[pair] for pair in geometry.assign(scores))
            wide = scores if scores.shape[0] <= scores.shape[1] else scores.T
            ways = itertools.permutations(range(wide.shape[1]), wide.shape[0])
            assert total == pytest.approx(
                max(sum(wide[i, j] for i, j in enumerate(way)) for way in ways)
            )
            for greedy in (
                geometry.take_largest(scores, 1e-12),
                geometry.take_in_order(scores, list(range(len(a))), 0),
            ):
                assert total >= sum(scores[pair] for pair in greedy) - 1e-12


def test_average_precision_equals_coco(subtests):
    for seed in range(20):
        with subtests.test(seed=seed):
            from pycocotools.coco import COCO
            from pycocotools.cocoeval import COCOeval

            rng = np.random.default_rng(seed)
            right = random_boxes(1 + seed % 5, seed)
            predicted = np.concatenate(
                [right + rng.normal(0, 3, right.shape), random_boxes(seed % 4, seed + 50)]
            )
            predicted[:, 2:] = np.maximum(predicted[:, 2:], predicted[:, :2] + 0.5)
            confidence = rng.permutation(len(predicted)) / len(predicted)

            def record(i, box, **more):
                size = [box[2] - box[0], box[3] - box[1]]
                return {
                    "id": i + 1,
                    "image_id": 1,
                    "category_id": 1,
                    "bbox": [*box[:2], *size],
                    "area": size[0] * size[1],
                } | more

            truth = COCO()
            guess = COCO()
            with contextlib.redirect_stdout(io.StringIO()):
                for coco, rows, scores in ((truth, right, None), (guess, predicted, confidence)):
                    extras = [
                        {"iscrowd": 0} | ({} if scores is None else {"score": float(scores[i])})
                        for i in range(len(rows))
                    ]
                    coco.dataset = {
                        "images": [{"id": 1}],
                        "categories": [{"id": 1}],
                        "annotations": [
                            record(i, list(map(float, box)), **extras[i])
                            for i, box in enumerate(rows)
                        ],
                    }
                    coco.createIndex()
                judge = COCOeval(truth, guess, "bbox")
                judge.evaluate()
                judge.accumulate()
            theirs = judge.eval["precision"][:, :, 0, 0, 2].mean(1)  # [thresholds]
            scores = geometry.iou(predicted, right)
            ours = [geometry.average_precision(scores, confidence, t) for t in geometry.THRESHOLDS]
            assert np.allclose(ours, theirs, atol=1e-9)


def test_inverted_and_empty_boxes_meet_nothing_and_equal_ones_have_exactly_one():
    box = np.array([[3.0, 4, 9, 8]])
    for bad in ([[9.0, 8, 3, 4]], [[3.0, 4, 3, 8]], [[9.0, 4, 3, 8]]):
        bad = np.array(bad)
        assert (
            geometry.iou(bad, box) == 0
            and geometry.iou(bad, bad) == 0
            and geometry.giou(bad, box) == -1
        )
    for tiny in ([[3.0, 4, 4, 5]], [[0.25, 0.5, 0.250001, 0.500001]], [[0.1, 0.2, 0.7, 0.9]]):
        assert (
            geometry.iou(np.array(tiny), np.array(tiny))
            == 1
            == geometry.giou(np.array(tiny), np.array(tiny))
        )


# The rewards


def said(rows) -> str:
    return (
        "<answer>" + json.dumps([{"bbox_2d": list(map(float, row))} for row in rows]) + "</answer>"
    )


@settings(max_examples=100, deadline=None)
@given(a=BOXES, b=BOXES, overlap=st.sampled_from(["iou", "giou"]))
def test_grounding_is_symmetric_and_in_range(a, b, overlap):
    reward = Grounding(overlap)
    forth = reward([said(a)], [{"boxes": b}])
    back = reward([said(b)], [{"boxes": a}])
    assert torch.allclose(forth, back) and 0 <= forth.item() <= 1 + 1e-6
    assert reward([said(a)], [{"boxes": a}]).item() == pytest.approx(1)


@pytest.mark.parametrize("truth", SPACES)
@pytest.mark.parametrize("answer", SPACES)
@settings(max_examples=15, deadline=None)
@given(
    box=st.tuples(*[st.floats(0.001, 0.499)] * 4), other=st.tuples(*[st.floats(0.001, 0.499)] * 4)
)
def test_a_box_scores_the_same_in_every_space(truth, answer, box, other):
    def place(corners, space):
        x, y, w, h = corners
        width, height = SIZES[space]
        return [x * width, y * height, (x + w) * width, (y + h) * height]

    view = {"coords": answer, "sizes": [SIZES["original"]], "resized": [SIZES["resized"]]}
    prompt = {"boxes": [place(box, truth)], "space": truth, "view": view}
    plain = Grounding()(
        [said([place(other, "rel1")])], [{"boxes": [place(box, "rel1")], "space": "rel1"}]
    )
    assert torch.allclose(Grounding()([said([place(other, answer)])], [prompt]), plain, atol=1e-5)
    assert Grounding()([said([place(box, answer)])], [prompt]).item() == pytest.approx(1, abs=1e-6)
    assert Grounding()([Grounding().ground_truth(prompt)], [prompt]).item() == pytest.approx(
        1, abs=2e-3
    )


def test_unknown_sizes_are_the_prompts_fault_and_pil_images_know_theirs():
    from PIL import Image

    prompt = {"boxes": [[10, 20, 30, 40]], "view": {"coords": "rel1000"}}
    assert Grounding()([said([[100, 200, 300, 400]])], [prompt]).isnan().all()
    known = prompt | {
        "images": [Image.new("RGB", (50, 50)), Image.new("RGB", (100, 100))],
        "image_index": 1,
    }
    assert Grounding()([said([[100, 200, 300, 400]])], [known]).item() == 1


def test_broken_right_boxes_are_nan(subtests):
    for boxes in [
        [[3, 2, 1, 4]],
        [[1, 2, 3]],
        [["a", 1, 2, 3]],
        [[0, 0, float("nan"), 1]],
        [[1, 1, 1, 2]],
    ]:
        with subtests.test(boxes=boxes):
            assert Grounding()([said([[1, 2, 3, 4]])], [{"boxes": boxes}]).isnan().all()


def test_both_empty_is_one_and_one_empty_is_zero():
    reward = Grounding()
    assert reward(["[]", "none", "", "[1,2,3,4]"], [{"boxes": []}] * 4).tolist() == [1, 1, 0, 0]
    assert reward(["[]"], [{"boxes": [[1, 2, 3, 4]]}]).tolist() == [0]


def test_statuses_of_boxes():
    texts = [
        "[1,2,3,4]",
        "[3,4,1,2]",
        "[1,2,1,4]",
        "[1,2,3,900]",
        "[[1,2,3,4],[1,2,3,5]]",
        "?",
        "<answer>[1,2,3,4]",
    ]
    prompt = {"boxes": [[1, 2, 3, 4]], "width": 100, "height": 100}
    statuses = "ok inverted degenerate out_of_range wrong_count unparseable repaired".split()
    assert Grounding().status(texts, [prompt] * 7) == statuses


def test_referring_wants_one_box_and_the_published_form_takes_the_first():
    prompt = {"boxes": [[10, 20, 30, 40]]}
    two = "<answer>[[10,20,30,40],[0,0,5,5]]</answer>"
    assert Referring()([two, "[10,20,30,40]"], [prompt] * 2).tolist() == [0, 1]
    assert Referring(form="vlm_r1")([two, "[10.5,20,30,40]"], [prompt] * 2).tolist() == [1, 0]
    assert Referring(threshold=0.5)(["[10,20,30,40]", "[10,20,30,29]"], [prompt] * 2).tolist() == [
        1,
        0,
    ]
