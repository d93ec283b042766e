"""Checks short answers: a number, a name, a count, an option, a set of labels, a text that was
read."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.card import card
from rewards.reading import Status, boxed, fenced, final, items, normal, number, real, worst
from rewards.vision.base import Verdict, Verifiable, need, tagged
from rewards.vision.coords import Unscorable

Tolerance = Annotated[float, Ge(0)]


def short(text: str) -> tuple[str, Status]:
    r"""Return the final answer as one line: what stands in ``\boxed``, in a fence, or all of it."""
    answer = final(text)
    body = (boxed(answer.value) or fenced(answer.value)).strip()
    return body, answer.status if normal(body) else "unparseable"


def true_number(prompt: Prompt, field: str = "answer") -> float:
    value = need(prompt, field)
    target = real(value)
    if target is None and isinstance(value, str):
        target = number(value).value
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
    """Check the final answer: numbers by value, names by normalised equality.

    Two names are equal after NFKC, case folding, and evening out blanks, hyphens, underscores and a
    final full stop; parts of a name never count. ``7``, ``7.0`` and ``seven`` are one number. A
    prompt may have further ground truths in ``aliases``.

    Args:
        tolerance: of a number, relative to the right one; 0: exact (to 1e-9).
    """

    def __init__(self, tolerance: Tolerance = 0.0):
        self.tolerance = tolerance

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        targets = accepted(prompt)
        body, status = short(text)
        if status == "unparseable":
            return Verdict(0.0, status)
        if any(normal(body) == normal(target) for target in targets):
            return Verdict(1.0, status)
        numeric = [number(target) for target in targets]
        right = [
            target.value for target in numeric if target.status == "ok" and target.value is not None
        ]
        parsed = number(text)
        if not right:
            return Verdict(0.0, status)
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        near = any(
            math.isclose(parsed.value, v, rel_tol=max(self.tolerance, 1e-9), abs_tol=1e-9)
            for v in right
        )
        return Verdict(float(near), parsed.status)

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
    """Check that the answer is the class, by normalised equality (and ``aliases``), never as a
    number.

    The published reward takes any part of the name, or any text that holds it: an empty answer and
    "a" score 1 there.
    """

    def __init__(self) -> None:
        super().__init__()

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        body, status = short(text)
        squeezed = normal(body).replace(" ", "")
        right = {normal(name).replace(" ", "") for name in accepted(prompt)}
        return Verdict(float(bool(squeezed) and squeezed in right), status)

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
    """Check a count: exactly, or the closer the more.

    Args:
        fuzzy: CrowdVLM-R1's graded reward, ``max(0, 1 - |n - right| / right)``; where the right
            number is 0 only 0 counts. (The abstract gives the idea; the slope is ours.)
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

    The answer is letters (``B``, ``(B) a cat``, ``A, C``), or an option's whole text if the prompt
    has ``choices``. The right one is in ``answer``: a letter, letters, an option's text or a list.

    Args:
        partial: "none": all or nothing; "subset": the share that was found, if nothing wrong was
            named (TW-GRPO); "jaccard": intersection over union.
    """

    def __init__(self, partial: Literal["none", "subset", "jaccard"] = "subset"):
        self.credit = {"none": _all_or_nothing, "subset": _subset, "jaccard": jaccard}[partial]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = self._right(prompt)
        body, status = short(text)
        chosen = letters(body, prompt.get("choices"))
        if not chosen:
            return Verdict(0.0, "unparseable")
        return Verdict(
            self.credit(chosen, right),
            status if len(chosen) == len(right) else worst(status, "wrong_count"),
        )

    def _right(self, prompt: Prompt) -> set[str]:
        value = need(prompt, "answer")
        right: set[str] = set()
        for entry in value if isinstance(value, list) else [value]:
            right |= letters(str(entry), prompt.get("choices"))
        if not right:
            raise Unscorable(
                f'"answer" is {value!r}; expected a letter or the text of one of the choices'
            )
        return right

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(", ".join(sorted(self._right(prompt))))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        count = max(len(prompt.get("choices") or "ABCD"), ord(max(self._right(prompt))) - 64)
        names = [chr(65 + i) for i in range(count)]
        wrong = [name for name in names if name not in self._right(prompt)]
        answers = {"empty answer": tagged("")}
        if wrong:
            answers |= {"all options": tagged(", ".join(names)), "a wrong option": tagged(wrong[0])}
        return answers


def letters(text: str, choices: Any = None) -> set[str]:
    """Return the options that a short answer names, as capital letters; empty if it names none
    clearly."""
    body = re.sub(
        r"^\s*(?:the\s+)?(?:correct\s+)?(?:final\s+)?(?:answers?|options?|choices?)"
        r"\s*(?:is|are|:)*\s*",
        "",
        text.strip(),
        flags=re.I,
    )
    names = [normal(letter) for letter in choices or []]
    if normal(body) in names:
        return {chr(65 + names.index(normal(body)))}
    several = re.fullmatch(
        r"[\[(\"']*[A-Za-z][\])\"']*"
        r"(?:(?:\s*[,;/&]\s*|\s+and\s+|\s+or\s+|\s*)[\[(\"']*[A-Z][\])\"'.]*)*\.?",
        body,
    )
    if several:
        chosen = set(
            re.findall(
                r"(?<![A-Za-z])[A-Za-z](?![a-z])|(?<=[A-Z])[A-Z](?![a-z])",
                re.sub(r"\b(?:and|or)\b", ",", body),
            )
        )
        chosen = {letter.upper() for letter in chosen}
    else:
        first = re.match(r"[\[(]?([A-Z])(?:[\]).:](?!\w)|\s*[-–—]\s)\s*(.+)", body, flags=re.S)
        if not first or re.search(r"(?<!\w)[(\[]?[A-Z][)\].:](?:\s|$)", first[2]):
            return set()
        chosen = {first[1]}
    return chosen if not names or all(ord(letter) - 65 < len(names) for letter in chosen) else set()


def _all_or_nothing(chosen: set[str], right: set[str]) -> float:
    return float(chosen == right)


def _subset(chosen: set[str], right: set[str]) -> float:
    return len(chosen) / len(right) if chosen <= right else 0.0


def jaccard(chosen: set[str], right: set[str]) -> float:
    """Compute intersection over union of two sets; 1 of two empty ones."""
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

    The answer is a JSON list or names separated by commas, semicolons or lines; an empty set is
    ``none`` or ``[]``. Duplicates count once; names are compared as in ``answer``.
    """

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = {normal(label) for label in self._labels(prompt)}
        parsed = items(text)
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        names = {normal(label) for label in parsed.value}
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
