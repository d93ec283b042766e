"""Relative paths in rows start at the file that names them, wherever a command runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.data.captions import Captions
from mmrl.data.pairs import PreferencePairs
from mmrl.data.prompts import Prompts, read
from mmrl.data.vision.source import Vision
from mmrl.zoo.stages.answers import of_field
from tests.fixtures import tiny_vlms

SOURCES = {
    "prompts": (Prompts, {}),
    "vision": (Vision, {}),
    "captions": (Captions, {"file_name": "a.png"}),
    "preferences": (PreferencePairs, {"chosen": "yes", "rejected": "no"}),
}


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    """Two folders with pictures of one name, and the working folder in neither."""
    for name in ("one", "two", "elsewhere"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        tiny_vlms.image(40, 30).save(tmp_path / name / "a.png")
        tiny_vlms.image(30, 40).save(tmp_path / name / "target.png")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def written(folder: Path, **values) -> str:
    (folder / "rows.jsonl").write_text(json.dumps({"text": f"a text of {folder.name}", **values}))
    return str(folder / "rows.jsonl")


@pytest.mark.parametrize("kind", SOURCES)
def test_paths_of_every_source_start_at_their_file(folder, kind):
    cls, more = SOURCES[kind]
    row = {"image": "a.png", "reference": "target.png", "note": "later.png", **more}
    paths = [written(folder / name, **row) for name in ("one", "two")]
    source = cls(paths[0], held_out=paths[1])
    for prompt, place in ((source.train[0], folder / "one"), (source.held_out[0], folder / "two")):
        shown = prompt["images"][0] if kind == "vision" else prompt["image"]
        assert shown == str(place / "a.png")
        assert prompt["reference"] == str(place / "target.png")  # of a reward
        assert prompt["note"] == "later.png"  # no file, no path


def test_what_policies_open_is_a_path_also_where_no_file_is(folder):
    path = Path(written(folder / "one", images=["gone.png", "a.png"], video="gone.mp4"))
    for prompt in (Prompts(str(path), held_out=0).train[0], read(path)[0]):
        assert prompt["images"] == [str(folder / "one" / name) for name in ("gone.png", "a.png")]
        assert prompt["video"] == str(folder / "one" / "gone.mp4")


def test_answers_in_a_field_and_tables_below_a_folder_name_their_pictures(folder):
    path = written(folder / "one", gold="target.png", image="a.png")
    (answer,) = of_field("gold")(Prompts(path, held_out=0).train[0])
    assert str(answer.content) == str(folder / "one" / "target.png")
    (folder / "two" / "data").mkdir()
    written(folder / "two" / "data", image="a.png")
    (prompt,) = Vision(str(folder / "two"), held_out=0).train
    assert prompt["images"] == [str(folder / "two" / "a.png")]


def test_escapes_of_addresses_of_files_are_read(folder):
    """``%20`` is a blank, as ``Path.as_uri`` writes it, unless a file is really called so."""
    names = ("my pic#1.png", "50%25.png")
    for name in names:
        tiny_vlms.image(40, 30).save(folder / "one" / name)
    blank, literal = folder / "one" / names[0], folder / "one" / names[1]
    assert "%20" in blank.as_uri()
    parts = [{"type": "image", "image": blank.as_uri()}, {"type": "text", "text": "what?"}]
    path = written(folder / "one", messages=[{"role": "user", "content": parts}])
    (turn,) = Vision(path, held_out=0).train[0]["messages"]
    assert turn["content"][0]["image"] == str(blank)
    path = written(folder / "one", images=[blank.as_uri(), f"file://{literal}"])
    assert Prompts(path, held_out=0).train[0]["images"] == [str(blank), str(literal)]
