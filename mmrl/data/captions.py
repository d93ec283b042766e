"""Registers the data source ``captions``: pictures or videos with the text that asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Lt

from mmrl.config.values import Location
from mmrl.core.errors import UserError
from mmrl.core.pictures import MOST_PIXELS
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.prompts import SPLIT
from mmrl.data.prompts import split as by_text
from mmrl.data.sources.intake import Broken, Intake
from mmrl.data.sources.media import content_of, folder_of, medium
from mmrl.data.sources.reader import Part, Request
from mmrl.data.sources.selection import renamed

# names of a row's file in use; of a row with both, the image is where the video begins
FILES = ("answer", "file_name", "video", "image", "file", "path", "img", "jpg", "png", "webp")
TEXTS = ("text", "caption", "prompt")
SHOWN = ("image", "video")  # beside the answer: what a prompt shows


class Captioned(Intake):
    """Reads pictures with captions, and says what was expected where there are none."""

    def prompts(self, part: Part) -> list[Prompt]:
        try:
            return super().prompts(part)
        except UserError as error:
            if ": no row" not in str(error) or self.summary.read:
                raise
            raise UserError(_expected(self.request.path)) from error

    def divided(self, *arguments: Any) -> tuple[list[Prompt], list[Prompt]]:
        try:
            return super().divided(*arguments)
        except UserError as error:
            if "no rows there" not in str(error):
                raise
            raise UserError(_expected(self.request.path)) from error


@DATA.register("captions")
class Captions:
    """Read pictures or videos with captions, to learn from: a folder, any table of rows, the Hub.

    path: a folder of files, each beside a .txt (or .caption) file of the same name that holds its
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
    max_pixels: of a picture; a larger one is broken.
    """

    fields: tuple[str, ...] = ("text", "answer")
    intake: type[Intake] = Captioned
    divided_by = "the caption"
    train: list[Prompt]
    held_out: list[Prompt]

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
    ):
        request = Request(
            str(path), split, subset, revision, streaming, columns or {}, filters or {}, limit, True
        )
        self.columns = request.columns
        self.folder = request.folder
        pictures = self._pictures if scan else None
        intake = self.intake(request, self._prompt, broken, pictures, max_pixels=max_pixels)
        self.train, self.held_out = intake.divided(held_out, SPLIT, by_text, self.divided_by)

    def _prompt(self, place: str, row: Any) -> Prompt:
        if not isinstance(row, Mapping):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        named = renamed(row, self.columns)
        file = _first(named, FILES, (str, bytes, Mapping))
        text = _first(named, TEXTS, (str,))
        rest = {key: value for key, value in named.items() if key not in (file, text)}
        folder = folder_of(place, self.folder)
        for key in SHOWN:  # of editing, and of a video that begins with a picture
            if isinstance(rest.get(key), str) and rest[key].strip():
                rest[key] = medium(rest[key], folder)
        return rest | {"text": named[text], "answer": medium(named[file], folder)}

    def _pictures(self, prompt: Prompt) -> list[Any]:
        """Return what a scan opens of a row: the file, and what the prompt shows beside it."""
        shown = [prompt[key] for key in SHOWN if isinstance(prompt.get(key), str)]
        return [content_of(prompt["answer"]), *(file for file in shown if file.strip())]


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
