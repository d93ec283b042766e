"""Videos in one file with their sound: read again they are what was written."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.core.media.movies import frame_rate, write_mp4
from mmrl.core.media.sample_files import write_sample
from mmrl.core.media.sound import with_sound

SIDES = 33, 40
FRAMES = 12


def frames():
    """Another grey in each, [F, H, W, 3]."""
    shades = torch.linspace(30, 220, FRAMES).byte()
    return shades[:, None, None, None].expand(FRAMES, *SIDES, 3)


def tone(rate, channels=2, seconds=1.0):
    """Silence, then a tone from the middle on; the channels differ in pitch."""
    time = torch.arange(int(rate * seconds)) / rate
    pitch = torch.tensor([440.0, 660.0, 440.0, 660.0])[:channels, None]
    return (time >= seconds / 2) * (2 * torch.pi * pitch * time).sin() / 2


def read(path):
    with av.open(str(path)) as file:
        rate = file.streams.video[0].average_rate
        pictures = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        if not file.streams.audio:
            return pictures, rate, None, None
        file.seek(0)
        sound = [frame.to_ndarray() for frame in file.decode(audio=0)]
        return pictures, rate, np.concatenate(sound, 1), file.streams.audio[0].rate


@pytest.mark.parametrize(
    ("rate", "written", "channels"),
    [(24000, 24000, 2), (16000, 16000, 1), (1000, 8000, 1), (192000, 96000, 2), (48000, 48000, 4)],
)
def test_a_file_has_frames_and_sound(tmp_path, rate, written, channels):
    sound = tone(rate, channels)
    fps = frame_rate(FRAMES, sound.shape[1], rate)
    assert fps == FRAMES
    path = write_mp4(tmp_path / "v.mp4", frames(), fps, sound, rate)
    pictures, speed, heard, found = read(path)
    assert (len(pictures), speed, found) == (FRAMES, FRAMES, written)
    height, width = SIDES
    for picture, frame in zip(pictures, frames(), strict=True):
        assert picture.shape == (height + 1, width, 3)
        assert abs(picture[:height].astype(int) - frame.numpy()).max() <= 4
    assert len(heard) == min(channels, 2)
    assert written <= heard.shape[1] <= written + 2048  # whole packets
    half = written // 2
    start, end = heard[:, : half - 1200], heard[:, half + 1200 : 2 * half]
    assert np.abs(start).max() < 0.05
    assert np.square(end).mean(1) == pytest.approx(1 / 8, rel=0.15)
    crossings = (np.diff(np.sign(end), axis=1) != 0).mean(1) * written / 2
    assert crossings == pytest.approx([440, 660][: len(heard)], rel=0.05)


def test_the_commands_and_the_api_write_it(tmp_path):
    video = frames()[:, :32].permute(0, 3, 1, 2).float() / 255
    path = write_sample(with_sound(video, tone(8000), 8000), tmp_path / "a")
    assert path.suffix == ".mp4" and path.with_suffix(".wav").exists()
    assert len(read(path)[0]) == FRAMES and not path.with_suffix(".png").exists()
    silent = write_sample(video[..., :31, :31], tmp_path / "s", fps=25)  # odd sides
    assert read(silent)[1:3] == (Fraction(25), None) and not silent.with_suffix(".wav").exists()
    moving = Image.open(write_sample(video, tmp_path / "m", fps=25, animated=True))
    assert moving.n_frames == FRAMES and moving.info["duration"] == 40
    assert write_sample(video[0], tmp_path / "one").suffix == ".png"
    pictures = [Image.fromarray(frame) for frame in frames().contiguous().numpy()]
    mmrl.Video(pictures, (tone(8000), 8000)).save(tmp_path / "b.mp4")
    assert read(tmp_path / "b.mp4")[2] is not None and not (tmp_path / "b.wav").exists()
