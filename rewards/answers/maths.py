"""Defines ``maths`` and ``chart``, which check answers that are formulas or values."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from annotated_types import Ge
from cachetools import LRUCache

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import (
    Status,
    items,
    normal,
    plain,
    quantity_in,
    same_name,
    stated,
    worst,
)
from rewards.answers.reading.formulas import differ, explodes, tree_of
from rewards.answers.reading.numbers import near
from rewards.answers.reading.plain import bare, latex
from rewards.answers.reading.prose import CONCLUDES, without_roughly
from rewards.answers.reading.stated import DENIED, HEDGED
from rewards.answers.reading.statements import predicates
from rewards.answers.reading.units import unit_named
from rewards.answers.sandbox import Broken, Sandboxes, TooSlow
from rewards.answers.verifiable import Verdict, Verifiable, need, tagged
from rewards.answers.writing import true_text
from rewards.card import card

log = logging.getLogger(__name__)
LONGEST = 400  # characters of a formula; a longer one is no answer
SECONDS = 1.0  # of CPU time to parse an answer and compare it
WORKERS = Sandboxes("equal", SECONDS)  # for all rewards of this process
NAMED = re.compile(r"\s*[A-Za-z\u0370-\u03ff\\]{1,12}(?:_\{?\w+\}?)?'?\s*(?:\(\s*\w\s*\))?\s*")
# a quantity of a figure: sin A, the angle ABC, the area of a triangle
OF_FIGURE = re.compile(
    r"\s*m?\s*\\(?:sin|cos|tan|cot|angle|overline|vec|triangle|text|mathrm|operatorname|overrightarrow)"
    r"(?:_\{?\w+\}?)?\s*(?:\{[^{}=\d]{1,40}\}|\\?[A-Za-z]{1,8}|\(\s*\\?[A-Za-z]{1,8}\s*\))"
    r"(?:_\{?\w+\}?)?\s*|\s*[A-Z]_\{?\\triangle\s?[A-Z]{1,4}\}?\s*|\s*\|?[A-Z]{2}\|?\s*"
)
IN_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\(?\s*)(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})"
)
NEGATED = re.compile(r"\b(?:not|never|wrong|incorrect|false|cannot)\b|n't\b", re.I)
ALTERNATIVES = re.compile(r"\s*,?\s*(?:\\(?:text|mathrm)\s*\{\s*(?:or|and)\s*\}|\b(?:or|and)\b)\s*")
UNIT = re.compile(
    r"(?<=[\w})])\s*(?:\\[,;: ]|~)?\s*(?:\\(?:text|mathrm)\s*\{\s*([^{}]{1,20}?)\s*\}|"
    r"(?<![A-Za-z\\])([A-Za-z]{2,12}))(?:\^\{?\d\}?)?$"
)
EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)|\\equiv(?![A-Za-z])")


class Question(NamedTuple):
    """Holds a question for math-verify: do all ``parts`` of an answer equal the right one?"""

    right: str
    parts: tuple[str, ...]
    status: Status


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

    The final answer (the content of the last ``\boxed`` if there is one) is compared, not the
    reasoning before it. Numbers are compared by value and unit, as by ``answer``: 5 m is not 5 cm,
    5 % not 5. Every side of an equation must be right, ``x =`` apart. Formulas whose values differ
    at sample points are wrong without a call to math-verify; formulas of more than 400 characters,
    and powers and factorials too large to compute, are no answer. math-verify runs in worker
    processes; an answer that takes more than 1 s of CPU time, or 3 GiB, counts as no answer, and
    the log says how many did. Equal answers are checked once.
    """

    def __init__(self) -> None:
        self.slow = 0  # answers that took too long

    def counters(self) -> dict[str, float]:
        """Return what the log shows: how many answers took too long since the run began."""
        return {"too_slow": float(self.slow)}

    def verdicts(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Verdict]:
        """Judge a batch: first what can be decided here, then the rest by math-verify, each
        question once."""
        self._check(texts, prompts)
        first = [self._first(text, prompt) for text, prompt in zip(texts, prompts)]
        questions = {
            (question.right, part)
            for question in first
            if isinstance(question, Question)
            for part in question.parts
        }
        same = dict(zip(sorted(questions), self._equal(sorted(questions))))
        return [
            self._judged(question, same) if isinstance(question, Question) else question
            for question in first
        ]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        (verdict,) = self.verdicts([text], [prompt])
        if verdict.note and verdict.score != verdict.score:
            raise Unscorable(verdict.note)
        return verdict

    def _first(self, text: str, prompt: Prompt) -> Verdict | Question:
        try:
            right = true_text(prompt)
            if not _readable(right):
                raise Unscorable(f'"answer" is {prompt["answer"]!r}, which math-verify cannot read')
        except Unscorable as error:
            return self._unscorable(error)
        body, status = stated(text)
        return decided(right, said(body), status)

    def _judged(
        self, question: Question, same: dict[tuple[str, str], bool | Broken | None]
    ) -> Verdict:
        answers = [same[question.right, part] for part in question.parts]
        if any(isinstance(answer, TooSlow) for answer in answers):
            return Verdict(0.0, "unparseable", f"it took more than {SECONDS:g} s")
        if any(answer is None or isinstance(answer, Broken) for answer in answers):
            return Verdict(0.0, "unparseable")
        return Verdict(float(all(answers)), question.status)

    def _equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool | Broken | None]:
        """Ask which answers are right; None if one cannot be parsed. Timeouts are counted, and
        logged at the first, tenth, hundredth ..."""
        new = [pair for pair in pairs if pair not in EQUAL]
        answers = WORKERS.ask_all([("equal", *pair) for pair in new]) if new else []
        for pair, answer in zip(new, answers):
            EQUAL[pair] = answer
            if isinstance(answer, TooSlow):
                self.slow += 1
                if set(str(self.slow)[1:]) <= {"0"} and str(self.slow)[0] == "1":
                    log.warning(
                        "reward maths: %d answers took more than %g s to compare and earn nothing, "
                        "such as %.60r",
                        self.slow,
                        SECONDS,
                        pair[1],
                    )
        return [EQUAL[pair] for pair in pairs]

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(rf"\boxed{{{true_text(prompt)}}}")

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_text(prompt)
        return {"plus one": tagged(rf"\boxed{{{right} + 1}}"), "empty answer": tagged(r"\boxed{}")}


EQUAL: LRUCache[tuple[str, str], bool | Broken | None] = LRUCache(maxsize=8192)
READABLE: LRUCache[str, bool] = LRUCache(maxsize=8192)


FORMULA = re.compile(r"\\\(([^\n]{1,400}?)\\\)|\$\$?([^$]{1,400})\$\$?|\\\[(.{1,400}?)\\\]", re.S)
# the words before the formula that a sentence states
STATES = re.compile(
    r"(?:(?<!\w)(?:is|are|be|becomes|equals|gives|yields|get|obtain|have|simplif(?:y|ies) to|"
    r"reduces to|ist|sind|betr\u00e4gt|lautet|erhalten|est|sont|vaut|es|son|\u00e9|s\u00e3o|"
    r"\u00e8|sono)"
    r"|[\u4e3a\u662f\u5f97]|\u7b49\u4e8e)\s*[:\uff1a]?\s*\**\s*$"
)
UNITS_BEHIND = re.compile(
    r"[\s*]*(?P<name>(?:square |cubic )?[^\W\d_]{1,14})?(?P<power>[\u00b2\u00b3]|"
    r"\^[23])?[\s.\u3002*]*"
)
RAISED = {"\u00b2": "2", "^2": "2", "\u00b3": "3", "^3": "3"}
GIVEN = re.compile(
    r"\b(?:where|since|because|given|with|when|for|using|let|weil|car|porque)\b", re.I
)


def said(body: str) -> str:
    """Return the formula that the last sentence states or concludes; any other text unchanged."""
    body = body[-2 * LONGEST :] if len(body) > 2 * LONGEST else body
    formulas = list(FORMULA.finditer(body))
    if not formulas:
        names = () if "\\" in body else predicates(body)
        return names[0] if names and len(names[0]) < LONGEST else body
    unit = UNITS_BEHIND.fullmatch(body[formulas[-1].end() :])
    if not unit:
        return body
    sentence = re.split(r"[.!?\u3002]\s|\n", body[: formulas[-1].start()])[-1].lstrip()
    if DENIED.search(sentence) or HEDGED.search(sentence):
        return body
    concludes = CONCLUDES.match(sentence) and not GIVEN.search(sentence)
    if not STATES.search(sentence) and (not concludes or FORMULA.search(sentence)):
        return body
    formula = next(group for group in formulas[-1].groups() if group)
    if unit["name"] and unit_named(unit["name"]):
        return f"{formula}\\text{{{unit['name']}}}^{RAISED.get(unit['power'], '1')}"
    return formula if not unit["name"] or unit["name"].endswith(("unit", "units")) else body


def decided(right: str, body: str, status: Status) -> Verdict | Question:
    """Judge an answer if that needs no library; else return the question for math-verify."""
    if len(body) > 5 * LONGEST or not normal(body):
        return Verdict(0.0, "unparseable")
    if plain(body) == plain(right) or bare(plain(body)) == bare(plain(right)):
        return Verdict(1.0, status)
    true = quantity_in(right)
    if true.status == "ok" and true.value is not None:
        answered = quantity_in(body)
        if answered.value is not None:
            score = float(answered.value.equals(true.value))
            rounded = near(answered.value.value, true.value.value, 1e-5) and not isinstance(
                answered.value.value, int
            )
            if score or not rounded or answered.value.unit != true.value.unit:
                return Verdict(score, worst(status, answered.status))
    answer, target = (
        IN_DEGREES.sub(r"\1\\frac{\2\\pi}{180}", latex(text))
        for text in (ALTERNATIVES.sub(", ", body), right)
    )
    answer = answer if "\\approx" in target else exact(answer)
    if NEGATED.search(body) or not 0 < len(answer) <= LONGEST or explodes(answer):
        return Verdict(0.0, "unparseable")
    answer = without_unit(answer) if without_unit(target) == target else answer
    listed = "," in answer and len(EQUALS.split(answer)) > 2  # x = 2, x = -2
    parts = (answer,) if listed or len(EQUALS.split(target)) > 1 else sides(answer)
    if not parts:
        return Verdict(0.0, "unparseable")
    if any(explodes(part) for part in parts):
        return Verdict(0.0, "unparseable")
    apart = [differ(target, part) for part in parts]
    if any(apart):
        return Verdict(0.0, status)
    return Question(target, parts, status)


def exact(formula: str) -> str:
    """Return the exact value before a rounded one, as in 12\\sqrt{3} \\approx 20.8; empty if it is
    a name, as in x \\approx 5."""
    before, rounded, _ = formula.partition("\\approx")
    return "" if rounded and NAMED.fullmatch(before) else before.strip()


def without_unit(formula: str) -> str:
    """Strip the unit of measure from the end of a formula that is more than a unit: 2\\pi cm."""
    match = UNIT.search(formula)
    known = match and unit_named(match[1] or match[2])
    return formula[: match.start()] if known and match else formula


def sides(formula: str) -> tuple[str, ...]:
    """Return the sides of an equation that state a value: all but the name of what is computed."""
    parts = [part for part in EQUALS.split(formula) if part.strip()]
    stating = [
        part for part in parts[:-1] if not (NAMED.fullmatch(part) or OF_FIGURE.fullmatch(part))
    ]
    return (*stating, parts[-1]) if parts else ()


def _readable(text: str) -> bool:
    """Tell whether a ground truth can be parsed. If math-verify's process dies, for example on a
    busy machine, retry once, and again for the next answer: one failure must not disable the prompt
    for the whole run."""
    known = quantity_in(text).status == "ok" or tree_of(latex(text)) is not None
    for _ in range(0 if known or text in READABLE else 2):
        (answer,) = WORKERS.ask_all([("readable", latex(text))])
        if not isinstance(answer, Broken):
            READABLE[text] = bool(answer)
            break
    return known or READABLE.get(text, False)


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

    As in the published evaluation 12 % is 0.12; unlike there, numbers may have separators, units
    and words around them, such as "about". A list as ground truth is compared element by element,
    in order; a list of another length is wrong.

    Args:
        tolerance: relative to the right number; a right 0 must be matched exactly.
        partial: of a list, the share of right elements (by the longer list); False: all or nothing.
    """

    def __init__(self, tolerance: Annotated[float, Ge(0)] = 0.05, partial: bool = False):
        self.tolerance = tolerance
        self.partial = partial

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = need(prompt, "answer")
        if not isinstance(right, list):
            answer = stated(text)
            if not normal(answer.value):
                return Verdict(0.0, "unparseable")
            return Verdict(float(self._near(answer.value, true_text(prompt))), answer.status)
        if not right:
            raise Unscorable('"answer" is an empty list')
        parsed = items(text, [str(entry) for entry in right])
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
        target = quantity_in(right)
        if target.status != "ok" or target.value is None:
            return same_name(predicted, right)
        value = quantity_in(without_roughly(predicted)).value
        return value is not None and value.equals(target.value, self.tolerance)

    def ground_truth(self, prompt: Prompt) -> str:
        right = need(prompt, "answer")
        return tagged(", ".join(map(str, right)) if isinstance(right, list) else true_text(prompt))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = need(prompt, "answer")
        text = ", ".join(map(str, right)) if isinstance(right, list) else true_text(prompt)
        return {"hedge": tagged(f"{text}, or 987654321"), "empty answer": tagged("")}
