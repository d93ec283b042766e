"""Clips are read by the stamps of their frames and upright: held to FFmpeg's own times and filters,
and to the definition of a display matrix."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from mmrl.core.media.clips import ClipError, Timeline, header_of, open_clip
from tests.fixtures.clips import UNEVEN, numbers_in, write

FILES = [("a.mp4", "libx264"), ("a.mov", "mpeg4"), ("a.mkv", "libx264"), ("a.webm", "libvpx")]


@pytest.mark.parametrize("name, codec", FILES)
def test_frames_are_at_their_stamps_whatever_the_file_and_its_start(name, codec, tmp_path):
    path = write(tmp_path / name, [7000 + stamp for stamp in UNEVEN], codec)
    clip = open_clip(path)
    wanted = np.array(UNEVEN) / 1000
    assert clip.timeline.rate is None
    np.testing.assert_allclose(clip.timeline.times, wanted, atol=1e-3)
    assert 12.05 <= clip.timeline.duration <= 12.15
    moments = [0.0, 0.5, 3.99, 4.0, 11.9, 12.02, 20.0]
    on_screen = [max(i for i, t in enumerate(wanted) if t <= m + 1e-6) for m in moments]
    assert clip.timeline.shown(moments) == on_screen
    assert numbers_in(clip.read(on_screen)) == on_screen


@pytest.mark.parametrize(
    "name, rate", [("a.mp4", 30), ("a.mkv", Fraction(30000, 1001)), ("a.avi", 24)]
)
def test_a_steady_rate_is_known_through_rounded_stamps_and_reordered_frames(name, rate, tmp_path):
    path = tmp_path / name  # AVI has no stamps of frames, and H.264 stores them in another order
    write(path, range(60), "libx264", 1 / Fraction(rate))
    clip = open_clip(path)
    assert clip.timeline.rate == pytest.approx(float(rate))
    assert clip.timeline.duration == pytest.approx(60 / rate)
    assert numbers_in(clip.read([0, 7, 8, 59])) == [0, 7, 8, 59]


def test_an_edit_list_leaves_frames_out(tmp_path):
    """The list that the writer made is moved to begin two seconds into the file."""
    path = write(tmp_path / "a.mp4", range(60), "libx264", Fraction(1, 12))
    content = bytearray(path.read_bytes())

    def number(place, change=0):
        value = int.from_bytes(content[place : place + 4], "big") + change
        content[place : place + 4] = value.to_bytes(4, "big")
        return value

    units = [number(content.index(header) + 16) for header in (b"mvhd", b"mdhd")]
    entry = content.index(b"elst") + 4  # flags, count, then length and begin
    assert number(entry + 4) == 1
    number(entry + 8, -2 * units[0])
    number(entry + 12, 2 * units[1])
    path.write_bytes(content)
    with av.open(str(path)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    clip = open_clip(path)
    assert numbers_in(clip.read([0, 1])) == [24, 25] and len(times) == 36
    np.testing.assert_allclose(clip.timeline.times, np.array(times) - times[0], atol=1e-3)


TURNS = [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)]
MIRRORED = [(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)]


@pytest.mark.parametrize("turn", [*TURNS, *MIRRORED])
def test_the_header_turns_and_mirrors_the_picture(turn, tmp_path):
    """A pixel (x, y) comes to stand at (a x + c y, b x + d y)."""
    a, b, c, d = turn
    shown = np.zeros((32, 48, 3), np.uint8)
    shown[:16, :24], shown[:16, 24:], shown[16:, :24] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    matrix = [65536 * number for number in (a, b, 0, c, d, 0, 0, 0)]
    how = {"base": Fraction(1, 8), "matrix": (*matrix, 1 << 30), "pixels": shown}
    path = write(tmp_path / "a.mp4", range(4), **how)
    seen = open_clip(path).read([2])[0].astype(int)
    places = {(a * x + c * y, b * x + d * y): (y, x) for y in range(32) for x in range(48)}
    columns, lines = (sorted({place[k] for place in places}) for k in (0, 1))
    wanted = np.array([[shown[places[column, line]] for column in columns] for line in lines])
    assert seen.shape == wanted.shape
    assert np.abs(seen - wanted).mean() < 12


def filtered(path, filters, count):
    """The first frames that FFmpeg's filters give."""
    graph = av.filter.Graph()
    with av.open(str(path)) as container:
        nodes = [graph.add_buffer(template=container.streams.video[0])]
        nodes += [graph.add(name, options) for name, options in filters]
        graph.link_nodes(*nodes, graph.add("buffersink")).configure()
        for frame in container.decode(video=0):
            graph.push(frame)
        graph.push(None)
        return np.stack([graph.pull().to_ndarray(format="rgb24") for _ in range(count)])


@pytest.mark.parametrize("own", [8, 23, 30])
def test_a_clip_is_brought_to_a_rate_as_ffmpegs_filter_does_it(own, tmp_path):
    path = write(tmp_path / "a.mkv", range(2 * own), base=Fraction(1, own))
    shown = filtered(path, [("fps", "fps=24")], 40)
    assert open_clip(path).timeline.at_rate(40, 24.0) == numbers_in(shown)


def test_an_uneven_clip_is_brought_to_a_rate_by_time():
    line = Timeline([0.0, 0.1, 1.0, 3.0], 4.0, None)
    assert line.at_rate(4, 1.0) == [1, 2, 2, 3]
    assert line.at_rate(9, 2.0) == [1, 1, 2, 2, 2, 2, 3, 3, 3]
    with pytest.raises(ClipError, match="lasts 4.00 s, and 6 frames at 1 a second take 6.00 s"):
        line.at_rate(6, 1.0)


def remuxed(path, place):
    """Write a file again with what it says of its frames in front of them."""
    front = {"movflags": "faststart"}
    with av.open(str(path)) as old, av.open(str(place), "w", options=front) as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                new.mux(packet)
    return place


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    frames = np.zeros((2, 8, 12, 3), np.uint8)
    whole = write(tmp_path / "a.mkv", range(0, 6000, 40)).read_bytes()
    write(tmp_path / "a.mp4", range(0, 6000, 40))
    front = remuxed(tmp_path / "a.mp4", tmp_path / "b.mp4").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.mp4").write_bytes(front[: len(front) * 2 // 3])
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").write_bytes(b"")
    Image.new("RGB", (4, 4)).save(tmp_path / "small.png")
    Image.new("RGB", (6, 4)).save(tmp_path / "large.png")
    says = [
        (tmp_path / "gone.mp4", None, "no such file"),
        (tmp_path / "cut.mkv", None, r"it is cut short: 2.\d of 6.0 s are there"),
        (tmp_path / "cut.mp4", None, r"it is cut short: 2.\d of 6.0 s are there"),
        (tmp_path / "text.mp4", None, "it is cut short, or no video"),
        (tmp_path / "empty.mp4", None, "it is cut short, or no video"),
        (write(tmp_path / "a.h264", range(9), "libx264"), None, "have no time stamps; write it as"),
        (frames, None, "which have no times; write their frames a second into the row: fps"),
        (frames, 0, "fps is 0, expected a number"),
        (frames.astype(float), 2, r"uint8 \[F, H, W, 3\], got float64 \[2, 8, 12, 3\]"),
        ([tmp_path / "small.png", tmp_path / "large.png"], 2, "several sizes, 4 x 4, 6 x 4"),
        ([tmp_path / "small.png", tmp_path / "gone.png"], 2, r"its frame 1 \(.*gone.png\): "),
    ]
    for source, rate, sentence in says:
        with pytest.raises(ClipError, match=sentence):
            open_clip(source, rate)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_pixels_that_are_no_squares_are_widened_as_ffmpeg_shows_them(name, tmp_path):
    """Held to the filter ``scale=iw*sar:ih``; a picture turned on its side grows higher."""
    wide = Fraction(16, 11)
    path = write(tmp_path / name, range(3), "mpeg4", Fraction(1, 8), aspect=wide)
    frames = open_clip(path).read([0, 1, 2])
    assert frames.shape[1:3] == (16, 93) and header_of(path)[0] == (93, 16)
    (shown,) = filtered(path, [("setsar", "16/11"), ("scale", "iw*sar:ih")], 1)
    assert np.abs(frames[0].astype(int) - shown).mean() < 3


@pytest.mark.parametrize("name, codec", [("a.avi", "mpeg4"), ("a.ts", "mpeg2video")])
def test_avi_and_transport_streams_that_end_early_are_refused_by_their_head(name, codec, tmp_path):
    base = Fraction(1, 25)
    content = write(tmp_path / name, range(250), codec, base).read_bytes()
    assert len(open_clip(tmp_path / name).timeline.times) == 250
    cut = tmp_path / f"cut-{name}"
    cut.write_bytes(content[: len(content) * 19 // 20 // 188 * 188 + 50])
    for look in (open_clip, header_of):
        with pytest.raises(ClipError, match="it is cut short: the file ends before its last part"):
            look(cut)
