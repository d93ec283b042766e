"""Holds the published rules by which answers are compared: VQA v2 and TextVQA, relaxed accuracy,
ANLS. Benchmarks use them unchanged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rewards.answers.reading.plain import SHORT, evened

THRESHOLD = 0.5  # of ANLS: less similar answers earn nothing
TOLERANCE = 0.05  # of relaxed accuracy

# ------------------------------------------------------------------------------------------- VQA

# What the published evaluation removes, or replaces by a blank if there is no blank next to it.
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
DIGIT_COMMA = re.compile(r"\d,+(?=\d)")
FULL_STOP = re.compile(r"\.(?!\d)")
ARTICLES = {"a", "an", "the"}
COUNTED = {
    word: str(i)
    for i, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
COUNTED["none"] = "0"
# Words that get their apostrophes back, whichever of them is missing.
CONTRACTED = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've "
    "hasn't haven't he'd he'd've "
    "he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've "
    "mustn't must've needn't not've "
    "o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've "
    "somebody'll somebody's someone'd "
    "someone'd've someone'll someone's something'd something'd've something'll that's there'd "
    "there'd've there're there's "
    "they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're "
    "what's what've when's where'd "
    "where's where've who'd who'd've who'll who's who've why'll why're why's won't would've "
    "wouldn't wouldn't've y'all "
    "y'all'll y'all'd've you'd you'd've you'll you're you've 'twas 'ow's'at"
).split()


def _contractions() -> dict[str, str]:
    table = {"somebody'd": "somebodyd"}  # as published
    for word in CONTRACTED:
        parts = word.split("'")
        for missing in range(1, len(parts)):
            table[
                "'".join(
                    parts[: missing - 1]
                    + [parts[missing - 1] + parts[missing]]
                    + parts[missing + 1 :]
                )
            ] = word
    return table


CONTRACTIONS = _contractions()


def vqa_words(text: str) -> str:
    """Normalise an answer as VQA v2 does (processPunctuation and processDigitArticle of its
    evaluation): punctuation, articles, number words to ten, apostrophes, case."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    joined = bool(DIGIT_COMMA.search(text))
    evened_out = text
    for sign in PUNCTUATION:
        evened_out = evened_out.replace(
            sign, "" if joined or f"{sign} " in text or f" {sign}" in text else " "
        )
    words = [COUNTED.get(word, word) for word in FULL_STOP.sub("", evened_out).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def textvqa_words(text: str) -> str:
    """Normalise an answer as TextVQA's evaluation does: as VQA v2, after a tokenizer that drops
    commas and question marks and splits off 's."""
    return vqa_words(text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip())


# Signs that those rules lose and a reader does not: of a number, between operands, a factorial, the
# note on a grade.
MEANT = re.compile(
    r"(?<![\w)])-(?=\s?\.?\d)|(?<=\d)!|(?<=\d)\s*[-+/=<>]\s*(?=[\d.])|"
    r"(?<![^\W_][A-Za-z])(?<=[A-Za-z])[-+]+(?!\w)|"
    r"\b[A-Za-z]\s*[-+/=<>]\s*(?=\d+\b|[A-Za-z]\b)|(?<=\d)\s*[-+/=<>]\s*(?=[A-Za-z]\b)|"
    r"(?<![\w])[<>](?=\s?\d)"
)


@lru_cache(maxsize=8192)
def vqa_key(text: str, textvqa: bool = False) -> tuple[str, str]:
    """Return the key by which two VQA answers are equal: the published words, and the signs that
    these rules lose. A bare article is kept, and so is a text too long to be an answer."""
    if len(text) > SHORT:
        return text, ""
    plain = evened(text).strip()
    plain = re.sub(r"(?<!\w)(?:minus|negative)\s+(?=\d)", "-", plain, flags=re.I)
    words = (textvqa_words if textvqa else vqa_words)(plain)
    signs = "".join(match[0].strip() for match in MEANT.finditer(plain))
    return words or plain.casefold(), signs


def agreement(answered: object, people: Sequence[object]) -> float:
    """Average over the people left out of min(1, others who said the same / 3); of fewer than four
    people one is enough."""
    if len(people) < 4:
        return float(answered in people)
    same = [person == answered for person in people]
    return sum(min(1.0, (sum(same) - left_out) / 3) for left_out in same) / len(people)


# -------------------------------------------------------------------------------- charts, documents


def relaxed(answer: str, right: str) -> bool:
    """Tell whether the answer to a chart question is right (Masry et al. 2022): numbers within 5 %
    of the right one, everything else equal up to case.

    As in the published evaluation "12%" is read as 0.12, no thousands are, and a right value of 0
    is compared as a word.
    """
    value = _float(answer)
    target = _float(right)
    if value is not None and target:
        return abs(value - target) / abs(target) <= TOLERANCE
    return answer.lower() == right.lower()


def _float(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(answer: str, rights: Sequence[str]) -> float:
    """Return the normalised Levenshtein similarity to the nearest of several right answers, 0 below
    0.5 (Biten et al. 2019; as in the published code exactly 0.5 counts)."""
    from rapidfuzz.distance import Levenshtein

    near = 0.0
    for right in rights:
        pair = [" ".join(text.strip().lower().split()) for text in (answer, right)]
        longest = max(len(answer), len(right))
        near = max(near, 1 - Levenshtein.distance(*pair) / longest if longest else 1.0)
    return near if near >= THRESHOLD else 0.0
