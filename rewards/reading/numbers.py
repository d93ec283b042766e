"""Reads the number of an answer."""

from __future__ import annotations

import re

from rewards.reading.figures import NUMBER
from rewards.reading.parsed import UNPARSEABLE, Parsed, worst
from rewards.reading.parts import boxed, fenced, final


def number(text: str) -> Parsed[float]:
    """Read the one number of the final answer: ``7``, ``1,234``, ``12 %``, ``seven``; with words
    around it "repaired".

    Several different numbers are no answer ("wrong_count"): who hedges is not paid.
    """
    answer = final(text)
    body = (boxed(answer.value) or fenced(answer.value)).strip().strip(".").strip()
    word = WORDS.get(body.casefold())
    plain = re.fullmatch(
        rf"[$€£]?\s*({NUMBER})\s*[%°]?", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", body)
    )
    if plain:
        return Parsed(float(plain[1]), answer.status)
    if word is not None:
        return Parsed(float(word), answer.status)
    values = {
        float(figure)
        for figure in re.findall(
            rf"(?<![\w.]){NUMBER}(?![\w])", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", body)
        )
    }
    if len(values) == 1:
        return Parsed(values.pop(), worst(answer.status, "repaired"))
    return Parsed(None, "wrong_count") if values else UNPARSEABLE


WORDS = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen "
        "fourteen fifteen sixteen seventeen "
        "eighteen nineteen twenty".split(),
        range(21),
    )
)
