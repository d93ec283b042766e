"""Derives wrong answers from a row's ground truth that a careless parser accepts: another sign,
another unit, a negation, the text of another option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mmrl.core.types import Prompt
from rewards.answers.reading import real
from rewards.answers.verifiable import tagged

FEW = 5  # up to this, neighbouring integers differ by more than any usual tolerance
UNITS = {"cm": "m", "m": "cm", "mm": "m", "km": "m", "kg": "g", "g": "kg", "s": "h", "min": "h"}
UNITS |= {"%": "", "ml": "l", "l": "ml", "inches": "feet", "feet": "inches", "h": "s"}
MARKUP = re.compile(r"[\n<|\[{\\]")  # of tables, lists, formulas
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def faults(prompt: Prompt, right: str) -> dict[str, str]:
    """Return wrong answers by the name of the fault. ``right``: the ground truth as written; rows
    without one short ``answer`` get only the unclosed thought."""
    faulty = dict(_of_answer(prompt, right))
    if right.startswith("<answer>") or is_short(prompt, right):
        faulty["thought cut off"] = f"<think>It may be {right}, or"
    return faulty


def _of_answer(prompt: Prompt, right: str) -> Iterator[tuple[str, str]]:
    answer = _answer(prompt)
    if answer is None or not is_short(prompt, right):
        return

    def written(text: str) -> str:
        return right.replace(answer, text, 1)

    yield "answer negated", written(f"not {answer}")
    quantity = re.fullmatch(r"(-?[\d.,]+)\s*(\D{0,9})", answer)
    number = real(quantity[1].replace(",", "")) if quantity else None
    if quantity and number:
        unit = f" {quantity[2]}".rstrip() if quantity[2] not in ("", "%") else quantity[2]
        yield "sign flipped", written(f"{-number:.12g}{unit}")
        yield "decimal point shifted", written(f"{number * 10:.12g}{unit}")
        if abs(number) <= FEW and number == int(number):
            yield "neighbouring number", written(f"{number + 1:.12g}{unit}")
        if quantity[2] in UNITS:
            yield "another unit", written(f"{quantity[1]} {UNITS[quantity[2]]}".strip())


def is_short(prompt: Prompt, right: str) -> bool:
    """Tell whether a ground truth is just the row's short answer."""
    answer = _answer(prompt)
    return answer is not None and right in (answer, tagged(answer))


def _answer(prompt: Prompt) -> str | None:
    value = prompt.get("answer")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    text = str(value).strip()
    return text if 0 < len(text) <= 100 and not MARKUP.search(text) else None


def contradiction(prompt: Prompt, right: str) -> str | None:
    """Return the right letter with the text of another option; None if options have no texts, or
    the ground truth is not a single letter."""
    choices: Any = prompt.get("choices")
    letter = right.removeprefix("<answer>").removesuffix("</answer>").strip()
    if not isinstance(choices, list) or len(letter) != 1 or letter not in LETTERS:
        return None
    place = LETTERS.index(letter)
    texts = [str(choice).strip() for choice in choices]
    if place >= len(texts) or any(text.upper() in LETTERS for text in texts):
        return None
    another_text = texts[place - 1]
    return tagged(f"{letter}. {another_text}") if another_text != texts[place] else None


def in_markdown(right: str) -> str:
    """Return an answer in bold, as models often write it."""
    inside = right.removeprefix("<answer>").removesuffix("</answer>")
    return right.replace(inside, f"**{inside}**", 1)
