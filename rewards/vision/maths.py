"""Defines ``maths`` and ``chart``, which check answers that are formulas or values."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from functools import lru_cache
from typing import Annotated

from annotated_types import Ge

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards._sandbox import Broken, Sandbox
from rewards.card import card
from rewards.reading import items, normal, number, worst
from rewards.vision.base import Verdict, Verifiable, need, tagged
from rewards.vision.coords import Unscorable
from rewards.vision.words import short
from rewards.vision.writing import true_text

LONGEST = 400  # characters of a formula; longer ones are no answer
MONSTERS = re.compile(
    r"\^[^+\-=,]*\^|\*\*.*\*\*|\d{40}|(?:\^|\*\*)\s*\{?\s*\(?\s*\d{4}|\d{4}\s*!|!\s*!|!\s*\)\s*!"
)
SECONDS = 3.0  # of processor time to read an answer and compare it
WORKER = Sandbox("equal", SECONDS)  # one for all rewards of this process


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
    that nobody could compute, are no answer. math-verify runs in a process beside this one, which
    is killed and replaced where an answer takes more than 3 s of a processor or 3 GiB: it is none.
    """

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = true_text(prompt)
        if not _readable(right):
            raise Unscorable(f'"answer" is {prompt["answer"]!r}, which math-verify cannot read')
        body, status = short(text)
        sane = status != "unparseable" and len(body) <= LONGEST and not MONSTERS.search(body)
        same = _equal(right, body) if sane else None
        return Verdict(0.0, "unparseable") if same is None else Verdict(float(same), status)

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(rf"\boxed{{{true_text(prompt)}}}")

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_text(prompt)
        return {"plus one": tagged(rf"\boxed{{{right} + 1}}"), "empty answer": tagged(r"\boxed{}")}


def _readable(text: str) -> bool:
    """Tell whether math-verify can read a ground truth. Where its process ends, on a machine that
    is too busy say, it is asked once more, and again for the next answer: one bad moment must not
    cost the prompt the whole run."""
    for _ in range(2):
        with suppress(Broken):
            return _read(text)
    return False


@lru_cache(maxsize=4096)
def _read(text: str) -> bool:
    """Ask whether math-verify can read a formula. Raises Broken, which is not remembered."""
    return bool(WORKER.ask("readable", text))


@lru_cache(maxsize=4096)
def _equal(right: str, answer: str) -> bool | None:
    """Tell whether an answer is right; None where it cannot be read, or not in time."""
    try:
        same: bool | None = WORKER.ask("equal", right, answer)
    except Broken:
        return None
    return same


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
