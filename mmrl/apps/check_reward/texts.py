"""Probes rewards of texts: ground truths, empty answers, exploits, other rows' answers, other
coordinate spaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from mmrl.apps.check_reward import Line, Offence, Subject, faults
from mmrl.apps.check_reward.places import where
from mmrl.core.errors import UserError
from mmrl.core.media.pictures import PictureError, is_pil, opened, upright_size
from mmrl.core.types import Prompt
from mmrl.data.vision import boxes, points
from mmrl.scoring import Handled
from mmrl.scoring.attempt import as_values
from rewards.answers.coords import CoordSpace, Unscorable
from rewards.answers.grounding import Grounding
from rewards.answers.verifiable import Verifiable
from rewards.answers.words import Answer, Choice, Classification
from rewards.card import card_of, method_of

CLOSE = 1e-4  # rounding tolerance of a ground truth
# arbitrary; different ratios in x and y
VIEW = {"sizes": [[1000, 800]] * 16, "resized": [[512, 384]] * 16}


def audit(subject: Subject) -> list[Line]:
    """Run all probes of a reward of texts."""
    answers, unwritten = ground_truths(subject)
    lines = [_written(subject, unwritten), *_placed(subject)]
    if not answers:
        return lines
    prompts = [subject.prompts[i] for i in answers]
    right = list(answers.values())
    best = score(subject, right, prompts)
    if plain := without_tags(subject, right, best):
        note = "ground truths are written without tags: in <answer> tags this reward pays nothing"
        return [Line("ground truths", "written without tags", [], [], note=note), *audit(plain)]
    lines += [_maximum(subject, prompts, right, best), _twice(subject, prompts, right, best)]
    tried = [best]
    for probe, texts, rule in _probes(subject, prompts, right):
        written = {i: text for i, text in enumerate(texts) if text is not None}
        wrong = list(written.values())
        answered = [prompts[i] for i in written]
        scores = score(subject, wrong, answered)
        lines.append(_below(probe, rule, answered, wrong, scores, [best[i] for i in written]))
        tried.append(scores)
    lines += [_markdown(subject, prompts, right, best), _spaces(subject, prompts, best)]
    return [line for line in [*lines, in_range(subject, tried)] if line.applies]


def score(subject: Subject, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[float]:
    """Return the scores of texts as numbers. Raises UserError if the reward raises."""
    if not texts:
        return []
    values = subject.ask(list(texts), prompts, f"{len(texts)} answers such as {texts[0][:60]!r}")
    return as_values(values, len(texts), subject.name).tolist()


def ground_truths(subject: Subject) -> tuple[dict[int, str], dict[int, str]]:
    """Return the ideal answer of each row, and why the other rows have none."""
    write = _writer(subject)
    answers: dict[int, str] = {}
    unwritten: dict[int, str] = {}
    fields = ("answer", "boxes", "ground_truth")
    if not method_of(subject.reward, "ground_truth") and not any(
        name in prompt for prompt in subject.prompts for name in fields
    ):
        raise UserError(
            f"reward {subject.name!r}: the prompts hold no ground truth to try it on; give each "
            f"an `answer`, `boxes` or `ground_truth`, or the reward a method ground_truth(prompt)"
        )
    for i, prompt in enumerate(subject.prompts):
        try:
            answers[i] = write(prompt)
        except Unscorable as error:
            unwritten[i] = str(error)
    return answers, unwritten


def _writer(subject: Subject) -> Callable[[Prompt], str]:
    """Return the reward that writes ground truths: the reward itself, or one of mmrl's by the row's
    answer or boxes."""
    writes: Callable[[Prompt], str] | None = method_of(subject.reward, "ground_truth")
    if writes is not None:
        return writes
    ours = _like_ours(subject).ground_truth
    return (lambda prompt: bare(ours(prompt))) if subject.bare else ours


def bare(text: str) -> str:
    """Return an answer without its tags."""
    return text.replace("<answer>", "").replace("</answer>", "")


def without_tags(subject: Subject, right: list[str], best: list[float]) -> Subject | None:
    """Return the subject with answers without ``<answer>`` tags, if a user's reward pays ground
    truths only without tags; else None."""
    if method_of(subject.reward, "ground_truth") or any(s > 0 for s in best):
        return None
    prompts = [prompt for prompt in subject.prompts if _writes(subject, prompt)]
    plain = score(subject, [bare(text) for text in right], prompts)
    return replace(subject, bare=True) if mean(plain) > mean(best) + CLOSE else None


def _writes(subject: Subject, prompt: Prompt) -> bool:
    try:
        _writer(subject)(prompt)
    except Unscorable:
        return False
    return True


def _like_ours(subject: Subject) -> Verifiable:
    """Return one of mmrl's rewards whose wrong answers fit a user's reward: of boxes, or of short
    answers."""
    boxed = any("boxes" in p for p in subject.prompts) and not any(
        "answer" in p for p in subject.prompts
    )
    return Grounding() if boxed else Classification()


def _written(subject: Subject, unwritten: dict[int, str]) -> Line:
    offences = [
        Offence(where(subject.prompts[i]), "", math.nan, why) for i, why in unwritten.items()
    ]
    return Line("data", "every row has a ground truth", [], offences)


def _placed(subject: Subject) -> list[Line]:
    """Check that boxes and points of the data fit their pictures: in another space every answer
    earns 0."""
    prompts = subject.prompts
    lines = []
    for each in points.compared(prompts, lambda row: _size(prompts[row])):
        offences = [
            Offence(where(prompts[i]), "", math.nan, why) for i, why in each.verdict.rows.items()
        ]
        if likely := each.likely():
            everything = f"all {len(each.placed)} {each.noun}"
            offences.insert(0, Offence(everything, "", math.nan, f"the {each.noun} {likely}"))
        elif each.verdict.doubt:
            offences.append(Offence(f"many {each.noun}", "", math.nan, each.verdict.doubt))
        lines.append(Line(each.noun, f"lie in their pictures ({each.space})", [], offences))
    return lines


def _size(prompt: Prompt) -> tuple[float, float] | None:
    """Return the size of the picture of a prompt's boxes; None if unknown."""
    pictures = prompt.get("images", prompt.get("image"))
    several = pictures if isinstance(pictures, list) else [pictures]
    index = prompt.get("image_index", 0)
    picture = several[index] if isinstance(index, int) and index < len(several) else None
    try:
        if isinstance(picture, (str, Path)):
            with opened(picture) as image:
                return upright_size(image)
        if is_pil(picture):
            return upright_size(picture)
    except PictureError:
        return None
    return boxes.said_size(prompt)


def _maximum(
    subject: Subject, prompts: list[Prompt], texts: list[str], scores: list[float]
) -> Line:
    high = card_of(subject.reward).high
    top = max((s for s in scores if not math.isnan(s)), default=math.nan) if high is None else high
    bad = (
        [i for i, s in enumerate(scores) if not s >= top - CLOSE]
        if high is not None
        else _nan(scores)
    )
    notes = _notes(subject, [texts[i] for i in bad], [prompts[i] for i in bad])
    offences = [
        Offence(where(prompts[i]), texts[i], scores[i], note) for i, note in zip(bad, notes)
    ]
    return Line(
        "ground truth",
        f"is the maximum, {top:g}" if high is not None else "is a number",
        scores,
        offences,
    )


def _notes(subject: Subject, texts: list[str], prompts: list[Prompt]) -> list[str]:
    """Return how the reward parsed each answer, if it reports that."""
    verdicts = method_of(subject.reward, "verdicts")
    if verdicts is None:
        return [""] * len(texts)
    return [verdict.note or verdict.status for verdict in verdicts(texts, prompts)]


def _twice(subject: Subject, prompts: list[Prompt], texts: list[str], scores: list[float]) -> Line:
    alone = [score(subject, [text], [prompt])[0] for text, prompt in zip(texts, prompts)]
    bad = [
        i
        for i, (a, b) in enumerate(zip(scores, alone))
        if a != b and not (math.isnan(a) and math.isnan(b))
    ]
    offences = [
        Offence(where(prompts[i]), texts[i], alone[i], f"in the batch it was {scores[i]:g}")
        for i in bad
    ]
    return Line("ground truth, one by one", "the same as in the batch", alone, offences)


def _probes(
    subject: Subject, prompts: list[Prompt], right: list[str]
) -> list[tuple[str, list[str | None], str]]:
    """Return (name, one text per prompt or None, rule) of every answer that should not pay."""
    # form and length rewards: many texts are as good as a ground truth
    shaping = getattr(subject.reward, "shaping", False)
    rule = "not more" if shaping else "less"
    probes: list[tuple[str, list[str | None], str]] = [
        ("empty", [""] * len(prompts), rule),
        ("echo of the prompt", [str(p.get("text", "")) for p in prompts], rule),
    ]
    if not shaping:
        shifted = [*right[1:], *right[:1]]
        probes.append(
            (
                "another row's answer",
                [a if a != b else None for a, b in zip(shifted, right)],
                "less on average",
            )
        )
    wrong = method_of(subject.reward, "wrong_answers") or _like_ours(subject).wrong_answers
    tricks = [
        {name: bare(text) if subject.bare else text for name, text in wrong(prompt).items()}
        for prompt in prompts
    ]
    if not shaping:
        tricks = [
            trick | faults.faults(prompt, text) | _contradicted(prompt, text)
            for trick, prompt, text in zip(tricks, prompts, right, strict=True)
        ]
    for name in dict.fromkeys(name for answers in tricks for name in answers):
        probes.append((name, [answers.get(name) for answers in tricks], "less"))
    return probes


def _contradicted(prompt: Prompt, right: str) -> dict[str, str]:
    text = faults.contradiction(prompt, right)
    return {} if text is None else {"right letter, another option's text": text}


def _markdown(subject: Subject, prompts: list[Prompt], right: list[str], best: list[float]) -> Line:
    """Write short ground truths in bold, which mmrl's rewards accept."""
    rows = [i for i, prompt in enumerate(prompts) if faults.is_short(prompt, right[i])]
    reads = isinstance(_inner(subject.reward), (Answer, Choice)) and bool(rows)
    probe, rule = "ground truth in Markdown", "scores the same"
    if not reads:
        return Line(probe, rule, [], [], applies=False)
    written = [faults.in_markdown(right[i]) for i in rows]
    scores = score(subject, written, [prompts[i] for i in rows])
    offences = [
        Offence(where(prompts[i]), text, s, f"without Markdown {best[i]:g}")
        for i, text, s in zip(rows, written, scores)
        if not s >= best[i] - CLOSE
    ]
    return Line(probe, rule, scores, offences)


def _inner(reward: Any) -> Any:
    return reward.reward if isinstance(reward, Handled) else reward


def _below(
    probe: str,
    rule: str,
    prompts: list[Prompt],
    texts: list[str],
    scores: list[float],
    best: list[float],
) -> Line:
    """Check a probe's scores; ``rule``: "less" and "not more" hold row by row; "less on average"
    also allows no row to be better."""
    if not scores:
        return Line(probe, rule, scores, [], applies=False)
    bad = [
        i
        for i, (s, b) in enumerate(zip(scores, best))
        if s > b + CLOSE or (rule == "less" and s > b - CLOSE)
    ]
    if rule == "less on average" and not bad and mean(scores) > mean(best) - CLOSE:
        bad = list(range(len(scores)))
    offences = [
        Offence(where(prompts[i]), texts[i], scores[i], f"the ground truth scores {best[i]:g}")
        for i in bad
    ]
    return Line(probe, f"{rule} than the ground truth", scores, offences)


def mean(scores: Sequence[float]) -> float:
    known = [s for s in scores if not math.isnan(s)]
    return sum(known) / len(known) if known else math.nan


def _spaces(subject: Subject, prompts: list[Prompt], best: list[float]) -> Line:
    """Write the ground truth in the four coordinate conventions of models."""
    probe = "ground truth in other coordinate spaces"
    rule = "scores the same"
    if not getattr(subject.reward, "spatial", False):
        return Line(probe, rule, [], [], applies=False)
    write = _writer(subject)
    high = card_of(subject.reward).high
    scores = []
    offences = []
    for space in get_args(CoordSpace):
        convertible = [
            {**prompt, "view": {**VIEW, **_sizes(prompt), "coords": space}} for prompt in prompts
        ]
        texts = [write(prompt) for prompt in convertible]
        space_scores = score(subject, texts, convertible)
        # coordinates are written with 6 decimals
        bad = [
            i
            for i, s in enumerate(space_scores)
            if not s >= (best[i] if high is None else high) - 1e-3
        ]
        offences += [
            Offence(where(convertible[i]), texts[i], space_scores[i], f"coordinates in {space}")
            for i in bad
        ]
        scores += space_scores
    return Line(probe, rule, scores, offences)


def _sizes(prompt: Prompt) -> dict[str, Any]:
    return (
        {"sizes": [[prompt["width"], prompt["height"]]] * 16}
        if "width" in prompt and "height" in prompt
        else {}
    )


def in_range(subject: Subject, tried: Sequence[Sequence[float]]) -> Line:
    """Probe whether all scores are in the range declared on the reward's card."""
    about = card_of(subject.reward)
    scores = [s for scores in tried for s in scores]
    low = -math.inf if about.low is None else about.low
    high = math.inf if about.high is None else about.high
    bad = [s for s in scores if s < low - 1e-6 or s > high + 1e-6 or math.isinf(s)]
    offences = [Offence("a probe above", "", s, f"the card says {low:g} to {high:g}") for s in bad]
    return Line("all of them", "in the declared range", scores, offences)


def _nan(scores: list[float]) -> list[int]:
    return [i for i, s in enumerate(scores) if math.isnan(s)]
