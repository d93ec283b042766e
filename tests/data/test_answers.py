"""Demonstrations may be videos; what is no video is reported."""

import json

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.zoo.stages.answers import of_field, of_file


def film(path, frames=3):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for i in range(frames):
            pixels = np.full((16, 32, 3), 60 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_videos_are_answers(tmp_path):
    film(tmp_path / "a.mp4")
    lines = [
        {"prompt": "p", "answers": [{"video": "a.mp4", "reward": 1.0}]},
        {"prompt": "p", "answer": "a.mp4"},
    ]
    (tmp_path / "rated.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rated, plain = of_file(tmp_path / "rated.jsonl")({"text": "p"})
    video = rated.media()
    assert rated.reward == 1.0 and video.shape == (3, 3, 16, 32)
    assert torch.allclose(video.mean((1, 2, 3)), torch.tensor([0, 60, 120]) / 255, atol=0.02)
    assert torch.equal(plain.media(), video)


def test_rated_videos_are_read_as_they_are_stored(tmp_path):
    frames = [Image.new("RGB", (32, 16), (60 * i, 0, 0)) for i in range(3)]
    frames[0].save(tmp_path / "v.png", save_all=True, append_images=frames[1:], duration=100)
    frames[1].save(tmp_path / "still.png")
    (film,) = of_field("answer")({"text": "p", "answer": str(tmp_path / "v.png")})
    (still,) = of_field("answer")({"text": "p", "answer": str(tmp_path / "still.png")})
    assert film.media().shape == (3, 3, 16, 32) and still.media().shape == (3, 16, 32)
    assert torch.allclose(film.media()[:, 0].mean((1, 2)) * 255, torch.tensor([0.0, 60.0, 120.0]))


def test_what_is_no_video_is_one_sentence(tmp_path):
    (tmp_path / "b.mp4").write_bytes(b"no film")
    for name in ("b.mp4", "absent.mp4"):
        (answer,) = of_field("answer")({"text": "p", "answer": str(tmp_path / name)})
        with pytest.raises(UserError, match=f"{name}: no video that can be read"):
            answer.media()


def test_a_video_that_answers_is_brought_to_the_policys_rate(tmp_path):
    film(tmp_path / "a.mp4", 4)  # of 8 a second
    (answer,) = of_field("answer")({"text": "p", "answer": str(tmp_path / "a.mp4")})
    for frames, rate, numbers in ((2, 4.0, [0, 2]), (None, 16.0, [0, 0, 1, 1, 2, 2, 3, 3])):
        shown = answer.media(frames, rate).mean((1, 2, 3)) * 255 / 60
        assert torch.allclose(shown, torch.tensor(numbers).float(), atol=0.1)
    with pytest.raises(UserError, match="a.mp4: .*it lasts 0.50 s, and 17 frames"):
        answer.media(17, 8.0)
