"""Registers the data source ``vision``: every row is read, checked and counted before training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from mmrl.config.values import Location
from mmrl.core.errors import UserError
from mmrl.core.media.pictures import MOST_PIXELS
from mmrl.core.media.scan import is_clip
from mmrl.core.placeholders import misfit
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.prompts import SPLIT
from mmrl.data.prompts import split as split_by
from mmrl.data.sources.intake import Broken, Intake
from mmrl.data.sources.media import clips, content_of, folder_of, medium, placed
from mmrl.data.sources.reader import Request
from mmrl.data.sources.text_files import Row
from mmrl.data.vision import boxes, formats, points
from mmrl.data.vision.inversion import inverted
from mmrl.data.vision.layouts import marked, refuse_unshown, usual

Format = Literal["auto", "plain", "llava", "sharegpt", "qwen", "coco", "refcoco"]
Size = tuple[int, int]


@DATA.register("vision")
class Vision:
    """Read questions about images and videos: any usual file, data set folders, the Hub, in usual
    formats.

    path: a file (.jsonl, .json, .csv, .tsv, also .gz and .zst; .parquet, .arrow, WebDataset's
    .tar), a folder with train and test, what ``save_to_disk`` wrote, or the id of a data set,
    owner/name. images: the folder that image and video paths start in; by default the file's own.
    format: auto tells them apart row by row. columns: which name of a row holds what, {text:
    problem}. space: of the coordinates in the data: original, resized, rel1000, rel1. box_format:
    corners, xyxy, or a corner and the sides, xywh; by default corners, of COCO and RefCOCO sides.
    question: what is asked of COCO data, with {labels} or {expression} in it. system: a system
    message for all. held_out: a second file, a split, or the share of the images to hold out; by
    default the data's test part, else 5 %. broken: what happens if rows are. invert: share of the
    multiple-choice questions to train on that are inverted, so that several options are right
    (TW-GRPO). filters: which rows are taken, {difficulty: {max: 3}}. limit: rows that are read.
    split, subset, revision: of a data set. streaming: read it as it is loaded, up to limit. scan:
    look at every file before training. max_pixels: of a picture; a larger one is broken.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def __init__(
        self,
        path: Location,
        images: Path | None = None,
        format: Format = "auto",
        columns: dict[str, str] | None = None,
        space: Literal["original", "resized", "rel1000", "rel1"] | None = None,
        question: str | None = None,
        system: str | None = None,
        held_out: Location | Annotated[float, Ge(0), Lt(1)] | None = None,
        broken: Broken = "error",
        invert: Annotated[float, Ge(0), Le(1)] = 0.0,
        box_format: Literal["xyxy", "xywh"] | None = None,
        filters: dict[str, Any] | None = None,
        limit: Annotated[int, Ge(1)] | None = None,
        split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        scan: bool = True,
        max_pixels: Annotated[int, Ge(1)] = MOST_PIXELS,
    ):
        added = {"space": space, "system": system}
        self.added = {key: value for key, value in added.items() if value is not None}
        self.format = format
        self.columns = columns or {}
        self.question = question
        self.box_format = box_format
        request = Request(str(path), split, subset, revision, streaming, {}, filters or {}, limit)
        self.images = None if images is None else Path(images)
        self.folder = request.folder
        intake = _Annotated(self, request, broken, media_of if scan else None, max_pixels)
        self.train, self.held_out = intake.divided(
            held_out, SPLIT, partial(split_by, key=picture_of), "the picture"
        )
        if invert:
            self.train = inverted(self.train, invert)

    def kind_of(self, row: Any) -> str:
        """Return the format of a row."""
        if self.format != "auto" or not isinstance(row, Mapping):
            return self.format
        if isinstance(row.get("annotations"), list) and isinstance(row.get("images"), list):
            several = [*row["annotations"][:1], *row["images"][:1]]
            return "refcoco" if any(formats.expressions(record) for record in several) else "coco"
        talk = formats.turns_of(row)
        return "plain" if talk is None else "llava" if talk == "conversations" else "qwen"

    def prompt(self, row: Any) -> Prompt:
        """Turn a row into a prompt. Raises ValueError for a row that is broken."""
        if not isinstance(row, Mapping):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        row = usual(row)
        kind = self.kind_of(row)
        if kind == "refcoco":
            return formats.refers(
                row, self.question, self.columns, are_corners=self.box_format == "xyxy"
            )
        talks = kind in ("llava", "sharegpt", "qwen")
        read = formats.conversation if talks else formats.plain
        prompt = marked(read(row, self.columns))
        refuse_unshown(prompt)
        return self._boxed(prompt)

    def _boxed(self, prompt: Prompt) -> Prompt:
        """Read boxes from a text, and convert a corner and sides to corners."""
        if "boxes" not in prompt:
            return prompt
        values = boxes.written(prompt["boxes"])
        if self.box_format == "xywh" and isinstance(values, list):
            values = [formats.corners(box) for box in values]
        return {**prompt, "boxes": values}

    def finished(self, place: str, prompt: Prompt) -> Prompt:
        """Complete a prompt's paths, and check it."""
        if not isinstance(prompt.get("text"), str) or not prompt["text"].strip():
            problem = "no text (the question)"
            if isinstance(prompt.get("text"), Mapping):
                problem = f"its question holds {', '.join(prompt['text'])}, expected one text"
            raise ValueError(
                f"{problem}; it has {', '.join(prompt)}; name it with columns: {{text: ...}}"
            )
        prompt = dict(prompt)
        folders = self._folders(place)
        if prompt.get("images") is not None:
            several = prompt["images"] if isinstance(prompt["images"], list) else [prompt["images"]]
            prompt["images"] = [medium(source, *folders) for source in several]
        if prompt.get("video") is not None:
            prompt["video"] = clips(prompt["video"], folders, prompt.get("fps"))
        if isinstance(prompt.get("mask"), str):
            prompt["mask"] = medium(prompt["mask"], *folders)
        prompt = points.read(prompt)
        if "messages" in prompt:
            rate = prompt.get("fps")
            prompt["messages"] = [_turn(turn, folders, rate) for turn in prompt["messages"]]
        formats.check(prompt)
        if why := misfit(prompt):
            raise ValueError(why)
        return placed({**self.added, **prompt, "origin": place}, folders[0])

    def _folders(self, place: str) -> tuple[Path, ...]:
        """Return where paths of a row start: in ``images``, else in the folder of the row's file,
        or in the folder that ``path`` names, as in data sets of the Hub."""
        if self.images is not None:
            return (self.images,)
        return folder_of(place, self.folder), self.folder


def _turn(turn: dict[str, Any], folders: Sequence[Path], rate: Any) -> dict[str, Any]:
    """Complete the paths in the parts of a turn."""
    if isinstance(turn["content"], str):
        return turn
    return turn | {"content": [_part(part, folders, rate) for part in turn["content"]]}


def _part(part: dict[str, Any], folders: Sequence[Path], rate: Any) -> dict[str, Any]:
    media = ("image", "path", "url")
    part = {k: medium(v, *folders) if k in media else v for k, v in part.items()}
    if "video" in part:
        rate = part.get("sample_fps", part.get("fps", rate))
        part["video"] = clips(part["video"], folders, rate)
    return part


class _Annotated(Intake):
    """Reads the rows of a vision source: COCO files are many prompts; boxes and points are compared
    with pictures."""

    def __init__(
        self,
        source: Vision,
        request: Request,
        broken: Broken,
        pictures: Callable[[Prompt], list[Any]] | None,
        max_pixels: int,
    ):
        self.source = source
        super().__init__(
            request, self._made, broken, pictures, self._places, self._questions, max_pixels
        )

    def _questions(self, place: str, row: Any) -> Iterator[Row]:
        """Yield the location of every question of a COCO file, and a function that makes it."""
        makers = {"coco": formats.coco, "refcoco": formats.refcoco}
        kind = self.source.kind_of(row)
        if kind not in makers or not isinstance(row, Mapping) or "annotations" not in row:
            yield place, row
            return
        try:
            for name, make in makers[kind](row, self.source.question):
                yield f"{place}: {name}", make
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{place}: not a COCO file: {error!r}") from error

    def _made(self, place: str, row: Any) -> Prompt:
        prompt = row() if callable(row) else self.source.prompt(row)
        try:
            return self.source.finished(place, prompt)
        except FileNotFoundError as error:
            missing = str(error).partition(";")[0]
            raise ValueError(
                f"{missing}; the option images names the folder that paths start in"
            ) from error

    def _places(self, prompts: list[Prompt], sizes: list[list[Size]]) -> Mapping[int, str]:
        """Return what is wrong with boxes and points, by prompt. Raises UserError if all of them
        are in another space."""

        def size_of(number: int) -> boxes.Size | None:
            index = prompts[number].get("image_index", 0)
            known = sizes[number]
            if isinstance(index, int) and -len(known) <= index < len(known) and all(known[index]):
                return known[index]
            return boxes.said_size(prompts[number])

        wrong: dict[int, str] = {}
        for each in points.compared(prompts, size_of):
            if likely := each.likely():
                first = prompts[each.placed[0].row]["origin"]
                raise UserError(
                    f"{first}: the {each.noun} are not in the space {each.space}, as the data are "
                    f"said to be; they {likely}"
                )
            wrong |= each.verdict.rows
            if each.verdict.doubt:
                self.summary.notes[each.verdict.doubt] += len(each.placed)
        return wrong


def media_of(prompt: Prompt) -> list[Any]:
    """List the pictures and clips of a prompt, to be checked before training."""
    images = prompt.get("images")
    several = images if isinstance(images, list) else [] if images is None else [images]
    video = prompt.get("video")
    clips = video if isinstance(video, list) else [video]
    clips = [*clips, *in_messages(prompt, ("video",))]
    pictures = [*several, *in_messages(prompt, ("image",))]
    return [*map(content_of, pictures), *(clip for clip in clips if is_clip(clip))]


def picture_of(prompt: Prompt) -> str:
    """Return the key of a split: one picture or video, so that all questions about it stay on one
    side; without any, the text."""
    first = next(iter([*(prompt.get("images") or ()), *in_messages(prompt)]), prompt.get("video"))
    if first is None:
        return str(prompt["text"])
    return os.path.basename(first) if isinstance(first, str) else str(prompt["origin"])


def in_messages(prompt: Prompt, kinds: tuple[str, ...] = ("image", "video")) -> list[Any]:
    """List images and videos in the parts of a conversation, as Qwen's format has them."""
    turns = [
        turn["content"]
        for turn in prompt.get("messages") or ()
        if not isinstance(turn["content"], str)
    ]
    parts = [part for turn in turns for part in turn if part.get("type") in kinds]
    keys = ("image", "video", "path", "url")
    return [part[key] for part in parts for key in keys if part.get(key) is not None]
