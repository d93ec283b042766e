"""Pictures with captions, to learn from."""

import json

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.data.captions import Captions


@pytest.fixture
def folder(tmp_path):
    for i, name in enumerate("abc"):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


def table(folder, *rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return folder / name


def test_a_folder_of_pictures_beside_their_captions(folder):
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"picture {name}\n")
    source = Captions(folder, held_out=0.3)
    found = {prompt["text"]: prompt["answer"] for prompt in [*source.train, *source.held_out]}
    assert found == {f"picture {name}": str((folder / f"{name}.png").resolve()) for name in "abc"}
    assert source.train and source.held_out and not Captions(folder, held_out=0).held_out
    (folder / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a.png: no caption; write it into a.txt"):
        Captions(folder)


def test_a_table_of_files_and_captions_keeps_other_values(folder):
    rows = [
        {"file_name": "a.png", "text": "one", "label": 3},
        {"image": "b.png", "caption": "two", "plan": "red"},
    ]
    path = table(folder, *rows, name="metadata.jsonl")
    first, second = Captions(folder, held_out=0).train
    assert (first["label"], second["plan"]) == (3, "red")
    assert (first["text"], second["text"]) == ("one", "two")
    assert first["origin"] == f"{path}:1" and second["answer"].endswith("b.png")


def test_clips_have_a_first_frame_or_are_a_list_of_pictures_at_a_rate(folder):
    (folder / "a.mp4").write_bytes(b"")
    place = str(folder.resolve())
    path = table(folder, {"video": "a.mp4", "image": "a.png", "text": "one"})
    (prompt,) = Captions(path, held_out=0, scan=False).train
    assert [prompt["answer"], prompt["image"]] == [f"{place}/a.mp4", f"{place}/a.png"]
    path = table(folder, {"video": ["a.png", "a.png"], "text": "one", "fps": 8})
    (prompt,) = Captions(path, held_out=0).train
    assert prompt["answer"] == [f"{place}/a.png"] * 2 and prompt["fps"] == 8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"file_name": "none.png", "text": "a"}, "no file .*none.png"),
        ({"file_name": "a.png"}, "no text or caption; this row has file_name"),
        ({"text": "a"}, "no answer or file_name"),
        ([], "expected an object, got list"),
        ({"video": "a.mp4", "image": "none.png", "text": "a"}, "no file .*"),
        ({"video": ["a.png", "a.png"], "text": "one"}, "into the row: fps"),
        ({"video": [1], "text": "one"}, "is a list"),
    ],
)
def test_a_broken_row_is_named_with_its_line(folder, row, message):
    table(folder, row, name="metadata.jsonl")
    with pytest.raises(UserError, match=f"metadata.jsonl:1: .*{message}"):
        Captions(folder)
