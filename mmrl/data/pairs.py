"""Reads preference data: pairs of answers, or single ones with a label."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Image

from mmrl.config.preferences import Preferences
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data import published
from mmrl.data.captions import SHOWN, Captions
from mmrl.data.prompts import decoded
from mmrl.data.sources.folders import PICTURES, VIDEOS
from mmrl.data.sources.intake import Intake
from mmrl.data.sources.media import content_of, folder_of, medium
from mmrl.data.sources.selection import renamed
from mmrl.data.sources.text_files import Row
from samplers.noise import Rng

EXPECTED = 'expected {"prompt": "...", "chosen": "...", "rejected": "..."}, texts or paths of files'
SIDES = ("chosen", "rejected")
GOOD = {True, "1", "true", "True", "good", "desirable"}
BAD = {False, -1, "0", "-1", "false", "False", "bad", "undesirable"}


@dataclass(frozen=True)
class Judged:
    """Holds an answer and its label: 1 better or good, 0 worse, -1 bad."""

    content: Any
    reward: float


class Pairs:
    """Finds the compared answers of a prompt: in its row, or in a separate file."""

    def __init__(self, options: Preferences):
        self.options = options
        self.known = {} if options.path is None else pairs_of_file(options.path)

    def kept(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Select the prompts that have answers, if these are in a separate file. Raises UserError
        if none has."""
        compared = self.kept_or_none(prompts)
        if prompts and not compared:
            raise UserError(
                f"train.preferences.path: {self.options.path} has no pair for any prompt of the "
                f'data; its lines\' "prompt" repeats the field {self.options.key!r} of a row '
                f"(train.preferences.key)"
            )
        return compared if len(compared) < len(prompts) else prompts

    def kept_or_none(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Select the prompts that have answers; none if no prompt has any."""
        if self.options.path is None:
            return prompts
        return [prompt for prompt in prompts if self._named(prompt) in self.known]

    def of(self, prompt: Prompt, rng: Rng) -> tuple[Judged, ...]:
        """Return the better and the worse answer, or the one that has a label; of several pairs a
        random one."""
        options = self.options
        if options.label is not None:
            is_good = prompt[options.label] in GOOD
            return (Judged(answer_of(prompt[options.answer]), 1.0 if is_good else -1.0),)
        if options.path is None:
            sides = prompt[options.chosen], prompt[options.rejected]
        else:
            listed = self.known[self._named(prompt)]
            sides = listed[rng.fold(self._named(prompt)).permutation(len(listed)).tolist()[0]]
        return Judged(answer_of(sides[0]), 1.0), Judged(answer_of(sides[1]), 0.0)

    def problem(self, prompt: Prompt) -> str | None:
        """Describe what is wrong with the answers of a row, for any policy; None: nothing."""
        options = self.options
        if options.path is not None:
            return None
        names = [options.chosen, options.rejected]
        if options.label is not None:
            names = [options.answer, options.label]
        for name in names:
            if prompt.get(name) is None or prompt[name] == "":
                known = ", ".join(key for key in prompt if key != "origin")
                return (
                    f"no {name!r}; it has {known}; add it, or name another field in "
                    f"train.preferences"
                )
        if options.label is not None:
            label = prompt[options.label]
            if not isinstance(label, (bool, int, float, str)) or label not in GOOD | BAD:
                return f"{options.label!r} is {str(label)[:40]!r}, expected true or false"
            return None
        if same(answer_of(prompt[options.chosen]), answer_of(prompt[options.rejected])):
            return f"{options.chosen!r} and {options.rejected!r} are equal: nothing is preferred"
        return None

    def _named(self, prompt: Prompt) -> str:
        return str(prompt.get(self.options.key)).strip()


def answer_of(value: Any) -> Any:
    """Return the answer: of a conversation, as TRL's data sets have them, the last turn."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value:
        turn = value[-1]
        if isinstance(turn, Mapping) and "content" in turn:
            return _words(turn["content"])
    return value


def same(first: Any, second: Any) -> bool:
    """Tell whether two answers are equal, as far as can be seen without opening files."""
    return isinstance(first, (str, bytes, int, float)) and first == second


def pairs_of_file(path: Path) -> dict[str, list[tuple[Any, Any]]]:
    """Read a .jsonl file of pairs, by prompt; ties are left out. Raises UserError."""
    pairs: dict[str, list[tuple[Any, Any]]] = {}
    for number, line in enumerate(decoded(path, "train.preferences.path").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if record.get("tie"):
                continue
            sides = tuple(_placed(answer_of(record[side]), path.parent) for side in SIDES)
            prompt = str(record["prompt"]).strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}:{number}: {EXPECTED} ({error})") from error
        if same(*sides):
            raise UserError(f"{path}:{number}: chosen and rejected are equal; leave the line out")
        pairs.setdefault(prompt, []).append((sides[0], sides[1]))
    if not pairs:
        raise UserError(f"{path} holds no pairs; {EXPECTED}")
    return pairs


@DATA.register("preferences")
class PreferencePairs(Captions):
    """Read pairs of a preferred and a rejected answer, as TRL and the Hub have them.

    path: a table of rows (.jsonl, .csv, .parquet and the like), a folder, or the id of a data set,
    owner/name. A row has ``prompt`` or ``text``, ``chosen`` and ``rejected``: texts, conversations
    (of which the last turn is the answer), or pictures and videos, whose paths start at the file or
    which the row holds. Rows of Pick-a-Pic, HPD v2 and v3, ImageReward and Rapidata are read as
    they are published: of a ranking every pair is a row, ties are left out and counted. Train on
    them with ``train.preferences: {}``. held_out: a second file, a
    split, or the share of the prompts to hold out; by default 5 %. columns: what values are called,
    {chosen: image_good}. filters: which rows are taken. limit: rows that are read. split, subset,
    revision: of a data set. streaming: read it as it is loaded, up to limit. broken: what happens
    if rows are. scan: look at every file before training. max_pixels: of a picture; a larger one is
    broken. buckets: sizes [height, width] that pictures are trained at, each pair at that of the
    aspect ratio nearest to its better picture; without them all are cropped to the policy's size.
    """

    fields = ("text", *SIDES)
    intake = Intake
    divided_by = "the prompt"

    def _expanded(self, place: str, row: Any) -> Iterator[Row]:
        """Make the pairs of a row as data sets publish them, unless ``columns`` names the sides."""
        named = set(SIDES) & set(self.columns)
        try:
            pairs = None
            if isinstance(row, Mapping) and not named:
                pairs = published.pairs_in(row, self.summary.undecided)
        except (ValueError, TypeError) as error:
            yield place, ValueError(str(error))
            return
        yield from ((place, pair) for pair in ([row] if pairs is None else pairs))

    def _prompt(self, place: str, row: Any) -> Prompt:
        if not isinstance(row, Mapping):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        named = renamed(row, self.columns)
        name = next((key for key in ("text", "prompt") if named.get(key)), None)
        if name is None:
            raise ValueError(f"no prompt or text; this row has {', '.join(map(str, row))}")
        for side in SIDES:
            if named.get(side) in (None, "", b""):
                raise ValueError(
                    f"no {side!r}; this row has {', '.join(map(str, row))}; columns names it"
                )
        folder = folder_of(place, self.folder)
        sides = {side: _placed(answer_of(named[side]), folder) for side in SIDES}
        if same(*sides.values()):
            raise ValueError("chosen and rejected are equal: nothing is preferred")
        rest = {key: value for key, value in named.items() if key not in (name, *SIDES)}
        return rest | {"text": str(answer_of(named[name]))} | sides

    def _pictures(self, prompt: Prompt) -> list[Any]:
        sides = [prompt.get(key) for key in (*SIDES, *SHOWN)]
        media = (*PICTURES, *VIDEOS)
        shown = [each for each in sides if isinstance(each, Image) or _ends(each, media)]
        return [content_of(each) for each in shown]


def _placed(value: Any, folder: Path) -> Any:
    """Return a text as it is, and a picture or video with its absolute path."""
    is_media = isinstance(value, (bytes, Mapping)) or _ends(value, (*PICTURES, *VIDEOS))
    return medium(value, folder) if is_media else value


def _ends(value: Any, suffixes: tuple[str, ...]) -> bool:
    """Tell whether a value is the path of a file with one of these suffixes, not an answer."""
    if not isinstance(value, str) or "\n" in value:
        return False
    return Path(value[:4096]).suffix.lower() in suffixes


def _words(content: Any) -> Any:
    """Return the text of a turn, whose content may be a list of parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content
