"""Scores answers by the published rules: relaxed accuracy, ANLS, counts, DPG's dependencies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rewards.reading import boxed, final, normal, number

THRESHOLD = 0.5  # of ANLS: answers at this normalised distance, or beyond, earn nothing
TOLERANCE = 0.05  # of relaxed accuracy


def written(text: str) -> str:
    r"""Return the final answer of a text: the last ``<answer>``, what follows the thought, what
    stands in the last ``\boxed``, without a final full stop."""
    answer = final(text).value
    inside = boxed(answer)
    plain = (answer if inside is None else inside).strip()
    return plain[:-1].rstrip() if plain.endswith(".") and not plain.endswith("..") else plain


def relaxed(answer: str, right: str) -> bool:
    """Tell whether a chart question is right (Masry et al. 2022): numbers may be off by 5 % of the
    right one, everything else must be equal but for capitals.

    As in the published evaluation "12%" is read as 0.12, and a right value of 0 is compared as a
    word.
    """
    value = as_number(answer)
    target = as_number(right)
    if value is not None and target:
        return abs(value - target) / abs(target) <= TOLERANCE
    return answer.strip().lower() == right.strip().lower()


def as_number(text: str) -> float | None:
    """Read a number or a percentage; None for anything else."""
    plain = text.strip()
    try:
        return float(plain.rstrip("%")) / 100 if plain.endswith("%") else float(plain)
    except ValueError:
        return None


def anls(answer: str, rights: Sequence[str]) -> float:
    """Return the normalised Levenshtein similarity to the nearest of several right answers, 0 where
    half of the longer text or more would have to change (Biten et al. 2019)."""
    from rapidfuzz.distance import Levenshtein

    near = 0.0
    for right in rights:
        pair = [" ".join(text.strip().lower().split()) for text in (answer, right)]
        longest = max(map(len, pair))
        distance = Levenshtein.distance(*pair) / longest if longest else 0.0
        near = max(near, 1 - distance if distance < THRESHOLD else 0.0)
    return near


def same_answer(answer: str, right: str) -> bool:
    """Tell whether a short answer is right: equal numbers ("3", "three"), or equal words."""
    target = number(right)
    if target.status == "ok":
        return number(answer).value == target.value
    return bool(normal(answer)) and normal(answer) == normal(right)


def choice(answer: str, right: str) -> bool:
    """Tell whether the letter of a multiple choice is right: "B", "(B)", "B. 30"."""
    letter = re.match(r"^\(?([A-Za-z])\)?(?:[.:)\s]|$)", answer.strip())
    return bool(letter) and letter is not None and letter[1].upper() == right.strip().upper()


def with_dependencies(
    answers: Mapping[int, bool], parents: Mapping[int, Sequence[int]]
) -> dict[int, float]:
    """Score DPG's questions: a question counts only if all questions that it depends on were
    answered yes. 0 is no question; as published, a parent that itself lost its point counts as
    no."""
    scores = {question: float(yes) for question, yes in answers.items()}
    for question, needed in parents.items():
        if question in scores and any(p and not scores.get(p, 0.0) for p in needed):
            scores[question] = 0.0
    return scores
