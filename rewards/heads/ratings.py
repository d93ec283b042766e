"""Reads ratings of samples, and preference pairs, for ``mmrl fit-head``."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.clips import ClipError, open_clip
from mmrl.core.media.pictures import frame_count
from rewards.base.json_lines import json_lines
from rewards.base.prompt import from_pil, read_picture

PICTURE = ("picture", "image", "video", "file", "sample")  # names of the column with the picture
SCORE = ("score", "rating")
FRAMES = 4  # frames of a video that are read


@dataclass(frozen=True)
class Ratings:
    """Holds ratings of samples, or pairs. ``samples``: [N] or [N, 2], files or answers.
    ``targets``: scores [N], or [N, K] of K ``aspects`` with NaN where one is not rated; for pairs,
    the probability that the first is better: 1, or 0.5 for a tie. ``groups``: rows of one group
    share a sample or a prompt, and are held out together. ``prompts``: their texts."""

    samples: list[tuple[Path | str, ...]]
    targets: Tensor
    groups: Tensor
    prompts: list[str]
    aspects: tuple[str, ...] = ("",)

    @property
    def paired(self) -> bool:
        return len(self.samples[0]) == 2


def read_ratings(path: Path, texts: bool = False) -> Ratings:
    """Read a .csv or .jsonl file: rows of a sample and its score, or of its ``ratings``, an object
    of aspects; or pairs with ``chosen`` and ``rejected`` as ``mmrl view --rate`` and ``mmrl label``
    write them. Samples are files relative to it, or answers (``texts``). UserError with the row of
    a mistake."""
    kinds = set()
    samples, scores, keys, prompts = [], [], [], []
    for place, row in _rows(path):
        pair = {"chosen", "rejected"} <= set(row)
        kinds.add((pair, "ratings" in row))
        if len(kinds) > 1:
            raise UserError(f"{place}: pairs and ratings in one file; give a file of one kind")
        names, score = _pair(row, place) if pair else _rating(row, place)
        samples.append(tuple(name if texts else _file(path.parent / name, place) for name in names))
        scores.append(score)
        prompts.append(str(row.get("prompt") or row.get("text") or ""))
        keys.append([f"sample {sample}" for sample in samples[-1]])
        keys[-1] += [f"prompt {prompts[-1]}"] * bool(prompts[-1])
    if not samples:
        raise UserError(f"{path}: no rows; ratings need a picture and a score in every row")
    aspects = tuple(sorted({aspect for score in scores for aspect in score}))
    table = [[score.get(aspect, math.nan) for aspect in aspects] for score in scores]
    targets = torch.tensor(table, dtype=torch.float64)
    for aspect, column in zip(aspects, targets.T, strict=True):
        values = column[~column.isnan()]
        if len(samples[0]) == 1 and len(values.unique()) < 2:
            which = f"the score {values[0]:g}" if not aspect else f"one rating of {aspect!r}"
            raise UserError(f"{path}: every picture has {which}; nothing can be learnt")
    targets = targets[:, 0] if aspects == ("",) else targets
    return Ratings(samples, targets, connected(keys), prompts, aspects)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix not in (".csv", ".jsonl"):
        raise UserError(f"{path}: give a .csv or .jsonl file of ratings or pairs")
    if path.suffix == ".csv":
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
            yield f"{path}:{number}", row
        return
    for number, row in json_lines(path):
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected an object with picture and score")
        yield f"{path}:{number}", row


def _rating(row: Mapping[str, Any], place: str) -> tuple[list[str], dict[str, float]]:
    """Return the sample of a row and its scores by aspect, one without a name if there is but
    one."""
    sample = next((row[name] for name in PICTURE if row.get(name)), None)
    score = next((row[name] for name in SCORE if row.get(name) not in (None, "")), None)
    scores = row.get("ratings") or {"": score}
    if not isinstance(sample, str) or not isinstance(scores, Mapping) or None in scores.values():
        raise UserError(
            f"{place}: expected {' or '.join(PICTURE)} and {' or '.join(SCORE)} or ratings, or the "
            f"pair chosen and rejected; found {', '.join(map(str, row))[:200] or 'nothing'}"
        )
    return [sample], {str(aspect): _number(score, place) for aspect, score in scores.items()}


def _number(score: Any, place: str) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{place}: score {str(score)[:40]!r} is no number")
    return value


def _pair(row: Mapping[str, Any], place: str) -> tuple[list[str], dict[str, float]]:
    """Return the names of a pair's files, the better one first, and the probability of that."""
    if row["chosen"] is None and row["rejected"] is None and row.get("tie"):
        answers = row.get("answers")
        sides = answers if isinstance(answers, list) else []
        names: list[Any] = [
            side.get("image") or side.get("video") for side in sides if isinstance(side, dict)
        ]
        target = 0.5
    else:
        names = [row["chosen"], row["rejected"]]
        target = 1.0
    if len(names) != 2 or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{place}: a pair names two files of pictures, chosen and rejected")
    return list(names), {"": target}


def _file(path: Path, place: str) -> Path:
    try:
        known = path.is_file()
    except (OSError, ValueError):  # an answer of a language model is not a file name
        known = False
    if not known:
        raise UserError(
            f"{place}: no picture {str(path)[:120]}; files are looked for beside the data "
            f"(answers need --text-model)"
        )
    return path.resolve()


def connected(keys: Sequence[Sequence[str]]) -> Tensor:
    """Return a group for each row, [N]: rows with a common key are in one group."""
    parent = list(range(len(keys)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    first: dict[str, int] = {}
    for row, names in enumerate(keys):
        for name in names:
            parent[root(row)] = root(first.setdefault(name, row))
    return torch.tensor([root(row) for row in range(len(keys))])


def load_frames(file: Path) -> Tensor:
    """Read a picture, or a few frames of a video or an animated picture: [F, 3, H, W] in 0..1."""
    from PIL import Image

    if file.suffix == ".mp4":
        return _clip_frames(file)

    picture = read_picture(file, "picture", "fitted_head")
    count = frame_count(picture)
    if count == 1:
        return from_pil(picture)[None]
    places = torch.linspace(0, count - 1, min(count, FRAMES)).round().long().tolist()
    frames = []
    with Image.open(file) as video:
        for place in places:
            video.seek(place)
            frames.append(from_pil(video.copy()))
    return torch.stack(frames)


def _clip_frames(file: Path) -> Tensor:
    try:
        clip = open_clip(file)
        frames = clip.read(clip.timeline.spread(min(len(clip.timeline.times), FRAMES)))
    except ClipError as error:
        raise UserError(f"{file}: no video that can be read: {error}") from error
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
