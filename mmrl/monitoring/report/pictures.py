"""Joins small pictures to one sheet of equal tiles (PNG), and splits a sheet into its tiles.

A sheet of videos is an .mp4 file, its tiles are ``Film``.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmrl.core.files import replace_file
from mmrl.core.media.clips import open_clip
from mmrl.core.media.movies import mp4_bytes
from mmrl.core.media.pictures import frame_count

if TYPE_CHECKING:
    from torch import Tensor

GAP = 2  # pixels between tiles
ENDINGS = (".mp4", ".png")  # of a film, of a picture
PACE = 120  # default milliseconds per frame
# limits of videos on a sheet: frames are dropped, and pictures downscaled
MOST_FRAMES = 128
MOST_SIDE = 192


@dataclass(frozen=True)
class Layout:
    """Describes how a sheet is divided; ``samples/captions.json`` holds one for each sheet."""

    count: int
    columns: int
    width: int
    height: int
    gap: int = GAP

    def size(self) -> tuple[int, int]:
        """Return width and height of the whole sheet in pixels."""
        rows = -(-self.count // self.columns)
        return (
            self.columns * (self.width + self.gap) - self.gap,
            rows * (self.height + self.gap) - self.gap,
        )

    def box(self, index: int) -> tuple[int, int, int, int]:
        """Return left, upper, right, lower of a tile."""
        row, column = divmod(index, self.columns)
        x = column * (self.width + self.gap)
        y = row * (self.height + self.gap)
        return x, y, x + self.width, y + self.height


@dataclass(frozen=True)
class Film:
    """Holds the frames of a video, all of one size."""

    frames: tuple[Image.Image, ...]
    pace: float = PACE  # milliseconds a frame is shown

    @property
    def width(self) -> int:
        return self.frames[0].width

    @property
    def size(self) -> tuple[int, int]:
        return self.frames[0].size

    def mp4(self) -> bytes:
        """Return it as the bytes of an .mp4 file."""
        return mp4_bytes(np.stack([np.asarray(frame) for frame in self.frames]), 1000 / self.pace)


Tile = Image.Image | Film


def sheet(images: Tensor) -> tuple[Image.Image, Layout]:
    """Put images [N, 3, H, W] in 0..1 (clamped; NaN is black) on one RGB picture, row by row."""
    count, channels, height, width = images.shape
    if not count or channels != 3:
        raise ValueError(f"images must be [N, 3, H, W] with N >= 1, not {tuple(images.shape)}")
    layout = Layout(count, min(count, math.ceil(math.sqrt(count))), width, height)
    bytes_ = (images.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().byte().cpu()
    picture = Image.new("RGB", layout.size(), "white")
    for i, tile in enumerate(bytes_.permute(0, 2, 3, 1).contiguous().numpy()):
        picture.paste(Image.fromarray(tile), layout.box(i)[:2])
    return picture, layout


def film_sheet(videos: Tensor, fps: float | None = None) -> tuple[Tile, Layout]:
    """Put videos [N, F, 3, H, W] in 0..1, of ``fps`` frames a second, side by side, at most 128
    frames of at most 192 pixels, of the videos' duration; a picture for single frames."""
    count, (height, width) = videos.shape[1], videos.shape[-2:]
    stride = -(-count // MOST_FRAMES)
    block = -(-max(height, width) // MOST_SIDE)
    moments = [videos[:, i].detach().float() for i in range(0, count, stride)]
    if block > 1:  # averages of pixel blocks; a remainder at the right and bottom is dropped
        high = max(1, height // block)
        wide = max(1, width // block)
        cut = [moment[..., : high * block, : wide * block] for moment in moments]
        moments = [
            moment.unflatten(-1, (wide, -1)).mean(-1).unflatten(-2, (high, -1)).mean(-2)
            for moment in cut
        ]
    drawn = [sheet(moment) for moment in moments]
    if len(drawn) == 1:
        return drawn[0]
    pace = PACE if fps is None else 1000 * stride / fps
    return Film(tuple(picture for picture, _ in drawn), pace), drawn[0][1]


def encoded(picture: Tile) -> tuple[bytes, str]:
    """Return the file of a picture, PNG, or of a film, MP4, with its ending."""
    if isinstance(picture, Film):
        return picture.mp4(), ".mp4"
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue(), ".png"


def save_picture(picture: Tile, path: Path) -> Path:
    """Save a picture as .png, a film as .mp4, replacing the other; returns the path."""
    content, ending = encoded(picture)
    path = path.with_name(path.name + ending)
    replace_file(path, content)
    for unused in set(ENDINGS) - {ending}:
        path.with_suffix(unused).unlink(missing_ok=True)
    return path


def saved_picture(path: Path) -> Path | None:
    """Find the file that ``save_picture`` wrote; None if there is none."""
    files = (path.with_name(path.name + ending) for ending in ENDINGS)
    return next((file for file in files if file.is_file()), None)


def open_picture(path: Path, size: tuple[int, int] | None = None) -> Tile:
    """Open a picture or a film, cropped to ``size``, since sides of .mp4 files are even. Earlier
    versions wrote films as animated PNG. Raises OSError or ValueError."""
    if path.suffix == ".mp4":
        return _open_film(path, size)
    with Image.open(path) as picture:
        frames = []
        for i in range(frame_count(picture)):
            picture.seek(i)
            frames.append(picture.convert("RGB"))
        pace = round(picture.info.get("duration") or PACE)
    return Film(tuple(frames), pace) if len(frames) > 1 else frames[0]


def _open_film(path: Path, size: tuple[int, int] | None) -> Film:
    clip = open_clip(path)
    line = clip.timeline
    width, height = size or (None, None)
    frames = clip.read(range(len(line.times)))[:, :height, :width]
    return Film(tuple(map(Image.fromarray, frames)), 1000 * line.length / len(frames))


def still(picture: Tile) -> Image.Image:
    """Return the picture, or the frame in the middle of a film."""
    return picture.frames[len(picture.frames) // 2] if isinstance(picture, Film) else picture


def tiles(picture: Tile, layout: Layout) -> list[Tile]:
    """Cut a sheet into its tiles, in order; ValueError if the picture is not of that layout."""
    if picture.size != layout.size():
        raise ValueError(f"the sheet measures {picture.size}, its layout says {layout.size()}")
    if isinstance(picture, Film):
        cut = zip(*(tiles(frame, layout) for frame in picture.frames), strict=True)
        return [Film(tuple(frames), picture.pace) for frames in cut]
    return [picture.crop(layout.box(i)) for i in range(layout.count)]


def enlarge(picture: Image.Image, side: int) -> Image.Image:
    """Scale a picture so that the longer side is ``side``: sharp pixels when growing, smooth when
    shrinking."""
    factor = side / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    return picture.resize(
        size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
    )


def compare(rows: Mapping[str, Sequence[Tile]], captions: list[str], side: int = 120) -> Tile:
    """Draw labelled rows of tiles above their captions, on white: the before-and-after picture,
    animated for videos."""
    films = [tile for row in rows.values() for tile in row if isinstance(tile, Film)]
    length = max((len(film.frames) for film in films), default=0)
    moments = [
        {label: [_at(tile, i) for tile in row] for label, row in rows.items()}
        for i in range(length or 1)
    ]
    drawn = tuple(_compare(moment, captions, side) for moment in moments)
    return Film(drawn, films[0].pace) if length else drawn[0]


def _at(tile: Tile, moment: int) -> Image.Image:
    return tile.frames[min(moment, len(tile.frames) - 1)] if isinstance(tile, Film) else tile


def _compare(
    rows: Mapping[str, Sequence[Image.Image]], captions: list[str], side: int
) -> Image.Image:
    title = ImageFont.load_default(18)
    small = ImageFont.load_default(13)
    count = max(map(len, rows.values()))
    gap = 10
    left = 20 + max(int(title.getlength(label)) for label in rows)
    texts = [textwrap.wrap(caption, max(8, side // 7))[:5] for caption in captions[:count]]
    below = 18 * max(map(len, texts), default=0) + gap
    size = (left + count * (side + gap), gap + len(rows) * (side + gap) + below)
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for r, (label, row) in enumerate(rows.items()):
        y = gap + r * (side + gap)
        draw.text((10, y + side / 2), label, fill="#222222", font=title, anchor="lm")
        for c, tile in enumerate(row):
            picture.paste(enlarge(tile, side), (left + c * (side + gap), y))
    for c, lines in enumerate(texts):
        for i, line in enumerate(lines):
            place = (left + c * (side + gap) + side / 2, gap + len(rows) * (side + gap) + 18 * i)
            draw.text(place, line, fill="#444444", font=small, anchor="ma")
    return picture


def strip(pictures: list[Image.Image]) -> Image.Image:
    """Put pictures side by side at the height of the first; a single one is unchanged."""
    if len(pictures) == 1:
        return pictures[0]
    height = pictures[0].height
    sized = [p.resize((max(1, round(p.width * height / p.height)), height)) for p in pictures]
    whole = Image.new("RGB", (sum(p.width + GAP for p in sized) - GAP, height), "white")
    for i, picture in enumerate(sized):
        whole.paste(picture, (sum(p.width + GAP for p in sized[:i]), 0))
    return whole


def data_uri(picture: Tile, most: int = 384) -> str:
    """Encode a small picture as PNG, a large one, or one downscaled to ``most`` pixels, as JPEG; a
    film as MP4."""
    if isinstance(picture, Film):
        return f"data:video/mp4;base64,{base64.b64encode(picture.mp4()).decode()}"
    small = enlarge(picture, most) if max(picture.size) > most else picture
    kind = "PNG" if max(small.size) <= 128 else "JPEG"
    buffer = io.BytesIO()
    small.save(buffer, format=kind, **({"quality": 88} if kind == "JPEG" else {"optimize": True}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
