"""Detection, confidence, points, actions, masks, spans and tracks against oracles and the errors of
published code."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    for entries, values in [
        (
            [([0, 0, 10, 10], "cat"), ([20, 20, 40, 40], "dog")],
            {"matched": 1, "f1": 1, "map": 1, "ap": 1, "vlm_r1": 1},
        ),
        (
            [([0, 0, 10, 10], "cat")],
            {"matched": 0.5, "f1": 2 / 3, "precision": 1, "recall": 0.5, "map": 0.5},
        ),
        (
            [([0, 0, 10, 10], "dog"), ([20, 20, 40, 40], "cat")],
            {"matched": 0, "f1": 0, "map": 0, "vlm_r1": 0.3},
        ),
        (
            [([0, 0, 10, 8], "cat"), ([20, 20, 40, 40], "dog")],
            {"matched": 0.9, "f1": 1, "map": 0.85, "visual_rft": 0.9},
        ),
        ([([0, 0, 10, 10], None), ([20, 20, 40, 40], "dog")], {"matched": 0.5, "f1": 0.5}),
    ]:
        with subtests.test(entries=entries, values=values):
            text = said(*[(box, label) if label else (box,) for box, label in entries])
            for measure, value in values.items():
                assert one(Detection(measure), text, SCENE) == pytest.approx(value, abs=0.011), (
                    measure
                )


def test_spam_with_other_labels_costs_and_published_forms_pay_for_it():
    right = [([0, 0, 10, 10], "cat", 1.0), ([20, 20, 40, 40], "dog", 1.0)]
    spam = [([i, i, i + 5, i + 7], "bird", 0.01) for i in range(9)]
    for measure in ("matched", "f1", "map", "ap", "precision", "visual_rft"):
        scores = [one(Detection(measure), said(*right, *spam[:n]), SCENE) for n in range(10)]
        assert scores[0] == pytest.approx(1) and all(b < a for a, b in zip(scores, scores[1:])), (
            measure
        )
    assert one(Detection("matched"), said(*right, *spam), SCENE) == pytest.approx(2 / 11)
    single = {"boxes": SCENE["boxes"][:1], "labels": ["cat"]}
    published = one(
        Detection("vlm_r1"),
        said(right[0], *[([50 + i, 0, 60 + i, 9], "cat") for i in range(9)]),
        single,
    )
    assert published == pytest.approx(0.865)  # measured on the published code


def test_the_published_confidence_exploit_is_closed():
    wrong = said(([60, 60, 70, 70], "cat", 0.0))
    assert one(Confidence(form="visual_rft"), wrong, SCENE) == 1
    assert one(Confidence(), wrong, SCENE) == 0
    assert one(Confidence(), said(([60, 60, 70, 70], "cat", 1.0)), SCENE) == -0.5
    assert one(Confidence(), "no idea", SCENE) == -1
    assert one(Confidence(), said(([0, 0, 10, 10], "cat", 5.0)), SCENE) == 0.5  # more than 1 is 1
    assert Confidence().status([said(([0, 0, 10, 10], "cat", 5.0))], [SCENE]) == ["out_of_range"]


def test_confidence_is_a_proper_score(subtests):
    for chance in [0.1, 0.5, 0.8]:
        with subtests.test(chance=chance):
            prompt = {"boxes": SCENE["boxes"][:1]}
            best = []
            for c in np.linspace(0, 1, 21):
                right = one(Confidence(), said(([0, 0, 10, 10], "cat", c)), prompt)
                wrong = one(Confidence(), said(([50, 50, 60, 60], "cat", c)), prompt)
                best.append(chance * right + (1 - chance) * wrong)
            assert np.linspace(0, 1, 21)[int(np.argmax(best))] == pytest.approx(chance) and max(
                best
            ) == pytest.approx(chance**2)


# Points and actions


def test_points_in_boxes_and_near_points():
    box = {"boxes": [[10, 10, 30, 20]]}
    point = {"point": [100, 100]}
    assert [
        one(Point(), text, box) for text in ("(20, 15)", "(30, 20)", "(31, 15)", "[10,10,30,20]")
    ] == [1, 1, 0, 1]
    gaussian = Point("gaussian", spread=0.5)
    assert one(gaussian, "(20, 15)", box) == 1 and one(gaussian, "(30, 15)", box) == pytest.approx(
        np.exp(-0.5)
    )
    assert (
        one(Point("distance"), "(100, 170)", point) == pytest.approx(0.5)
        and one(Point(), "(100, 170)", point) == 1
    )
    assert one(Point(), "[[20, 15], [21, 15]]", box) == 0.5
    view = {"coords": "rel1000", "sizes": [[200, 100]], "resized": [[20, 10]]}
    assert (
        one(
            Point("distance", radius=10),
            "(500, 500)",
            {"point": [0.5, 0.5], "space": "rel1", "view": view},
        )
        == 1
    )
    assert (
        one(
            Point("distance", radius=10),
            "(525, 500)",
            {"point": [0.5, 0.5], "space": "rel1", "view": view},
        )
        == 0.5
    )


def test_actions(subtests):
    for text, value in [
        ('{"action": "click", "point": [20, 15]}', 1),
        ("click(20, 15)", 1),
        ("click(x=20, y=15)", 1),
        ('{"action_type": "CLICK", "coordinate": [20, 15]}', 1),
        ('{"name": "click", "arguments": {"x": 20, "y": 15}}', 1),
        ('{"action": "click", "point": [90, 15]}', 0.5),
        ('{"action": "click"}', 0.5),
        ("scroll(20, 15)", 0),
        ('[{"action": "click", "point": [20, 15]}, {"action": "back"}]', 0),
        ("I click there", 0),
        ("", 0),
    ]:
        with subtests.test(text=text, value=value):
            assert one(Gui(), text, {"action": "click", "boxes": [[10, 10, 30, 20]]}) == value


@pytest.mark.parametrize(("x", "value"), [(639.5, 1), (640.5, 0.5)])
def test_a_click_counts_within_the_published_140_pixels_of_a_point(x, value):
    prompt = {"action": "click", "point": [500, 500]}
    assert one(Gui(), f'{{"action": "click", "point": [{x}, 500]}}', prompt) == value


def test_typed_texts_count_by_similarity_above_a_threshold():
    prompt = {"action": {"type": "type", "text": "hello"}}
    texts = [
        'type("hello")',
        'type("hallo")',
        'type("xyz")',
        "type",
        '{"action": "type", "text": "Hello"}',
    ]
    assert [one(Gui(type_weight=0), text, prompt) for text in texts] == pytest.approx(
        [1, 0.8, 0, 0, 1]
    )
    assert one(Gui(), "press_back", {"action": "press_back"}) == 1


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
            assert (ours == decode(code)).all() and (ours == mask).all()
            prompt = {"mask": mask}
            assert (
                one(Segmentation(), json.dumps({"size": list(shape), "counts": text}), prompt) == 1
            )


def test_polygons_boxes_and_run_lengths_are_one_mask():
    mask = np.zeros((40, 60), dtype=bool)
    mask[10:30, 20:50] = True
    prompt = {"mask": mask}
    texts = [
        "[[20,10],[50,10],[50,30],[20,30]]",
        '{"polygon": [20,10,50,10,50,30,20,30]}',
        "[20, 10, 50, 30]",
        "[[20,10,35,10,35,30,20,30],[35,10,50,10,50,30,35,30]]",
    ]
    assert [one(Segmentation(), text, prompt) for text in texts] == [1, 1, 1, 1]
    assert one(Segmentation(), "[20, 10, 35, 30]", prompt) == pytest.approx(0.5)
    relative = {**prompt, "view": {"coords": "rel1000", "sizes": [[60, 40]]}}
    assert one(Segmentation(), "[333.33333, 250, 833.33333, 750]", relative) == 1
    assert _rings([[[0, 0], [1, 0], [1, 1]], [[2, 2], [3, 2], [3, 3]]]) == [
        (0, 0, 1, 0, 1, 1),
        (2, 2, 3, 2, 3, 3),
    ]


def test_masks_of_every_kind_and_broken_ones(tmp_path):
    from PIL import Image

    mask = np.zeros((4, 6), dtype=np.uint8)
    mask[1:3, 2:5] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    kinds = [
        str(tmp_path / "m.png"),
        mask > 0,
        (mask > 0).tolist(),
        {"size": [4, 6], "counts": [9, 2, 2, 2, 2, 2, 5]},
    ]
    assert all((true_mask({"mask": kind}) == (mask > 0)).all() for kind in kinds)
    for broken in (str(tmp_path / "no.png"), [1, 2], {"size": [4, 6]}, [[0, 0, 1, 1, 2, 2]]):
        assert np.isnan(one(Segmentation(), "[]", {"mask": broken}))
    for text in (
        '{"size": [4, 6], "counts": "zzz"}',
        '{"size": [4, 6], "counts": [1, 2]}',
        '{"size": [9, 9], "counts": [81]}',
    ):
        assert one(Segmentation(), text, {"mask": mask}) == 0
    empty = {"mask": np.zeros((4, 6))}
    assert one(Segmentation(), "[]", empty) == 1 and one(Segmentation(), "[0, 0, 2, 2]", empty) == 0


# Time

TIMES = st.tuples(st.integers(0, 40), st.integers(1, 20)).map(
    lambda v: (float(v[0]), float(v[0] + v[1]))
)
SETS = st.lists(TIMES, min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(a=SETS, b=SETS)
def test_temporal_iou_equals_counting_seconds(a, b):
    def covered(found):
        return {t for start, end in found for t in range(int(start), int(end))}

    assert union(a, b) == pytest.approx(len(covered(a) & covered(b)) / len(covered(a) | covered(b)))
    assert union(a, b) == pytest.approx(union(b, a)) and union(a, a) == 1
    low = max(min(a[0][1], b[0][1]) - max(a[0][0], b[0][0]), 0) / (
        max(a[0][1], b[0][1]) - min(a[0][0], b[0][0])
    )
    assert hull(a, b) == pytest.approx(low) and hull(a[:1], b[:1]) <= union(a[:1], b[:1]) + 1e-9


def test_spans_in_every_notation(subtests):
    for text in [
        '{"start_time": 3.5, "end_time": 8}',
        "[3.5, 8]",
        "from 3.5 to 8",
        "3.5s - 8s",
        "00:03.5 - 00:08",
        "[[3.5, 8.0]]",
        '[{"start": "3.5", "end": "8"}]',
        "<answer>B</answer><glue>[[3.5, 8]]</glue>",
        "3.5 to 8 seconds",
    ]:
        with subtests.test(text=text):
            assert spans(text).value == [(3.5, 8.0)]


def test_statuses_of_spans_and_tracks():
    prompt = {"spans": [[2, 6]], "view": {"duration": 10.0}}
    texts = ["[2, 6]", "[6, 2]", "[2, 2]", "[2, 60]", "[[2,6],[7,8]]", "later", "[]"]
    expected = "ok inverted degenerate out_of_range wrong_count unparseable wrong_count".split()
    assert Temporal().status(texts, [prompt] * 7) == expected
    assert Temporal()(texts, [prompt] * 7).tolist() == pytest.approx([1, 0, 0, 4 / 58, 0.8, 0, 0])
    moving = {"tracks": [[0, 0, 10, 10], [5, 5, 15, 15]]}
    assert one(Tracking(), "[[0,0,10,10],[5,5,15,10]]", moving) == 0.75
    assert (
        one(Tracking(), '{"0": [0,0,10,10]}', moving)
        == 0.5
        == one(Tracking(), '{"0s": [0,0,10,10]}', moving)
    )


# Short answers


def test_fuzzy_counting_falls_with_the_error_and_zero_is_special():
    fuzzy = [one(Count(fuzzy=True), str(n), {"answer": 10}) for n in (10, 9, 12, 5, 25)]
    assert fuzzy == pytest.approx([1, 0.9, 0.8, 0.5, 0]) and one(Count(), "9", {"answer": 10}) == 0
    assert [one(Count(fuzzy=True), str(n), {"answer": 0}) for n in (0, 1)] == [1, 0]


def test_the_published_classification_exploits_are_closed():
    prompt = {"answer": "Boeing 737"}
    texts = ["", "a", "boeing 737-800", "boeing_737", "Boeing-737.", "not a Boeing 737"]
    assert Classification()(texts, [prompt] * 6).tolist() == [0, 0, 0, 1, 1, 0]


def test_partial_credit_of_choices():
    prompt = {"answer": "ABC"}
    for partial, values in {
        "subset": [1, 2 / 3, 0],
        "none": [1, 0, 0],
        "jaccard": [1, 2 / 3, 0.5],
    }.items():
        reward = Choice(partial)
        assert reward(["A, B, C", "AC", "A, B, D"], [prompt] * 3).tolist() == pytest.approx(values)


def test_an_action_without_an_argument_is_its_type_and_a_text_counts_from_the_threshold():
    home = {"action": "press_home"}
    texts = ['{"action": "press home"}', "press_home()", '{"action": "press back"}']
    assert Gui()(texts, [home] * 3).tolist() == [1, 1, 0]
    written = {"action": {"type": "type", "text": "abcd"}}
    texts = [f'{{"action": "type", "text": "{text}"}}' for text in ("abcd", "abxx", "axxx")]
    assert Gui()(texts, [written] * 3).tolist() == [1, 0.75, 0.5]
    assert Gui(type_weight=0.2)(texts, [written] * 3).tolist() == pytest.approx([1, 0.6, 0.2])


def test_an_action_may_be_called_as_agents_call_it():
    click = {"action": "click", "boxes": [[100, 200, 300, 400]]}
    for text in ("Action: click(start_box='(200,300)')", "left_click(200, 300)", "tap([200, 300])"):
        assert Gui()([text], [click]).item() == 1
    assert Gui()(["Action: click(start_box='(500,300)')"], [click]).item() == 0.5
    assert Gui()(["double_click(200, 300)"], [click]).item() == 0
