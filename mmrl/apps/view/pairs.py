"""Chooses pairs of samples of one prompt for human rating, and stores the ratings.

Pairs are blind: neither addresses nor texts reveal where a sample comes from, and sides are random.
Ratings are lines of a .jsonl file that the stage ``demonstrations`` reads (a pair of answers with
rewards), also with TRL's columns ``prompt``, ``chosen``, ``rejected``.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.apps.view.folders import Runs
from mmrl.core.errors import UserError
from mmrl.core.media.clips import open_clip
from mmrl.monitoring.report.curves import spread_out
from mmrl.monitoring.report.pictures import Film, Tile, encoded, open_picture
from mmrl.monitoring.report.runs import Run, read_run

MOST_OPEN = 64  # pairs that wait for a rating
MOST_SAMPLES = 24  # samples of one prompt, evenly spaced, that form pairs
REWARDS = {"1": (1.0, 0.0), "2": (0.0, 1.0), "0": (0.5, 0.5)}  # choice -> rewards left, right
SAMPLES = "samples.jsonl"  # written by `mmrl sample` next to its files


@dataclass(frozen=True)
class File:
    """Holds a picture or a film as a file: its bytes and their ending, .png or .mp4. ``name``: a
    hash of the sample."""

    encoded: bytes
    ending: str
    name: str


@dataclass(frozen=True)
class Sample:
    """One sample of a prompt. ``load`` returns a text, a picture, or the path of a film;
    ``source``: its model."""

    prompt: str
    source: str
    load: Callable[[], str | Tile | Path]
    picture: str = ""  # of the question, as a data URI; empty if there is none


@dataclass(frozen=True)
class Pair:
    """Holds two samples of a prompt in display order, and their sources."""

    number: str
    samples: tuple[Sample, Sample]
    contents: tuple[str | File, str | File]
    names: tuple[str, str]  # hashes of the samples

    @property
    def key(self) -> frozenset[str]:
        return frozenset(self.names)


@dataclass
class Pairs:
    """Serves pairs and writes ratings; ``file`` is only appended to, or the last line of this
    session removed."""

    runs: Runs
    file: Path
    rated: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    pending: dict[str, Pair] = field(default_factory=dict)
    sizes: list[tuple[int, tuple[str, frozenset[str]]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.pictures = self.file.with_name(f"{self.file.stem}-pictures")
        inside = [run.folder for run in self.runs.look() if _within(self.file, run.folder)]
        if inside:
            raise UserError(
                f"--rate {self.file} lies in the run folder {inside[0]}, which is only read; name "
                f"a file elsewhere"
            )
        self.rated = set(_ratings(self.file))
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise UserError(f"--rate {self.file} cannot be written: {error.strerror}") from error

    def next(self) -> Pair | None:
        """Return an unrated pair at random; None if there is none left."""
        lot = secrets.SystemRandom()
        with self.lock:
            groups = self._groups()
            lot.shuffle(groups)
            for samples in groups:
                choices = list(combinations(samples, 2))
                lot.shuffle(choices)
                for left, right in choices:
                    pair = self._pair(*((left, right) if lot.random() < 0.5 else (right, left)))
                    if pair is not None:
                        self.pending[pair.number] = pair
                        while len(self.pending) > MOST_OPEN:
                            self.pending.pop(next(iter(self.pending)))
                        return pair
        return None

    def total(self) -> int:
        """Count all pairs, rated or not, including equal samples."""
        return sum(len(s) * (len(s) - 1) // 2 for s in self._groups())

    def rate(self, number: str, choice: str) -> bool:
        """Write a rating: "1" the left one is better, "2" the right one, "0" a tie. False if the
        pair is not waiting for one."""
        with self.lock:
            pair = self.pending.pop(number, None)
            if pair is None:
                return False
            size = self.file.stat().st_size if self.file.exists() else 0
            line = json.dumps(self._record(pair, choice), ensure_ascii=False) + "\n"
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            known = (pair.samples[0].prompt, pair.key)
            self.rated.add(known)
            self.sizes.append((size, known))
            return True

    def undo(self) -> bool:
        """Undo the last rating of this session; False if there is none."""
        with self.lock:
            if not self.sizes:
                return False
            size, known = self.sizes.pop()
            os.truncate(self.file, size)
            self.rated.discard(known)
            return True

    def _record(self, pair: Pair, choice: str) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        for content, reward in zip(pair.contents, REWARDS[choice], strict=True):
            if isinstance(content, str):
                answers.append({"text": content, "reward": reward})
            else:
                self.pictures.mkdir(exist_ok=True)
                path = self.pictures / f"{content.name}{content.ending}"
                if not path.exists():
                    path.write_bytes(content.encoded)
                medium = "video" if content.ending == ".mp4" else "image"
                answers.append({medium: f"{self.pictures.name}/{path.name}", "reward": reward})
        contents = [str(next(iter(answer.values()))) for answer in answers]
        tie = choice == "0"
        better = contents[::-1] if choice == "2" else contents
        return {
            "prompt": pair.samples[0].prompt,
            "answers": answers,
            "chosen": None if tie else better[0],
            "rejected": None if tie else better[1],
            "tie": tie,
            "sources": [sample.source for sample in pair.samples],
            "names": list(pair.names),
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        }

    def _pair(self, left: Sample, right: Sample) -> Pair | None:
        """Load two samples; None if they are equal, already rated, or unreadable."""
        try:
            contents = (_content(left.load()), _content(right.load()))
        except (OSError, ValueError, IndexError):
            return None
        names = (_name(contents[0]), _name(contents[1]))
        if names[0] == names[1] or (left.prompt, frozenset(names)) in self.rated:
            return None
        return Pair(secrets.token_urlsafe(9), (left, right), contents, names)

    def _groups(self) -> list[list[Sample]]:
        groups: dict[tuple[str, str], list[Sample]] = {}
        for folder in self.runs.look():
            run = folder.read()
            for sample in (*_pictures(folder.key, folder.folder, run), *_texts(folder.key, run)):
                groups.setdefault((sample.prompt, sample.picture), []).append(sample)
        for place in self.runs.places:
            for sample in _sampled(place):
                groups.setdefault((sample.prompt, ""), []).append(sample)
        return [
            spread_out(samples, MOST_SAMPLES) for samples in groups.values() if len(samples) > 1
        ]


def _pictures(key: str, folder: Path, run: Run) -> Iterator[Sample]:
    """Yield the samples of previews: one for every prompt and iteration."""
    for name in ("before", *run.sheets_over_time(), "after"):
        captions = run.sample_captions(name)
        count = min(len(captions), len(run.sample_tiles(name)))
        for i in range(count):
            yield Sample(captions[i], f"{key}/{name}/{i}", partial(_tile, folder, name, i))


def _tile(folder: Path, name: str, index: int) -> Tile:
    return read_run(folder, jsonl=False).sample_tiles(name)[index]


def _texts(key: str, run: Run) -> Iterator[Sample]:
    """Yield the answers of rollouts.jsonl."""
    for line in run.rollouts:
        try:
            prompt = str(line["prompt"])
            picture = str(line["picture"] or "")
            for i, answer in enumerate(line["answers"]):
                text = str(answer["text"])
                source = f"{key}/iteration {line['iteration']}/{i}"
                yield Sample(prompt, source, partial(str, text), picture)
        except (KeyError, TypeError):
            continue


def _sampled(folder: Path) -> Iterator[Sample]:
    """Yield the files of `mmrl sample`, with prompts from samples.jsonl next to them."""
    path = folder / SAMPLES
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            file = (folder / str(record["file"])).resolve()
            prompt = str(record["prompt"])
        except (ValueError, KeyError, TypeError):
            continue
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            continue
        load = partial(READERS.get(file.suffix, open_picture), file)
        yield Sample(prompt, f"{folder.name}/{file.name}", load)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _film(file: Path) -> Path:
    """Return the path of a readable film. Raises ClipError."""
    open_clip(file)
    return file


READERS: dict[str, Callable[[Path], Any]] = {".txt": _read, ".mp4": _film}


def _content(sample: str | Tile | Path) -> str | File:
    if isinstance(sample, str):
        return sample
    if isinstance(sample, Path):
        whole = sample.read_bytes()
        return File(whole, sample.suffix, _hash(whole))
    whole, ending = encoded(sample)
    # of a film's frames, since encoders write different bytes
    raw = b"".join(map(Image.Image.tobytes, sample.frames)) if isinstance(sample, Film) else whole
    return File(whole, ending, _hash(raw))


def _name(content: str | File) -> str:
    return _hash(content.encode()) if isinstance(content, str) else content.name


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:24]


def _ratings(path: Path) -> Iterator[tuple[str, frozenset[str]]]:
    """Read the pairs in a file; UserError if it holds anything else."""
    if path.suffix != ".jsonl" or path.is_dir():
        raise UserError(f"--rate {path}: name a .jsonl file; ratings are appended to it")
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for place, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield str(record["prompt"]), frozenset(map(str, record["names"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{place}: this is not a rating of mmrl view; name another file, or fix the "
                f"line"
            ) from error


def _within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
