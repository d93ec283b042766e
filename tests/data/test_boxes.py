"""Boxes in the wrong space are caught, with what makes them right."""

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.data.vision.boxes import Placed, judge, unwrapped, written
from mmrl.data.vision.source import Vision

SIZES = [(640, 480), (480, 640), (800, 600)]
# x0, y0, x1, y1 as shares of the sides
SHARES = [
    (0.1, 0.2, 0.5, 0.9),
    (0.5, 0.1, 0.95, 0.4),
    (0.3, 0.3, 0.6, 0.7),
    (0.6, 0.5, 0.8, 0.98),
    (0.05, 0.6, 0.4, 0.95),
    (0.2, 0.1, 0.99, 0.8),
]


def rows_in(space):
    """Boxes of one data set, as a space or format writes them, with the sizes of the pictures."""
    rows = []
    for number, share in enumerate(SHARES * 4):
        width, height = SIZES[number % 3]
        x0, y0, x1, y1 = share
        pixels = [x0 * width, y0 * height, x1 * width, y1 * height]
        box = {
            "original": pixels,
            "rel1": list(share),
            "rel1000": [round(1000 * value) for value in share],
            "xywh": [*pixels[:2], pixels[2] - pixels[0], pixels[3] - pixels[1]],
            "yxyx": [pixels[i ^ 1] for i in range(4)],
        }[space]
        rows.append(Placed(number, box, (width, height)))
    return rows


def test_the_space_of_a_data_set_is_told_by_its_boxes(subtests):
    for said in ["original", "rel1", "rel1000"]:
        for actual in ["original", "rel1", "rel1000", "xywh"]:
            with subtests.test(said=said, actual=actual):
                verdict = judge(rows_in(actual), said)
                name = verdict.likely.partition(":")[0]
                if said == actual:
                    assert not verdict.likely and not verdict.rows and not verdict.doubt
                elif (said, actual) == ("rel1000", "original"):
                    assert not name, "pixels below 1000 are possible numbers of 0 to 1000"
                elif actual == "xywh":
                    assert name in {
                        "original": {"xywh"},
                        "rel1000": {"xywh"},
                        "rel1": {"original", "rel1000"},
                    }[said] | {""}
                else:
                    assert name == actual


def test_one_box_far_outside_is_that_rows_mistake():
    rows = rows_in("original")
    rows[3] = Placed(3, [600, 400, 6000, 4000], (640, 480))
    verdict = judge(rows, "original")
    assert not verdict.likely and list(verdict.rows) == [3]
    assert "lies outside its picture of 640 x 480 pixels" in verdict.rows[3]
    nearly = Placed(3, [600, 400, 655, 481], (640, 480))
    assert not judge([nearly], "original").rows, "annotators are not exact"
    assert list(judge([Placed(0, [-50, 0, 20, 20], None)], "original").rows) == [0]
    assert not judge([], "original").rows


def test_boxes_that_end_at_1000_in_large_pictures_are_doubted():
    rows = [Placed(i, [10, 20, 980 + i, 900], (4000, 3000)) for i in range(20)]
    verdict = judge(rows, "original")
    assert not verdict.rows and not verdict.likely and "space: rel1000" in verdict.doubt
    assert not judge(rows[:5], "original").doubt


def test_boxes_that_stand_in_a_text_are_read(subtests):
    for text, boxes in [
        ("<answer>[1, 2, 3, 4]</answer>", [[1, 2, 3, 4]]),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", [[1, 2, 3, 4], [5, 6, 7, 8]]),
        ('```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "x"}]\n```', [[1, 2, 3, 4]]),
        ("<answer>[{'Position': [1, 2, 3, 4], 'Confidence': 1}]</answer>", [[1, 2, 3, 4]]),
        ({"bbox": [1, 2, 3, 4]}, [[1, 2, 3, 4]]),
    ]:
        with subtests.test(text=text, boxes=boxes):
            assert written(text) == boxes


def test_texts_that_hold_no_boxes_say_so():
    with pytest.raises(ValueError, match="are no list of boxes"):
        written("the left one")
    with pytest.raises(ValueError, match="a box has none of bbox_2d"):
        written([{"corner": 3}])


def test_answers_are_unwrapped_where_the_tags_hold_them_whole():
    assert unwrapped(" <answer> B </answer>\n") == "B"
    for text in ("B", "<think>x</think><answer>B</answer>", "<answer>a</answer><answer>b</answer>"):
        assert unwrapped(text) == text


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate(SIZES):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    return tmp_path


def file_of(folder, space, key="bbox"):
    rows = [
        {"text": f"thing {each.row}?", "image": f"{each.row % 3}.png", key: list(each.box)}
        for each in rows_in(space)
    ]
    path = folder / f"{space}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_boxes_with_y_first_are_recognised_and_never_left_out_as_broken_rows(folder):
    """Some pictures are wider than high, so that only some of the boxes lie outside."""
    verdict = judge(rows_in("yxyx"), "original")
    assert verdict.likely.startswith("yxyx: ") and 0 < len(verdict.rows) < 24
    for broken in ("error", "skip"):
        with pytest.raises(UserError, match=r"look like yxyx: .*; write \[x0, y0, x1, y1\]"):
            Vision(file_of(folder, "yxyx"), broken=broken)


def test_many_rows_that_are_broken_alike_are_not_left_out(folder):
    path = file_of(folder, "original")
    rows = path.read_text().splitlines()
    several = [row.replace(".png", "-lost.png") if i < 6 else row for i, row in enumerate(rows)]
    path.write_text("\n".join(several))
    with pytest.raises(UserError, match="6 of 24 rows are broken for one same reason"):
        Vision(path, broken="skip")
    path.write_text("\n".join([*several[4:], *rows]))
    assert len(Vision(path, broken="skip", held_out=0.0).train) == 42, "two may be lost by chance"


@pytest.mark.parametrize(
    "actual, option", [("rel1", "space"), ("rel1000", "space"), ("xywh", "box_format")]
)
def test_a_source_stops_at_another_space_and_the_remedy_mends_it(folder, actual, option):
    path = file_of(folder, actual)
    for broken in ("error", "skip"):
        with pytest.raises(
            UserError, match=rf"they look like {actual}: .*; set {option}: {actual}"
        ):
            Vision(path, broken=broken)
    mended = Vision(path, held_out=0.0, **{option: actual}).train
    assert len(mended) == 24
    if option == "box_format":
        right = Vision(file_of(folder, "original"), held_out=0.0).train
        for one, other in zip(mended, right, strict=True):
            assert one["boxes"][0] == pytest.approx(other["boxes"][0])


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


def test_check_reward_fails_where_another_source_has_boxes_of_another_space(folder):
    path = file_of(folder, "rel1000", key="boxes")
    config = folder / "c.yaml"
    config.write_text(
        f"data: {{prompts: {{path: {path}, held_out: 0.0}}}}\n"
        f"reward: {{grounding: {{}}}}\npolicy: {{vlm: {{path: nowhere}}}}\n"
    )
    text = path.read_text().replace('"image": "', f'"image": "{folder}/')
    path.write_text(text.replace('"boxes": [', '"boxes": [[').replace("]}", "]]}"))
    done = CliRunner().invoke(app, ["check-reward", str(config)])
    assert done.exit_code == 1, done.output
    flat = " ".join(done.output.split())
    assert "the boxes look like rel1000" in flat and "set space: rel1000" in flat


def test_check_reward_passes_with_boxes_in_their_pictures(folder):
    path = file_of(folder, "original")
    config = folder / "c.yaml"
    config.write_text(
        f"data: {{vision: {{path: {path}}}}}\nreward: {{grounding: {{}}}}\n"
        f"policy: {{vlm: {{path: nowhere}}}}\n"
    )
    done = CliRunner().invoke(app, ["check-reward", str(config)])
    assert done.exit_code == 0, done.output
    assert "lie in their" in done.output


def test_referring_expressions_with_corners_are_told_from_sides(folder):
    rows = [
        {"image": f"{each.row % 3}.png", "sent": f"thing {each.row}", "bbox": list(each.box)}
        for each in rows_in("original")
    ]
    path = folder / "refs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"format": "refcoco", "columns": {"expression": "sent"}, "held_out": 0.0}
    with pytest.raises(UserError, match="they look like xyxy: .*; set box_format: xyxy"):
        Vision(path, **options)
    prompts = Vision(path, box_format="xyxy", **options).train
    assert [prompt["boxes"][0] for prompt in prompts] == [row["bbox"] for row in rows]
    assert prompts[2]["text"] == "Give the box of thing 2."
    with pytest.raises(UserError, match=r"no column 'no' \(columns.expression\)"):
        Vision(path, **options | {"columns": {"expression": "no"}})
