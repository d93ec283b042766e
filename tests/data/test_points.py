"""Points in the wrong space are caught as boxes are, with what makes them right."""

import json
import random

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.data.view import shown, side_of
from mmrl.data.vision.boxes import Placed
from mmrl.data.vision.points import judge, listed, read
from mmrl.data.vision.source import Vision

SIZES = [(640, 480), (360, 780), (800, 600)]
COUNT = 24


def shares():
    """The same points of every data set, as shares of the sides."""
    draw = random.Random(0)
    return [(draw.uniform(0.02, 0.98), draw.uniform(0.02, 0.98)) for _ in range(COUNT)]


def points_in(space):
    """Points of one data set, as a space or order writes them, with the sizes of the pictures."""
    rows = []
    for number, (x, y) in enumerate(shares()):
        width, height = SIZES[number % 3]
        point = {
            "original": (x * width, y * height),
            "rel1": (x, y),
            "rel1000": (round(1000 * x), round(1000 * y)),
            "yx": (y * height, x * width),
        }[space]
        rows.append(Placed(number, (*point, *point), (width, height)))
    return rows


def test_the_space_of_a_data_set_is_told_by_its_points(subtests):
    for said in ["original", "rel1", "rel1000"]:
        for actual in ["original", "rel1", "rel1000", "yx"]:
            with subtests.test(said=said, actual=actual):
                verdict = judge(points_in(actual), said)
                name = verdict.likely.partition(":")[0]
                if said == actual:
                    assert not verdict.likely and not verdict.rows and not verdict.doubt
                elif said == "rel1000" and actual in ("original", "yx"):
                    assert not name, "pixels below 1000 are possible numbers of 0 to 1000"
                elif actual == "yx":
                    assert name == ("yx" if said == "original" else "rel1000"), (
                        "y first is seen in pixels"
                    )
                else:
                    assert name == actual


def test_one_point_far_outside_is_that_rows_mistake():
    rows = points_in("original")
    rows[3] = Placed(3, (6000, 4000, 6000, 4000), (640, 480))
    verdict = judge(rows, "original")
    assert not verdict.likely and list(verdict.rows) == [3]
    assert verdict.rows[3] == "point [6000, 4000] lies outside its picture of 640 x 480 pixels"
    assert not judge([Placed(3, (641, 481, 641, 481), (640, 480))], "original").rows
    assert list(judge([Placed(0, (-50, 0, -50, 0), None)], "original").rows) == [0]
    assert not judge([], "original").rows
    corners = [Placed(n, (n % 2, 0, n % 2, 0), (640, 480)) for n in range(4)]
    assert not judge(corners, "original").likely, "the corner of a picture is a pixel, no share"


def test_points_that_end_at_1000_on_long_screens_are_doubted():
    screen = (1080, 2400)
    rows = [Placed(i, (500, 40 * i, 500, 40 * i), screen) for i in range(25)]
    verdict = judge(rows, "original")
    assert not verdict.rows and not verdict.likely and "space: rel1000" in verdict.doubt
    assert not judge(rows, "rel1000").doubt and not judge(rows[-5:], "original").doubt


def test_points_are_read_as_answers_write_them(subtests):
    for values, points in [
        ({"point": [3, 4]}, [[3, 4]]),
        ({"point": "<answer>(3, 4)</answer>"}, [[3, 4]]),
        ({"point": {"x": 3, "y": 4}}, [[3, 4]]),
        ({"point": '{"point_2d": [3, 4]}'}, [[3, 4]]),
        ({"points": [[3, 4], {"point_2d": [5, 6]}]}, [[3, 4], [5, 6]]),
        ({"points": "```json\n[[3, 4], [5, 6]]\n```"}, [[3, 4], [5, 6]]),
        ({"points": [3, 4]}, [[3, 4]]),
        ({"points": 5}, []),
        ({"points": ["first argue", "then conclude"]}, []),
        ({"point": "the tip of the nose"}, []),
        ({}, []),
    ]:
        with subtests.test(values=values, points=points):
            assert listed(read(values)) == points


def test_coordinates_that_are_no_points_say_so(subtests):
    for value, words in [
        ([1, 2, 3, 4], "four numbers are a box, which belongs under boxes"),
        ([1], "is not two numbers"),
        ([1, "2"], "is not two numbers"),
        ({"left": 3}, "is not two numbers"),
        ([1e12, 3], "is not two numbers"),
    ]:
        with subtests.test(value=value, words=words):
            with pytest.raises(ValueError, match=words):
                read({"point": value})
            with pytest.raises(ValueError, match="is not two numbers"):
                read({"points": [[1, 2], value]})


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (40, 90, 40)).save(tmp_path / f"{number}.png")
    return tmp_path


def file_of(folder, space):
    rows = [
        {
            "text": f"thing {each.row}?",
            "image": str(folder / f"{each.row % 3}.png"),
            "point": list(each.box[:2]),
            "action": "click",
        }
        for each in points_in(space)
    ]
    path = folder / f"{space}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("actual", ["rel1", "rel1000"])
def test_a_source_stops_at_another_space_and_the_remedy_mends_it(folder, actual):
    path = file_of(folder, actual)
    for broken in ("error", "skip"):
        with pytest.raises(
            UserError, match=rf"the points are .* look like {actual}: .*; set space: {actual}"
        ):
            Vision(path, broken=broken)
    assert len(Vision(path, held_out=0.0, space=actual).train) == COUNT


def test_points_with_y_first_are_told_by_pictures_that_are_not_square(folder):
    with pytest.raises(UserError, match=r"look like yx: .* inside as \[y, x\]; write \[x, y\]"):
        Vision(file_of(folder, "yx"))


def config_of(folder, path, source, reward):
    config = folder / "c.yaml"
    config.write_text(
        f"data: {{{source}: {{path: {path}, held_out: 0.0}}}}\nreward: {{{reward}: {{}}}}\n"
        f"policy: {{vlm: {{path: nowhere}}}}\n"
    )
    return str(config)


@pytest.mark.parametrize("reward", ["point", "gui"])
def test_check_reward_fails_where_another_source_has_points_of_another_space(folder, reward):
    config = config_of(folder, file_of(folder, "rel1000"), "prompts", reward)
    done = CliRunner().invoke(app, ["check-reward", config])
    flat = " ".join(done.output.split())
    assert done.exit_code == 1, done.output
    assert "all 24 points: points: the points look like rel1000" in flat
    assert "set space: rel1000" in flat


def test_check_reward_passes_with_points_in_their_pictures(folder):
    config = config_of(folder, file_of(folder, "original"), "vision", "point")
    done = CliRunner().invoke(app, ["check-reward", config])
    assert done.exit_code == 0, done.output
    assert "lie in their" in done.output


def test_the_view_of_the_data_counts_and_draws_points(folder, monkeypatch):
    monkeypatch.chdir(folder)
    prompts = Vision(file_of(folder, "original"), held_out=0.0).train
    assert side_of("train", prompts, 3).points == COUNT
    bare = {key: value for key, value in prompts[0].items() if key != "point"}
    assert shown(prompts[0])["picture"] != shown(bare)["picture"]
    path = file_of(folder, "rel1")
    done = CliRunner().invoke(app, ["data", config_of(folder, path, "vision", "point")])
    assert done.exit_code != 0 and "look like rel1" in str(done.exception)
    path = file_of(folder, "original")
    done = CliRunner().invoke(app, ["data", config_of(folder, path, "vision", "point")])
    assert done.exit_code == 0 and "0 boxes, 24 points" in done.output
