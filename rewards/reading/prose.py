"""Turns what prose puts around numbers into what the scanner of numbers reads: marks of points,
numbered lists, temperatures below zero, Chinese numerals, blanks that East Asia does not write."""

from __future__ import annotations

import re

from rewards.reading.stated import HEDGED, SENTENCE

# Molmo's marks around what it counts; their coordinates are no counts
POINTS = re.compile(r"</?points?\b[^<>]*>")
BELOW = re.compile(
    r"(?<![\w.-])(\d+(?:\.\d+)?\s*(?:\u00b0\s*[CF]?|degrees?(?: celsius| fahrenheit)?)) below "
    r"(?:zero|0(?:\s*\u00b0\s*[CF]?)?)(?!\w)",
    re.I,
)
MARKER = re.compile(r"(?m)^[ \t]*(\d{1,2})[.)][ \t]+")
CONCLUDES = re.compile(
    r"(?:so|thus|therefore|hence|in total|in conclusion|\u56e0\u6b64|\u6240\u4ee5)\b[, \uff0c]*",
    re.I,
)
UNSPACED = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3"  # kana, Han, Hangul
DIGITS = {letter: at for at, letter in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
PLACES = {"十": 10, "百": 100, "千": 1000}
NUMERAL = re.compile(
    rf"(?<![第{''.join(DIGITS)}{''.join(PLACES)}])([{''.join(DIGITS)}{''.join(PLACES)}]{{1,7}})"
    "(?=[个個只隻名位人张張条條头頭匹本把件棵朵架艘座台辆輛枚颗块根支种米元岁克秒天年度厘毫公]|小时|分钟|平方|立方)"
)
# a first, a month, a floor or an hour is no number of something
MISSING = re.compile(
    rf"(?<=[{UNSPACED}])(?<![第前])(?=-?\d)|(?<=\d)(?=[{UNSPACED}])(?![万亿十百千月日号號点點楼樓階時월일번층시])"
)
# not, about, at least, at most; or so, and more; in Chinese, Japanese and Korean
LEFT_OPEN = re.compile(
    r"(?:不是|不到|不足|并非|並非|[没沒]有|(?<!纽)(?<!紐)[约約]|大概|至少|至多|最多|最少|超[过過]|[少多大小][于於]|"
    r"接近|[将將]近|可能|恐らく|おそらく|약|최소|최대|적어도|거의)[是有为為]?\s*-?\d|"
    r"\d\s*\w{0,3}?\s?(?:左右|以上|以下|上下|多(?![边邊角面])|是错|是錯|不对|不對|不正[确確]|未[满満]|程度|"
    r"くらい|ぐらい|ほど|이상|이하|정도|쯤|아[니닙]|では?な|ではあ|じゃな)"
)


def without_points(text: str) -> str:
    """Take off Molmo's marks of points, but not the words in them."""
    return POINTS.sub(" ", text) if "<" in text else text


def scannable(text: str) -> str | None:
    """Rewrite a short plain text so that its numbers stand alone, with their signs; None where
    Chinese, Japanese or Korean words deny a number or leave it open."""
    text = BELOW.sub(r"-\1", text)
    head, line, rest = text.partition("\n")
    numbers = [int(number) for number in MARKER.findall(rest)]
    if head.strip() and len(numbers) > 1 and numbers == [*range(1, len(numbers) + 1)]:
        text = head + line + MARKER.sub("", rest)
    if text.isascii():
        return text
    text = MISSING.sub(" ", NUMERAL.sub(_figures, text))
    return None if LEFT_OPEN.search(text) else text


def conclusion(text: str) -> str:
    """Return the last of several sentences where it begins with "so" or "therefore", without that
    word; empty for any other text, and for a guess."""
    sentences = [s for line in text.split("\n") for s in SENTENCE.split(line) if s.strip()]
    match = CONCLUDES.match(sentences[-1].strip()) if len(sentences) > 1 else None
    if match is None or HEDGED.search(sentences[-1]):
        return ""
    return sentences[-1].strip()[match.end() :]


def _figures(found: re.Match[str]) -> str:
    """Write a Chinese numeral in figures; what is none ("five six": five or six) stays."""
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
