"""Registers the data source ``captions``: pictures or videos with the text that asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt, MinLen

from mmrl.config.values import Location
from mmrl.core.errors import UserError
from mmrl.core.framing import nearest
from mmrl.core.media.clips import is_frames
from mmrl.core.media.pictures import MOST_PIXELS
from mmrl.core.media.scan import is_clip
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data import kohya
from mmrl.data.prompts import SPLIT
from mmrl.data.prompts import split as by_text
from mmrl.data.sources.intake import Broken, Intake
from mmrl.data.sources.media import clips, content_of, folder_of, medium
from mmrl.data.sources.reader import Part, Request
from mmrl.data.sources.selection import renamed
from mmrl.data.sources.text_files import Row

# usual names of a row's file; in a row with both, the image is the video's first frame
FILES = ("answer", "file_name", "video", "image", "file", "path", "img", "jpg", "png", "webp")
TEXTS = ("text", "caption", "prompt")
Side = Annotated[int, Ge(1)]
Buckets = Annotated[list[tuple[Side, Side]], MinLen(1)]
SHOWN = ("image", "video")  # besides the answer: what a prompt shows


class Captioned(Intake):
    """Reads pictures with captions, and reports what was expected if there are none."""

    def prompts(self, part: Part) -> list[Prompt]:
        try:
            return super().prompts(part)
        except UserError as error:
            if ": no row" not in str(error) or self.summary.read:
                raise
            raise UserError(_expected(self.request.path)) from error

    def divided(self, *arguments: Any) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        try:
            return super().divided(*arguments)
        except UserError as error:
            if "no rows there" not in str(error):
                raise
            raise UserError(_expected(self.request.path)) from error


@DATA.register("captions")
class Captions:
    """Read pictures or videos with captions, to learn from: a folder, any table of rows, the Hub.

    path: a folder of files, each with a .txt (or .caption) file of the same name that holds its
    caption, or with a ``metadata.jsonl`` (.csv, .parquet) of rows {file_name, text}, as data sets
    of the Hub have them; a file of such rows, whose paths start at the file, or that holds the
    pictures (parquet, arrow, WebDataset's .tar); or the id of a data set, owner/name. Other values
    of a row stay, such as ``label`` for models of classes, ``plan`` for janus_unified, and
    ``image``, the first frame of a clip: a path that starts there too. Prompts
    hold the file under ``answer``, which ``objective: sft`` learns from. held_out: a second file, a
    split, or the share of the captions to hold out; by default 5 %. columns: what values are
    called, {text: prompt_en}. filters: which rows are taken, {width: {min: 512}}. limit: rows that
    are read. split, subset, revision: of a data set. streaming: read it as it is loaded, up to
    limit. broken: what happens if rows are. scan: look at every file before training.
    max_pixels: of a picture; a larger one is broken. buckets: sizes [height, width] that pictures
    are trained at, each at that of the nearest aspect ratio, kept in the row as ``size``; without
    them all are cropped to the policy's size.

    A list of captions makes a row of each; kohya's meta_cap.json is read too, tags after the
    caption.
    """

    fields: tuple[str, ...] = ("text", "answer")
    intake: type[Intake] = Captioned
    divided_by = "the caption"
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def __init__(
        self,
        path: Location,
        held_out: Location | Annotated[float, Ge(0), Lt(1)] | None = None,
        columns: dict[str, str] | None = None,
        filters: dict[str, Any] | None = None,
        limit: Annotated[int, Ge(1)] | None = None,
        split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        broken: Broken = "error",
        scan: bool = True,
        max_pixels: Annotated[int, Ge(1)] = MOST_PIXELS,
        buckets: Buckets | None = None,
    ):
        request = Request(
            str(path), split, subset, revision, streaming, columns or {}, filters or {}, limit, True
        )
        if buckets is not None and not scan:
            raise UserError("buckets: they need the sizes of all pictures: leave scan true")
        self.columns = request.columns
        self.folder = request.folder
        self.buckets = [(height, width) for height, width in buckets or []]
        pictures = self._pictures if scan else None
        intake = self.intake(
            request,
            self._prompt,
            broken,
            pictures,
            self._sized if buckets else None,
            self._expanded,
            max_pixels,
        )
        self.summary = intake.summary  # to which rows report
        self.train, self.held_out = intake.divided(held_out, SPLIT, by_picture, self.divided_by)

    def _expanded(self, place: str, row: Any) -> Iterator[Row]:
        """Expand a row that stands for several: kohya's object of all pictures, and captions in a
        list."""
        names = (self.columns.get("text"), *TEXTS, "captions")
        for inner in kohya.rows(row, folder_of(place, self.folder)):
            known = inner if isinstance(inner, Mapping) else {}
            name = next((name for name in names if isinstance(known.get(name), list)), "")
            listed = known[name] if name else []
            captions = [text for text in listed if isinstance(text, str) and text.strip()]
            if not captions:
                yield place, inner
                continue
            self.summary.notes["have several captions, each of which is a row"] += 1
            column = "text" if name == "captions" else name
            for text in captions:
                yield place, {**known, column: text, "captions": captions}

    def _sized(
        self, prompts: list[Prompt], sizes: list[list[tuple[int, int]]]
    ) -> Mapping[int, str]:
        """Set the size of prompts to the nearest aspect ratio; clips keep the policy's size."""
        for prompt, several in zip(prompts, sizes, strict=True):
            if several and 0 not in several[0] and not is_clip(self._pictures(prompt)[0]):
                width, height = several[0]
                prompt["size"] = list(nearest((height, width), self.buckets))
        return {}

    def _prompt(self, place: str, row: Any) -> Prompt:
        if not isinstance(row, Mapping):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        named = renamed(row, self.columns)
        file = _first(named, FILES, (str, bytes, Mapping, list))
        text = _first(named, TEXTS, (str,))
        rest = {key: value for key, value in named.items() if key not in (file, text)}
        folder = folder_of(place, self.folder)
        if (times := kohya.repeats(named[file])) > 1:
            self.summary.notes[
                f"lie in folders that repeat them in kohya's trainer ({times} times and the like), "
                "which is not read: all are drawn equally often; data mixture has weights"
            ] += 1
        for key in SHOWN:  # of editing, and of a video that begins with a picture
            if isinstance(rest.get(key), str) and rest[key].strip():
                rest[key] = medium(rest[key], folder)
        return rest | {"text": named[text], "answer": _answer(named, file, folder)}

    def _pictures(self, prompt: Prompt) -> list[Any]:
        """Return what a scan opens of a row: its files, and what else the prompt shows."""
        shown = [prompt[key] for key in SHOWN if isinstance(prompt.get(key), str)]
        answer = prompt["answer"]
        files = answer if isinstance(answer, list) else [answer]
        return [*map(content_of, files), *(file for file in shown if file.strip())]


def by_picture(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split by a hash of the caption; all captions of a picture stay on one side."""
    return by_text(
        prompts, share, lambda prompt: str((prompt.get("captions") or [prompt["text"]])[0])
    )


def _answer(row: Mapping[str, Any], name: str, folder: Path) -> Any:
    """Return the picture or video that a row holds under ``name``, or the frames of a clip."""
    if not isinstance(row[name], list):
        return medium(row[name], folder)
    if not is_frames(row[name]):
        raise ValueError(f"{name} is a list, expected a file, or the pictures of one clip")
    return clips(row[name], (folder,), row.get("fps"))


def _expected(path: str) -> str:
    return (
        f"{path}: no pictures with captions there; expected a.png beside a.txt, or a "
        f"metadata.jsonl of rows {{file_name, text}}"
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...], kinds: tuple[type, ...]) -> str:
    """Return the first of these names that holds a value of these kinds."""
    name = next(
        (
            name
            for name in names
            if isinstance(row.get(name), kinds)
            and (not isinstance(row[name], str) or row[name].strip())
        ),
        None,
    )
    if name is None:
        raise ValueError(f"no {' or '.join(names[:2])}; this row has {', '.join(map(str, row))}")
    return name
