"""Generates data for rewards without ground truth: twins, new instructions, points to check.

    python -m mmrl.rewards.judges.instructions twins data.jsonl twins.jsonl --url ...
    python -m mmrl.rewards.judges.instructions self-instruct data.jsonl new.jsonl --url ...
    python -m mmrl.rewards.judges.instructions points data.jsonl checked.jsonl --url ...

``--url`` is a server that speaks OpenAI's chat completions: the policy itself, exported and served,
or any other model. ``twins`` writes every question with rephrased versions, or with its picture
augmented, for ``co_reward``. ``self-instruct`` writes new instructions that pass filters, for
``majority_vote``. ``points`` splits every instruction into points, for ``judge_checklist``.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from rewards.answers.reading import final
from rewards.base.json_lines import json_lines
from rewards.combined.votes import leading, vote
from rewards.judges.question import Asker, Question, Unreadable
from rewards.judges.samples import prompt_pictures

FORBIDDEN = ("image", "images", "graph", "picture", "pictures", "file", "map", "draw", "plot")
LONGEST_POINT = 300  # letters


# --------------------------------------------------------------------------------------------------
# twins


def twins(rows: Sequence[Prompt], model: Asker, versions: int = 1) -> list[Prompt]:
    """Return every row and up to ``versions`` rephrased ones (Co-Reward), as versions of one twin.

    A version that repeats another, or has other numbers than the question, is left out, since its
    answer could differ.
    """
    questions = [
        Question(
            (
                *prompt_pictures(row),
                f"Say the question below in other words (way {number}). Keep its meaning, all "
                "names and all numbers as digits, so that its answer stays the same; do not "
                f"answer it. Write the new question and nothing else.\n\nQuestion:\n{text_of(row)}",
            ),
            read=written,
        )
        for row in rows
        for number in range(1, versions + 1)
    ]
    texts = model.ask(questions)
    versions_of_rows: list[Prompt] = []
    for i, row in enumerate(rows):
        taken = [text_of(row)]
        for text in texts[i * versions : (i + 1) * versions]:
            fresh = text is not None and text.casefold() not in {t.casefold() for t in taken}
            if fresh and numbers_in(text) == numbers_in(taken[0]):
                taken.append(text)
        versions_of_rows += [
            {**row, "text": text, "twin": str(i), "version": str(n)} for n, text in enumerate(taken)
        ]
    return versions_of_rows


def augmented(rows: Sequence[Prompt], folder: Path, seed: int = 0) -> list[Prompt]:
    """Return every row and a version with its pictures slightly rotated, cropped and brightened or
    darkened: Co-Reward's twins for questions about pictures. The new pictures are written to
    ``folder``."""
    from PIL import Image, ImageEnhance

    folder.mkdir(parents=True, exist_ok=True)
    twinned: list[Prompt] = []
    for i, row in enumerate(rows):
        twinned.append({**row, "twin": str(i), "version": "0"})
        files = []
        for k, picture in enumerate(prompt_pictures(row)):
            rng = random.Random(f"{seed} {i} {k}")
            width, height = picture.size
            turned = picture.rotate(rng.uniform(-5, 5), Image.Resampling.BICUBIC)
            left, top = round(width * rng.uniform(0, 0.05)), round(height * rng.uniform(0, 0.05))
            cut = turned.crop((left, top, width - left, height - top)).resize((width, height))
            file = folder / f"{i}_{k}.png"
            ImageEnhance.Brightness(cut).enhance(rng.uniform(0.85, 1.15)).save(file)
            files.append(str(file))
        if files:
            plain = {key: value for key, value in row.items() if key not in ("image", "images")}
            twinned.append({**plain, "images": files, "twin": str(i), "version": "1"})
    return twinned


def numbers_in(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:\.\d+)?", text))


# --------------------------------------------------------------------------------------------------
# self-instruction


@dataclass(frozen=True)
class Filters:
    """Holds the filters of new instructions; the defaults are Self-Instruct's and SeRL's.

    ``forbidden``: words that refer to missing media. ``least_words``, ``most_words``: length.
    ``similarity``: largest ROUGE-L with an existing instruction. ``low``, ``high``: share of the
    answers that agree with their majority; below, a vote is too unreliable, above, the answer is
    known. ``answers``: samples for that, 0 disables it.
    """

    forbidden: tuple[str, ...] = FORBIDDEN
    least_words: int = 3
    most_words: int = 150
    similarity: float = 0.7
    low: float = 0.2
    high: float = 0.8
    answers: int = 8

    def refuses(self, text: str, pool: Sequence[str]) -> str:
        """Return what is wrong with an instruction; nothing if it passes."""
        words = text.split()
        if not self.least_words <= len(words) <= self.most_words:
            return "length"
        if not text[0].isalnum():
            return "start"
        if {word.strip(".,:;!?\"'()").casefold() for word in words} & set(self.forbidden):
            return "forbidden word"
        if any(rouge_l(text, earlier) > self.similarity for earlier in pool):
            return "too similar"
        return ""


def self_instruct(
    seeds: Sequence[Prompt],
    model: Asker,
    count: int,
    filters: Filters | None = None,
    shots: int = 3,
    seed: int = 0,
) -> tuple[list[Prompt], Counter[str]]:
    """Return new instructions that pass the filters, at most ``count``, and how many each filter
    refused (SeRL).

    SeRL (Fang et al. 2025): the model writes instructions after ``shots`` examples; those that are
    too long or short, refer to missing media, resemble others, or are too hard or too easy are left
    out. The paper does this at every step with the current policy, as ``data: self_instruct`` does;
    this does it with a served model, between runs. A seed with pictures gives a new question about
    them. It stops after four rounds without a new one.
    """
    if not seeds:
        raise UserError("self-instruct needs at least one row to start from")
    rules = Filters() if filters is None else filters
    rng = random.Random(seed)
    pool = [text_of(row) for row in seeds]
    fresh: list[Prompt] = []
    refused: Counter[str] = Counter()
    idle = 0
    while len(fresh) < count and idle < 4:
        before = len(fresh)
        drawn = [rng.sample(list(seeds), min(shots, len(seeds))) for _ in range(count - before)]
        drafts = _drafts(drawn, model, rules, pool, refused)
        for draft, share in zip(drafts, agreement(drafts, model, rules.answers), strict=True):
            cause = "too hard" if share < rules.low else "too easy" if share > rules.high else ""
            if rules.answers and cause:
                refused[cause] += 1
            else:
                fresh.append(draft)
        idle = idle + 1 if len(fresh) == before else 0
    return fresh, +refused


def _drafts(
    drawn: Sequence[Sequence[Prompt]],
    model: Asker,
    rules: Filters,
    pool: list[str],
    refused: Counter[str],
) -> list[Prompt]:
    """Return the new instructions, one per set of examples, that pass the text filters; they join
    the pool."""
    drafts: list[Prompt] = []
    for examples, text in zip(drawn, model.ask([_asking(e) for e in drawn]), strict=True):
        cause = "no answer" if text is None else rules.refuses(text, pool)
        refused[cause] += bool(cause)
        if not cause:
            pool.append(text)
            drafts.append({"text": text, **pictures_of(examples[-1]), "origin": "self_instruct"})
    return drafts


def pictures_of(row: Prompt) -> Prompt:
    """Return the fields of a row that hold its pictures."""
    return {key: value for key, value in row.items() if key in ("image", "images")}


def _asking(examples: Sequence[Prompt]) -> Question:
    return Question((*prompt_pictures(examples[-1]), request(examples)), read=written)


def request(examples: Sequence[Prompt]) -> str:
    """Return the request for a new instruction, after examples; about the pictures of the last."""
    listed = "\n\n".join(f"Instruction {i}:\n{text_of(row)}" for i, row in enumerate(examples, 1))
    about = "about the pictures above, " if any(pictures_of(examples[-1]).values()) else ""
    return (
        f"{listed}\n\nWrite one new instruction, {about}of the same kind and about as "
        "difficult, but on something else, with one answer that can be checked. Write the "
        "instruction and nothing else; do not solve it."
    )


def new_instruction(text: str) -> str:
    """Return the instruction in a policy's text, after its thought; empty if there is none."""
    try:
        return written(final(text).value)
    except Unreadable:
        return ""


def agreement(rows: Sequence[Prompt], model: Asker, answers: int) -> list[float]:
    """Return for each row the share of ``answers`` sampled answers that agree with their
    majority."""
    if not answers:
        return [1.0] * len(rows)
    questions = [
        Question(
            (
                *prompt_pictures(row),
                f"{text_of(row)}\n\nThink first, then write the answer alone in <answer></answer>.",
            ),
            read=str,
            tokens=2048,
        )
        for row in rows
        for _ in range(answers)
    ]
    texts = model.ask(questions)
    shares = []
    for i in range(len(rows)):
        votes = [None if t is None else vote(t) for t in texts[i * answers : (i + 1) * answers]]
        shares.append(leading(votes)[1] / answers)
    return shares


def rouge_l(first: str, second: str) -> float:
    """Return ROUGE-L (Lin 2004): F1 of the longest common subsequence of the words of two texts."""
    from rapidfuzz.distance import LCSseq

    words = [re.findall(r"\w+", text.casefold()) for text in (first, second)]
    total = len(words[0]) + len(words[1])
    return 2 * LCSseq.similarity(*words) / total if total else 0.0


# --------------------------------------------------------------------------------------------------
# points


def points(
    rows: Sequence[Prompt], model: Asker, field: str = "checklist", most: int = 10
) -> tuple[list[Prompt], int]:
    """Return the rows with the points of their instruction in ``field``, and how many have none.

    ACE-RL: an instruction is split into its explicit and implicit demands, each of which can be
    checked by itself; ``judge_checklist`` rewards the share that is met (``levels: 2`` counts a
    partly met point as half).
    """
    schema = points_schema(most)
    questions = [
        Question(
            (
                *prompt_pictures(row),
                "Take the instruction below apart into points that a good answer to it must meet: "
                "what it says it wants, and what goes without saying for such a task (content, "
                "form, style, length). Each is one sentence that can be checked by itself in the "
                f"answer, and none repeats another. At most {most}, the most important first.\n\n"
                f"Instruction:\n{text_of(row)}",
            ),
            schema=schema,
            tokens=64 + 48 * most,
        )
        for row in rows
    ]
    listed: list[Prompt] = []
    missing = 0
    for row, answer in zip(rows, model.ask(questions), strict=True):
        answered = [] if answer is None else [p.strip()[:LONGEST_POINT] for p in answer["points"]]
        demands = list(dict.fromkeys(p for p in answered if p))[:most]
        missing += not demands
        listed.append({**row, field: demands} if demands else dict(row))
    return listed, missing


def points_schema(most: int) -> Any:
    """Return the schema of ``{"points": [text, ...]}``."""
    from pydantic import ConfigDict, Field, create_model

    return create_model(
        "Answer",
        __config__=ConfigDict(extra="forbid"),
        points=(list[str], Field(max_length=most, description="a list of sentences")),
    )


# --------------------------------------------------------------------------------------------------
# files


def text_of(row: Prompt) -> str:
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'a row has no "text": {str(row)[:80]}')
    return text


def written(text: str) -> str:
    """Extract a question from an answer, without quotes or a leading label. Raises Unreadable."""
    plain = re.sub(r"^(?:new )?(?:question|instruction)(?: \d+)?:\s*", "", text.strip(), flags=re.I)
    plain = plain.strip().strip('"').strip()
    if not plain:
        raise Unreadable("it is empty")
    return plain


def read(path: Path) -> list[Prompt]:
    """Read a .jsonl file; picture paths are relative to it."""
    rows = []
    for number, row in json_lines(path):
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is not an object")
        rows.append(located(row, path.parent))
    return rows


def located(row: Prompt, folder: Path) -> Prompt:
    """Return a row whose picture paths are resolved."""
    changed = dict(row)
    for key in ("image", "images"):
        if isinstance(row.get(key), str):
            changed[key] = str((folder / row[key]).resolve())
        elif isinstance(row.get(key), list):
            changed[key] = [str((folder / name).resolve()) for name in row[key]]
    return changed


def write(rows: Sequence[Prompt], path: Path) -> None:
    path.write_text("".join(f"{line}\n" for line in lines_of(rows)), encoding="utf-8")


def lines_of(rows: Sequence[Prompt]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in rows)


def server(url: str, temperature: float) -> Asker:
    """Return the model behind an address, sampling at a temperature."""
    from rewards.servers.chat_server import ChatServer

    return ChatServer(url, extra={"temperature": temperature})


def _twins(data: Path, out: Path, url: str = "", versions: int = 1, augment: bool = False) -> None:
    """Write every question with rephrased or augmented versions, for co_reward."""
    rows = read(data)
    if augment == bool(url):
        raise UserError("twins are rephrased by a model (--url) or augmented (--augment): say one")
    pictures = out.with_suffix("")
    twinned = (
        augmented(rows, pictures.resolve()) if augment else twins(rows, server(url, 0.7), versions)
    )
    write(twinned, out)
    print(f"{len(twinned)} rows of {len(rows)} questions")


def _self_instruct(data: Path, out: Path, url: str, count: int = 100, seed: int = 0) -> None:
    """Write new instructions that pass SeRL's filters, for majority_vote."""
    rows = read(data)
    rules = Filters(forbidden=()) if any(prompt_pictures(row) for row in rows) else Filters()
    fresh, refused = self_instruct(rows, server(url, 1.0), count, rules, seed=seed)
    write(fresh, out)
    print(f"{len(fresh)} instructions; refused: {dict(refused)}")


def _points(data: Path, out: Path, url: str, field: str = "checklist", most: int = 10) -> None:
    """Write every instruction with the points it demands, for judge_checklist."""
    rows, missing = points(read(data), server(url, 0.0), field, most)
    write(rows, out)
    print(f"{len(rows)} rows, {missing} without points")


if __name__ == "__main__":
    import typer

    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Make rows for rewards without right answers.",
    )
    app.command("twins")(_twins)
    app.command("self-instruct")(_self_instruct)
    app.command("points")(_points)
    try:
        app()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
