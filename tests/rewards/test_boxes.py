"""Geometry of boxes against torchvision, pycocotools and brute force; coordinate spaces; spam."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rewards import Grounding, Referring
from rewards.answers import boxes as geometry
from rewards.answers.coords import RELATIVE
from rewards.answers.notations import NOTATIONS, table
from rewards.answers.shapes import boxes, points

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


def test_iou_and_giou_equal_torchvision():
    from torchvision.ops import box_iou, generalized_box_iou

    a, b = random_boxes(40, 0), random_boxes(30, 10)
    pair = torch.from_numpy(a), torch.from_numpy(b)
    assert np.allclose(geometry.iou(a, b), box_iou(*pair).numpy(), atol=1e-12)
    assert np.allclose(geometry.giou(a, b), generalized_box_iou(*pair).numpy(), atol=1e-12)


def coco_of(rows, scores=None):
    from pycocotools.coco import COCO

    coco = COCO()
    common = {"image_id": 1, "category_id": 1, "iscrowd": 0}
    annotations = [
        common | {"id": i + 1, "bbox": [x, y, u - x, v - y], "area": (u - x) * (v - y)}
        for i, (x, y, u, v) in enumerate(rows.tolist())
    ]
    for i, score in enumerate([] if scores is None else scores.tolist()):
        annotations[i]["score"] = score
    coco.dataset = {"images": [{"id": 1}], "categories": [{"id": 1}], "annotations": annotations}
    coco.createIndex()
    return coco


def test_average_precision_equals_coco(subtests):
    from pycocotools.cocoeval import COCOeval

    for seed in range(20):
        with subtests.test(seed=seed), contextlib.redirect_stdout(io.StringIO()):
            rng = np.random.default_rng(seed)
            right = random_boxes(1 + seed % 5, seed)
            predicted = np.concatenate(
                [right + rng.normal(0, 3, right.shape), random_boxes(seed % 4, seed + 50)]
            )
            predicted[:, 2:] = np.maximum(predicted[:, 2:], predicted[:, :2] + 0.5)
            confidence = rng.permutation(len(predicted)) / len(predicted)
            judge = COCOeval(coco_of(right), coco_of(predicted, confidence), "bbox")
            judge.evaluate()
            judge.accumulate()
            theirs = judge.eval["precision"][:, :, 0, 0, 2].mean(1)  # [thresholds]
            scores = geometry.iou(predicted, right)
            ours = [geometry.average_precision(scores, confidence, t) for t in geometry.THRESHOLDS]
            assert np.allclose(ours, theirs, atol=1e-9)


def test_inverted_and_empty_boxes_meet_nothing_and_equal_ones_have_exactly_one():
    box = np.array([[3.0, 4, 9, 8]])
    for bad in np.array([[[9.0, 8, 3, 4]], [[3.0, 4, 3, 8]], [[9.0, 4, 3, 8]]]):
        assert geometry.iou(bad, box) == geometry.iou(bad, bad) == 0
        assert geometry.giou(bad, box) == -1
    for tiny in np.array([[[0.25, 0.5, 0.250001, 0.500001]], [[0.1, 0.2, 0.7, 0.9]]]):
        assert geometry.iou(tiny, tiny) == geometry.giou(tiny, tiny) == 1


# The rewards


def said(rows) -> str:
    boxes = [{"bbox_2d": list(map(float, row))} for row in rows]
    return f"<answer>{json.dumps(boxes)}</answer>"


@settings(max_examples=60, deadline=None)
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
    prompt = {"boxes": [[10, 20, 30, 40]], "view": {"coords": "rel1000"}}
    assert Grounding()([said([[100, 200, 300, 400]])], [prompt]).isnan().all()
    known = prompt | {"images": [Image.new("RGB", (50, 50)), Image.new("RGB", (100, 100))]}
    known |= {"image_index": 1}
    assert Grounding()([said([[100, 200, 300, 400]])], [known]).item() == 1


def test_broken_right_boxes_are_nan(subtests):
    nan = float("nan")
    for box in ([3, 2, 1, 4], [1, 2, 3], ["a", 1, 2, 3], [0, 0, nan, 1], [1, 1, 1, 2]):
        with subtests.test(box=box):
            assert Grounding()([said([[1, 2, 3, 4]])], [{"boxes": [box]}]).isnan().all()


def test_both_empty_is_one_and_one_empty_is_zero():
    reward = Grounding()
    assert reward(["[]", "none", "", "[1,2,3,4]"], [{"boxes": []}] * 4).tolist() == [1, 1, 0, 0]
    assert reward(["[]"], [{"boxes": [[1, 2, 3, 4]]}]).tolist() == [0]


def test_statuses_of_boxes():
    texts = ["[1,2,3,4]", "[3,4,1,2]", "[1,2,1,4]", "[1,2,3,900]", "[[1,2,3,4],[1,2,3,5]]"]
    texts += ["?", "<answer>[1,2,3,4]"]
    prompt = {"boxes": [[1, 2, 3, 4]], "width": 100, "height": 100}
    statuses = "ok inverted degenerate out_of_range wrong_count unparseable repaired".split()
    assert Grounding().status(texts, [prompt] * 7) == statuses


def test_referring_wants_one_box_and_the_published_form_takes_the_first():
    prompts = [{"boxes": [[10, 20, 30, 40]]}] * 2
    two = "<answer>[[10,20,30,40],[0,0,5,5]]</answer>"
    assert Referring()([two, "[10,20,30,40]"], prompts).tolist() == [0, 1]
    assert Referring(form="vlm_r1")([two, "[10.5,20,30,40]"], prompts).tolist() == [1, 0]
    near = ["[10,20,30,40]", "[10,20,30,29]"]
    assert Referring(threshold=0.5)(near, prompts).tolist() == [1, 0]


# boxes and points as models write them


CORNERS = (100.0, 200.0, 300.0, 400.0)
MIDDLE = (200.0, 300.0)
PICTURE = (640, 480)


def in_pixels(shape):
    """A shape's numbers in pixels; those of a model's own space are pixels already."""
    if shape.space is None:
        return shape.values
    return [v / RELATIVE[shape.space] * PICTURE[i % 2] for i, v in enumerate(shape.values)]


def examples():
    for each in NOTATIONS:
        # codes of a grid name the middle of their cell
        coarse = max(PICTURE) / 32 if "grid" in each.space else max(PICTURE) / 100
        within = coarse if each.space in ("0 to 100",) or "grid" in each.space else 1.0
        for text, read, want in ((each.box, boxes, CORNERS), (each.point, points, MIDDLE)):
            if text:
                yield text, read, want, within


def test_an_example_of_the_table_reads_as_its_shape(subtests):
    for text, read, want, within in examples():
        with subtests.test(text=text, read=read):
            for written in (text, f"<answer>{text}</answer>", f"<think>{text} or</think>\n{text}"):
                parsed = read(written)
                assert parsed.status == "ok" and len(parsed.value) == 1
                assert in_pixels(parsed.value[0]) == pytest.approx(want, abs=within)
                if "dog" in text and "<point" not in text:
                    assert parsed.value[0].label == "dog"


def test_the_page_shows_the_table_that_the_reader_uses():
    page = Path(__file__).parents[2] / "docs" / "verifiable-rewards.md"
    assert table() in page.read_text(), "put what rewards.answers.notations.table() returns there"


DOG = (CORNERS, "dog")


def test_boxes_without_a_notation_of_their_own(subtests):
    for text, want in [
        ('{"bounding_box": {"x1": 100, "y1": 200, "x2": 300, "y2": 400}}', [(CORNERS, None)]),
        ('{"xmin": 100, "ymin": 200, "xmax": 300, "ymax": 400}', [(CORNERS, None)]),
        ('{"x": 100, "y": 200, "width": 200, "height": 200, "class": "dog"}', [DOG]),
        ('{"bbox_2d": "[100, 200, 300, 400]", "category_name": "dog"}', [DOG]),
        ('{"bbox_2d": "100 200 300 400", "type": "dog"}', [DOG]),
        ('[{"bbox": [[100, 200], [300, 400]], "object_name": "dog"}]', [DOG]),
        ("[{'bbox_2d': [100, 200, 300, 400], 'label': 'dog'}]", [DOG]),
        ('```json\n[{"bbox_2d": [100, 200, 300, 400], "label": "dog"}, {"bbox_2d": [1, 2', [DOG]),
        ("bbox: 100, 200, 300, 400", [(CORNERS, None)]),
        ("x1=100, y1=200, x2=300, y2=400", [(CORNERS, None)]),
        ("<box>100 200 300 400</box>", [(CORNERS, None)]),
        ("<box>(100,200),(300,400)</box>", [(CORNERS, None)]),
        ("dog: [100, 200, 300, 400]", [DOG]),
        ("- **dog**: [100, 200, 300, 400]\n- cat: [1, 2, 3, 4]", [DOG, ((1, 2, 3, 4), "cat")]),
        ("A dog [100, 200, 300, 400] and a cat [1, 2, 3, 4].", [DOG, ((1, 2, 3, 4), "cat")]),
        ("dog[[100,200,300,400;001,002,003,004]]", [DOG, ((1, 2, 3, 4), "dog")]),
        ("The box is (100, 200), (300, 400).", [(CORNERS, None)]),
        ("I see nothing at 100.", None),
    ]:
        with subtests.test(text=text, want=want):
            parsed = boxes(text)
            assert (parsed.value and [(s.values, s.label) for s in parsed.value]) == want


def test_how_boxes_were_read(subtests):
    for text, status, count in [
        ("<answer>[1,1,2,2]</answer> no: <answer>[100,200,300,400]</answer>", "ok", 1),
        ("<answer>[100,200,300,400]", "repaired", 1),
        ("[{'bbox': [100, 200, 300, 400], 'label': 'cat'}]", "repaired", 1),
        ("[100,200,300,400] and [1,2,3,4]", "repaired", 2),
        ("<think>[100,200,300,400]</think>", "unparseable", None),
        ("<think>it is at [100,200,300,400]", "unparseable", None),
        ("", "unparseable", None),
        ("None", "ok", 0),
        ("[]", "ok", 0),
    ]:
        with subtests.test(text=text):
            parsed = boxes(text)
            assert parsed.status == status
            assert (None if parsed.value is None else len(parsed.value)) == count


def test_points_as_agents_and_models_write_them(subtests):
    for text, want in [
        ("click(point='<point>200 300</point>')", [MIDDLE]),
        ("CLICK <point>[[200, 300]]</point>", [MIDDLE]),
        ("{'action': 'CLICK', 'value': None, 'position': [0.3125, 0.625]}", [(0.3125, 0.625)]),
        ('{"point": {"x": 200, "y": 300}}', [MIDDLE]),
        ('{"MIDDLE": [200, 300]}', [MIDDLE]),
        ("<points x1='31.25' y1='62.5' x2='1' y2='2'>dogs</points>", [(31.25, 62.5), (1, 2)]),
        ('<points coords="1 1 312 625 2 010 020">dogs</points>', [(312, 625), (10, 20)]),
        ('<tracks coords="0.5 1 312 625;1.0 1 010 020">dog</tracks>', [(312, 625), (10, 20)]),
        ("<|box_start|>(100,200),(300,400)<|box_end|>", [MIDDLE]),
        ("<box>[[100, 200, 300, 400]]</box>", [MIDDLE]),
        ("(200, 300)", [MIDDLE]),
    ]:
        with subtests.test(text=text, want=want):
            assert [shape.values for shape in points(text).value] == want
