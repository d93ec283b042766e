"""Splits a short answer into figures, words and signs."""

from __future__ import annotations

import re
from typing import NamedTuple

# longest run of blanks or digits
RUN = 40
# Separators of any locale, where unambiguous. 1,234 is a thousand and 1.234 a little more than one,
# as in English; 1.234,5 and 1,5 can only be from another locale.
FIGURE = r"""
(?: [1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?
  | [1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?
  | [1-9]\d{0,2}(?:\.\d{3}){2,}(?:,\d+)?
  | [1-9]\d{0,2}(?:\.\d{3})+,\d+
  | [1-9]\d{0,2}(?:\ \d{3})+(?:[.,]\d+)?
  | [1-9]\d{0,2}(?:'\d{3})+(?:[.,]\d+)?
  | [1-9]\d{0,2}(?:_\d{3})+(?:\.\d+)?
  | \d+,\d{1,2} | 0,\d+ | \d+,\d{4,}
  | \d+\.\d+ | \d+\.(?!\w) | \.\d+ | \d+ )
(?:[eE][-+]?\d{1,4}(?![\d.]))? (?!\d|[.,:']\d)
"""
TOKEN = re.compile(
    rf"""(?P<figure>(?=[.\d])(?<![\w.]){FIGURE})
    | (?P<junk>\d[\d.,:/']*\d(?:[.]\d+)?|\d)
    | (?P<raised>[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+)
    | (?P<vulgar>[\u00bc-\u00be\u2150-\u215e\u2189])
    | (?P<word>[^\W\d_](?:[^\W_]|_(?=\w))*(?:[-'](?:[^\W_])+)*\.?(?<!\.)|_\w*)
    | (?P<sign>\S)""",
    re.X,
)


class Token(NamedTuple):
    """Holds a piece of an answer: ``glued`` to the piece before it, or after a blank."""

    kind: str
    text: str
    glued: bool


def tokens_of(text: str) -> list[Token]:
    """Return the pieces of a text in order; a word with hyphens is one, unless all its parts are
    number words (the scanner of numbers takes those apart)."""
    tokens = []
    end = 0
    for match in TOKEN.finditer(text):
        tokens.append(Token(str(match.lastgroup), match[0], match.start() == end and end > 0))
        end = match.end()
    return tokens


def value_of(figure: str) -> int | float:
    """Return the value of a figure."""
    mantissa, e, exponent = figure.replace("E", "e").partition("e")
    digits = re.sub(r"[ '_]", "", mantissa)
    comma, point = digits.rfind(","), digits.rfind(".")
    if comma >= 0 and point >= 0:
        thousands = "," if point > comma else "."
        digits = digits.replace(thousands, "").replace(",", ".")
    elif comma >= 0:
        grouped = re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}", digits)
        digits = digits.replace(",", "" if grouped else ".")
    elif digits.count(".") > 1:
        digits = digits.replace(".", "")
    if e or "." in digits:
        value = float(digits + e + exponent)
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return int(digits)
