"""Checks short answers: a number, a name, a count, an option, a set of labels."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import (
    items,
    normal,
    number,
    quantity_in,
    real,
    same_name,
    stated,
    worst,
)
from rewards.answers.reading.names import names_of, without_article
from rewards.answers.reading.options import LETTERS, Options, options_named, options_of
from rewards.answers.verifiable import Verdict, Verifiable, need, tagged
from rewards.card import card

Tolerance = Annotated[float, Ge(0)]


def true_number(prompt: Prompt, field: str = "answer") -> float:
    value = need(prompt, field)
    target = real(value)
    if target is None and isinstance(value, str):
        read = quantity_in(value).value
        target = None if read is None else float(read.value)
    if target is None or not math.isfinite(target):
        raise Unscorable(f'"{field}" is {value!r}; expected a number')
    return target


def accepted(prompt: Prompt) -> list[str]:
    """Return ``answer`` and its ``aliases``, as strings that are not empty."""
    value = need(prompt, "answer")
    texts = [*(value if isinstance(value, list) else [value]), *(prompt.get("aliases") or [])]
    texts = [
        str(candidate)
        for candidate in texts
        if isinstance(candidate, (str, int, float)) and normal(candidate)
    ]
    if not texts:
        raise Unscorable(f'"answer" is {value!r}; expected a text or a number')
    return texts


@REWARDS.register("answer")
@card(media="text", needs="answer", low=0, high=1)
class Answer(Verifiable):
    """Check the final answer: numbers by value and unit, names by normalised equality.

    ``7``, ``7.0`` and ``seven`` are one number, 12 % is 0.12, a missing unit is taken from the
    other. Two names are equal up to case, Unicode form, blanks, Markdown, hyphens between words, a
    final full stop and an article that the right one lacks; parts of a name never count. A prompt
    may have further ground truths in ``aliases``.

    Args:
        tolerance: for a number, relative to the right one; 0: exact (to 1e-9).
    """

    def __init__(self, tolerance: Tolerance = 0.0):
        self.tolerance = tolerance

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        targets = accepted(prompt)
        body, status = stated(text)
        if not normal(body):
            return Verdict(0.0, "unparseable")
        numeric = {target: quantity_in(target) for target in targets}
        if any(
            normal(body) == normal(target)
            or numeric[target].status != "ok"
            and same_name(body, target)
            for target in targets
        ):
            return Verdict(1.0, status)
        right = [read.value for read in numeric.values() if read.status == "ok" and read.value]
        if not right:
            return Verdict(0.0, status)
        answered = quantity_in(body)
        if answered.value is None:
            return Verdict(0.0, answered.status)
        good = any(answered.value.equals(value, self.tolerance) for value in right)
        return Verdict(float(good), worst(status, answered.status))

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(accepted(prompt)[0])

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = accepted(prompt)[0]
        return {"twice": tagged(f"{right} or 987654321"), "empty answer": tagged("")}


@REWARDS.register("classification")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="Visual-RFT (arXiv:2503.01785), classification",
    licence="Apache-2.0",
)
class Classification(Answer):
    """Check that the answer is the class, by normalised equality (or an alias), never as a number.

    The published reward accepts any part of the name, or any text that contains it: an empty answer
    and "a" score 1 there.
    """

    def __init__(self) -> None:
        super().__init__()

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        body, status = stated(text)
        if not normal(body):
            return Verdict(0.0, "unparseable")
        answered = {name.replace(" ", "") for name in names_of(body)}
        right = accepted(prompt)
        good = any(
            normal(name).replace(" ", "") in answered or same_name(body, name) for name in right
        )
        return Verdict(float(good), status)

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = accepted(prompt)[0]
        return {
            "first letter": tagged(right[0] + "z"),
            "inside a sentence": tagged(f"not {right}"),
            "empty answer": tagged(""),
        }


@REWARDS.register("count")
@card(media="text", needs="answer", low=0, high=1, source="CrowdVLM-R1 (arXiv:2504.03724)")
class Count(Verifiable):
    """Check a count: exactly, or graded by how close it is.

    Args:
        fuzzy: CrowdVLM-R1's graded reward, ``max(0, 1 - |n - right| / right)``; if the right number
            is 0, only 0 counts. (The abstract gives the idea; the slope is our choice.)
        sharpness: power of the fuzzy reward; more than 1 falls faster near the right number.
    """

    def __init__(self, fuzzy: bool = False, sharpness: Annotated[float, Gt(0)] = 1.0):
        self.fuzzy = fuzzy
        self.sharpness = sharpness

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = true_number(prompt)
        parsed = number(text)
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        status = (
            "out_of_range" if parsed.value < 0 or not math.isfinite(parsed.value) else parsed.status
        )
        error = abs(parsed.value - right)
        if error < 1e-9:
            return Verdict(1.0, status)
        close = max(0.0, 1.0 - error / abs(right)) if right and math.isfinite(error) else 0.0
        return Verdict(close**self.sharpness if self.fuzzy else 0.0, status)

    def ground_truth(self, prompt: Prompt) -> str:
        right = true_number(prompt)
        return tagged(f"{right:.0f}" if right.is_integer() else str(right))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = int(true_number(prompt))
        hedge = ", ".join(str(n) for n in range(max(0, right - 3), right + 4))
        return {
            "one too many": tagged(str(right + 1)),
            "hedge": tagged(hedge),
            "empty answer": tagged(""),
        }


@REWARDS.register("choice")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="TW-GRPO (arXiv:2505.24718), soft multi-choice reward",
)
class Choice(Verifiable):
    """Check the option or options chosen in a multiple choice question.

    The answer is letters (``B``, ``(B) a cat``, ``A, C``), an option's number, or its text if the
    prompt has ``choices``: a list of texts, with or without letters, or letter -> text. The letter
    wins over a text; a contradiction names nothing. The right one is in ``answer``: a letter,
    letters, an option's text or a list.

    Args:
        partial: "none": all or nothing; "subset": the share found, if nothing wrong was named
            (TW-GRPO); "jaccard": intersection over union.
    """

    def __init__(self, partial: Literal["none", "subset", "jaccard"] = "subset"):
        self.credit = {"none": _all_or_nothing, "subset": _subset, "jaccard": jaccard}[partial]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = self._right(prompt)
        body, status = stated(text)
        chosen = options_named(body, options_of(prompt.get("choices")))
        if not chosen:
            return Verdict(0.0, "unparseable")
        return Verdict(
            self.credit(chosen, right),
            status if len(chosen) == len(right) else worst(status, "wrong_count"),
        )

    def _right(self, prompt: Prompt) -> frozenset[str]:
        value = need(prompt, "answer")
        choices = options_of(prompt.get("choices"))
        right: set[str] = set()
        for entry in value if isinstance(value, list) else [value]:
            named = options_named(str(entry), choices)
            by_place = (
                str(entry).strip().isdigit() and choices.texts and not names_text(entry, choices)
            )
            if by_place and str(entry).strip() not in choices.labels:
                raise Unscorable(
                    f'"answer" is {value!r}, a place that counts from 0 or from 1; write the '
                    "letter or the text of the choice"
                )
            right |= named
        if not right:
            raise Unscorable(
                f'"answer" is {value!r}; expected a letter or the text of one of the choices'
            )
        return frozenset(right)

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(", ".join(sorted(self._right(prompt))))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = self._right(prompt)
        names = options_of(prompt.get("choices")).labels or default_labels(right)
        wrong = [name for name in names if name not in right]
        answers = {"empty answer": tagged("")}
        if wrong:
            answers |= {"all options": tagged(", ".join(names)), "a wrong option": tagged(wrong[0])}
        return answers


def names_text(entry: object, choices: Options) -> bool:
    """Tell whether a ground truth is the text of an option."""
    return any(normal(text) == normal(entry) for text in choices.texts)


def default_labels(right: frozenset[str]) -> tuple[str, ...]:
    """Return the labels of a question whose options are not given: four, or up to the last."""
    last = max(right)
    if last.isdigit():
        return tuple(str(i + 1) for i in range(max(4, int(last))))
    return tuple(LETTERS[: max(4, LETTERS.index(last) + 1)])


def _all_or_nothing(chosen: Set[str], right: Set[str]) -> float:
    return float(chosen == right)


def _subset(chosen: Set[str], right: Set[str]) -> float:
    return len(chosen) / len(right) if chosen <= right else 0.0


def jaccard(chosen: Set[str], right: Set[str]) -> float:
    """Compute intersection over union of two sets; 1 if both are empty."""
    return len(chosen & right) / len(chosen | right) if chosen | right else 1.0


@REWARDS.register("label_set")
@card(
    media="text",
    needs="labels",
    low=0,
    high=1,
    source="MedTVT-R1 (arXiv:2506.18512), Jaccard reward",
)
class LabelSet(Verifiable):
    """Compare the labels of the answer with the right ones (``labels``) by Jaccard index; both
    empty: 1.

    The answer is a JSON list or names separated by commas, semicolons, lines or "and" (which a
    right label may contain); an empty set is ``none`` or ``[]``. Duplicates count once; names are
    compared as in ``answer``.
    """

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = {normal(label) for label in self._labels(prompt)}
        parsed = items(text, self._labels(prompt))
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        read = (normal(label) for label in parsed.value)
        names = {name if name in right else without_article(name) for name in read}
        status = parsed.status if len(names) == len(right) else worst(parsed.status, "wrong_count")
        return Verdict(jaccard(names, right), status)

    def _labels(self, prompt: Prompt) -> list[str]:
        value = need(prompt, "labels")
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(label, (str, int)) for label in value
        ):
            raise Unscorable(f'"labels" is {value!r}; expected a list of names')
        return [str(label) for label in value]

    def ground_truth(self, prompt: Prompt) -> str:
        names = self._labels(prompt)
        return tagged('["' + '", "'.join(names) + '"]' if names else "[]")

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = self._labels(prompt)
        wrong = {"spam of labels": tagged(", ".join([*right, *(f"label {i}" for i in range(20))]))}
        return wrong | ({"none": tagged("[]")} if right else {})
