"""Videos inside tables and tars are read; what is no video is reported."""

import io
import tarfile

import pytest

from mmrl.data.captions import Captions
from mmrl.data.sources.media import video
from mmrl.data.vision.source import Vision
from tests.data.test_answers import film


@pytest.fixture
def content(tmp_path, monkeypatch) -> bytes:
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    return film(tmp_path / "film.mp4").read_bytes()


@pytest.mark.parametrize("source, key", [(Vision, "video"), (Captions, "answer")])
def test_a_tar_of_videos(tmp_path, content, source, key):
    path = tmp_path / "films.tar"
    with tarfile.open(path, "w") as archive:
        for name, part in (("a.mp4", content), ("a.txt", b"what moves?")):
            entry = tarfile.TarInfo(name)
            entry.size = len(part)
            archive.addfile(entry, io.BytesIO(part))
    for _ in range(2):  # the second time it is there already
        (prompt,) = source(str(path), held_out=0.0).train
        stored = tmp_path / "cache" / "videos"
        assert prompt["text"] == "what moves?" and [prompt[key]] == list(map(str, stored.iterdir()))
    assert next(stored.iterdir()).read_bytes() == content


def test_a_table_of_videos(tmp_path, content):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"text": "what?", "video": {"bytes": content, "path": "a.mp4"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "films.parquet")
    (prompt,) = Vision(str(tmp_path / "films.parquet"), held_out=0.0).train
    assert prompt["video"].endswith(".mp4")


def test_other_bytes_are_no_video(tmp_path):
    with pytest.raises(ValueError, match="not a video that can be read"):
        video(b"nothing", tmp_path)
