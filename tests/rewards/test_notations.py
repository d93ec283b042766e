"""Boxes and points as models write them: every row of the table that the reader uses, and forms
without a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.answers.coords import RELATIVE
from rewards.answers.notations import NOTATIONS, table
from rewards.answers.shapes import boxes, points

BOX = (100.0, 200.0, 300.0, 400.0)
POINT = (200.0, 300.0)
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
        for text, read, want in ((each.box, boxes, BOX), (each.point, points, POINT)):
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


DOG = (BOX, "dog")


def test_boxes_without_a_notation_of_their_own(subtests):
    for text, want in [
        ('{"bounding_box": {"x1": 100, "y1": 200, "x2": 300, "y2": 400}}', [(BOX, None)]),
        ('{"xmin": 100, "ymin": 200, "xmax": 300, "ymax": 400}', [(BOX, None)]),
        ('{"x": 100, "y": 200, "width": 200, "height": 200, "class": "dog"}', [DOG]),
        ('{"left": 100, "top": 200, "right": 300, "bottom": 400, "name": "dog"}', [DOG]),
        ('{"bbox_2d": "[100, 200, 300, 400]", "category_name": "dog"}', [DOG]),
        ('{"bbox_2d": "100 200 300 400", "type": "dog"}', [DOG]),
        ('[{"bbox": [[100, 200], [300, 400]], "object_name": "dog"}]', [DOG]),
        ("[{'bbox_2d': [100, 200, 300, 400], 'label': 'dog'}]", [DOG]),
        ('```json\n[{"bbox_2d": [100, 200, 300, 400], "label": "dog"}, {"bbox_2d": [1, 2', [DOG]),
        ("bbox: 100, 200, 300, 400", [(BOX, None)]),
        ("x1=100, y1=200, x2=300, y2=400", [(BOX, None)]),
        ("<box>100 200 300 400</box>", [(BOX, None)]),
        ("<box>(100,200),(300,400)</box>", [(BOX, None)]),
        ("dog: [100, 200, 300, 400]", [DOG]),
        ("- **dog**: [100, 200, 300, 400]\n- cat: [1, 2, 3, 4]", [DOG, ((1, 2, 3, 4), "cat")]),
        ("A dog [100, 200, 300, 400] and a cat [1, 2, 3, 4].", [DOG, ((1, 2, 3, 4), "cat")]),
        ("dog[[100,200,300,400;001,002,003,004]]", [DOG, ((1, 2, 3, 4), "dog")]),
        ("The box is (100, 200), (300, 400).", [(BOX, None)]),
        ("I see nothing at 100.", None),
        ("[100, 200, 300]", None),
    ]:
        with subtests.test(text=text, want=want):
            parsed = boxes(text)
            assert (parsed.value and [(s.values, s.label) for s in parsed.value]) == want


def test_points_as_agents_and_models_write_them(subtests):
    for text, want in [
        ("click(start_box='<|box_start|>(200,300)<|box_end|>')", [POINT]),
        ("click(point='<point>200 300</point>')", [POINT]),
        ("Action: left_click(200, 300)", [POINT]),
        ("CLICK <point>[[200, 300]]</point>", [POINT]),
        ("{'action': 'CLICK', 'value': None, 'position': [0.3125, 0.625]}", [(0.3125, 0.625)]),
        ('{"action": "left_click", "coordinate": [200, 300]}', [POINT]),
        (
            '<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", '
            '"coordinate": [200, 300]}}</tool_call>',
            [POINT],
        ),
        ('{"point": {"x": 200, "y": 300}}', [POINT]),
        ('{"POINT": [200, 300]}', [POINT]),
        ("<points x1='31.25' y1='62.5' x2='1' y2='2'>dogs</points>", [(31.25, 62.5), (1, 2)]),
        ('<points coords="1 1 312 625 2 010 020">dogs</points>', [(312, 625), (10, 20)]),
        ('<tracks coords="0.5 1 312 625;1.0 1 010 020">dog</tracks>', [(312, 625), (10, 20)]),
        ("<|box_start|>(100,200),(300,400)<|box_end|>", [POINT]),
        ("<box>[[100, 200, 300, 400]]</box>", [POINT]),
        ("(200, 300)", [POINT]),
    ]:
        with subtests.test(text=text, want=want):
            assert [shape.values for shape in points(text).value] == want
