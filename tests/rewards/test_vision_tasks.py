"""Detection, confidence, points, actions, masks, spans and tracks against oracles and the errors of
published code."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rewards import (
    Choice,
    Classification,
    Confidence,
    Count,
    Detection,
    Gui,
    Point,
    Segmentation,
    Temporal,
    Tracking,
)
from rewards.answers.masks import _rings, _runs, true_mask
from rewards.answers.spans import hull, spans, union

SCENE = {"boxes": [[0, 0, 10, 10], [20, 20, 40, 40]], "labels": ["cat", "Dog"]}


def said(*entries) -> str:
    names = ("bbox_2d", "label", "confidence")
    return json.dumps([dict(zip(names, entry)) for entry in entries])


def one(reward, text, prompt) -> float:
    return reward([text], [prompt]).item()


# Detection


def test_detection_by_hand(subtests):
    cat, dog = ([0, 0, 10, 10], "cat"), ([20, 20, 40, 40], "dog")
    bare, small = ([0, 0, 10, 10],), ([0, 0, 10, 8], "cat")
    swapped = [([0, 0, 10, 10], "dog"), ([20, 20, 40, 40], "cat")]
    single = {"matched": 0.5, "f1": 2 / 3, "precision": 1, "recall": 0.5, "map": 0.5}
    for entries, values in [
        ([cat, dog], {"matched": 1, "f1": 1, "map": 1, "ap": 1, "vlm_r1": 1}),
        ([cat], single),
        (swapped, {"matched": 0, "f1": 0, "map": 0, "vlm_r1": 0.3}),
        ([small, dog], {"matched": 0.9, "f1": 1, "map": 0.85, "visual_rft": 0.9}),
        ([bare, dog], {"matched": 0.5, "f1": 0.5}),
    ]:
        for measure, value in values.items():
            with subtests.test(entries=entries, measure=measure):
                score = one(Detection(measure), said(*entries), SCENE)
                assert score == pytest.approx(value, abs=0.011)


def test_spam_with_other_labels_costs_and_published_forms_pay_for_it():
    right = [([0, 0, 10, 10], "cat", 1.0), ([20, 20, 40, 40], "dog", 1.0)]
    spam = [([i, i, i + 5, i + 7], "bird", 0.01) for i in range(9)]
    for measure in ("matched", "f1", "map", "ap", "precision", "visual_rft"):
        scores = [one(Detection(measure), said(*right, *spam[:n]), SCENE) for n in range(10)]
        assert scores[0] == pytest.approx(1), measure
        assert all(b < a for a, b in zip(scores, scores[1:])), measure
    assert one(Detection("matched"), said(*right, *spam), SCENE) == pytest.approx(2 / 11)
    single = {"boxes": SCENE["boxes"][:1], "labels": ["cat"]}
    cats = said(right[0], *[([50 + i, 0, 60 + i, 9], "cat") for i in range(9)])
    published = one(Detection("vlm_r1"), cats, single)
    assert published == pytest.approx(0.865)  # measured on the published code


def test_the_published_confidence_exploit_is_closed():
    wrong = said(([60, 60, 70, 70], "cat", 0.0))
    assert one(Confidence(form="visual_rft"), wrong, SCENE) == 1
    assert one(Confidence(), wrong, SCENE) == 0
    assert one(Confidence(), said(([60, 60, 70, 70], "cat", 1.0)), SCENE) == -0.5
    assert one(Confidence(), "no idea", SCENE) == -1
    assert one(Confidence(), said(([0, 0, 10, 10], "cat", 5.0)), SCENE) == 0.5  # more than 1 is 1
    assert Confidence().status([said(([0, 0, 10, 10], "cat", 5.0))], [SCENE]) == ["out_of_range"]


def test_confidence_is_a_proper_score():
    prompt = {"boxes": SCENE["boxes"][:1]}
    levels = np.linspace(0, 1, 21)

    def paid(box):
        return np.array([one(Confidence(), said((box, "cat", c)), prompt) for c in levels])

    right, wrong = paid([0, 0, 10, 10]), paid([50, 50, 60, 60])
    for chance in (0.1, 0.5, 0.8):
        mean = chance * right + (1 - chance) * wrong
        assert levels[mean.argmax()] == pytest.approx(chance)
        assert mean.max() == pytest.approx(chance**2)


# Points and actions


BOX = {"boxes": [[10, 10, 30, 20]]}
FAR = {"point": [100, 100]}
VIEW = {"coords": "rel1000", "sizes": [[200, 100]], "resized": [[20, 10]]}
MIDDLE = {"point": [0.5, 0.5], "space": "rel1", "view": VIEW}
CLICK = {"action": "click"} | BOX
CLICKED = {"action": "click", "point": [500, 500]}
TYPED = {"action": {"type": "type", "text": "abcd"}}
NUDGED = Point("gaussian", spread=0.5)
TEN = {"answer": 10}
PLANE = {"answer": "Boeing 737"}
ABC = {"answer": "ABC"}
BY_HAND = [
    (Point(), "(20, 15)", BOX, 1),
    (Point(), "(30, 20)", BOX, 1),
    (Point(), "(31, 15)", BOX, 0),
    (Point(), "[[20, 15], [21, 15]]", BOX, 0.5),
    (NUDGED, "(30, 15)", BOX, np.exp(-0.5)),
    (Point("distance"), "(100, 170)", FAR, 0.5),
    (Point(), "(100, 170)", FAR, 1),
    (Point("distance", radius=10), "(525, 500)", MIDDLE, 0.5),
    (Gui(), "click(x=20, y=15)", CLICK, 1),
    (Gui(), "tap([20, 15])", CLICK, 1),
    (Gui(), '{"name": "click", "arguments": {"x": 20, "y": 15}}', CLICK, 1),
    (Gui(), '{"action": "click", "point": [90, 15]}', CLICK, 0.5),
    (Gui(), '{"action": "click"}', CLICK, 0.5),
    (Gui(), "double_click(20, 15)", CLICK, 0),
    (Gui(), '[{"action": "click", "point": [20, 15]}, {"action": "back"}]', CLICK, 0),
    (Gui(), '{"action": "click", "point": [639.5, 500]}', CLICKED, 1),  # published: 140 pixels
    (Gui(), '{"action": "click", "point": [640.5, 500]}', CLICKED, 0.5),
    (Gui(), '{"action": "press home"}', {"action": "press_home"}, 1),
    (Gui(), '{"action": "press back"}', {"action": "press_home"}, 0),
    (Gui(), 'type("abcd")', TYPED, 1),
    (Gui(), '{"action": "type", "text": "abxx"}', TYPED, 0.75),
    (Gui(type_weight=0.2), '{"action": "type", "text": "abxx"}', TYPED, 0.6),
    (Gui(type_weight=0), "type", TYPED, 0),
    (Count(fuzzy=True), "9", TEN, 0.9),
    (Count(fuzzy=True), "25", TEN, 0),
    (Count(), "9", TEN, 0),
    (Count(fuzzy=True), "0", {"answer": 0}, 1),
    (Count(fuzzy=True), "1", {"answer": 0}, 0),
    (Classification(), "", PLANE, 0),  # part of the right one, as published, is not right
    (Classification(), "boeing 737-800", PLANE, 0),
    (Classification(), "boeing_737", PLANE, 1),
    (Choice("subset"), "AC", ABC, 2 / 3),
    (Choice("none"), "AC", ABC, 0),
    (Choice("jaccard"), "A, B, D", ABC, 0.5),
]


def test_points_actions_counts_and_choices_by_hand(subtests):
    for reward, text, prompt, value in BY_HAND:
        with subtests.test(reward=reward, text=text):
            assert one(reward, text, prompt) == pytest.approx(value)


# Masks


def test_run_lengths_equal_pycocotools():
    from pycocotools.mask import decode, encode

    rng = np.random.default_rng(0)
    for shape in ((1, 1), (7, 5), (64, 48), (200, 90)):
        for share in (0.0, 0.02, 0.2, 1.0):
            mask = (rng.random(shape) < share).astype(np.uint8, order="F")
            code = encode(mask)
            text = code["counts"].decode()
            runs = _runs(text)
            ours = np.repeat(np.arange(len(runs)) % 2, runs).reshape(shape[::-1]).T
            assert (ours == decode(code)).all()
            answer = json.dumps({"size": list(shape), "counts": text})
            assert one(Segmentation(), answer, {"mask": mask}) == 1


def test_polygons_boxes_and_run_lengths_are_one_mask():
    mask = np.zeros((40, 60), dtype=bool)
    mask[10:30, 20:50] = True
    relative = {"mask": mask, "view": {"coords": "rel1000", "sizes": [[60, 40]]}}
    for text, prompt, value in (
        ("[[20,10],[50,10],[50,30],[20,30]]", {"mask": mask}, 1),
        ('{"polygon": [20,10,50,10,50,30,20,30]}', {"mask": mask}, 1),
        ("[20, 10, 50, 30]", {"mask": mask}, 1),
        ("[[20,10,35,10,35,30,20,30],[35,10,50,10,50,30,35,30]]", {"mask": mask}, 1),
        ("[20, 10, 35, 30]", {"mask": mask}, 0.5),
        ("[333.33333, 250, 833.33333, 750]", relative, 1),
    ):
        assert one(Segmentation(), text, prompt) == pytest.approx(value), text
    rings = [[[0, 0], [1, 0], [1, 1]], [[2, 2], [3, 2], [3, 3]]]
    assert _rings(rings) == [(0, 0, 1, 0, 1, 1), (2, 2, 3, 2, 3, 3)]


def test_masks_of_every_kind_and_broken_ones(tmp_path):
    mask = np.zeros((4, 6), dtype=np.uint8)
    mask[1:3, 2:5] = 255
    file = str(tmp_path / "m.png")
    Image.fromarray(mask).save(file)
    runs = {"size": [4, 6], "counts": [9, 2, 2, 2, 2, 2, 5]}
    for kind in (file, mask > 0, (mask > 0).tolist(), runs):
        assert (true_mask({"mask": kind}) == (mask > 0)).all()
    for broken in (str(tmp_path / "no.png"), [1, 2], {"size": [4, 6]}, [[0, 0, 1, 1, 2, 2]]):
        assert np.isnan(one(Segmentation(), "[]", {"mask": broken}))
    for size, counts in (([4, 6], "zzz"), ([4, 6], [1, 2]), ([9, 9], [81])):
        text = json.dumps({"size": size, "counts": counts})
        assert one(Segmentation(), text, {"mask": mask}) == 0
    empty = {"mask": np.zeros((4, 6))}
    assert one(Segmentation(), "[]", empty) == 1 and one(Segmentation(), "[0, 0, 2, 2]", empty) == 0


# Time

TIMES = st.tuples(st.integers(0, 40), st.integers(1, 20)).map(
    lambda v: (float(v[0]), float(v[0] + v[1]))
)
SETS = st.lists(TIMES, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(a=SETS, b=SETS)
def test_temporal_iou_equals_counting_seconds(a, b):
    def covered(found):
        return {t for start, end in found for t in range(int(start), int(end))}

    assert union(a, b) == pytest.approx(len(covered(a) & covered(b)) / len(covered(a) | covered(b)))
    (s, e), (u, v) = a[0], b[0]
    assert hull(a, b) == pytest.approx(max(min(e, v) - max(s, u), 0) / (max(e, v) - min(s, u)))


def test_statuses_of_spans_and_tracks():
    prompt = {"spans": [[2, 6]], "view": {"duration": 10.0}}
    texts = ["[2, 6]", "[6, 2]", "[2, 2]", "[2, 60]", "[[2,6],[7,8]]", "later", "[]"]
    expected = "ok inverted degenerate out_of_range wrong_count unparseable wrong_count".split()
    assert Temporal().status(texts, [prompt] * 7) == expected
    assert Temporal()(texts, [prompt] * 7).tolist() == pytest.approx([1, 0, 0, 4 / 58, 0.8, 0, 0])
    moving = {"tracks": [[0, 0, 10, 10], [5, 5, 15, 15]]}
    tracks = ["[[0,0,10,10],[5,5,15,10]]", '{"0": [0,0,10,10]}', '{"0s": [0,0,10,10]}']
    assert Tracking()(tracks, [moving] * 3).tolist() == [0.75, 0.5, 0.5]
    for text, start in (("from 0:03 to 1:00:08", 3), ("00:03.5 - 1:00:08", 3.5)):
        assert spans(text).value == [(start, 3608)]
