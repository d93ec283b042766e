"""Describes what a configuration will train on: counts, lengths, fields, samples, what is left
out."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mmrl.core.media.pictures import PictureError, is_pil, opened, rgb_picture
from mmrl.core.types import Prompt
from mmrl.data.base import as_curriculum
from mmrl.data.ledger import Summary
from mmrl.data.sources.folders import VIDEOS
from mmrl.data.sources.intake import identical
from mmrl.data.vision import points
from mmrl.data.vision.source import in_messages

THUMBNAIL = 200  # pixels of the longer side
MOST_LISTED = 1000  # rows left out that are named
MOST_REASONS = 20
MOST_MEASURED = 5000  # pictures whose sizes are looked up
DOT = 4  # pixels of the radius of a point on a thumbnail
INNER = ("origin", "entry", "messages")  # fields that are shown elsewhere, or not the user's
BINS = 24  # bars of a histogram


@dataclass(frozen=True)
class Spread:
    """Summarises many numbers."""

    name: str
    low: float
    middle: float
    most: float  # nine of ten are at most this
    high: float
    bars: tuple[float, ...]  # heights of a histogram from low to high, the highest 1

    @classmethod
    def of(cls, name: str, values: Sequence[float]) -> Spread | None:
        """Summarise numbers; None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        low, high = ordered[0], ordered[-1]
        width = (high - low) / BINS or 1.0
        counts = Counter(min(BINS - 1, int((value - low) / width)) for value in ordered)
        tallest = max(counts.values())
        most = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        bars = tuple(counts[i] / tallest for i in range(BINS))
        return cls(name, low, median(ordered), most, high, bars)

    def words(self) -> str:
        """Describe the numbers in words."""
        if self.low == self.high:
            return f"{self.low:g}"
        rest = f"half up to {self.middle:g}, nine of ten up to {self.most:g}"
        return f"{self.low:g} to {self.high:g}, {rest}"


@dataclass(frozen=True)
class Side:
    """Describes the prompts that are trained on, or held out."""

    name: str
    prompts: int
    distinct: int
    pictures: int
    videos: int
    boxes: int
    points: int
    spreads: tuple[Spread, ...]
    fields: tuple[tuple[str, int, str], ...]  # name, prompts that have it, an example
    sources: tuple[tuple[str, int], ...]  # of a mixture
    shown: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class View:
    """Describes the data of a configuration. ``problems``: why training would not begin."""

    summaries: Sequence[Summary]
    sides: tuple[Side, ...]
    problems: Sequence[str] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    framed: str = ""  # what pictures lose to the policy's size

    def lines(self) -> list[str]:
        """Return the lines for a terminal."""
        lines = [line for summary in self.summaries for line in summary.lines()]
        for summary in self.summaries:
            lines += [f"    filter {name}: {count}" for name, count in summary.filtered.items()]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [self.framed] if self.framed else []
        for side in self.sides:
            counts = f"{side.name}: {side.prompts} prompts, {side.distinct} of them distinct"
            dots = f", {side.points} points" if side.points else ""
            places = f"{side.boxes} boxes{dots}"
            lines.append(f"{counts}; {side.pictures} pictures, {side.videos} videos, {places}")
            lines += [f"    {spread.name}: {spread.words()}" for spread in side.spreads]
            shares = [f"{name} {count}" for name, count in side.sources]
            lines += [f"    sources: {', '.join(shares)}"] if shares else []
            known = [f"{name} ({count})" for name, count, _ in side.fields]
            lines += [f"    fields: {', '.join(known)}"] if known else []
        shares = [f"{name} {share:.1%}" for name, share in self.shares.items()]
        return lines + ([f"drawn in iteration 1: {', '.join(shares)}"] if shares else [])


def view_of(source: Any, summaries: Sequence[Summary], problems: Sequence[str], count: int) -> View:
    """Describe a data source. ``count``: prompts of each side that are shown."""
    sides = tuple(
        side_of(name, list(prompts), count)
        for name, prompts in (("train", source.train), ("held out", source.held_out))
    )
    return View(summaries, sides, problems, as_curriculum(source.train).shares(0))


def side_of(name: str, prompts: Sequence[Prompt], count: int) -> Side:
    """Describe the prompts of one side."""
    step = max(1, len(prompts) // max(1, count))
    media = [media_of(prompt) for prompt in prompts]
    named = Counter(key for prompt in prompts for key in prompt if key not in INNER)
    examples = {key: _example(prompts, key) for key in named}
    boxes = [len(_listed(prompt["boxes"])) for prompt in prompts if prompt.get("boxes")]
    texts = [str(prompt.get("text", "")) for prompt in prompts]
    answers = [len(p["answer"]) for p in prompts if isinstance(p.get("answer"), str)]
    spreads = (
        Spread.of("characters of a text", [len(text) for text in texts]),
        Spread.of("words of a text", [len(text.split()) for text in texts]),
        Spread.of("characters of an answer", [] if _are_files(prompts) else answers),
        Spread.of("boxes of a prompt", boxes),
        Spread.of("pictures of a prompt", [len(each) for each, _ in media if each]),
        Spread.of("pixels of a longer side", _longer_sides([p for each, _ in media for p in each])),
    )
    sources = Counter(str(prompt["source"]) for prompt in prompts if "source" in prompt)
    return Side(
        name,
        len(prompts),
        len(set(map(identical, prompts))),
        sum(len(pictures) for pictures, _ in media),
        sum(videos for _, videos in media),
        sum(boxes),
        sum(len(points.listed(prompt)) for prompt in prompts),
        tuple(spread for spread in spreads if spread is not None),
        tuple((key, number, examples[key]) for key, number in named.most_common()),
        tuple(sources.most_common()),
        tuple(shown(prompt) for prompt in list(prompts)[::step][:count]),
    )


def media_of(prompt: Prompt) -> tuple[list[Any], int]:
    """Return the pictures of a prompt, that of its answer included, and its number of videos."""
    images = prompt.get("images", prompt.get("image"))
    several = images if isinstance(images, list) else [] if images is None else [images]
    pictures = [*several, *in_messages(prompt, ("image",))]
    videos = len(in_messages(prompt, ("video",))) + (prompt.get("video") is not None)
    answer = prompt.get("answer")
    if _is_file(answer):
        if str(answer).lower().endswith(VIDEOS):
            videos += 1
        else:
            pictures.append(answer)
    return pictures, videos


def shown(prompt: Prompt) -> dict[str, Any]:
    """Return what the page shows of a prompt: a thumbnail of its first picture with its boxes."""
    pictures, _ = media_of(prompt)
    answer = prompt.get("answer")
    return {
        "text": str(prompt.get("text", ""))[:600],
        "answer": "" if answer is None or _is_file(answer) else str(answer)[:300],
        "origin": str(prompt.get("origin", "")),
        "picture": thumbnail(pictures[0], prompt) if pictures else "",
        "count": len(pictures),
    }


def thumbnail(source: Any, prompt: Prompt) -> str:
    """Encode a thumbnail of a picture, with the boxes and points of its prompt, as a data: address;
    "" if it cannot be read."""
    from PIL import ImageDraw

    try:
        picture = rgb_picture(source)
    except PictureError:
        return ""
    width, height = picture.size
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    extent = {"rel1": (1, 1), "rel1000": (1000, 1000)}.get(str(prompt.get("space")))
    if prompt.get("space") != "resized":
        across, down = extent or (width, height)
        factors = (picture.width / across, picture.height / down) * 2
        draw = ImageDraw.Draw(picture)
        for box in _listed(prompt.get("boxes") or []):
            draw.rectangle([v * f for v, f in zip(box, factors)], outline="#e0004f", width=2)
        for x, y in points.listed(prompt):
            centre = (x * factors[0], y * factors[1])
            draw.circle(centre, DOT, fill="#e0004f", outline="white")
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def render(view: View, title: str) -> str:
    """Return the page as text. Jinja escapes texts of the data."""
    from jinja2 import Environment, PackageLoader

    env = Environment(
        loader=PackageLoader("mmrl.data"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    reasons = Counter(
        problem.partition(": ")[2][:80] for summary in view.summaries for problem in summary.dropped
    )
    return env.get_template("data.html").render(
        view=view, title=title, most=MOST_LISTED, reasons=reasons.most_common(MOST_REASONS)
    )


def _longer_sides(pictures: Sequence[Any]) -> list[int]:
    """Return the longer side of pictures, from their headers; of very many, of some."""
    step = 1 + len(pictures) // MOST_MEASURED
    sides = []
    for picture in pictures[::step]:
        with suppress(PictureError, OSError):
            image = picture if hasattr(picture, "size") else opened(picture)
            sides.append(max(image.size))
    return sides


def _listed(boxes: Any) -> list[Any]:
    flat = len(boxes) == 4 and not any(isinstance(value, Sized) for value in boxes)
    return [boxes] if flat else list(boxes)


def _example(prompts: Sequence[Prompt], key: str) -> str:
    value = next(prompt[key] for prompt in prompts if key in prompt)
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_file(answer: Any) -> bool:
    """Tell whether an answer is a picture or video to learn from: an absolute path, or a
    picture."""
    return is_pil(answer) or (isinstance(answer, str) and answer.startswith("/"))


def _are_files(prompts: Sequence[Prompt]) -> bool:
    return all(_is_file(prompt.get("answer")) for prompt in prompts)
