"""Reads prompts from files and splits them into a training and a held-out set, in an order that
depends on the seed only."""

from __future__ import annotations

import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, overload

from annotated_types import Ge, Lt

from mmrl.config.values import Location, exists
from mmrl.core.errors import UserError
from mmrl.core.pictures import MOST_PIXELS
from mmrl.core.registry import DATA
from mmrl.core.types import Copies, Prompt
from mmrl.data.sources.intake import Broken, Intake
from mmrl.data.sources.media import folder_of, inline_picture, placed
from mmrl.data.sources.reader import Request, rows_of
from mmrl.data.sources.selection import renamed
from samplers.noise import Rng

PLAIN = frozenset((str, int, float, bool))  # types of values in which no picture stands
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
    """Make a prompt of a row; pictures that stand in it are opened."""
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

    (But for tiny files: a side that the hash would leave empty gets the one text nearest to it.)
    """
    ranks = {name: _rank(name) for name in map(key, prompts)}
    held = {text for text, rank in ranks.items() if rank < share}
    if ranks and share > 0 and not held:
        held.add(min(ranks, key=ranks.__getitem__))
    if ranks and len(held) == len(ranks):
        held.discard(max(ranks, key=ranks.__getitem__))
    return [p for p in prompts if key(p) not in held], [p for p in prompts if key(p) in held]


def development_and_test(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Split held-out prompts into two halves: settings are chosen on the first, numbers reported of
    the second.

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


def batch(prompts: Sequence[Prompt], count: int, iteration: int, seed: int) -> list[Prompt]:
    """Return the prompts of an iteration, ``count`` of them: epoch after epoch, each in its own
    random order.

    Nothing is remembered between calls: the position in the data is the iteration, so a resumed run
    continues exactly. No prompt repeats within an epoch; a batch may lie across two epochs, or wrap
    around several when it is larger.
    """
    if not prompts:
        raise UserError("there are no prompts to draw from")
    if isinstance(prompts, Curriculum):
        return prompts.batch(count, iteration, seed)
    positions = range(iteration * count, (iteration + 1) * count)
    return [prompts[place(position, len(prompts), seed)] for position in positions]


def pick(prompts: Sequence[Prompt], u: float, iteration: int) -> Prompt:
    """Return one of the prompts that ``iteration`` may draw, for u in [0, 1)."""
    if isinstance(prompts, Curriculum):
        return prompts.pick(u, iteration)
    return prompts[int(u * len(prompts))]


def place(position: int, size: int, seed: int, *names: int | str) -> int:
    """Return the index, among ``size`` prompts, of draw number ``position``: epoch after epoch,
    each in its own random order."""
    epoch, slot = divmod(position, size)
    return _order(size, seed, epoch, *names)[slot]


@lru_cache(maxsize=64)
def _order(n: int, seed: int, epoch: int, *names: int | str) -> tuple[int, ...]:
    return tuple(Rng.of(seed, "data", *names, epoch).permutation(n).tolist())


class Curriculum(Sequence[Prompt]):
    """Holds training prompts and decides itself which of them an iteration draws."""

    @property
    def measures(self) -> frozenset[str]:
        """Name what of an iteration's answers is to be told by ``see`` before ``learn``:
        "diversity", how much those to a prompt differ, 0 to 1; "entropy", of every answer [reward,
        mean entropy of its decisions]."""
        return frozenset()

    @property
    def together(self) -> int:
        """Tell how many neighbours of a batch are one question, whose answers are compared."""
        return 1

    def __init__(self, prompts: Sequence[Prompt]):
        self.prompts = list(prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self.prompts[index]

    @abstractmethod
    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Return ``count`` prompts; the same on all processes, and after a resume."""

    def pick(self, u: float, iteration: int) -> Prompt:
        return self[int(u * len(self))]

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        """Return a prompt of the data as this iteration asks it, such as with a hint."""
        return prompt

    def reserved(self, count: int, iteration: int) -> list[Prompt]:
        """Return the prompts that an iteration of ``count`` must ask, whoever chooses the rest."""
        return []

    @abstractmethod
    def over(self, prompts: Sequence[Prompt]) -> Curriculum:
        """Return the same curriculum over a subset of its prompts."""

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        """Say how often each of the prompts of an iteration is answered: ``group_size`` times each
        on average, or each as often as a list says."""
        return group_size

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Take in how the groups of an iteration were rewarded; called alike on all processes."""

    def see_update(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of an iteration's update, before ``learn``; called alike on all
        processes."""

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        """Take in what was measured of prompts, by ``entry``: one of ``measures``, or "drift", how
        far the policy has moved since it last answered; called alike on all processes."""

    def predict_by(self, predict: Callable[[Sequence[Prompt]], list[float]]) -> None:
        """Take what predicts the rewards of prompts by a value model of the policy's kind; it is
        called alike on all processes."""

    def rescoring(self, iteration: int) -> int:
        """Say how many answers to every prompt are wanted after this iteration, only to be
        measured; 0: none."""
        return 0

    def renew(self, outcomes: Sequence[Outcome], diversity: Mapping[int, float]) -> None:
        """Take in such answers to all prompts; called alike on all processes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, after a resume."""


class Outcome(NamedTuple):
    """Holds the rewards of one group: the ``entry`` of its prompt, their mean, whether they are all
    equal, and each that could be scored."""

    entry: int
    mean: float
    flat: bool
    rewards: tuple[float, ...] = ()


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
