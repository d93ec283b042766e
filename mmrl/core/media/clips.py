"""Reads clips for policies and data sources: frames by time stamps, upright, with square pixels.

Phones and screen recorders write variable frame rates; edit lists drop frames; a header may rotate
or mirror the picture. Second 0 is the earliest time stamp of the file, sound included, as in
players. With a sample aspect ratio, as on discs and in broadcasts, frames get the width that
players show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.core.media.pictures import PictureError, is_pil, rgb_picture

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")  # types that may be frames
WITHIN = 1e-3  # seconds: stamps of Matroska are whole milliseconds
CUT = "it is cut short, or no video that FFmpeg reads"
SHORT = 0.9  # a file with a smaller share of the length in its header is truncated
HELD = (
    0.05  # of a tick: a clip's end is that of its last frame, so 5 s give 81 frames at 16 a second
)
UNKNOWN = 2**32 - 1  # size field of an AVI that was streamed
TRANSPORT = (
    (0, 188),
    (4, 192),
    (0, 204),
)  # offset of the sync byte, and length, of transport packets
RIGHT_ANGLE = 0.02  # tolerance of the rotation's cosine: only quarter turns are supported
NO_RATE = (
    "it is given as frames, which have no times; write their frames a second into the row: fps"
)


class ClipError(ValueError):
    """Says why a clip cannot be used."""


@dataclass(frozen=True)
class Timeline:
    """Holds when a clip shows its frames. ``times`` [n] in seconds, ascending; ``duration``: when
    the last frame ends; ``rate``: frames a second, None if it varies."""

    times: Sequence[float]
    duration: float
    rate: float | None

    @property
    def length(self) -> float:
        """Return the seconds from the first frame's start to the last one's end."""
        return self.duration - self.times[0]

    @classmethod
    def steady(cls, count: int, rate: float) -> Timeline:
        """Return the timeline of ``count`` frames at ``rate``."""
        return cls([number / rate for number in range(count)], count / rate, rate)

    def shown(self, moments: Sequence[float]) -> list[int]:
        """Return the indices of the frames on screen at these seconds; before the start, the
        first."""
        return [max(0, bisect_right(self.times, moment + WITHIN) - 1) for moment in moments]

    def spread(self, count: int) -> list[int]:
        """Return the indices of ``count`` frames, evenly in time from the first to the last; the
        middle for one."""
        if count == 1:
            return self.shown([(self.times[0] + self.duration) / 2 + WITHIN])
        if self.rate is not None:  # the nearest frame
            evenly = np.linspace(0, len(self.times) - 1, count).round()
            return [int(number) for number in evenly]
        return self.shown(np.linspace(self.times[0], self.times[-1], count).tolist())

    def at_rate(self, count: int | None, rate: float) -> list[int]:
        """Return the indices of the frames at the first ``count`` ticks of ``rate`` (None: all),
        each frame from its nearest tick, as in FFmpeg's filter ``fps``. Raises ClipError for a clip
        that is too short."""
        count = max(1, round(self.length * rate)) if count is None else count
        if self.length * rate < count - 1 - HELD:
            raise ClipError(too_short(self.length, count, rate))
        ticks = (np.arange(count) + 0.5) / rate - 2 * WITHIN
        return self.shown((self.times[0] + ticks).tolist())


def too_short(seconds: float, count: int, rate: float) -> str:
    """Describe a clip that is too short for ``count`` frames at ``rate``."""
    return (
        f"it lasts {seconds:.2f} s, and {count} frames at {rate:g} a second take "
        f"{count / rate:.2f} s; leave it out, or make fewer frames"
    )


@dataclass(frozen=True)
class Clip:
    """Holds a clip whose frames are read lazily. ``read``: frame indices -> uint8 [F, H, W, 3];
    raises ClipError."""

    timeline: Timeline
    read: Callable[[Sequence[int]], np.ndarray]


def open_clip(source: Any, rate: float | None = None) -> Clip:
    """Open a video file, or frames at ``rate`` frames a second: uint8 [F, H, W, 3], or a list of
    pictures (``rgb_picture``). A file has its own time stamps. Raises ClipError."""
    if isinstance(source, (str, Path)):
        return _of_file(Path(source))
    if rate is None:
        raise ClipError(NO_RATE)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ClipError(f"its fps is {rate!r}, expected a number of frames a second above 0")
    frames = _stacked(source)
    return Clip(Timeline.steady(len(frames), float(rate)), lambda numbers: frames[list(numbers)])


def is_frames(value: Any) -> bool:
    """Tell whether a value is one clip as a list of pictures, not a list of clips."""
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_picture, value))


def header_of(path: Path) -> tuple[tuple[int, int], float | None]:
    """Read size (width, height in square pixels, before rotation) and seconds from a video file's
    header; None if it gives no length. Raises ClipError if there is no video."""
    with _film(path) as (container, stream):
        seconds = _promised(stream)
        if seconds is None and container.duration:
            seconds = container.duration / 1e6
        return (_width(stream), stream.height), seconds


def check_whole(path: Path) -> None:
    """Decode all of a video file. Raises ClipError if frames are missing."""
    expected = len(open_clip(path).timeline.times)
    with _film(path) as (container, stream):
        missing = expected - sum(1 for _ in container.decode(stream))
    if missing > 0:
        raise ClipError(f"{missing} of its {expected} frames cannot be decoded; it is damaged")


def _is_picture(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, Path)):
        return Path(value).suffix.lower() in PICTURES
    if isinstance(value, bytes):
        return value.startswith((b"\x89PNG", b"\xff\xd8\xff")) or value[8:12] == b"WEBP"
    return is_pil(value) or getattr(value, "ndim", 0) == 3


def _stacked(source: Any) -> np.ndarray:
    """Return frames as uint8 [F, H, W, 3]."""
    if isinstance(source, (list, tuple)) and not all(hasattr(frame, "ndim") for frame in source):
        source = [_pixels(frame, number) for number, frame in enumerate(source)]
    if isinstance(source, list) and len({np.shape(frame) for frame in source}) > 1:
        sizes = sorted({" x ".join(map(str, np.shape(frame)[1::-1])) for frame in source})
        raise ClipError(f"its frames are of several sizes, {', '.join(sizes)}; scale them to one")
    frames = np.asarray(source)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ClipError(
            "a video is a file, pictures, or frames uint8 [F, H, W, 3], got "
            f"{frames.dtype} {list(frames.shape)}"
        )
    return frames


def _pixels(frame: Any, number: int) -> np.ndarray:
    name = f" ({frame})" if isinstance(frame, (str, Path)) else ""
    try:
        return np.asarray(rgb_picture(frame))
    except (PictureError, TypeError) as error:  # not a picture at all
        raise ClipError(f"its frame {number}{name}: {error}") from error


# --------------------------------------------------------------------------------------------------
# files


@contextmanager
def _film(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first video stream that is not cover art. Converts FFmpeg's errors to
    ClipError."""
    import av

    try:
        if _ends_early(path):
            raise ClipError("it is cut short: the file ends before its last part; copy it again")
        with av.open(str(path)) as container:
            cover = av.stream.Disposition.attached_pic
            streams = [s for s in container.streams.video if cover not in s.disposition]
            if not streams:
                raise ClipError(f"it holds no pictures that move; {CUT}")
            streams[0].thread_type = "AUTO"
            yield container, streams[0]
    except ClipError:
        raise
    except AttributeError as error:  # a stream without a decoder
        raise ClipError(f"its header is not whole; {CUT}") from error
    except (OSError, ValueError, IndexError, EOFError, av.FFmpegError) as error:
        raise ClipError(_reason(error)) from error


def _ends_early(path: Path) -> bool:
    """Tell whether an AVI is shorter than its header says, or an MPEG transport stream ends within
    a packet; a cut between packets cannot be detected."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(256)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        promised = int.from_bytes(head[4:8], "little")
        return promised < UNKNOWN and promised + 8 > size
    for first, length in TRANSPORT:
        if head[first : first + 1] == head[first + length : first + length + 1] == b"G":
            return size % length > 0
    return False


def _width(stream: Any) -> int:
    """Return the width of frames in square pixels, as players show them."""
    return max(1, round(int(stream.width) * float(stream.sample_aspect_ratio or 1)))


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    words = getattr(error, "strerror", None) or str(error)
    return f"{words}; {CUT}"


def _of_file(path: Path) -> Clip:
    stamps = _stamps(path)
    ticks = sorted({stamp for stamp, _ in stamps.shown})
    times = [tick * stamps.base - stamps.begins for tick in ticks]
    rate = _steady_rate(times, stamps)
    last = max(length for stamp, length in stamps.shown if stamp == ticks[-1]) * stamps.base
    if last <= 0:
        last = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    ends = times[-1] + last if rate is None else times[0] + len(times) / rate
    timeline = Timeline(times, ends, rate)
    reach = ticks[-1] * stamps.base + last  # Matroska's duration counts from its own 0
    if stamps.promised is not None and reach < SHORT * stamps.promised - 0.5:
        raise ClipError(
            f"it is cut short: {reach:.1f} of {stamps.promised:.1f} s are there; copy it again"
        )
    return Clip(timeline, partial(_decoded, path, ticks, stamps))


@dataclass(frozen=True)
class _Stamps:
    """Holds a file's time stamps: stamp and length of shown frames in units of ``base`` seconds,
    where its clock ``begins``, its ``rates`` and its ``promised`` seconds. ``by_order``: frames
    have no stamps, so the file's are used in order (AVI)."""

    shown: list[tuple[int, int]]
    base: float
    begins: float
    rates: list[float]
    promised: float | None
    by_order: bool


def _stamps(path: Path) -> _Stamps:
    """Read the stamps of all frames, decoding only the first; no frame can be shown before it."""
    with _film(path) as (container, stream):
        packets = [p for p in container.demux(stream) if p.size and not p.is_discard]
        shown = [(p.pts, p.duration or 0) for p in packets if p.pts is not None]
        rates = [stream.average_rate, stream.base_rate, stream.guessed_rate]
        base, promised, start = float(stream.time_base), _promised(stream), container.start_time
        by_order = container.format.name == "avi"
    with _film(path) as (container, stream):
        first = next(container.decode(stream), None)
    if first is None:
        raise ClipError(f"no frame of it can be decoded; {CUT}")
    if not by_order:
        shown = [each for each in shown if first.pts is not None and each[0] >= first.pts]
    if not shown:
        raise ClipError("its frames have no time stamps; write it as MP4 or Matroska with FFmpeg")
    earliest = min(stamp for stamp, _ in shown) * base
    begins = earliest if start is None or by_order else min(earliest, start / 1e6)
    return _Stamps(shown, base, begins, [float(r) for r in rates if r], promised, by_order)


def _promised(stream: Any) -> float | None:
    """Return the seconds in a stream's header; Matroska has them as a tag."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    hours, _, rest = stream.metadata.get("DURATION", "").partition(":")
    minutes, _, seconds = rest.partition(":")
    try:
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        return None


def _steady_rate(times: Sequence[float], stamps: _Stamps) -> float | None:
    """Return the file's rate if all frames have it, up to the rounding of their stamps."""
    count = np.arange(len(times))
    since = np.asarray(times) - times[0]
    for rate in stamps.rates:
        near = min(max(stamps.base, WITHIN) * 1.01, 0.45 / rate)
        if float(np.abs(since - count / rate).max()) <= near:
            return rate
    return None


def _decoded(
    path: Path, ticks: Sequence[int], stamps: _Stamps, numbers: Sequence[int]
) -> np.ndarray:
    """Decode the frames of these indices, upright."""
    due = {ticks[number] for number in numbers}
    pictures: dict[int, np.ndarray] = {}
    with _film(path) as (container, stream):
        width = _width(stream)
        for frame, tick in zip(
            container.decode(stream), ticks if stamps.by_order else repeat(None)
        ):
            stamp = frame.pts if tick is None else tick
            if stamp in due and stamp not in pictures:
                pictures[stamp] = upright(frame, width)
                if len(pictures) == len(due):
                    break
    if missing := [ticks[number] for number in numbers if ticks[number] not in pictures]:
        seconds = missing[0] * stamps.base - stamps.begins
        raise ClipError(f"its frame at {seconds:.2f} s cannot be decoded; it is damaged")
    if len({pixels.shape for pixels in pictures.values()}) > 1:
        raise ClipError("its frames are of several sizes")
    return np.stack([pictures[ticks[number]] for number in numbers])


def upright(frame: Any, width: int) -> np.ndarray:
    """Return a decoded frame as uint8 [H, W, 3], scaled to ``width``, then rotated and mirrored by
    its header."""
    whole = {} if width == frame.width else {"width": width, "height": frame.height}
    pixels: np.ndarray = frame.to_ndarray(format="rgb24", **whole)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    # a pixel (x, y) moves to (a x + c y, b x + d y), as in libavutil/display.h
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5] / 65536.0
    length = max(abs(a), abs(b))
    if not length or min(abs(a), abs(b)) > RIGHT_ANGLE * length:
        raise ClipError("its header turns the picture by no quarter; write it upright with FFmpeg")
    if abs(b) > abs(a):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    pixels = pixels[:, ::-1] if a < 0 else pixels
    return np.ascontiguousarray(pixels[::-1] if d < 0 else pixels)
