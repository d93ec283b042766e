"""Scores answers by the published rules: relaxed accuracy, ANLS, counts, DPG's dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewards.answers.reading import normal, quantity_in, same_name, stated
from rewards.answers.reading.options import options_named, options_of
from rewards.answers.reading.plain import bare, plain
from rewards.answers.reading.published import anls, relaxed

__all__ = ["anls", "choice", "relaxed", "same_answer", "with_dependencies", "written"]


def written(text: str) -> str:
    r"""Return the final answer of a text: the last ``<answer>`` or ``\boxed``, or the text after
    the thought or "the answer is", without Markdown, LaTeX and a final full stop."""
    return bare(plain(stated(text).value))


def same_answer(answer: str, right: str) -> bool:
    """Tell whether a short answer is right: equal numbers ("3", "three"), or equal words."""
    target = quantity_in(right)
    if target.status == "ok" and target.value is not None:
        answered = quantity_in(answer).value
        return answered is not None and answered.equals(target.value)
    return bool(normal(answer)) and same_name(answer, right)


def choice(answer: str, right: str, choices: Sequence[str] = ()) -> bool:
    """Tell whether the letter of a multiple choice is right: "B", "(B)", "B. 30"."""
    return options_named(answer, options_of(list(choices))) == {right.strip().upper()}


def with_dependencies(
    answers: Mapping[int, bool], parents: Mapping[int, Sequence[int]]
) -> dict[int, float]:
    """Score DPG's questions: a question counts only if all questions that it depends on were
    answered yes. 0 is not a question; as published, a parent that itself lost its point counts as
    no."""
    scores = {question: float(yes) for question, yes in answers.items()}
    for question, needed in parents.items():
        if question in scores and any(p and not scores.get(p, 0.0) for p in needed):
            scores[question] = 0.0
    return scores
