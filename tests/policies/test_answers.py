"""Clips that are answers are brought to the model's rate by time, or refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.policies.answers import media_problem, opened
from tests.fixtures.clips import UNEVEN, numbered, numbers_in, write


def test_a_clip_of_a_varying_rate_and_one_of_pictures_play_by_time(tmp_path):
    path = write(tmp_path / "a.mkv", UNEVEN)
    times = np.array(UNEVEN) / 1000
    shown = [int((times < (k + 0.5) / 2).sum()) - 1 for k in range(24)]
    frames = opened(path, "video", 24, {"text": "x"}, 2.0)
    assert numbers_in(frames.permute(0, 2, 3, 1).numpy() * 255) == shown
    pictures = [Image.fromarray(numbered(i)) for i in range(8)]
    frames = opened(pictures, "video", 4, {"text": "x", "fps": 12}, 6.0)
    assert numbers_in(frames.permute(0, 2, 3, 1).numpy() * 255) == [0, 2, 4, 6]
    assert len(opened(pictures, "video", None, {"text": "x", "fps": 12}, 24.0)) == 16


def test_a_clip_that_is_too_short_or_has_no_times_is_refused_before_training(tmp_path):
    path = write(tmp_path / "a.mp4", range(8), base=Fraction(1, 8))
    row = {"text": "x", "origin": "d.jsonl:3"}
    assert media_problem(str(path), "video", 17, row, 16.0) is None  # a second and its last frame
    why = media_problem(str(path), "video", 33, row, 16.0)
    assert "it lasts 1.00 s, and 33 frames at 16 a second take 2.06 s; leave it out, or" in why
    with pytest.raises(UserError, match="d.jsonl:3: cannot read .*a.mp4.*it lasts 1.00 s"):
        opened(path, "video", 33, row, 16.0)
    uneven = write(tmp_path / "b.mp4", [0, 40, 90, 500, 1000, 1033, 2500], "libx264")
    assert media_problem(str(uneven), "video", 20, row, 8.0) is None  # its header says less
    assert len(opened(uneven, "video", 20, row, 8.0)) == 20
    pictures = np.zeros((8, 4, 4, 3), np.uint8)
    assert media_problem(pictures, "video", 17, row | {"fps": 8}, 16.0) is None
    assert "it lasts 1.00 s" in media_problem(pictures, "video", 18, row | {"fps": 8}, 16.0)
    with pytest.raises(UserError, match="d.jsonl:3: cannot read the video: .*the row: fps"):
        opened(pictures, "video", 4, row, 16.0)
