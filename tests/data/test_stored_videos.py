"""Videos as answers, and inside tables and tars; what is no video is reported."""

import io
import json
import tarfile

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.data.captions import Captions
from mmrl.data.vision.source import Vision
from mmrl.zoo.stages.answers import of_file
from tests.fixtures.clips import film


@pytest.fixture
def clip(tmp_path, monkeypatch):
    """Four frames of 8 a second, each brighter by 50."""
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    return film(tmp_path / "a.mp4", 4)


@pytest.mark.parametrize("source, key", [(Vision, "video"), (Captions, "answer")])
def test_a_tar_of_videos(tmp_path, clip, source, key):
    path = tmp_path / "films.tar"
    with tarfile.open(path, "w") as archive:
        for name, part in (("a.mp4", clip.read_bytes()), ("a.txt", b"what moves?")):
            entry = tarfile.TarInfo(name)
            entry.size = len(part)
            archive.addfile(entry, io.BytesIO(part))
    for _ in range(2):  # the second time it is there already
        (prompt,) = source(str(path), held_out=0.0).train
        stored = tmp_path / "cache" / "videos"
        assert prompt["text"] == "what moves?" and [prompt[key]] == list(map(str, stored.iterdir()))
    assert next(stored.iterdir()).read_bytes() == clip.read_bytes()


def test_videos_are_answers_and_are_brought_to_the_policys_rate(tmp_path, clip):
    lines = [
        {"prompt": "p", "answers": [{"video": "a.mp4", "reward": 1.0}]},
        {"prompt": "p", "answer": "a.mp4"},
    ]
    (tmp_path / "rated.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rated, plain = of_file(tmp_path / "rated.jsonl")({"text": "p"})
    assert rated.reward == 1.0 and rated.media().shape == (4, 3, 16, 32)
    assert torch.equal(plain.media(), rated.media())
    for frames, rate, numbers in (
        (None, None, [0, 1, 2, 3]),
        (2, 4.0, [0, 2]),
        (None, 16.0, [0, 0, 1, 1, 2, 2, 3, 3]),
    ):
        shown = plain.media(frames, rate).mean((1, 2, 3)) * 255 / 50
        assert torch.allclose(shown, torch.tensor(numbers).float(), atol=0.1)
    with pytest.raises(UserError, match="a.mp4: .*it lasts 0.50 s, and 17 frames"):
        plain.media(17, 8.0)
