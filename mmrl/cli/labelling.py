"""Makes preference pairs: samples answers, scores them by rewards, keeps the best and the worst."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mmrl.cli import commands
from mmrl.core.errors import UserError
from mmrl.core.files import check_writable, on_disk
from mmrl.core.media.sample_files import write_sample
from mmrl.core.types import Media, Prompt
from mmrl.experiment import build, evaluation
from mmrl.experiment.build import Session
from mmrl.scoring import Scorer

ROWS = 64  # samples drawn and scored at once, unless a prompt has more


@dataclass(frozen=True)
class Labelling:
    """Options for making pairs. ``by``: the reward that compares, "" the configuration's weighted
    sum; ``margin``: minimum difference of best and worst; ``part``: of the data, train or held_out;
    ``limit``: prompts, None all."""

    num_samples: int = 8
    by: str = ""
    margin: float = 0.0
    part: str = "train"
    limit: int | None = None
    seed: int = 0
    at: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Counts pairs written, and prompts whose samples were (nearly) equally good or could not be
    scored."""

    pairs: int
    equal: int


def label(path: Path, file: Path, how: Labelling, overrides: Sequence[str] = ()) -> Outcome:
    """Write pairs of a run's model, or of a configuration's base model, to ``file``, a line each:
    the prompt's own fields, ``prompt``, ``chosen``, ``rejected`` and their ``rewards``. Pictures
    and videos are in a folder of the same name next to it. Raises UserError; lines already written
    stay.
    """
    _check(file, how)
    session, _ = commands.opened(path, overrides, how.at, judged=bool(how.by))
    scorer = _scorer(session, how.by)
    prompts = _prompts(session, how)
    evaluation.sample_in_evaluation(session.policy)
    pictures = file.with_name(f"{file.stem}-files")
    pairs = 0
    size = max(1, ROWS // how.num_samples)
    with on_disk(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as lines, commands.in_force(session, "live"):
            for first in range(0, len(prompts), size):
                some = prompts[first : first + size]
                media, totals = _drawn(session, some, how, scorer, first)
                writer = _Writer(lines, pictures, first, media, session.policy.media.fps)
                pairs += sum(
                    writer.pair(place, prompt, totals[place], how.margin)
                    for place, prompt in enumerate(some)
                )
    return Outcome(pairs, len(prompts) - pairs)


def _check(file: Path, how: Labelling) -> None:
    if file.suffix != ".jsonl":
        raise UserError(f"--out {file}: name a .jsonl file; pairs are written to it")
    if file.exists():
        raise UserError(f"--out {file} exists: nothing of it is overwritten; name another file")
    if how.num_samples < 2:
        raise UserError("--num-samples: a pair needs two samples of a prompt, or more")
    check_writable(file.parent)


def _scorer(session: Session, by: str) -> Scorer:
    judges = session.judges()
    if not by:
        if not session.scorer.rewards:
            raise UserError("the configuration has no reward to compare by; give one: --by NAME")
        return session.scorer
    name = by if by in judges.rewards else build.short_names([by])[by]
    if name not in judges.rewards:
        known = ", ".join(judges.rewards) or "none"
        raise UserError(
            f"--by {by}: the configuration has {known}; add it with evaluate.reward.{by}=1.0"
        )
    return Scorer({name: judges.rewards[name]})


def _prompts(session: Session, how: Labelling) -> list[Prompt]:
    if how.part not in ("train", "held_out"):
        raise UserError(f"--split {how.part}: expected train or held_out")
    prompts: list[Prompt] = list(getattr(session.source, how.part))
    if not prompts:
        raise UserError(f"--split {how.part}: the data has no such prompts")
    return prompts[: how.limit]


def _drawn(
    session: Session, prompts: Sequence[Prompt], how: Labelling, scorer: Scorer, first: int
) -> tuple[Media, Tensor]:
    """Sample and score: the samples, and their total rewards [P, N], NaN for one without a
    reward."""
    seed = how.seed + first  # equal prompts in two batches must get different samples
    media, rows = evaluation.sample(session.policy, prompts, how.num_samples, seed)
    group = torch.arange(len(rows)) // how.num_samples
    marked = [{**prompt, "group": i} for prompt, i in zip(rows, group.tolist(), strict=True)]
    rewards = scorer(media, marked, group).per_row()
    return media, rewards.total().view(-1, how.num_samples)


@dataclass(frozen=True)
class _Writer:
    """Writes pairs of the samples of some prompts, after ``first`` earlier ones."""

    lines: IO[str]
    files: Path
    first: int
    media: Media
    fps: float  # of videos

    def pair(self, place: int, prompt: Prompt, totals: Tensor, margin: float) -> bool:
        """Write the best and the worst sample of a prompt, unless they are nearly equal."""
        known = ~totals.isnan()
        if int(known.sum()) < 2:
            return False
        best = int(totals.nan_to_num(-torch.inf).argmax())
        worst = int(totals.nan_to_num(torch.inf).argmin())
        if not float(totals[best] - totals[worst]) > margin:
            return False
        number = self.first + place
        sides = [
            self._side(self.media[place * len(totals) + row], f"{number:06d}-{name}")
            for row, name in ((best, "chosen"), (worst, "rejected"))
        ]
        record = dict(self._own_fields(prompt, number)) | {
            "prompt": str(prompt.get("text", "")),
            "chosen": sides[0],
            "rejected": sides[1],
            "rewards": [float(totals[best]), float(totals[worst])],
        }
        self.lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.lines.flush()
        return True

    def _side(self, item: Any, name: str) -> str:
        if isinstance(item, str):
            return item
        self.files.mkdir(exist_ok=True)
        path = write_sample(item, self.files / name, self.fps)
        return f"{self.files.name}/{path.name}"

    def _own_fields(self, prompt: Prompt, number: int) -> Iterator[tuple[str, Any]]:
        """Yield the JSON-serialisable fields of a row; pictures that are not files are written."""
        for key, value in prompt.items():
            if key in ("origin", "view", "text"):
                continue
            if key in ("image", "images"):
                several = value if isinstance(value, (list, tuple)) else [value]
                names = [self._picture(each, f"{number:06d}-{i}") for i, each in enumerate(several)]
                yield "images", names
            elif _is_plain(value):
                yield key, value

    def _picture(self, value: Any, name: str) -> str:
        if isinstance(value, (str, Path)):
            return str(Path(value).resolve())
        self.files.mkdir(exist_ok=True)
        value.save(self.files / f"{name}.png")
        return f"{self.files.name}/{name}.png"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
