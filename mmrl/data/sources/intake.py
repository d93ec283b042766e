"""Turns rows into prompts, the same for every data source: counts, reports, leaves out, splits."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from mmrl.core.broken_rows import refuse
from mmrl.core.errors import UserError
from mmrl.core.media.pictures import MOST_PIXELS, raise_limit
from mmrl.core.media.scan import is_clip, scan
from mmrl.core.types import Prompt
from mmrl.data.ledger import Summary, report
from mmrl.data.sources.media import folder_of, placed
from mmrl.data.sources.reader import Expand, Part, Request
from mmrl.data.sources.stored import stored

Broken = Literal["error", "skip"]
SHOWN = frozenset(("images", "image", "video", "answer", "messages"))  # beside the text
Make = Callable[[str, Any], Prompt]  # (place, row) -> prompt; raises ValueError
# what a row that is not as expected may raise
MISFITS = (ValueError, KeyError, TypeError, AttributeError, OSError)
Key = Callable[[Prompt], str]
Split = Callable[[Sequence[Prompt], float], tuple[list[Prompt], list[Prompt]]]


@dataclass
class Intake:
    """Reads the parts of one source. ``make`` turns a row into a prompt; ``pictures`` lists what to
    check before training, if anything; ``verify`` checks all prompts of a part, with the sizes of
    their pictures, and returns what is wrong with some; ``expand`` makes several rows of one;
    ``max_pixels``: of a picture, larger ones are broken."""

    request: Request
    make: Make
    broken: Broken = "error"
    pictures: Callable[[Prompt], list[Any]] | None = None
    verify: Callable[[list[Prompt], list[list[tuple[int, int]]]], Mapping[int, str]] | None = None
    expand: Expand | None = None
    max_pixels: int = MOST_PIXELS
    summary: Summary = field(init=False)

    def __post_init__(self) -> None:
        self.summary = Summary(self.request.path, skips=self.broken == "skip")
        raise_limit(self.max_pixels)

    def prompts(self, part: Part) -> list[Prompt]:
        """Read a part; broken rows go to the summary. Raises UserError if all rows are broken."""
        prompts: list[Prompt] = []
        problems: list[tuple[int, str]] = []  # and how many prompts precede the row
        rows = self.request.rows(part, self.summary, self.expand)
        before, folder = self.summary.read, self.request.folder
        for place, row in rows:
            try:
                if isinstance(row, ValueError):
                    raise row
                prompt = self.make(place, row)
                prompt["origin"] = place
                prompts.append(placed(prompt, folder_of(place, folder)))
            except MISFITS as error:
                problems.append((len(prompts), f"{place}: {_why(error)}"))
        if wrong := self._look(prompts):
            problems += ((n + 1, f"{prompts[n]['origin']}: {why}") for n, why in wrong.items())
            prompts = [prompt for n, prompt in enumerate(prompts) if n not in wrong]
        problems.sort(key=itemgetter(0))
        self.summary.dropped += [problem for _, problem in problems]
        if problems and not prompts:
            refuse([problem for _, problem in problems], len(problems))
        if not prompts:
            whole = ", ".join(map(str, part)) if isinstance(part, list) else self.request.path
            read = self.summary.read - before
            why = "all rows are left out by filters" if read else "no row there"
            raise UserError(f"{whole}: {why}")
        return prompts

    def _look(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Check the pictures and clips of all prompts. Returns what is wrong, by the number of the
        prompt."""
        if self.pictures is None and self.verify is None:
            return {}
        looks = self.pictures or (lambda prompt: [])
        sources = [looks(prompt) for prompt in prompts]
        listed = [source for several in sources for source in several]
        findings = iter(scan(listed, max_pixels=self.max_pixels))
        sizes: dict[int, list[tuple[int, int]]] = {}
        wrong: dict[int, str] = {}
        for number, several in enumerate(sources):
            looked = [(next(findings), source) for source in several]
            sizes[number] = [finding.size for finding, source in looked if not is_clip(source)]
            self.summary.notes.update(finding.note for finding, _ in looked if finding.note)
            named = [f"{_named(source)}{each.problem}" for each, source in looked if each.problem]
            if named:
                wrong[number] = named[0]
        if self.verify is not None:
            whole = [number for number in range(len(prompts)) if number not in wrong]
            misfits = self.verify([prompts[n] for n in whole], [sizes[n] for n in whole])
            wrong |= {whole[place]: why for place, why in misfits.items()}
        return wrong

    def divided(
        self, held_out: str | Path | float | None, default: float, split: Split, by: str
    ) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        """Read all parts, report the summary, and return what is trained on and what is held out.
        ``held_out``: a file, a split of the data, a share, or None for the data's own part, else
        the ``default`` share; ``by``: what the share is chosen by."""
        held_out = str(held_out) if isinstance(held_out, Path) else held_out
        with _without_collector():
            train = self.prompts(self.request.training())
            rest: Part | None = None
            if isinstance(held_out, str):
                rest = self.request.named(str(held_out))
            elif held_out is None:
                rest = self.request.testing()
            if rest is not None:
                held = self.prompts(rest)
                how = str(held_out) if held_out is not None else _label(rest)
            else:
                share = default if held_out is None else float(held_out)
                train, held = split(train, share)
                how = f"{100 * share:.3g} % by a hash of {by}" if share else ""
            self.account(train, held, how)
            return stored(train), stored(held)

    def account(self, train: Sequence[Prompt], held_out: Sequence[Prompt], how: str) -> None:
        """Report the summary."""
        summary = self.summary
        summary.train, summary.held_out, summary.split = len(train), len(held_out), how
        summary.repeated = len(train) + len(held_out)
        summary.repeated -= len({hash(identical(prompt)) for prompt in chain(train, held_out)})
        summary.digest = digest_of(chain(train, held_out))
        report(summary)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turn off Python's cycle collector: rows may be many, and have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def identical(prompt: Prompt) -> tuple[Any, ...]:
    """Return a key that is equal for prompts that ask the same of the same pictures."""
    text = prompt.get("text")
    if SHOWN.isdisjoint(prompt):
        return (text,)
    return (text, *(repr(prompt.get(key)) for key in sorted(SHOWN)))


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return a digest of texts and answers that depends neither on the process nor on paths."""
    digest = blake2b(digest_size=16)
    rows = iter(prompts)
    while texts := [_said(prompt) for prompt in islice(rows, 1000)]:
        digest.update("\0".join([*texts, ""]).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _said(prompt: Prompt) -> str:
    text = str(prompt.get("text"))
    answer = prompt.get("answer")
    if not isinstance(answer, (str, int, float)):
        return text
    return f"{text}\n{os.path.basename(answer) if isinstance(answer, str) else answer}"


def _label(part: Part) -> str:
    if isinstance(part, str):
        return f"its own split {part}"
    first = f"{part[0].parent.name}/{part[0].name}"
    return f"its own {first}" if len(part) == 1 else f"its own {len(part)} files, {first} first"


def _named(source: Any) -> str:
    return f"{source}: " if isinstance(source, str) else "a picture: "


def _why(error: BaseException) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
