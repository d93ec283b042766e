"""Boxes and points in the wrong space are caught, with what makes them right."""

import json
from itertools import product

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.data.vision import boxes, points
from mmrl.data.vision.boxes import Placed
from mmrl.data.vision.source import Vision

SIZES = [(640, 480), (360, 780), (800, 600)]
COUNT = 24
# x0, y0, x1, y1 as shares of the sides
SHARES = [(0.1, 0.2, 0.5, 0.9), (0.5, 0.1, 0.95, 0.4), (0.3, 0.3, 0.6, 0.7), (0.2, 0.1, 0.99, 0.8)]


def boxes_in(space):
    """Boxes of one data set, as a space or format writes them, with the sizes of the pictures."""
    rows = []
    for number, share in enumerate(SHARES * 6):
        width, height = SIZES[number % 3]
        x0, y0, x1, y1 = share
        pixels = [x0 * width, y0 * height, x1 * width, y1 * height]
        box = {
            "original": pixels,
            "rel1": list(share),
            "rel1000": [round(1000 * value) for value in share],
            "xywh": [*pixels[:2], pixels[2] - pixels[0], pixels[3] - pixels[1]],
            "yx": [pixels[i ^ 1] for i in range(4)],
        }[space]
        rows.append(Placed(number, box, (width, height)))
    return rows


def points_in(space):
    """The last corners of the boxes."""
    return [Placed(row.row, (*row.box[2:], *row.box[2:]), row.size) for row in boxes_in(space)]


KINDS = {"boxes": (boxes.judge, boxes_in), "points": (points.judge, points_in)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_of_a_data_set_is_told_by_its_numbers(kind):
    judge, numbers = KINDS[kind]
    for said, actual in product(["original", "rel1", "rel1000"], repeat=2):
        verdict = judge(numbers(actual), said)
        # pixels below 1000 are possible in rel1000
        possible = said == actual or (said, actual) == ("rel1000", "original")
        assert verdict.likely.partition(":")[0] == ("" if possible else actual), (said, actual)
        if said == actual:
            assert not verdict.rows and not verdict.doubt
    verdict = judge(numbers("yx"), "original")
    assert verdict.likely.startswith("yx") and 0 < len(verdict.rows) < COUNT


@pytest.mark.parametrize(
    ("kind", "far", "near", "negative"),
    [
        ("boxes", [600, 400, 6000, 4000], [600, 400, 655, 481], [-50, 0, 20, 20]),
        ("points", [6000, 4000] * 2, [641, 481] * 2, [-50, 0] * 2),
    ],
)
def test_one_far_outside_is_that_rows_mistake(kind, far, near, negative):
    judge, numbers = KINDS[kind]
    rows = numbers("original")
    rows[3] = Placed(3, far, (640, 480))
    verdict = judge(rows, "original")
    assert not verdict.likely and list(verdict.rows) == [3]
    assert "lies outside its picture of 640 x 480 pixels" in verdict.rows[3]
    assert not judge([Placed(3, near, (640, 480))], "original").rows, "nobody is exact"
    assert list(judge([Placed(0, negative, None)], "original").rows) == [0]


def test_numbers_that_end_at_1000_in_large_pictures_are_doubted():
    many = [Placed(i, [10, 20, 980 + i, 900], (4000, 3000)) for i in range(20)]
    screen = [Placed(i, (500, 40 * i, 500, 40 * i), (1080, 2400)) for i in range(25)]
    for judge, rows in ((boxes.judge, many), (points.judge, screen)):
        verdict = judge(rows, "original")
        assert not verdict.rows and not verdict.likely and "space: rel1000" in verdict.doubt
        assert not judge(rows[-5:], "original").doubt and not judge(rows, "rel1000").doubt


FOUR = [1, 2, 3, 4]


BOXES = [
    ("<answer>[1, 2, 3, 4]</answer>", [FOUR]),
    ("[[1, 2, 3, 4], [5, 6, 7, 8]]", [FOUR, [5, 6, 7, 8]]),
    ('```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "x"}]\n```', [FOUR]),
    ("<answer>[{'Position': [1, 2, 3, 4], 'Confidence': 1}]</answer>", [FOUR]),
    ({"bbox": FOUR}, [FOUR]),
    ("the left one", "are no list of boxes"),
    ([{"corner": 3}], "a box has none of bbox_2d"),
]
POINTS = [
    ({"point": [3, 4]}, [[3, 4]]),
    ({"point": "<answer>(3, 4)</answer>"}, [[3, 4]]),
    ({"point": {"x": 3, "y": 4}}, [[3, 4]]),
    ({"point": '{"point_2d": [3, 4]}'}, [[3, 4]]),
    ({"points": [[3, 4], {"point_2d": [5, 6]}]}, [[3, 4], [5, 6]]),
    ({"points": "```json\n[[3, 4], [5, 6]]\n```"}, [[3, 4], [5, 6]]),
    ({"points": [3, 4]}, [[3, 4]]),
    ({"points": ["first argue", "then conclude"]}, []),
    ({"point": "the tip of the nose"}, []),
    ({"point": FOUR}, "four numbers are a box, which belongs under boxes"),
    ({"point": [1, "2"]}, "is not two numbers"),
    ({"point": [1e12, 3]}, "is not two numbers"),
    ({"points": [[1, 2], {"left": 3}]}, "is not two numbers"),
]


def test_boxes_and_points_are_read_as_answers_write_them(subtests):
    points_of = lambda values: points.listed(points.read(values))  # noqa: E731
    for read, table in ((boxes.written, BOXES), (points_of, POINTS)):
        for value, expected in table:
            with subtests.test(value=value):
                if isinstance(expected, list):
                    assert read(value) == expected
                else:
                    with pytest.raises(ValueError, match=expected):
                        read(value)


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (40, 90, 40)).save(tmp_path / f"{number}.png")
    return tmp_path


def file_of(folder, kind, space):
    rows = []
    for each in KINDS[kind][1](space):
        place = {"bbox": list(each.box)} if kind == "boxes" else {"point": list(each.box[:2])}
        image = str(folder / f"{each.row % 3}.png")
        rows.append({"text": f"thing {each.row}?", "image": image, "action": "click"} | place)
    path = folder / f"{kind}-{space}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("kind", "actual", "remedy"),
    [
        ("boxes", "rel1", {"space": "rel1"}),
        ("boxes", "xywh", {"box_format": "xywh"}),
        ("boxes", "yx", "write [x0, y0, x1, y1]"),
        ("points", "rel1000", {"space": "rel1000"}),
        ("points", "yx", "write [x, y]"),
    ],
)
def test_a_source_stops_at_another_space_and_the_remedy_mends_it(folder, kind, actual, remedy):
    path = file_of(folder, kind, actual)
    for broken in ("error", "skip"):
        with pytest.raises(UserError) as error:
            Vision(path, broken=broken)
        assert f"look like {actual}" in str(error.value)
        if isinstance(remedy, str):
            assert remedy in str(error.value)
    if isinstance(remedy, dict):
        ((option, value),) = remedy.items()
        assert f"set {option}: {value}" in str(error.value)
        mended = Vision(path, held_out=0.0, **remedy).train
        assert len(mended) == COUNT
    if remedy == {"box_format": "xywh"}:
        right = Vision(file_of(folder, kind, "original"), held_out=0.0).train
        for one, other in zip(mended, right, strict=True):
            assert one["boxes"][0] == pytest.approx(other["boxes"][0])


def test_many_rows_that_are_broken_alike_are_not_left_out(folder):
    path = file_of(folder, "boxes", "original")
    rows = path.read_text().splitlines()
    several = [row.replace(".png", "-lost.png") if i < 6 else row for i, row in enumerate(rows)]
    path.write_text("\n".join(several))
    with pytest.raises(UserError, match="6 of 24 rows are broken for one same reason"):
        Vision(path, broken="skip")
    path.write_text("\n".join([*several[4:], *rows]))
    assert len(Vision(path, broken="skip", held_out=0.0).train) == 42, "two may be lost by chance"


def test_a_turned_picture_is_measured_as_it_is_seen(folder):
    image = Image.new("RGB", (400, 100))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(folder / "turned.jpg", exif=exif)
    row = {"text": "where?", "image": "turned.jpg"}
    path = folder / "turned.jsonl"
    path.write_text(json.dumps(row | {"bbox": [10, 200, 90, 390]}))
    assert Vision(path, held_out=0.0).train
    path.write_text(json.dumps(row | {"bbox": [200, 10, 390, 90]}))
    with pytest.raises(UserError, match="lies outside its picture of 100 x 400 pixels"):
        Vision(path)


def test_referring_expressions_with_corners_are_told_from_sides(folder):
    path = file_of(folder, "boxes", "original")
    options = {"format": "refcoco", "columns": {"expression": "text"}, "held_out": 0.0}
    with pytest.raises(UserError, match="they look like xyxy: .*; set box_format: xyxy"):
        Vision(path, **options)
    prompts = Vision(path, box_format="xyxy", **options).train
    assert [p["boxes"][0] for p in prompts] == [list(each.box) for each in boxes_in("original")]


def checked(folder, path, source, reward):
    config = folder / "c.yaml"
    config.write_text(
        f"data: {{{source}: {{path: {path}, held_out: 0.0}}}}\nreward: {{{reward}: {{}}}}\n"
        f"policy: {{vlm: {{path: nowhere}}}}\n"
    )
    done = CliRunner().invoke(app, ["check-reward", str(config)])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(("kind", "reward"), [("boxes", "grounding"), ("points", "point")])
def test_check_reward_fails_where_another_source_has_numbers_of_another_space(folder, kind, reward):
    path = file_of(folder, kind, "rel1000")
    text = path.read_text().replace('"bbox": [', '"boxes": [[')
    path.write_text(text.replace("]}", "]]}") if kind == "boxes" else text)
    status, said = checked(folder, path, "prompts", reward)
    assert status == 1 and f"the {kind} look like rel1000" in said and "set space: rel1000" in said
    status, said = checked(folder, file_of(folder, kind, "original"), "vision", reward)
    assert status == 0 and "lie in their" in said
