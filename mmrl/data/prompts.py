"""Reads prompts from files and splits them into a training and a held-out set, in an order that
depends on the seed only."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt

from mmrl.config.values import Location, exists
from mmrl.core.errors import UserError
from mmrl.core.media.pictures import MOST_PIXELS
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.sources.intake import Broken, Intake
from mmrl.data.sources.media import folder_of, inline_picture, placed
from mmrl.data.sources.reader import Request, rows_of
from mmrl.data.sources.selection import renamed

PLAIN = frozenset((str, int, float, bool))  # types of values that hold no picture
SPLIT = 0.05  # share of the texts that is held out by default
NAMES = {
    "train": ("train_metadata.jsonl", "train.jsonl", "train.txt"),
    "test": ("test_metadata.jsonl", "test.jsonl", "test.txt"),
}


@DATA.register("prompts")
class Prompts:
    """Read prompts from a .txt file (one a line), rows of any usual file, a folder, or the Hub.

    path: .txt, .jsonl, .json, .csv, .tsv (also .gz, .zst), .parquet, .arrow, .tar; a folder holding
    ``train_metadata.jsonl`` or ``train.*`` (and ``test...``), or what ``save_to_disk`` wrote; or
    the id of a data set, owner/name. held_out: a second file, a split, or the share of the texts to
    hold out; by default the data's test part, else 5 %. key: the key that holds the text; by
    default "text" or "prompt". columns: what other values are called, {label: class_id}. filters:
    which rows are taken, {score: {min: 5}}. limit: rows that are read. split, subset, revision: of
    a data set. streaming: read it as it is loaded, up to limit. broken: what happens if rows are.
    max_pixels: of a picture that a row holds; a larger one is broken.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def __init__(
        self,
        path: Location,
        held_out: Location | Annotated[float, Ge(0), Lt(1)] | None = None,
        key: str | None = None,
        columns: dict[str, str] | None = None,
        filters: dict[str, Any] | None = None,
        limit: Annotated[int, Ge(1)] | None = None,
        split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        broken: Broken = "error",
        max_pixels: Annotated[int, Ge(1)] = MOST_PIXELS,
    ):
        path = Location(str(path))
        held_out = Location(str(held_out)) if isinstance(held_out, Path) else held_out
        if exists(Path(path)) and Path(path).is_dir() and split is None and subset is None:
            folder = Path(path)
            chosen = _inside(folder, "train")
            path = Location(str(chosen or path))
            test = _inside(folder, "test") if held_out is None and chosen else None
            held_out = Location(str(test)) if test else held_out
        request = Request(
            path, split, subset, revision, streaming, columns or {}, filters or {}, limit
        )
        make = partial(_made, key, request.columns, max_pixels)
        intake = Intake(request, make, broken, max_pixels=max_pixels)
        self.train, self.held_out = intake.divided(held_out, SPLIT, _split, "the text")
        if isinstance(held_out, str) and (
            shared := len({p["text"] for p in self.train} & {p["text"] for p in self.held_out})
        ):
            warnings.warn(
                f"{shared} texts of {held_out} are also in {path}: they are not held out",
                stacklevel=2,
            )


def _made(
    key: str | None, columns: Mapping[str, str], max_pixels: int, place: str, row: Any
) -> Prompt:
    """Make a prompt of a row; pictures that it holds are opened."""
    if columns:
        row = renamed(row, columns) if isinstance(row, dict) else row
        key = "text" if "text" in columns else key
    prompt = _json_row(row, key)
    if PLAIN.issuperset(map(type, prompt.values())):
        return prompt
    return {
        name: inline_picture(value, max_pixels)
        for name, value in prompt.items()
        if value is not None
    }


def split(
    prompts: Sequence[Prompt], share: float, key: Callable[[Prompt], str] = itemgetter("text")
) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into training and held-out ones by a hash of the text (or another ``key``):
    equal ones stay together, and more lines move none of them.

    (In tiny files, a side that the hash would leave empty gets the one text nearest to it.)
    """
    ranks = {name: _rank(name) for name in map(key, prompts)}
    held = {text for text, rank in ranks.items() if rank < share}
    if ranks and share > 0 and not held:
        held.add(min(ranks, key=ranks.__getitem__))
    if ranks and len(held) == len(ranks):
        held.discard(max(ranks, key=ranks.__getitem__))
    return [p for p in prompts if key(p) not in held], [p for p in prompts if key(p) in held]


def development_and_test(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Split held-out prompts into two halves: settings are chosen on the first, results are
    reported on the second.

    By a hash of the text, so that equal texts stay together and more lines move none of them; by
    the place where most texts repeat, as questions about pictures do.
    """
    texts = [str(prompt.get("text", "")) for prompt in prompts]
    repeat = 2 * len(set(texts)) <= len(texts)
    names = {
        id(prompt): f"half {place if repeat else text}"
        for place, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    }
    test, development = split(prompts, 0.5, lambda prompt: names[id(prompt)])
    return development, test


_split = split  # the option of that name hides it


def _rank(text: str) -> float:
    """Hash a text to a number in [0, 1), the same everywhere."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def read(path: Path, key: str | None = None) -> list[Prompt]:
    """Read the prompts of a file in order. Raises UserError with file and line."""
    prompts = []
    for place, row in rows_of(path):
        try:
            prompts.append(placed(_json_row(row, key), folder_of(place, path.parent)))
        except (ValueError, RecursionError) as error:
            shown = getattr(error, "shown", "") or _begun(row)
            raise UserError(f"{place}: {error}\n    {shown}") from error
    if not prompts:
        raise UserError(f"{path} holds no prompt: write one a line")
    return prompts


def _begun(row: Any) -> str:
    """Show how a row begins."""
    shown = json.dumps(row, default=str, ensure_ascii=False)
    return shown if len(shown) <= 80 else shown[:80] + " ..."


def _json_row(value: Any, key: str | None) -> Prompt:
    """Make a prompt of a row: an object, or a text alone. Raises ValueError for others."""
    if isinstance(value, ValueError):
        raise value
    if isinstance(value, str):
        value = {key or "text": value}
    if not isinstance(value, dict):
        raise ValueError(f'expected {{"text": "..."}} or a string, got {type(value).__name__}')
    name = key or ("text" if "text" in value else "prompt" if "prompt" in value else None)
    if name not in value:
        field = repr(key) if key else "'text' or 'prompt'"
        likely = next((k for k in value if isinstance(value[k], str) and value[k].strip()), "KEY")
        raise ValueError(
            f"no key {field}; this line has {', '.join(value) or 'none'}; name it with the option "
            f"key, such as {{prompts: {{path: ..., key: {likely}}}}}"
        )
    if not isinstance(value[name], str) or not value[name].strip():
        shown = json.dumps(value[name], default=str)[:60]
        raise ValueError(f"{name!r} must be text that is not empty, got {shown}")
    return value if name == "text" else {**value, "text": value[name]}


def decoded(path: Path, content_name: str = "prompts") -> str:
    """Read a whole UTF-8 file. Raises UserError naming the line that is not UTF-8, or, where it
    cannot be read, what it should hold."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read {content_name}: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        remedy = (
            f"save it as UTF-8, for instance: iconv -f latin1 -t utf-8 {path.name} > "
            f"utf8{path.suffix}"
        )
        raise UserError(
            f"{path}:{number}: byte 0x{content[error.start]:02x} is not UTF-8; {remedy}"
        ) from error


def _inside(folder: Path, part: str) -> Path | None:
    return next((folder / name for name in NAMES[part] if (folder / name).is_file()), None)
