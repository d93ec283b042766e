"""Pictures are looked at before training, once; a broken one is a row that is left out."""

import json
import sqlite3
from functools import partial

import numpy as np
import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.media import scan as scanning
from mmrl.core.media.scan import Finding, scan
from mmrl.data.captions import Captions
from mmrl.data.ledger import collecting
from mmrl.data.vision.source import Vision
from tests.fixtures.clips import film


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    pics = tmp_path / "pics"
    pics.mkdir()
    noise = Image.effect_noise((60, 40), 50).convert("RGB")
    for name in ("whole.png", "cut.png", "cut.jpg", "more.jpg"):
        noise.save(pics / name)
    for name in ("cut.png", "cut.jpg"):
        content = (pics / name).read_bytes()
        (pics / name).write_bytes(content[: len(content) // 2])
    deep = np.linspace(0, 65535, 40 * 60).reshape(40, 60).astype(np.uint16)
    Image.fromarray(deep).save(pics / "deep.png")
    (pics / "text.png").write_text("not found")
    return pics


def rows(folder, names, **more):
    path = folder / "rows.jsonl"
    lines = [{"text": f"what is {name}?", "image": name} | more for name in names]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_every_picture_is_looked_at_once(folder, monkeypatch):
    names = [str(folder / name) for name in ("whole.png", "cut.jpg", "deep.png", "whole.png")]
    findings = scan(names)
    assert [finding.size for finding in findings] == [(60, 40), (0, 0), (60, 40), (60, 40)]
    assert "truncated" in findings[1].problem and "scaled by their range" in findings[2].note
    looked = []
    monkeypatch.setattr(scanning, "look_at", lambda source, **_: looked.append(source) or Finding())
    assert scan(names) == findings and not looked, "it is remembered"
    (folder / "whole.png").write_bytes((folder / "more.jpg").read_bytes())
    scan(names)
    assert looked == [names[0]], "a file that has changed is looked at again"
    assert scan([str(folder / "gone.png")])[0].problem == "no such file"


class Full(sqlite3.Connection):
    def executemany(self, *arguments):
        raise sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("harm", ["no database", "a full disk"])
def test_a_cache_that_cannot_be_used_is_done_without(harm, folder, monkeypatch, tmp_path):
    if harm == "no database":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "pictures.sqlite").write_text("this is no database" * 100)
    else:
        connect = partial(sqlite3.connect, factory=Full)
        monkeypatch.setattr(scanning.sqlite3, "connect", connect)
    assert scan([str(folder / "whole.png")])[0].size == (60, 40)


def test_files_are_decoded_only_where_their_end_does_not_tell_or_the_user_asks(folder, monkeypatch):
    """A file whose middle is damaged ends as it should; only a decoder notices."""
    content = (folder / "whole.png").read_bytes()
    middle = len(content) // 2
    (folder / "hurt.png").write_bytes(content[:middle] + b"\0" * 40 + content[middle + 40 :])
    (folder / "more.jpg").write_bytes((folder / "more.jpg").read_bytes() + b"\0\0")  # after its end
    Image.new("RGB", (6, 4)).save(folder / "a.webp")
    Image.new("RGB", (6, 4)).save(folder / "a.bmp")
    film(folder / "a.mp4", 4)
    names = ["whole.png", "hurt.png", "more.jpg", "a.webp", "a.bmp", "a.mp4"]
    loaded = []
    load = Image.Image.load
    monkeypatch.setattr(Image.Image, "load", lambda self: loaded.append(self.format) or load(self))
    findings = scan([str(folder / name) for name in names])
    assert [each.problem for each in findings] == [""] * 6 and findings[5].seconds == 0.5
    assert {"PNG", "WEBP"}.isdisjoint(loaded)
    with scanning.decoding():
        whole = scan([str(folder / name) for name in names])
    assert [bool(each.problem) for each in whole] == [False, True, False, False, False, False]
    assert scan([str(folder / "hurt.png")])[0].problem, "a later start knows it"


@pytest.mark.parametrize("name", ["cut.png", "cut.jpg", "text.png"])
def test_one_bad_picture_is_named_or_left_out_as_asked(folder, name):
    path = rows(folder, ["whole.png", name, "more.jpg"])
    with pytest.raises(UserError, match=rf"1 of 3 rows are broken:\n.*rows.jsonl:2: .*{name}: "):
        Vision(path)
    with collecting() as summaries:
        source = Vision(path, broken="skip", held_out=0.0)
    assert [prompt["text"][8:-1] for prompt in source.train] == ["whole.png", "more.jpg"]
    assert name in summaries[0].dropped[0]
    (line,) = summaries[0].lines()
    assert "3 rows read, 1 broken and left out, 2 to train on, 0 held out" in line
    assert len(Vision(path, scan=False, held_out=0.0).train) == 3, "nobody looked"


def test_pictures_of_conversations_and_of_captions_are_looked_at(folder):
    path = folder / "talk.jsonl"
    part = {"type": "image", "image": "cut.jpg"}
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "a?"}]}]
    path.write_text(json.dumps({"messages": talk}))
    with pytest.raises(UserError, match="cut.jpg: image file is truncated"):
        Vision(path)
    with pytest.raises(UserError, match="cut.png: "):
        Captions(rows(folder, ["cut.png", "whole.png"]))
    with collecting() as summaries:
        Vision(rows(folder, ["whole.png", "more.jpg", "whole.png", "deep.png"]), held_out=0.4)
    said = " ".join(summaries[0].lines())
    assert "1 repeat another row" in said and "(40 % by a hash of the picture)" in said
    assert "1 pictures: more than 8 bits a value, scaled by their range" in said


def test_a_picture_larger_than_the_limit_is_a_broken_row_that_names_the_option(folder, monkeypatch):
    """A file of 22 kB that claims 180 megapixels, and has them."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    Image.new("1", (15000, 12000)).save(folder / "huge.png")
    path = rows(folder, ["whole.png", "huge.png", "more.jpg"])
    with pytest.raises(UserError, match=r"rows.jsonl:2: .*huge.png: .*180,000,000 .* data.max_pix"):
        Vision(path)
    with collecting() as summaries:
        assert len(Vision(path, broken="skip", held_out=0.0).train) == 2
    assert "raise data.max_pixels" in summaries[0].dropped[0]
    for _ in range(2):  # also from the memory of what was found
        source = Vision(path, held_out=0.0, max_pixels=200_000_000)
        assert [prompt["text"][8:-1] for prompt in source.train][1] == "huge.png"
    for source in (Vision, Captions):
        with pytest.raises(UserError, match="1 of 3 rows are broken:\n.*180,000,000 pixels"):
            source(path)
