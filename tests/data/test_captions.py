"""Pictures with captions, to learn from."""

import json

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.data.captions import Captions


def folder_of(tmp_path, names="abc"):
    for i, name in enumerate(names):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


def test_a_folder_of_pictures_beside_their_captions(tmp_path):
    folder_of(tmp_path)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"picture {name}\n")
    source = Captions(tmp_path, held_out=0.3)
    prompts = sorted([*source.train, *source.held_out], key=lambda prompt: prompt["text"])
    assert [prompt["text"] for prompt in prompts] == [f"picture {name}" for name in "abc"]
    assert [prompt["answer"] for prompt in prompts] == [
        str((tmp_path / f"{name}.png").resolve()) for name in "abc"
    ]
    assert source.train and source.held_out and not Captions(tmp_path, held_out=0).held_out


@pytest.mark.parametrize("name", ["metadata.jsonl", "rows.jsonl"])
def test_a_table_of_files_and_captions_keeps_other_values(tmp_path, name):
    folder_of(tmp_path)
    rows = [
        {"file_name": "a.png", "text": "one", "label": 3},
        {"image": "b.png", "caption": "two", "plan": "red"},
    ]
    table = tmp_path / name
    table.write_text("\n".join(map(json.dumps, rows)))
    source = Captions(tmp_path if name == "metadata.jsonl" else table, held_out=0)
    first, second = source.train
    assert (first["label"], second["plan"]) == (3, "red")
    assert (first["text"], second["text"]) == ("one", "two")
    assert first["origin"] == f"{table}:1" and second["answer"].endswith("b.png")


def test_a_clip_s_first_frame_is_looked_for_beside_its_table(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "a.mp4").write_bytes(b"")
    table = tmp_path / "rows.jsonl"
    row = {"video": "a.mp4", "image": "a.png", "text": "one"}
    table.write_text(json.dumps(row))
    (prompt,) = Captions(table, held_out=0, scan=False).train
    paths = [str(tmp_path.resolve() / name) for name in ("a.mp4", "a.png")]
    assert [prompt["answer"], prompt["image"]] == paths
    table.write_text(json.dumps(row | {"image": "none.png"}))
    with pytest.raises(UserError, match="rows.jsonl:1: no file .*none.png"):
        Captions(table)


def test_pictures_in_a_list_are_a_clip_at_the_rate_of_the_row(tmp_path):
    folder_of(tmp_path)
    table = tmp_path / "rows.jsonl"
    row = {"video": ["a.png", "a.png"], "text": "one"}
    table.write_text(json.dumps(row | {"fps": 8}))
    (prompt,) = Captions(table, held_out=0).train
    assert prompt["answer"] == [str(tmp_path.resolve() / "a.png")] * 2 and prompt["fps"] == 8
    for wrong, sentence in ((row, "into the row: fps"), (row | {"video": [1]}, "is a list")):
        table.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=f"rows.jsonl:1: .*{sentence}"):
            Captions(table)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"file_name": "none.png", "text": "a"}, "metadata.jsonl:1: no file .*none.png"),
        ({"file_name": "a.png"}, "metadata.jsonl:1: no text or caption; this row has file_name"),
        ({"text": "a"}, "metadata.jsonl:1: no answer or file_name"),
        ([], "metadata.jsonl:1: expected an object, got list"),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path, row, message):
    folder_of(tmp_path)
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=message):
        Captions(tmp_path)


def test_what_holds_no_captions_is_refused(tmp_path):
    with pytest.raises(UserError, match="no pictures with captions there"):
        Captions(tmp_path)
    folder_of(tmp_path, "a")
    with pytest.raises(UserError, match=r"a.png: no caption; write it into a.txt"):
        Captions(tmp_path)
    with pytest.raises(UserError, match="a.png: rows are read from .txt"):
        Captions(tmp_path / "a.png")
