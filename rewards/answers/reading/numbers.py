"""Parses the number of an answer, with its unit, in the notations that people and models use."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rewards.answers.reading.figures import calm
from rewards.answers.reading.languages import absent
from rewards.answers.reading.parsed import UNPARSEABLE, Parsed, worst
from rewards.answers.reading.plain import SHORT, bare, plain
from rewards.answers.reading.prose import conclusion, scannable, without_points
from rewards.answers.reading.spelled import ALL, FIRST, GROUPS, SCALES, spelled, whole_words
from rewards.answers.reading.stated import emphasised, stated
from rewards.answers.reading.tokens import Token, tokens_of, value_of
from rewards.answers.reading.units import CURRENCIES, UNITS, Unit, unit_named

Real = int | float
MOST = 300  # tokens of an answer that are read: no number needs more
NEGATIVE = {"minus": -1, "negative": -1, "plus": 1, "positive": 1}
SYMBOLS = {
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "mn": 10**6,
    "mio": 10**6,
    "B": 10**9,
    "bn": 10**9,
    "T": 10**12,
}
SYMBOLS |= {"\u4e07": 10**4, "\u4ebf": 10**8, "\u5341": 10, "\u767e": 100, "\u5343": 1000}
RAISED = {
    **{
        letter: str(unicodedata.digit(letter))
        for letter in "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
    },
    "\u207a": "+",
    "\u207b": "-",
}
TIMES = {"\u00d7", "*", "\u00b7", "x", "X"}
# words before a number that make it approximate or a bound
NEAR = (
    "about around approximately approx roughly circa ca nearly almost over under above below "
    "exceeding "
    "~ \u2248 \u00b1 < > \u2264 \u2265 \u2260 \u2243 \u2245"
).split()
NEARBY = {
    ("at", "least"),
    ("at", "most"),
    ("more", "than"),
    ("less", "than"),
    ("fewer", "than"),
    ("greater", "than"),
    ("up", "to"),
    ("close", "to"),
    ("larger", "than"),
    ("higher", "than"),
    ("lower", "than"),
    ("smaller", "than"),
    ("or", "equal"),
    ("equal", "than"),
    ("other", "than"),
    ("different", "from"),
    ("as", "many"),
    ("instead", "of"),
    ("rather", "than"),
    ("no", "longer"),
    ("minimum", "of"),
    ("maximum", "of"),
    ("not", "exactly"),
    ("close", "by"),
    ("somewhere", "around"),
}
DENIES = {
    *"not never neither nor cannot isn aren without except excluding maybe perhaps possibly".split()
}
REFUTES = {
    *"wrong incorrect false not never impossible approximately roughly minimum maximum".split()
}
AFTER = {
    ("or", "more"),
    ("or", "less"),
    ("or", "fewer"),
    ("or", "so"),
    ("and", "more"),
    ("and", "up"),
    ("at", "least"),
    ("at", "most"),
    ("or", "above"),
    ("or", "below"),
    ("or", "higher"),
    ("or", "lower"),
    ("and", "above"),
    ("and", "below"),
    ("off", "by"),
    ("too", "many"),
    ("too", "few"),
}
ENDS = {",", ";", ".", ":", "!", "?", "\n", "(", ")", "\u3001"}
OPERATORS = {*"^*/\u00d7\u00b7\u00f7\u00b1<>\u2264\u2265\u2260\u2248~\u221a|%\\@_\u03c0"}
# words that end the noun that is counted
STOPS = {
    *"is are was were be in on at of and or but with for from to by as that which who there "
    "here so because than "
    "total altogether visible shown present it this the a an i we you they he she left per "
    "each if".split()
}
SEES = {
    *"are is were was has have had see sees contains contain shows show holds be with find "
    "count visible".split()
}
COPULAS = {
    *"is was are were equals = ist sind war waren betr\u00e4gt lautet est sont vaut es son era fue "
    "\u00e9 s\u00e3o foi \u00e8 sono zijn \u662f \u4e3a".split()
}
EXISTS = {"there", "here", "that", "it", "they", "these", "those", "es", "da", "dort"}
PERCENT = {*"% percent prozent pourcent porciento porcento percento procent".split()}
TOTALS = {"total", "totals", "altogether", "overall"}
NOT_NOTHING = {
    *"one more less fewer longer idea answer way doubt wait problem number matter need of the "
    "above hay se".split()
}


@dataclass(frozen=True)
class Quantity:
    """Holds a number as stated: its value (per cent as hundredths), its unit of measure, else the
    noun that it counts."""

    value: Real
    unit: Unit | None = None
    noun: tuple[str, ...] = ()
    percent: bool = False

    def equals(self, right: Quantity, tolerance: float = 0.0) -> bool:
        """Tell whether it is the right quantity. A missing unit or noun is taken from the other;
        integers must be equal, others agree to 1e-9, or to ``tolerance``, relative to the right
        one."""
        value = self.value
        if self.unit and right.unit:
            ratio = self.unit.ratio(right.unit)
            if ratio is None:
                return False
            value = value if ratio == 1 else value * ratio
        elif (
            (self.unit or right.unit)
            and (self.noun or right.noun)
            or self.noun
            and right.noun
            and not _same_noun(self.noun, right.noun)
        ):
            return False
        elif right.noun and not self.noun and right.noun[0][:1].isupper():
            return False  # a title that begins with a number: 12 Monkeys
        return near(value, right.value, tolerance)


def near(value: Real, right: Real, tolerance: float = 0.0) -> bool:
    """Tell whether a value is the right one: integers exactly, others to 1e-9, or within the
    tolerance, relative to the right one."""
    if isinstance(value, int) and isinstance(right, int) and not tolerance:
        return value == right
    if not (math.isfinite(value) and math.isfinite(right)):
        return value == right
    return abs(value - right) <= max(tolerance, 1e-9) * abs(right) * (1 + 1e-12)


def _same_noun(said: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Tell whether two nouns are the same, ignoring what else describes one of them."""
    first, second = ({word.casefold().removesuffix("s") for word in noun} for noun in (said, right))
    return first <= second or second <= first


@dataclass(frozen=True)
class Found:
    """Holds a quantity and the tokens it was read from."""

    quantity: Quantity
    start: int
    end: int


def number(text: str) -> Parsed[float]:
    """Read the one number of the final answer, without its unit: see ``quantity``."""
    parsed = quantity(text)
    return Parsed(None if parsed.value is None else parsed.value.value, parsed.status)


def quantity(text: str) -> Parsed[Quantity]:
    """Read the one number of the final answer: ``7``, ``1,234``, ``12 %``, ``-1/2``, ``seven``,
    ``5 million``, ``3 cm``; "repaired" if among other words.

    Several different numbers are no answer ("wrong_count"), so hedging earns nothing. Neither is a
    number that is denied, approximate or a bound: ``not 5``, ``about 5``, ``at least 5``.
    """
    answer = stated(text)
    parsed = quantity_in(answer.value)
    return Parsed(parsed.value, worst(answer.status, parsed.status))


ASIDE = re.compile(
    r"(?<=[^\W\d])\s+\u2014\s+(?=\d)"
)  # a dash that is no sign: the number \u2014 42
EXCLAIMED = re.compile(r"(\b[^\W\d_]{2,}\b.*\d)!+$", re.S)  # it's 5!, not 5!
BECAUSE = re.compile(
    r"\A(.*\d.*?),?\s+(?:because|weil|parce que|porque)\b.*\Z", re.S
)  # after a number it only gives a reason
# one thousand, one hundred
SCALE_COMMA = re.compile(r"\b(hundred|thousand|[mbt]r?illion), (?=[a-z])", re.I)


@lru_cache(maxsize=4096)
def quantity_in(span: str) -> Parsed[Quantity]:
    """Read the one number of a short text that is nothing but the answer."""
    span = ASIDE.sub(": ", without_points(span))
    if len(span) > SHORT:
        return UNPARSEABLE
    text = calm(plain(span))
    body = scannable(bare(EXCLAIMED.sub(r"\1", text) if "!" in text else text))
    if body is None:
        return UNPARSEABLE
    body = SCALE_COMMA.sub(r"\1 ", BECAUSE.sub(r"\1", body))
    parsed = _parsed(body)
    if parsed.value is None and (last := conclusion(body)):
        parsed = Parsed(_parsed(bare(last)).value, "repaired")
    if parsed.value is None and "**" in span and (meant := _in_bold(span)):
        return Parsed(quantity_in(meant).value, "repaired")
    return parsed


# what changes the meaning of a bold number: **12** of 15, **3** + 4
GOES_ON = re.compile(
    r"\s*(?:of|out|to|or|and|bis|von|sur|de|\u5230|[-+/*\u00d7\u2013~^%:]|\d)", re.I
)


def _in_bold(span: str) -> str:
    """Return a sentence that has one number in bold without its other figures: "In 2019 it is
    **5**." as "In then it is 5."; empty for any other text."""
    bold = emphasised(span)
    if bold is None or not any(letter.isdigit() for letter in bold):
        return ""
    before, _, behind = span.partition(f"**{bold}**")
    if GOES_ON.match(behind) or re.search(r"[-+/*\u00d7\u2013~^:\d]\s*$", before.rstrip(": ")):
        return ""
    return f"{FIGURES.sub('then', before)} {bold} {FIGURES.sub('then', behind)}"


FIGURES = re.compile(r"(?<![\w.,-])\d[\d.,:/]*(?<![.,:/])%?(?!\w)")


def _parsed(body: str) -> Parsed[Quantity]:
    """Read the one number of a plain text."""
    words = whole_words(body.casefold())
    if words is not None:
        return Parsed(Quantity(words))
    tokens = tokens_of(body)[:MOST]
    if not tokens or len(tokens) == MOST:
        return UNPARSEABLE
    sides = _split(tokens)
    if len(sides) > 1:
        return _equation(sides)
    return _among(tokens)


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """Split an equation at its equals signs."""
    sides: list[list[Token]] = [[]]
    for token in tokens:
        if token.text == "=":
            sides.append([])
        else:
            sides[-1].append(token)
    return sides


def _equation(sides: list[list[Token]]) -> Parsed[Quantity]:
    """Read the last side of an equation, whose other sides must be names or equal it."""
    last = _among(sides[-1])
    if last.value is None:
        return last
    for written in sides[:-1]:
        side: Sequence[Token] = written
        matches = _scan(side)
        value = _arithmetic(side)
        if value is None and (stating := _behind_copula(side)):
            matches, value = None, _arithmetic(stating)
            side = stating
        if (
            value is None
            and any(token.kind in ("figure", "junk", "vulgar") for token in side)
            or value is None
            and matches
        ):
            return Parsed(None, "wrong_count")
        if value is not None and not near(value, last.value.value):
            return Parsed(None, "wrong_count")
    return Parsed(last.value, "repaired" if any(sides[0]) else last.status)


def _behind_copula(side: Sequence[Token]) -> Sequence[Token]:
    """Return the predicate of a sentence: 3 + 4 of "the sum is 3 + 4", "sum: 3 + 4"."""
    at = [i for i, token in enumerate(side) if token.text.casefold() in COPULAS | {":"}]
    return side[at[-1] + 1 :] if at else ()


def _arithmetic(tokens: Sequence[Token]) -> Real | None:
    """Compute sums and products of numbers, left to right as usual; None for anything else."""
    terms: list[Real] = []
    at = 0
    sign: Real = 1
    operator = "+"
    while at < len(tokens):
        matches = _number(tokens, at, signed=operator in "*/" or not terms)
        if matches is None or matches.end == at:
            return None
        value = matches.quantity.value
        try:
            if operator == "+":
                terms.append(sign * value)
            else:
                terms[-1] = terms[-1] * value if operator == "*" else terms[-1] / value
        except (ZeroDivisionError, OverflowError):
            return None
        at = matches.end
        if at == len(tokens):
            return sum(terms)
        text = tokens[at].text
        if text in "+-":
            operator, sign = "+", -1 if text == "-" else 1
        elif text in TIMES or text in "/\u00f7":
            operator = "*" if text in TIMES else "/"
        else:
            return None
        at += 1
    return None


def _among(tokens: Sequence[Token]) -> Parsed[Quantity]:
    """Read the one number among other words."""
    matches = _scan(tokens)
    if matches is None:
        return UNPARSEABLE
    if not matches:
        return _nothing(tokens)
    if len(matches) > 1:
        matches = _meant(tokens, matches)
    if (
        len({(f.quantity.value, f.quantity.percent) for f in matches}) > 1
        or len({f.quantity.unit for f in matches} - {None}) > 1
    ):
        return Parsed(None, "wrong_count")
    if not all(_clear(tokens, match) for match in matches):
        return UNPARSEABLE
    first = matches[0]
    alone = first.start == 0 and first.end == len(tokens)
    return Parsed(first.quantity, "ok" if alone else "repaired")


def _meant(tokens: Sequence[Token], matches: list[Found]) -> list[Found]:
    """Choose among several numbers: "5, not 6", "7 cats: 3 black and 4 white", "3 + 4, 7 in total",
    "the value for 2015 is 12", "5 cm (50 mm)"; all of them if no such rule applies."""
    affirmed = [f for f in matches if not _is(tokens, f.start - 1, "not")] or matches
    if affirmed != matches and len(affirmed) == 1:
        return affirmed
    undated = [f for f in matches if not _is_date(tokens, f)]
    if len(undated) == 1:
        return undated
    if len(matches) == 2 and _converted(tokens, *matches):
        return matches[:1]
    values = [f.quantity.value for f in matches]
    between = [t.text.casefold() for t in tokens[matches[0].end : matches[1].start]]
    if len(values) > 2 and values[0] == sum(values[1:]) and {"(", ":"} & {*between}:
        return matches[:1]
    if _parted(tokens, matches):
        return matches[:1]
    last = matches[-1]
    around = {t.text.casefold() for t in tokens[matches[-2].end :]}
    if len(values) > 2 and values[-1] == sum(values[:-1]) and around & TOTALS:
        return matches[-1:]
    verb = last.start - 1 - (tokens[last.start - 1].text.casefold() in ("de", "di"))
    states = verb > 0 and tokens[verb].text.casefold() in COPULAS
    subject = tokens[0].kind == "word" and matches[0].start > 0 and _of_subject(tokens, verb)
    subject &= not any(_of_subject(tokens, f.start - 1) for f in matches[:-1])
    if states and subject and last.end + len(last.quantity.noun) == len(tokens):
        return matches[-1:]
    return matches


def _is_date(tokens: Sequence[Token], match: Found) -> bool:
    """Tell whether a number is the year of another: 35 in 2018, 35 (2018)."""
    value, before = match.quantity.value, tokens[match.start - 1].text.casefold()
    bracketed = tokens[match.start].text == "(" and match.end == match.start + 3
    return (
        isinstance(value, int)
        and 1900 <= value < 2100
        and len(tokens[match.start + bracketed].text) == 4
        and not match.quantity.unit
        and (bracketed or before in YEARS or before in DATES and not match.quantity.noun)
    )


YEARS = {*"in en im em nel".split()}
DATES = {*"for during year by of pour para \u5728".split()}


def _parted(tokens: Sequence[Token], matches: list[Found]) -> bool:
    """Tell whether the numbers after the first, in other sentences or named as parts, only break it
    down: three mugs, two of them red and one blue."""
    total, parts = matches[0].quantity, [f.quantity for f in matches[1:]]
    if not isinstance(total.value, int) or total.unit or any(p.unit or p.percent for p in parts):
        return False
    words = [token.text.casefold() for token in tokens]
    behind = words[matches[0].end :]
    marked = any(tuple(words[f.end : f.end + 2]) == ("of", "the") for f in matches[1:])
    marked |= any(pair in OF_THEM for pair in zip(behind, behind[1:]))
    marked |= any(
        word in ("davon", "d'entre") or word.startswith("\u5176\u4e2d") for word in behind
    )
    head = {*words[: matches[0].start]}
    if not (total.noun or head & (SEES | EXISTS_THERE)):
        return False
    if any(not _is_part(p, total, marked) for p in parts):
        return False
    whole = sum(p.value for p in parts)
    if marked:
        return 0 < whole <= total.value
    clause = words[matches[0].end : matches[1].start]
    ends = next((i for i, word in enumerate(clause) if word in (".", ";", ":", "\n")), None)
    return whole == total.value and ends is not None and not PLACES & {*clause[:ends]}


def _is_part(part: Quantity, total: Quantity, marked: bool) -> bool:
    """Tell whether a number may count part of a total: it has no noun."""
    if not isinstance(part.value, int) or not 0 < part.value <= total.value:
        return False
    noun = tuple(word.casefold() for word in part.noun)
    if not noun or noun[0] in PART_WORDS:
        return True
    if marked and noun[0][0] >= "\u3040":
        return True
    return bool(total.noun) and _same_noun(part.noun, total.noun) and len(noun) == 1


OF_THEM = {("of", word) for word in ("them", "which", "whom", "these", "those")} | {
    ("de", "ellos"),
    ("de", "ellas"),
    ("di", "loro"),
    ("di", "essi"),
    ("di", "esse"),
    ("van", "hen"),
}
PART_WORDS = {
    *"davon d'entre d de di van deles delas sind ist sont est son es s\u00e3o \u00e9 sono \u00e8 "
    "zijn stand stands sit sits appear appears look looks wear wears face faces".split()
}
PLACES = {
    *"left right top bottom middle center centre front back foreground background upper lower "
    "behind links rechts gauche droite izquierda derecha".split()
}
EXISTS_THERE = {*"gibt sehe sieht zeigt a hay veo h\u00e1 vejo sono vedo zijn".split()}


def _of_subject(tokens: Sequence[Token], verb: int) -> bool:
    """Tell whether the verb has a subject: the total is, not there are."""
    states = verb > 0 and tokens[verb].text.casefold() in COPULAS - {"="}
    return states and tokens[verb - 1].text.casefold() not in EXISTS


def _converted(tokens: Sequence[Token], first: Found, second: Found) -> bool:
    """Tell whether the second number is the first in another unit, in brackets after it, to within
    2 %."""
    inside = {token.text.casefold() for token in tokens[first.end + 1 : second.start]}
    front, behind = first.quantity, second.quantity
    if not (
        _is(tokens, first.end, "(")
        and _is(tokens, second.end, ")")
        and inside <= {"or", "approx", "approx.", *NEAR}
        and front.unit
        and behind.unit
    ):
        return False
    kinds = (front.unit.kind, behind.unit.kind)
    if kinds == ("celsius", "fahrenheit"):
        return abs(front.value * 1.8 + 32 - behind.value) < 1
    if kinds == ("fahrenheit", "celsius"):
        return abs((front.value - 32) / 1.8 - behind.value) < 1
    ratio = front.unit.ratio(behind.unit)
    return ratio is not None and near(front.value * ratio, behind.value, 0.02)


def _nothing(tokens: Sequence[Token]) -> Parsed[Quantity]:
    """Read "none", "there are no dogs", "il n'y a aucun chien" as 0."""
    words = [token.text.casefold() for token in tokens]
    if absent(" ".join(words)):
        return Parsed(Quantity(0), "repaired")
    if (
        words in (["none"], ["nil"], ["nought"])
        or words[:1] == ["none"]
        and words[1:2] != ["of"]
        and len(words) < 4
    ):
        return Parsed(Quantity(0))
    for at, word in enumerate(words):
        follows = tokens[at + 1] if at + 1 < len(words) else None
        before = at == 0 and len(words) < 5 or at > 0 and words[at - 1] in SEES
        if word == "none" and at and words[at - 1] in SEES:
            return Parsed(Quantity(0), "repaired")
        if (
            word == "no"
            and before
            and follows
            and follows.kind == "word"
            and words[at + 1] not in NOT_NOTHING
        ):
            noun = _noun(tokens, at + 1)
            return Parsed(Quantity(0, None, noun), "repaired")
    return UNPARSEABLE


def _scan(tokens: Sequence[Token]) -> list[Found] | None:
    """Find all numbers; None if one is part of something else: a date, a version, 5x."""
    matches: list[Found] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        match = None if _in_a_tuple(tokens, at) else _number(tokens, at)
        if match is not None:
            matches.append(match)
            at = match.end
        elif token.kind in ("junk", "raised") or token.kind in ("figure", "vulgar"):
            return None
        else:
            at += 1
    return matches


def _in_a_tuple(tokens: Sequence[Token], at: int) -> bool:
    """Tell whether brackets open here, or just before, around two numbers: (1,2) is not 1.2."""
    if at + 1 < len(tokens) and tokens[at].text in ("(", "["):
        at += 1
    elif not at or tokens[at - 1].text not in ("(", "[", "{"):
        return False
    text = tokens[at].text
    return tokens[at].kind == "figure" and "," in text and not isinstance(value_of(text), int)


# -------------------------------------------------------------------------------------- one number


def _number(tokens: Sequence[Token], start: int, signed: bool = True) -> Found | None:
    """Read the number that begins at a token, with sign, unit and noun."""
    sign, at = _signs(tokens, start) if signed else (1, start)
    money = UNITS[tokens[at].text] if at < len(tokens) and tokens[at].text in CURRENCIES else None
    at += money is not None
    if money and _is(tokens, at, "-"):
        sign, at = -sign, at + 1
    ratio = _ratio(tokens, at)
    if ratio is None or at - start > 3:
        return None
    value, at = _scaled(tokens, *ratio, money is not None)
    share, end = _percent(tokens, at)
    if share:
        return Found(Quantity(sign * _over(value, share), percent=True), start, end)
    if money:
        at += at < len(tokens) and unit_named(tokens[at].text) == money
        return Found(Quantity(sign * value, money), start, at)
    unit, at = _unit(tokens, at)
    noun = () if unit else _noun(tokens, at)
    if noun and start == 0 and at + len(noun) == len(tokens):
        at += len(noun)
    return Found(Quantity(sign * value, unit, noun), start, at)


def _signs(tokens: Sequence[Token], start: int) -> tuple[int, int]:
    """Read signs before a number, and where they end; a minus that subtracts is not a sign."""
    at, sign = start, 1
    while at < len(tokens):
        text = tokens[at].text.casefold()
        if text in "+-" and (at > start or not tokens[at].glued or not _operand(tokens, at - 1)):
            sign *= -1 if text == "-" else 1
        elif text in NEGATIVE and at + 1 < len(tokens):
            sign *= NEGATIVE[text]
        else:
            break
        at += 1
    return sign, at


def _percent(tokens: Sequence[Token], at: int) -> tuple[int, int]:
    """Read a sign or the words of per cent: the denominator, 0 if there is none."""
    if at < len(tokens) and tokens[at].text.casefold() in PERCENT:
        return 100, at + 1
    if at + 1 < len(tokens) and (tokens[at].text + tokens[at + 1].text).casefold() in PERCENT:
        return 100, at + 2
    return (1000, at + 1) if _is(tokens, at, "\u2030") else (0, at)


def _is(tokens: Sequence[Token], at: int, text: str) -> bool:
    return at < len(tokens) and tokens[at].text.casefold() == text


def _operand(tokens: Sequence[Token], at: int) -> bool:
    """Tell whether a token can stand before a minus that subtracts."""
    if at < 0:
        return False
    token = tokens[at]
    return (
        token.kind in ("figure", "junk", "vulgar", "raised")
        or token.text in ")]"
        or (token.kind == "word")
    )


def _over(value: Real, by: int) -> Real:
    share = Fraction(value) / by if isinstance(value, int) else value / by
    return _simple(share)


def _simple(value: Fraction | float) -> Real:
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else value.numerator / value.denominator
    return value


def _ratio(tokens: Sequence[Token], at: int) -> tuple[Real, int] | None:
    """Read a figure, mixed number, root or power, or a fraction of two of them."""
    first = _power(tokens, at)
    if first is None:
        return None
    value, at = first
    mixed = _mixed(tokens, value, at)
    if mixed:
        return mixed
    below = _power(tokens, at + 1) if _is(tokens, at, "/") else None
    if below is None:
        return value, at
    if below[0] == 0 or _is(tokens, below[1], "/"):
        return None
    try:
        share = (
            Fraction(value) / below[0]
            if isinstance(value, int) and isinstance(below[0], int)
            else value / below[0]
        )
    except OverflowError:
        return None
    return _simple(share), below[1]


def _mixed(tokens: Sequence[Token], value: Real, at: int) -> tuple[Real, int] | None:
    """Read the fraction after a whole number: 3 1/2, 3½, 3 and a half."""
    if not isinstance(value, int) or at >= len(tokens):
        return None
    token = tokens[at]
    if token.kind == "vulgar":
        return _simple(
            value + Fraction(unicodedata.numeric(token.text)).limit_denominator(100)
        ), at + 1
    behind = [t.text for t in tokens[at : at + 4]]
    start = at + 1 if behind[:1] == ["and"] else at
    three = tokens[start : start + 3]
    if len(three) == 3 and three[0].kind == three[2].kind == "figure" and three[1].text == "/":
        above, below = value_of(three[0].text), value_of(three[2].text)
        if (
            isinstance(above, int)
            and isinstance(below, int)
            and 0 < above < below
            and not three[0].glued
        ):
            return _simple(value + Fraction(above, below)), start + 3
    if behind[:1] == ["and"]:
        if start < len(tokens) and tokens[start].kind == "vulgar":
            return _simple(
                value + Fraction(unicodedata.numeric(tokens[start].text)).limit_denominator(100)
            ), start + 1
        words, end = _run(tokens, start)
        share = spelled(words)
        if share is not None and 0 < share < 1:
            return _simple(value + share), end
    return None


def _power(tokens: Sequence[Token], at: int) -> tuple[Real, int] | None:
    """Read a base and its exponent: 10^6, 2**3, 10⁶, 1.5 x 10^6."""
    base = _base(tokens, at)
    if base is None:
        return None
    value, at = _raised(tokens, *base)
    if at < len(tokens) and tokens[at].text in TIMES and _is(tokens, at + 1, "10"):
        ten, end = _raised(tokens, 10, at + 2)
        if end > at + 2:
            value, at = value * ten, end
    elif at < len(tokens) and tokens[at].text == "\u221a":
        root = _base(tokens, at)
        if root is not None:
            value, at = value * root[0], root[1]
    return value, at


def _raised(tokens: Sequence[Token], value: Real, at: int) -> tuple[Real, int]:
    """Apply an exponent, if there is one that can be computed."""
    if at >= len(tokens):
        return value, at
    exponent: Real | None = None
    end = at
    if tokens[at].kind == "raised" and tokens[at].glued:
        digits = "".join(RAISED.get(letter, "x") for letter in tokens[at].text)
        if digits.lstrip("+-").isdigit():
            exponent, end = int(digits), at + 1
    elif tokens[at].text == "^" or tokens[at].text == "*" and _is(tokens, at + 1, "*"):
        end = at + (1 if tokens[at].text == "^" else 2)
        sign = -1 if _is(tokens, end, "-") else 1
        matches = _base(tokens, end + (sign < 0 or _is(tokens, end, "+")))
        if matches:
            exponent, end = sign * matches[0], matches[1]
    if exponent is None:
        return value, at
    try:
        if isinstance(value, int) and isinstance(exponent, int) and abs(exponent) <= 400:
            power = _simple(Fraction(value) ** exponent)
        else:
            power = float(value) ** float(exponent)
    except (OverflowError, ZeroDivisionError, ValueError):
        return value, at
    return (value, at) if isinstance(power, complex) else (power, end)


def _base(tokens: Sequence[Token], at: int) -> tuple[Real, int] | None:
    """Read a figure, number words, a vulgar fraction, a root, or any of them in brackets."""
    if at >= len(tokens):
        return None
    token = tokens[at]
    if token.kind == "figure":
        return value_of(token.text), at + 1
    if token.kind == "vulgar":
        return unicodedata.numeric(token.text), at + 1
    if token.text == "\u221a" or token.text.casefold() == "sqrt":
        inside = _base(tokens, at + 1)
        if inside is None or inside[0] < 0:
            return None
        root = math.sqrt(inside[0])
        return (int(root) if root.is_integer() else root), inside[1]
    if token.text == "(":
        return _bracketed(tokens, at)
    return _words(tokens, at) if token.kind == "word" else None


def _bracketed(tokens: Sequence[Token], at: int) -> tuple[Real, int] | None:
    """Read a number in brackets; after a word, brackets hold its argument."""
    if tokens[at].glued and tokens[at - 1].kind == "word" and tokens[at - 1].text != "sqrt":
        return None
    sign = -1 if _is(tokens, at + 1, "-") else 1
    inner = _ratio(tokens, at + 1 + (sign < 0))
    return (sign * inner[0], inner[1] + 1) if inner and _is(tokens, inner[1], ")") else None


def _words(tokens: Sequence[Token], at: int) -> tuple[Real, int] | None:
    """Read the longest run of number words that is a number."""
    words, end = _run(tokens, at)
    value = spelled(words)
    while value is None and len(words) > 1 and "-" not in tokens[end - 1].text:
        words, end = words[:-1], end - 1
        value = spelled(words)
    if value is None or _one_of(tokens, at, end, words):
        return None
    return _simple(value), end


def _run(tokens: Sequence[Token], at: int) -> tuple[tuple[str, ...], int]:
    """Return the number words from a token on, and where they end."""
    words: list[list[str]] = []
    while at + len(words) < len(tokens) and tokens[at + len(words)].kind == "word":
        parts = tokens[at + len(words)].text.casefold().split("-")
        if (
            not all(part in ALL for part in parts)
            or not words
            and parts[0] not in FIRST | {"a", "an", "point"}
        ):
            break
        words.append(parts)
    while words and words[-1][-1] in ("and", "a", "an", "of", "point", "oh"):
        words.pop()
    return tuple(word for parts in words for word in parts), at + len(words)


def _one_of(tokens: Sequence[Token], start: int, end: int, words: tuple[str, ...]) -> bool:
    """Tell whether "one" or a part is a pronoun or an ordinal here: "the one on the left"."""
    if words not in (("one",), ("half",)) or (start == 0 and end == len(tokens)):
        return False
    before = tokens[start - 1].text.casefold() if start else ""
    after = tokens[end].text.casefold() if end < len(tokens) else ""
    if words == ("half",):
        return after in ("of", "the")
    return after == "of" or before in {
        *"the this that which no any every each some another other red blue green white black "
        "small large big first second third last right left".split()
    }


def _scaled(tokens: Sequence[Token], value: Real, at: int, money: bool) -> tuple[Real, int]:
    """Apply the words after a figure: 5 million, 5 hundred thousand, 5k, 5 dozen."""
    for _ in range(3):
        if at >= len(tokens):
            break
        token = tokens[at]
        word = token.text.casefold().removesuffix("s") if token.kind == "word" else token.text
        scale = SCALES.get(word) or (GROUPS.get(word) if word != "score" else None)
        if scale is None and (
            token.glued or token.text in ("mn", "mio", "bn", "\u4e07", "\u4ebf", "k")
        ):
            scale = SYMBOLS.get(token.text)
        if scale is None and money and token.glued:
            scale = {"m": 10**6, "b": 10**9}.get(token.text)
        if scale is None or at and tokens[at - 1].text == "and":
            break
        exact = Fraction(str(value)) if isinstance(value, float) and math.isfinite(value) else None
        value = _simple(exact * scale) if exact is not None else value * scale
        at += 1
    return value, at


def _unit(tokens: Sequence[Token], at: int) -> tuple[Unit | None, int]:
    """Read a unit of up to four tokens; "in" and other short words only at the end of the
    answer."""
    for size in (5, 4, 3, 2, 1):
        part = tokens[at : at + size]
        if len(part) < size:
            continue
        spelling = "".join(
            ("" if token.glued or not i else " ") + token.text for i, token in enumerate(part)
        )
        unit = unit_named(spelling) or unit_named(
            spelling.replace("^(2)", "\u00b2").replace("^(3)", "\u00b3")
        )
        if spelling == "s" and at and len(tokens[at - 1].text) == 4:
            continue  # the 1990s
        last = at + size == len(tokens) or tokens[at + size].text in ENDS
        if unit and (
            last
            or spelling
            not in ("in", "a", "h", "s", "t", "A", "B", "p", "mi", "bar", "day", "second", "'", '"')
        ):
            return unit, at + size
    return None, at


def _noun(tokens: Sequence[Token], at: int) -> tuple[str, ...]:
    """Return the words that a number counts: at most three, up to a preposition or the end."""
    words: list[str] = []
    for token in tokens[at : at + 4]:
        if (
            token.kind != "word"
            or token.glued
            or token.text.casefold() in STOPS
            or token.text.casefold() in REFUTES
        ):
            break
        words.append(token.text)
    return tuple(words[:3]) if len(words) < 4 else ()


# ----------------------------------------------------------------------------------------- context


def _clear(tokens: Sequence[Token], match: Found) -> bool:
    """Tell whether the words around a number leave its meaning unchanged."""
    before = tokens[match.start - 1].text.casefold() if match.start else ""
    if before in BOUNDS or before == "after" and not (match.quantity.unit or match.quantity.noun):
        return False
    return _clear_before(tokens, match.start) and _clear_behind(tokens, match.end)


BOUNDS = {"before", "until", "till", "pre", "post"}


def _clear_before(tokens: Sequence[Token], start: int) -> bool:
    if not start:
        return True
    before = [token.text.casefold() for token in tokens[max(0, start - 12) : start]]
    last = before[-1]
    if last in OPERATORS or last in "+-" and tokens[start].glued or last in NEAR:
        return False
    if last == "(" and tokens[start - 1].glued and start > 1 and tokens[start - 2].kind == "word":
        return False  # f(5)
    if tokens[start].glued and (
        tokens[start - 1].kind == "word" or last == ":" and _operand(tokens, start - 2)
    ):
        return False
    if before[-2:] in (["c", "."], ["ca", "."], ["approx", "."]):
        return False
    close = [word for word in before if word not in ("a", "an", "the", "only", "just")]
    if close and (
        close[-1] in NEAR
        or close[-1] == "no"
        or tuple(close[-2:]) in NEARBY
        or tuple(close[-3:-1]) in NEARBY
        and close[-1] in ("to", "as")
    ):
        return False
    clause: list[str] = []
    for word in reversed(before):
        if word in ENDS:
            break
        clause.append(word)
    if "be" in clause and {"could", "might", "may"} & {*clause}:
        return False
    return not any(word in DENIES or word == "or" or word.endswith("n't") for word in clause)


def _clear_behind(tokens: Sequence[Token], end: int) -> bool:
    if end >= len(tokens):
        return True
    token = tokens[end]
    if (
        token.text in OPERATORS
        or token.text == "?"
        or token.kind in ("raised", "vulgar")
        or token.text == "!"
        and token.glued
    ):
        return False
    if token.text in "+-" and (
        token.glued or end + 1 >= len(tokens) or tokens[end + 1].kind != "word"
    ):
        return False
    if (
        token.kind == "word"
        and token.glued
        or token.text == ":"
        and end + 1 < len(tokens)
        and tokens[end + 1].glued
        and tokens[end + 1].kind in ("figure", "junk")
    ):
        return False
    if token.text == "(" and token.glued:
        return False
    clause: list[str] = []
    for later in tokens[end : end + 12]:
        if later.text in ENDS:
            break
        clause.append(later.text.casefold())
    if "or" in clause or any(pair in AFTER for pair in zip(clause, clause[1:])):
        return False
    return not any(word in REFUTES or word.endswith("n't") for word in clause) and clause[
        :1
    ] not in (["plus"], ["ish"], ["minus"])
