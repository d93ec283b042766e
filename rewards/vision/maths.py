"""Defines ``maths`` and ``chart``, which check answers that are formulas or values."""

from __future__ import annotations

import math
import re
import threading
from functools import lru_cache
from typing import Annotated, Any

from annotated_types import Ge

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.card import card
from rewards.vision.answers import items, normal, number, worst
from rewards.vision.base import Verdict, Verifiable, need, tagged
from rewards.vision.coords import Unscorable
from rewards.vision.words import short
from rewards.vision.writing import true_text

LONGEST = 400  # characters of a formula; longer ones are no answer
MONSTERS = re.compile(
    r"\^[^+\-=,]*\^|\*\*.*\*\*|\d{40}|(?:\^|\*\*)\s*\{?\s*\(?\s*\d{4}|\d{4}\s*!|!\s*!|!\s*\)\s*!"
)
SECONDS = 3  # of parsing and of comparing, each


@REWARDS.register("maths")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="math-verify (Hugging Face)",
    licence="Apache-2.0",
)
class Maths(Verifiable):
    r"""Check that the answer equals the right one as mathematics, by math-verify: LaTeX, sets,
    intervals.

    The final answer (what stands in the last ``\boxed`` if there is one) is compared, not the
    reasoning before it. Formulas of more than 400 characters, and powers of powers or factorials
    that nobody could compute, are no answer. In the main thread parsing and comparing stop after 3
    s each.
    """

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = _parse(true_text(prompt))
        if not right:
            raise Unscorable(f'"answer" is {prompt["answer"]!r}, which math-verify cannot read')
        body, status = short(text)
        sane = status != "unparseable" and len(body) <= LONGEST and not MONSTERS.search(body)
        predicted = _parse(body) if sane else ()
        if not predicted:
            return Verdict(0.0, "unparseable")
        from math_verify import verify

        return Verdict(
            float(verify(list(right), list(predicted), timeout_seconds=_limit())), status
        )

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(rf"\boxed{{{true_text(prompt)}}}")

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_text(prompt)
        return {"plus one": tagged(rf"\boxed{{{right} + 1}}"), "empty answer": tagged(r"\boxed{}")}


def _limit() -> int | None:
    """Return the seconds math-verify may take; None outside the main thread, since it stops by a
    signal."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    """Return what math-verify reads in a formula, with and without dollars around it; empty if
    nothing."""
    from math_verify import parse

    body = text.strip().strip("$")
    expressions = parse(f"${body}$", parsing_timeout=_limit()) or parse(
        body, parsing_timeout=_limit()
    )
    return tuple(expressions)


@REWARDS.register("chart")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="ChartQA (arXiv:2203.10244), relaxed accuracy",
)
class Chart(Verifiable):
    """Compare values read from a chart (relaxed accuracy): numbers within 5 %, names by equality.

    A ground truth that is a list is compared element by element, in order; a list of another length
    is wrong.

    Args:
        tolerance: relative to the right number; a right 0 must be met exactly.
        partial: of a list, the share of right elements (by the longer list); False: all or nothing.
    """

    def __init__(self, tolerance: Annotated[float, Ge(0)] = 0.05, partial: bool = False):
        self.tolerance = tolerance
        self.partial = partial

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = need(prompt, "answer")
        if not isinstance(right, list):
            body, status = short(text)
            return Verdict(float(self._near(body, true_text(prompt))), status)
        if not right:
            raise Unscorable('"answer" is an empty list')
        parsed = items(text)
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        hits = sum(self._near(a, str(b)) for a, b in zip(parsed.value, right))
        same = len(parsed.value) == len(right)
        share = hits / max(len(parsed.value), len(right))
        return Verdict(
            share if self.partial or share == 1 else 0.0,
            parsed.status if same else worst(parsed.status, "wrong_count"),
        )

    def _near(self, predicted: str, right: str) -> bool:
        target = number(right)
        value = number(predicted)
        if target.status != "ok" or target.value is None:
            return bool(normal(predicted)) and normal(predicted) == normal(right)
        if value.status != "ok" or value.value is None or not math.isfinite(value.value):
            return False
        return abs(value.value - target.value) <= self.tolerance * abs(target.value)

    def ground_truth(self, prompt: Prompt) -> str:
        right = need(prompt, "answer")
        return tagged(", ".join(map(str, right)) if isinstance(right, list) else true_text(prompt))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = need(prompt, "answer")
        text = ", ".join(map(str, right)) if isinstance(right, list) else true_text(prompt)
        return {"hedge": tagged(f"{text}, or 987654321"), "empty answer": tagged("")}
