"""Rewrites prose around numbers for the number scanner: point marks, numbered lists, temperatures
below zero, Chinese numerals, the blanks that East Asian scripts omit."""

from __future__ import annotations

import re

from rewards.answers.reading.languages import THEREFORE, language_of
from rewards.answers.reading.plain import SHORT
from rewards.answers.reading.spelled import in_figures
from rewards.answers.reading.stated import HEDGED, SENTENCE

# Molmo's marks around what it counts; their coordinates are not counts
POINTS = re.compile(r"</?points?\b[^<>]*>")
BELOW = re.compile(
    r"(?<![\w.-])(\d+(?:\.\d+)?\s*(?:\u00b0\s*[CF]?|degrees?(?: celsius| fahrenheit)?)) below "
    r"(?:zero|0(?:\s*\u00b0\s*[CF]?)?)(?!\w)",
    re.I,
)
MARKER = re.compile(r"(?m)^[ \t]*(\d{1,2})[.)][ \t]+")
CONCLUDES = re.compile(rf"{THEREFORE}[, \uff0c]*", re.I)
RESULT = re.compile(
    r"(?:the|this|that) (?:\w+ ){0,2}(?:total|sum|difference|result|average|mean|ratio|product|"
    r"count|"
    r"area|perimeter|volume|length|height|angle|distance|price|cost|number|value|answer)\b|"
    r"(?:total|sum|result|count|difference|average)(?: \w+)?\s*[:=]|that (?:makes|gives)|this "
    r"(?:makes|gives)|it (?:is|equals)",
    re.I,
)
ENDING = (".", ":", "!", "?", "\u3002", "\uff1a", "\uff01")
UNSPACED = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3"  # kana, Han, Hangul
DIGITS = {letter: at for at, letter in enumerate("零一二三四五六七八九")} | {
    "两": 2,
    "兩": 2,
    "〇": 0,
}
PLACES = {"十": 10, "百": 100, "千": 1000}
NUMERAL = re.compile(
    rf"(?<![第{''.join(DIGITS)}{''.join(PLACES)}])([{''.join(DIGITS)}{''.join(PLACES)}]{{1,7}})"
    "(?=[个個只隻名位人张張条條头頭匹本把件棵朵架艘座台辆輛枚颗顆块塊根支种種米元岁歲克秒天年度厘毫公]|小[时時]|分[钟鐘]|平方|立方)"
)
WHOLE = re.compile(rf"\A([{''.join(DIGITS)}{''.join(PLACES)}]{{1,7}})\Z")
# Korean's own numbers before what they count
KOREAN = "한 두 세 네 다섯 여섯 일곱 여덟 아홉 열".split()
NATIVE = re.compile(
    rf"(?<![\uac00-\ud7a3])({'|'.join(KOREAN)})(?=\s?[\uba85\ub9c8\uac1c\ub300\uad8c\uc7a5\uadf8\ucc44])"
)
# an ordinal, a month, a floor or an hour is not a count
MISSING = re.compile(
    rf"(?<=[{UNSPACED}])(?<![第前])(?=-?\d)|(?<=\d)(?=[{UNSPACED}])(?![万亿十百千月日号號点點楼樓階時월일번층시])"
)
# not, about, at least, at most; or so, and more; in Chinese, Japanese and Korean
LEFT_OPEN = re.compile(
    r"(?:不是|不到|不足|并非|並非|[没沒]有|(?<!纽)(?<!紐)[约約]|大概|至少|至多|最多|最少|超[过過]|[少多大小][于於]|"
    r"接近|[将將]近|可能|恐らく|おそらく|약|최소|최대|적어도|거의)[是有为為]?[\s:$€£¥*]*-?\d|"
    r"\d\s*\w{0,3}?\s?(?:左右|以上|以下|上下|多(?![边邊角面])|是错|是錯|不对|不對|不正[确確]|未[满満]|程度|"
    r"くらい|ぐらい|ほど|이상|이하|정도|쯤|아[니닙]|では?な|ではあ|じゃな)"
)


# the same in German, French, Spanish, Portuguese, Italian and Dutch
OPEN_WORDS = (
    r"nicht|keine?[nmrs]?|etwa|ungef\u00e4hr|knapp|mindestens|h\u00f6chstens|bis zu|"
    r"(?:mehr|weniger|gr\u00f6\u00dfer|kleiner) als|\u00fcber|vielleicht|m\u00f6glicherweise|"
    r"k\u00f6nnten?|"
    r"falsch|aucune?|jamais|environ|presque|pr\u00e8s de|au moins|au plus|jusqu'\u00e0|"
    r"(?:plus|moins) d(?:e|')|peut-\u00eatre|pourrai(?:t|ent)|nunca|aproximadamente|unos|unas|"
    r"cerca de|"
    r"no (?:son|es|hay|est\u00e1n?|tiene)|al menos|por lo menos|como m\u00e1ximo|hasta|"
    r"(?:m\u00e1s|menos) de|quiz\u00e1s?|tal vez|"
    r"podr\u00edan?|"
    r"n\u00e3o|quase|pelo menos|no m\u00e1ximo|at\u00e9|mais de|talvez|poderiam?|"
    r"quasi|almeno|al massimo|fino a|(?:pi\u00f9|meno) di|forse|potrebbero?|"
    r"\u043d\u0435|\u043d\u0435\u0442|\u043e\u043a\u043e\u043b\u043e|\u043f\u0440\u0438\u043c\u0435\u0440\u043d\u043e|"
    r"\u0431\u043e\u043b\u0435\u0435|\u043c\u0435\u043d\u0435\u0435|\u0431\u043e\u043b\u044c\u0448\u0435|"
    r"\u043c\u0435\u043d\u044c\u0448\u0435|\u043f\u043e\u0447\u0442\u0438|"
    r"niet|geen|ongeveer|bijna|minstens|hoogstens|(?:meer|minder) dan|misschien"
)
# words of English too, which say so only in their own language
OPEN_THERE = "no|fast|tot|rund|non|pas|ca|unter|casi|circa|nie"
OPEN_BEHIND = (
    r"oder (?:mehr|weniger|so)|ou (?:plus|moins|mais|menos)|o (?:m\u00e1s|menos|pi\u00f9|meno)|"
    r"of (?:meer|minder)|ist falsch|est faux|n'est pas|no es|n\u00e3o \u00e9|non \u00e8|ist nicht"
)


def _open(words: str) -> re.Pattern[str]:
    clause = r"[^.,;:!?\d\n]{0,80}"
    return re.compile(
        rf"(?<!\w)(?:{words})(?!\w){clause}\d|(?<!\w)\d{clause}(?<!\w)(?:{OPEN_BEHIND})(?!\w)", re.I
    )


DIGIT = re.compile(r"\d")
OPEN = _open(f"{OPEN_WORDS}|{OPEN_THERE}")
OPEN_ALONE = _open(OPEN_WORDS)
# words for "about", for rewards that allow a difference
ROUGHLY = re.compile(
    r"(?<!\w)(?:about|around|approximately|approx\.?|roughly|circa|ca\.|etwa|ungef\u00e4hr|rund|environ|"
    r"aproximadamente|cerca de|ongeveer)\s+(?=[*$\u20ac\u00a3~-]{0,4}\d)|"
    r"(?:[~\u2248]|\\approx|\\sim)\s*(?=[$\u20ac\u00a3-]?\d)|(?:大[约約]|(?<!\u7ebd)\u7ea6|\u5927\u6982)[\u662f\u4e3a]?\s*(?=[*-]{0,3}\d)",
    re.I,
)
ENDED = re.compile(
    r"(?<=[\uac00-\ud7a3\w])(?:\uc785\ub2c8\ub2e4|\uc774\uc5d0\uc694|\uc774\ub2e4)(?=\W*$)"
)
HUNDREDTHS = re.compile(r"(?<=[\w ])(?:por cient?o|por cento|pour ?cent|per cento)\b", re.I)
PER_CENT = re.compile(r"\u767e\u5206\u4e4b\s?(\d+(?:\.\d+)?)")


def without_roughly(text: str) -> str:
    """Strip "about" and "approximately" from numbers, for rewards that allow some difference."""
    return ROUGHLY.sub("", text) if len(text) <= SHORT else text


def without_points(text: str) -> str:
    """Strip Molmo's point marks, but not the words in them."""
    return POINTS.sub(" ", text) if "<" in text else text


def scannable(text: str) -> str | None:
    """Rewrite a short plain text so that its numbers are separate, with their signs; None if
    Chinese, Japanese or Korean words deny a number or leave it open."""
    text = in_figures(BELOW.sub(r"-\1", HUNDREDTHS.sub("%", ENDED.sub("", text))))
    if DIGIT.search(text) and (OPEN if language_of(text) != "en" else OPEN_ALONE).search(text):
        return None
    numbers = [int(number) for number in MARKER.findall(text)]
    lines = sum(bool(line.strip()) for line in text.split("\n"))
    if 1 < len(numbers) < lines and numbers == [*range(1, len(numbers) + 1)]:
        text = MARKER.sub("", text)
    if text.isascii():
        return text
    text = NATIVE.sub(lambda found: str(1 + KOREAN.index(found[1])), PER_CENT.sub(r"\1%", text))
    text = MISSING.sub(" ", WHOLE.sub(_figures, NUMERAL.sub(_figures, text)))
    return None if LEFT_OPEN.search(text) else text


def conclusion(text: str) -> str:
    """Return the last of several sentences if it begins with "so" or "therefore" (without that
    word), states the sum or the difference, or is a closing line; empty for any other text, and for
    a guess."""
    sentences = [s for line in text.split("\n") for s in SENTENCE.split(line) if s.strip()]
    if len(sentences) < 2 or HEDGED.search(sentences[-1]):
        return ""
    last = sentences[-1].strip()
    if match := CONCLUDES.match(last):
        return last[match.end() :]
    earlier = [named[0].casefold() for s in sentences[:-1] if (named := RESULT.match(s.strip()))]
    if named := RESULT.match(last):
        return "" if named[0].casefold() in earlier else last
    return "" if earlier else closing_line(text)


def closing_line(text: str) -> str:
    """Return the last line of a text if it is short and follows a line that ends a sentence or in a
    colon; else empty."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    closes = len(lines) > 1 and len(lines[-1]) <= 60 and lines[-2].strip("*_ ").endswith(ENDING)
    return lines[-1] if closes else ""


def _figures(found: re.Match[str]) -> str:
    """Write a Chinese numeral in figures; others ("five six": five or six) stay."""
    total = digit = 0
    place = 10_000
    for at, letter in enumerate(found[1]):
        if letter in PLACES:
            if PLACES[letter] >= place or not digit and (at or letter != "十"):
                return found[0]
            place = PLACES[letter]
            total, digit = total + (digit or 1) * place, 0
        elif digit:
            return found[0]
        else:
            digit = DIGITS[letter]
    return f"{total + digit}"
