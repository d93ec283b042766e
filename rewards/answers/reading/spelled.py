"""Parses numbers in words: text2num for seven languages, and halves, dozens and decimal points."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from text_to_num import alpha2digit, text2num

from rewards.answers.reading.languages import language_of

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "lakh": 10**5,
    "crore": 10**7,
}
GROUPS = {"dozen": 12, "score": 20, "pair": 2}
PARTS = {
    "half": Fraction(1, 2),
    "third": Fraction(1, 3),
    "quarter": Fraction(1, 4),
    "fourth": Fraction(1, 4),
    "fifth": Fraction(1, 5),
    "sixth": Fraction(1, 6),
    "seventh": Fraction(1, 7),
    "eighth": Fraction(1, 8),
    "ninth": Fraction(1, 9),
    "tenth": Fraction(1, 10),
    "hundredth": Fraction(1, 100),
}
# words of a spelled number, with those that only join others
FIRST = {*UNITS, *TENS, *SCALES, "dozen", "half"}
ALL = (
    FIRST
    | {"and", "a", "an", "point", "oh", "of", "pair"}
    | {*PARTS}
    | {f"{p}s" for p in PARTS}
    | {"halves"}
)
# languages whose number words are read as a whole answer
SPACED = ("fr", "es", "pt")
JOINED = {*"oder ou o u of e y et und en or and".split()}
# articles, and words of English
OTHERS = {*"un une ein eine een um uma una once cent".split()}


NO_WORDS = re.compile(r"[\d.:;?!()\[\]{}|*/=<>$%\"]")  # what no number in words contains


# German, Italian and Dutch write a number as one word, which is slow to try
COMPOUND = ("de", "it", "nl")
COMPOUND_BEGINS = re.compile(
    r"[\W_]*(?:ac|bi|c[ei]|d[eioru]|e[eiln\u00e9]|\u00e9|f[u\u00fc]|h[ou]|m[ei]|n[eou]|ot|qu|s[ei]|"
    r"t[aeiruw]|u[nm]|v[ei]|z[ew])",
    re.I,
)


@lru_cache(maxsize=4096)
def whole_words(text: str) -> int | None:
    """Read an answer that is only a number in words, in one of seven languages; None if two of them
    disagree."""
    if not text or len(text) > 120 or NO_WORDS.search(text):
        return None
    english = _in(text, "en")
    if english is not None or text in OTHERS:
        return english
    compound = COMPOUND if COMPOUND_BEGINS.match(text) else ()
    codes = (*SPACED, *compound)
    values = {value for code in codes if (value := _in(text, code)) is not None}
    return values.pop() if len(values) == 1 else None


def _in(text: str, code: str) -> int | None:
    try:
        return int(text2num(text, code))
    except ValueError:
        return None


def in_figures(text: str) -> str:
    """Write a sentence's number words from two on in figures, in the seven languages except
    English, which has its own reader; ordinals do not count."""
    language = language_of(text)
    if language == "en":
        return _counted(text)
    figures = str(alpha2digit(text, language, threshold=1.5))
    ordinal = any(figures.count(sign) > text.count(sign) for sign in ".\u00ba\u00aa") or (
        language == "es" and re.search(r"\b(?:primer|tercer)\b", text, re.I)
    )
    return text if ordinal else figures


def _counted(text: str) -> str:
    """Write the number before a noun in figures (vier Hunde) if it is not English and is the only
    number."""
    first, *rest = text.casefold().split()[:6] or [""]
    number = whole_words(first) if rest and first.isalpha() else None
    if number is None or _in(first, "en") is not None:
        return text
    if any(word in JOINED or whole_words(word) is not None for word in rest):
        return text
    return f"{number} {text.split(maxsplit=1)[1]}"


@lru_cache(maxsize=4096)
def spelled(words: tuple[str, ...]) -> Fraction | None:
    """Read English number words, hyphens apart: one million two, two and a half, three quarters,
    half a dozen, one point five; None if they form no number."""
    if not words:
        return None
    if words[0] in ("a", "an"):
        rest = words[1:]
        return (
            spelled(("one", *rest))
            if rest and (rest[0] in SCALES or _part(rest[0]) or rest[0] in GROUPS)
            else None
        )
    for simple in (_dozens, _shares, _points, _plain):
        value = simple(words)
        if value is not None:
            return value
    return None


def _plain(words: Sequence[str]) -> Fraction | None:
    if any(word in ("a", "an", "of", "point", "oh") for word in words) or words[-1] == "and":
        return None
    value = _in(" ".join(words), "en")
    return None if value is None else Fraction(value)


def _part(word: str) -> Fraction | None:
    if word == "halves":
        return PARTS["half"]
    return PARTS.get(word) or PARTS.get(word.removesuffix("s"))


def _shares(words: tuple[str, ...]) -> Fraction | None:
    """Read halves and thirds, alone, of a scale (half a million), or after a whole number."""
    if words[0] == "half":
        rest = words[2:] if words[1:2] in (("a",), ("an",)) else words[1:]
        scale = Fraction(1) if not rest else spelled(("one", *rest)) if rest[0] in SCALES else None
        return scale / 2 if scale is not None and len(words) != 2 else None
    if words[-1] in SCALES and len(words) > 1 and any(_part(word) for word in words):
        inner = spelled(words[:-1])
        return None if inner is None else inner * SCALES[words[-1]]
    part = _part(words[-1])
    if part is None or len(words) < 2:
        return None
    head = words[:-1]
    if "and" in head:
        at = len(head) - 1 - head[::-1].index("and")
        whole = spelled(head[:at])
        share = (
            spelled(("one" if head[at + 1 :] in ((), ("a",), ("an",)) else head[at + 1], words[-1]))
            if len(head) - at <= 2
            else None
        )
        return whole + share if whole is not None and share is not None and share < 1 else None
    count = _plain(head)
    return count * part if count is not None and 0 < count < 100 else None


def _dozens(words: tuple[str, ...]) -> Fraction | None:
    last = words[-1]
    if last not in GROUPS:
        return None
    if words[0] == "half" and last == "dozen":
        return Fraction(6)
    head = words[:-1]
    count = _plain(head) if head else Fraction(1)
    return None if count is None else count * GROUPS[last]


def _points(words: tuple[str, ...]) -> Fraction | None:
    """Read "one point two five"; "point five"."""
    if "point" not in words:
        return None
    at = words.index("point")
    digits = [
        "0" if word == "oh" else str(UNITS.index(word))
        for word in words[at + 1 :]
        if word == "oh" or word in UNITS[:10]
    ]
    whole = _plain(words[:at]) if at else Fraction(0)
    if not digits or len(digits) != len(words) - at - 1 or whole is None:
        return None
    return whole + Fraction("0." + "".join(digits))
