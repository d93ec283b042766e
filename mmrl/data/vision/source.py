"""Registers the data source ``vision``: every row is read, checked and counted before training."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.prompts import SPLIT, split
from mmrl.data.vision import formats
from mmrl.data.vision.inversion import inverted
from mmrl.data.vision.rows import inside, rows_of

Format = Literal["auto", "plain", "llava", "sharegpt", "qwen", "coco", "refcoco"]
SHOWN = 5  # broken rows in a message


@DATA.register("vision")
class Vision:
    """Read questions about images and videos: jsonl, json, parquet or data set folders, in usual
    formats.

    path: a file, or a folder with train and test. images: the folder that image and video paths
    start in; by default the file's own. format: auto tells them apart row by row. fields: which
    name of a row holds what, {text: problem}. space: of the coordinates in the data: original,
    resized, rel1000, rel1. question: what is asked of COCO data, with {labels} or {expression} in
    it. system: a system message for all. held_out: a second file, or the share of the images to
    hold out; by default the folder's test part, else 5 %. broken: what happens if rows are. invert:
    share of the multiple-choice questions to train on that are turned around, so that several
    options are right (TW-GRPO).
    """

    train: list[Prompt]
    held_out: list[Prompt]

    def __init__(
        self,
        path: Path,
        images: Path | None = None,
        format: Format = "auto",
        fields: dict[str, str] | None = None,
        space: Literal["original", "resized", "rel1000", "rel1"] | None = None,
        question: str | None = None,
        system: str | None = None,
        held_out: Path | Annotated[float, Ge(0), Lt(1)] | None = None,
        broken: Literal["error", "skip"] = "error",
        invert: Annotated[float, Ge(0), Le(1)] = 0.0,
    ):
        path = Path(path)
        added = {"space": space, "system": system}
        self.added = {key: value for key, value in added.items() if value is not None}
        self.format = format
        self.fields = fields or {}
        self.question = question
        self.broken = broken
        self.images = Path(images) if images is not None else path if path.is_dir() else path.parent
        part = (inside(path, "train") or path) if path.is_dir() else path
        prompts = self._read(part if isinstance(part, list) else [part])
        rest = inside(path, "test") if held_out is None and path.is_dir() else held_out
        if isinstance(rest, (str, Path, list)):
            self.train = prompts
            self.held_out = self._read(rest if isinstance(rest, list) else [Path(rest)])
        else:
            self.train, self.held_out = split(prompts, SPLIT if rest is None else rest, picture_of)
        if invert:
            self.train = inverted(self.train, invert)

    def _read(self, files: Iterable[Path]) -> list[Prompt]:
        """Read all prompts of these files. Raises UserError with the number of broken rows and the
        first few of them."""
        files = list(files)
        prompts = []
        problems = []
        for place, make in self._rows(files):
            try:
                prompts.append(self._finished(place, make()))
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else str(error)
                problems.append(f"{place}: {why}")
        self._complain(problems, len(prompts) + len(problems))
        if not prompts:
            raise UserError(f"{', '.join(map(str, files))}: no question there")
        return prompts

    def _rows(self, files: Iterable[Path]) -> Iterator[tuple[str, Callable[[], Prompt]]]:
        """Yield the place of every prompt, and a function that makes it."""
        makers = {"coco": formats.coco, "refcoco": formats.refcoco}
        for file in files:
            for place, row in rows_of(file):
                kind = self._kind(row)
                if kind in makers and isinstance(row, Mapping) and "annotations" in row:
                    try:
                        for part, make in makers[kind](row, self.question):
                            yield f"{place}: {part}", make
                    except (KeyError, ValueError, TypeError) as error:
                        raise UserError(f"{place}: not a COCO file: {error!r}") from error
                else:
                    yield place, partial(self._prompt, row, kind)

    def _kind(self, row: Any) -> str:
        if self.format != "auto" or not isinstance(row, Mapping):
            return self.format
        if isinstance(row.get("annotations"), list) and isinstance(row.get("images"), list):
            several = [*row["annotations"][:1], *row["images"][:1]]
            return "refcoco" if any(formats.expressions(record) for record in several) else "coco"
        return "qwen" if "messages" in row else "llava" if "conversations" in row else "plain"

    def _prompt(self, row: Any, kind: str) -> Prompt:
        if isinstance(row, ValueError):
            raise row
        if not isinstance(row, Mapping):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        row = {key: value for key, value in row.items() if value is not None}
        if kind == "refcoco":
            return formats.refers(row, self.question, self.fields)
        if kind in ("llava", "sharegpt", "qwen"):
            if not {"messages", "conversations"} & set(row):
                raise ValueError(f"no messages or conversations; it has {', '.join(row)}")
            return formats.conversation(row, self.fields)
        return formats.plain(row, self.fields)

    def _finished(self, place: str, prompt: Prompt) -> Prompt:
        """Complete a prompt's paths, and check it."""
        if not isinstance(prompt.get("text"), str) or not prompt["text"].strip():
            raise ValueError(
                f"no text (the question); it has {', '.join(prompt)}; name it with "
                f"fields: {{text: ...}}"
            )
        prompt = {**prompt, "text": prompt["text"].strip()}
        for key in ("images", "video"):
            if prompt.get(key) is not None:
                several = prompt[key] if isinstance(prompt[key], list) else [prompt[key]]
                prompt[key] = [self._medium(source) for source in several]
        if isinstance(prompt.get("video"), list) and len(prompt["video"]) == 1:
            prompt["video"] = prompt["video"][0]
        if isinstance(prompt.get("mask"), str):
            prompt["mask"] = self._medium(prompt["mask"])
        if "messages" in prompt:
            prompt["messages"] = [self._turn(turn) for turn in prompt["messages"]]
        formats.check(prompt)
        return {**self.added, **prompt, "origin": place}

    def _turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        if isinstance(turn["content"], str):
            return turn
        media = ("image", "video", "path", "url")
        return turn | {
            "content": [
                {k: self._medium(v) if k in media else v for k, v in part.items()}
                for part in turn["content"]
            ]
        }

    def _medium(self, source: Any) -> Any:
        """Return a whole path, or what the row itself holds: a picture, or its bytes as parquet
        data sets have them."""
        if isinstance(source, Mapping):
            if source.get("bytes") is None:
                return self._medium(source["path"])
            from PIL import Image

            return Image.open(io.BytesIO(source["bytes"]))
        if not isinstance(source, (str, Path)):
            return source
        name = str(source).removeprefix("file://")
        if name.startswith(("http://", "https://", "data:")):
            raise ValueError(f"{name[:60]} is not a file; download it first")
        path = self.images / name  # a whole path stays
        if not path.is_file():
            raise ValueError(
                f"no file {path}; the option images names the folder that paths start in"
            )
        return str(path.resolve())

    def _complain(self, problems: list[str], count: int) -> None:
        if not problems:
            return
        rest = f"\n    and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        message = (
            (f"{len(problems)} of {count} rows are broken:\n    ")
            + "\n    ".join(problems[:SHOWN])
            + rest
        )
        if self.broken == "error":
            raise UserError(f"{message}\n  mend them, or leave them out with broken: skip")
        warnings.warn(f"{message}\n  left out", stacklevel=4)


def picture_of(prompt: Prompt) -> str:
    """Return the key that a split holds together: one picture or video, so that all questions about
    it stay on one side; without any, the text."""
    first = next(iter([*(prompt.get("images") or ()), *in_messages(prompt)]), prompt.get("video"))
    if first is None:
        return str(prompt["text"])
    return Path(first).name if isinstance(first, str) else str(prompt["origin"])


def in_messages(prompt: Prompt) -> list[Any]:
    """List images and videos in the parts of a conversation, as Qwen's format has them."""
    turns = [
        turn["content"]
        for turn in prompt.get("messages") or ()
        if not isinstance(turn["content"], str)
    ]
    parts = [part for turn in turns for part in turn if part.get("type") in ("image", "video")]
    keys = ("image", "video", "path", "url")
    return [part[key] for part in parts for key in keys if part.get(key) is not None]
