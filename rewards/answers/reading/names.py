"""Parses names and lists of names, and tells whether two names are the same."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from functools import lru_cache

from rewards.answers.reading.numbers import quantity_in
from rewards.answers.reading.objects import loose_json
from rewards.answers.reading.parsed import UNPARSEABLE, Parsed, worst
from rewards.answers.reading.parts import fenced, final
from rewards.answers.reading.plain import SHORT, bare, plain
from rewards.answers.reading.prose import closing_line
from rewards.answers.reading.stated import announced, emphasised
from rewards.answers.reading.statements import predicates

NOTHING = {"none", "null", "nothing", "no object", "no objects", "no box", "no boxes", "n/a"}
# A hyphen or underscore joins words of two letters or more; x-1 and A_1 keep theirs.
JOINT = re.compile(
    r"(?<=[^\W\d_]{2})[-_]+(?=\w)|(?<=[^\W_])[-_]+(?=[^\W\d_]{2})|(?<=\d\d)[-_]+(?=[^\W\d_])|"
    r"_+(?=[^\W_]{2})"
)
EXCLAIMED = re.compile(r"(?<=[^\W\d_]{3})!+$")
ARTICLE = re.compile(r"(?:the|an?)\s+(?=\S)")
SUBJECT = re.compile(
    r"^(?:(?:so|thus|hence|therefore|well|okay|ok)[, ]+)?(?:(?:i (?:think|believe|guess) "
    r")?(?:it|this|that|he|she) (?:is|looks like)|"
    r"(?:it|this|that|he|she)'s|there (?:is|are)|these are|those are|they are|they're|i (?:can "
    r")?see|(?:the|this) (?:image|picture|photo|video) (?:shows|contains|depicts))\s+",
    re.I,
)
# yes or no followed by a sentence, which may not say the other
YES_NO = re.compile(r"(yes|no)\s*[,.;:!\n-]\s*(?=\w)")
OTHER = {"yes": r"\b(?:no|not|none|never|but)\b|n't\b", "no": r"\b(?:yes|but)\b"}
SEPARATOR = re.compile(r"[,;\n\u3001\uff0c\uff1b]")
BULLET = re.compile(r"^\s*(?:[-*\u2022]\s+|\d+[.)]\s+)")
MOST = 500  # names of a list
NOON = re.compile(r"(?<=\d)\s?([ap])\.?\s?m\b\.?")  # p.m., PM
DESCRIBED = re.compile(
    r"\s*\*\*([^*\n]{1,80})\*\*\s*(?:[:\u2013\u2014-]|(?<=:\*\*)|$)"
    r"(?!\s*(?:no|not|none|absent)\b)",
    re.I,
)
# a sentence that lists: the fruits in the image are an apple and a pear
LISTS = re.compile(
    r"^(?:the|these|those|all)\b[^,;:\n.]{0,60}?\b(?:are|include|includes|consist of)\s+(?=\S)",
    re.I,
)
# what is said to be absent: a cat but no dog
ABSENT = re.compile(
    r"\s*(?:but\s+|and\s+|there (?:is|are)\s+)*(?:no|not|without|neither|nor)\s+\S", re.I
)
ASIDE = re.compile(r"\s*\((?:no|not|without) [^()]*\)", re.I)
BUT = re.compile(r"\s*(?:,\s*)?\bbut\s+(?=(?:no|not|without|there (?:is|are) no)\b)", re.I)
SEEN = re.compile(
    r"\s+(?:(?:is|are) )?(?:visible |shown |seen |present )?(?:in|on) (?:the|this) (?:image|"
    r"picture|photo|scene|video)"
    r"\s*\.?\s*$|\s+(?:is|are) (?:visible|shown|present)\s*\.?\s*$",
    re.I,
)
# words in front of a list, up to their colon
INTRODUCED = re.compile(
    r"\s*(?:[^\n:,;\[\]{}\uff1a]{2,80}[^\W\d]:(?=\s)|[^\n:\uff1a\[\]{}]{2,120}[:\uff1a]\**[ \t]*\n|"
    r"[^\n:,;\[\]{}\uff1a\uff0c\uff1b\u3001\u3002]{2,60}\uff1a)\s*(?=\S)"
)


def normal(text: object) -> str:
    """Normalise a name for comparison: Unicode NFKC, case, blanks, quotes, Markdown, hyphens
    between words and one final full stop; signs, operators, grades (A+) and factorials are kept."""
    return _normal(str(text))


@lru_cache(maxsize=8192)
def _normal(text: str) -> str:
    if text.isascii() and text.replace(" ", "").isalnum():
        return " ".join(text.casefold().split())
    folded = plain(text)
    if len(folded) > SHORT:
        return " ".join(folded.casefold().split())
    folded = bare(folded)
    if not folded.isascii():
        folded = unicodedata.normalize("NFC", folded)
    folded = NOON.sub(r" \1m", JOINT.sub(" ", folded.casefold()))
    return " ".join(EXCLAIMED.sub("", folded).split())


def names_of(span: str, said: bool = True) -> list[str]:
    """Return the ways to read a short answer as a name, normalised: unchanged, without a leading
    "it is" or "there is", the only words in bold, the yes or no that it begins with, the predicate
    of its last sentence, and its closing line; the last two only if ``said``."""
    whole = normal(span)
    names = [whole, SUBJECT.sub("", whole)]
    if bold := emphasised(span):
        names.append(normal(bold))
    if (verdict := YES_NO.match(whole)) and not re.search(
        OTHER[verdict[1]], whole[verdict.end() :]
    ):
        names.append(verdict[1])
    if latin := LATIN.fullmatch(span.strip()):
        names.append(normal(latin[1]))
    names += map(normal, (*predicates(span), closing_line(span)) if said else ())
    return list(dict.fromkeys(names))


def without_article(name: str) -> str:
    """Take the article off a name in normal form."""
    return ARTICLE.sub("", name, count=1) if ARTICLE.match(name) else name


def same_name(span: str, right: str) -> bool:
    """Tell whether a short answer is this name: equal in normal form, up to an article that the
    right name does not have."""
    target = normal(right)
    if not target:
        return False
    for name in names_of(span):
        if name == target:
            return True
        article = ARTICLE.match(name)
        if article and not ARTICLE.match(target) and name[article.end() :] == target:
            return len(target) > 1
    return False


def items(text: str, known: Collection[str] = ()) -> Parsed[list[str]]:
    """Read a list of names: a JSON list of strings, or names separated by commas, semicolons, lines
    or "and". ``known``: names that contain a separator and must stay whole."""
    answer = final(text)
    announcement = announced(answer.value)
    body = fenced(answer.value if announcement is None else announcement)
    if body.casefold().strip(". ") in NOTHING or body == "[]":
        return Parsed([], answer.status)
    if body.startswith(("[", "{")):
        parsed = loose_json(body)
        value = parsed.value
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))
        names = [_called(name) for name in value] if isinstance(value, list) else []
        if isinstance(value, list) and (
            value == [] or all(isinstance(name, (str, int, float)) for name in names)
        ):
            return Parsed(
                [WHERE.sub("", str(name)).strip() for name in names],
                worst(answer.status, parsed.status),
            )
        return UNPARSEABLE
    whole = {normal(name) for name in known}
    introduced = INTRODUCED.match(body)
    if introduced and normal(body) not in whole and ":" not in "".join(known):
        body = body[introduced.end() :]
    elif normal(body) not in whole:
        body = _listing(body) if len(body) <= SHORT else SUBJECT.sub("", body, count=1)
    if described := _described(body):
        return Parsed(described, answer.status)
    listed = [WHERE.sub("", BULLET.sub("", part)).strip() for part in _parts(_lined(body), whole)]
    labels = [n for n in listed if normal(n) and (normal(n) in whole or not ABSENT.match(n))]
    return Parsed(labels, answer.status) if labels else UNPARSEABLE


def _called(entry: object) -> object:
    """Return the name of a record in a list; anything else unchanged."""
    if not isinstance(entry, dict):
        return entry
    return next((entry[key] for key in ("label", "name", "object", "class") if key in entry), None)


def _lined(body: str) -> str:
    """Put the parts of "1) cat 2) dog" on separate lines."""
    numbers = NUMBERED.findall(body) if "\n" not in body else []
    listed = len(numbers) > 1 and numbers == [str(i + 1) for i in range(len(numbers))]
    return NUMBERED.sub("\n", body) if listed else body


NUMBERED = re.compile(r"(?:^|\s)(\d{1,2})[.)]\s+")
# where a name of a list is seen: cat (left)
WHERE = re.compile(
    r"\s*\((?:(?:on|in|at|to|the|far|top|bottom|upper|lower)[ -])*(?:left|right|top|bottom|center|"
    r"centre|middle|foreground|background|front|back|corner|side)(?: (?:side|corner))?\)$",
    re.I,
)
# cat (Felis catus)
LATIN = re.compile(
    r"([^()]{2,60})\s\(\*?[A-Z][a-z]{2,} [a-z]+(?:us|a|um|is|i|ae|ens|or|ix|es)\*?\)[.]?"
)


def _listing(body: str) -> str:
    """Strip the sentence around a list: "The image shows a cat and a dog, but no bird." becomes a
    cat and a dog, no bird."""
    body = SEEN.sub("", ASIDE.sub("", body))
    names = LISTS.sub("", SUBJECT.sub("", body, count=1))
    if names == body and "\n" not in body and (what := predicates(body)):
        names = what[0]
    return BUT.sub(", ", names)


def _described(body: str) -> list[str]:
    """Return the bold names of a list in which every line describes one: 1. **Car**: a red one."""
    lines = [line.strip() for line in body.split("\n") if line.strip()]
    lines = lines[1:] if lines and lines[0].strip("*").endswith(":") else lines
    named = [DESCRIBED.match(BULLET.sub("", line)) for line in lines]
    return [name[1].rstrip(": ") for name in named if name] if len(named) > 1 and all(named) else []


def _parts(body: str, whole: Collection[str]) -> list[str]:
    """Split a text at its separators, but not inside known names that contain one."""
    if normal(body) in whole:
        return [body]
    rough = SEPARATOR.split(body)
    if len(rough) > MOST:
        return []
    if (
        len(rough) > 1
        and re.fullmatch(r"\s*-?[\d.]+(?:,\d{3})+(?:\.\d+)?\s*", body)
        and quantity_in(body).status == "ok"
    ):
        return [body]
    joined = {name for name in whole if " " in name}
    parts: list[str] = []
    for part in rough:
        if " " not in part.strip():
            parts.append(part)
            continue
        part = re.sub(r"^\s*(?:and|or|&)\s+", "", part)
        pair = re.split(r"\s+(?:and|&|und|et|y|e)\s+", part)
        parts += (
            [part] if normal(part) in whole else _joined(pair, part, joined) if joined else pair
        )
    return parts


def _joined(pieces: list[str], part: str, whole: Collection[str]) -> list[str]:
    """Join pieces of a known name: oil and [salt and pepper]."""
    for i in range(len(pieces) - 1):
        start = part.find(pieces[i])
        end = part.find(pieces[i + 1], start + len(pieces[i])) + len(pieces[i + 1])
        if normal(part[start:end]) in whole:
            return [*pieces[:i], part[start:end], *_joined(pieces[i + 2 :], part[end:], whole)]
    return pieces
