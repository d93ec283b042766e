"""Reads which options of a multiple choice an answer names: by letter, by number, by text, or by
letter and text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rewards.answers.reading.names import names_of, normal, without_article
from rewards.answers.reading.numbers import Quantity, quantity_in
from rewards.answers.reading.objects import literal
from rewards.answers.reading.plain import SHORT, bare, plain
from rewards.answers.reading.stated import CORRECTS, emphasised, stated
from rewards.answers.reading.statements import CONTRAST, predicates, sentences_of

LINES = 40  # of an answer whose first line is a label
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# "A. a cat", "(B) a dog", "C: a bird": options that are given with their letters
LABELLED = re.compile(r"^\s*[(\[]?([A-Za-z]|\d{1,2})\s*[)\].:\u3001-]\s*(.*)$", re.S)
LEAD = re.compile(
    r"^(?:so|thus|hence|therefore|then|okay|ok|well|finally|in conclusion|"
    r"所以|因此|故|综上|綜上)?[,: ，]*"
    r"(?:(?:i(?:'d| would| will|'ll)? (?:choose|select|pick|go with|say|answer|think)(?: "
    r"that)?(?: it(?:'s| is))?|"
    r"my (?:choice|pick|guess) (?:is|:)|it(?:'s| is| must be| should be)|that(?:'s| is| would "
    r"be)|this is|"
    r"(?:the )?(?:best |correct |right |final |most \w+ )*(?:options?|choices?|letters?|"
    r"ones?)\b(?: (?:here|above))?(?: is| are| would be|:)?|"
    r"(?:the )?(?:best |correct |right |final )*answers?\b(?: is| are|:)?|"
    r"故?(?:我(?:的)?|[应應][该該]?|[会會])*(?:[选選][择擇]|[选選][项項]|[选選]|結論|结论)(?:的?是|为|為|:)?|"
    r"(?:la|el|le|die|il|l'|(?-i:a) )\s*(?=(?:opci[o\u00f3]n |option |opzione |op\u00e7\u00e3o "
    r")?[(\[]?[A-Z][)\]]?"
    r"(?:\W*$|[:.)] ))|"
    r"(?:(?-i:a|la|le|der) )?(?:opci[o\u00f3]n|option|opzione|op\u00e7\u00e3o|letra|lettera|"
    r"lettre|buchstabe)|"
    r"\u0432\u0430\u0440\u0438\u0430\u043d\u0442|\uc120\ud0dd\uc9c0|\u9078\u629e\u80a2)[: ]*)+",
    re.I,
)
THEN = re.compile(
    r"^(?:so|thus|hence|therefore|then|finally|daher|donc|por lo tanto|portanto|quindi|"
    r"\u6240\u4ee5|"
    r"\u56e0\u6b64|\u6545)\b[,: \uff0c]+",
    re.I,
)
# what follows a letter without a blank in Chinese, Japanese and Korean
SUFFIX = re.compile(
    r"(?<![A-Za-z])([A-Z][)\]]?)(?:[项項]|[选選][项項]|です|\u3067\u3042\u308b|\u3060|"
    r"\uc785\ub2c8\ub2e4|"
    r"\uc774\ub2e4|\u756a|\ubc88)(?=\W*$)"
)
# words after a letter that only say that it is the answer
TAIL = re.compile(
    r"^(?:is|would be|looks|seems|must be|should be)?\s*(?:the |my )?(?:(?:best|most \w+|"
    r"correct|right|true|final|only)\s*)*"
    r"(?:answer|option|choice|one|correct|right)?(?:\s*(?:here|indeed|of course))?$|^it is$|"
    r"^(?:[项項]|[选選][项項]|是正[确確]的|正[确確]|です|"
    r"\uc785\ub2c8\ub2e4|\u0939\u0948)$",
    re.I,
)
REFUSED = re.compile(
    r"^\W*(?:(?:is|was|are|seems?|looks?|would be|can be|could be)\s+)?(?:not|n't|no\b|never|"
    r"wrong|incorrect|false|isn't|isnt|"
    r"cannot|can't|doesn't|eliminated|ruled out|excluded|impossible|unlikely|neither|nope)\b",
    re.I,
)
DENIED = re.compile(
    r"\b(?:not|neither|never|nor|except|isn't|wrong|incorrect|unlike|eliminate|rule out|"
    r"exclude)\b|n't\b",
    re.I,
)
WORDS_LIKE_RUNS = {
    *"be ad ah eh bad bed beg ace aced chi act ago am an as at ab cd ac/dc deg dim els hi no "
    "ox".split()
} - {"ab", "cd"}
SIGN = "[,;/&+、，和与與及иと와과]"
_WORD = "and|or|und|oder|et|ou|y|o|e|en"
JOIN = rf"\s*(?:{SIGN}|{_WORD})(?:{SIGN}|{_WORD}|\s)*"  # in one way only, to save time
LINKS = re.compile(
    r"\b(?:and|or|und|oder|et|ou|en)\b|(?<=[A-Z)\]]) [yoe] (?=[(\[]?[A-Z](?![A-Za-z]))"
)
LISTED = re.compile(rf"[(\[]?[A-Za-z][)\].]*(?:\s*{SIGN}(?:{SIGN}|\s)*[(\[]?[A-Za-z][)\].]*)+")
# B and C are both right
BOTH = re.compile(
    r"^(?i:both )?(?i:options? |answers? |choices? |statements? )?(?P<labels>[(\[]?[A-Z][)\]]?"
    rf"(?:{JOIN}[(\[]?[A-Z][)\]]?)+)(?: (?:are|son|sont|sind|sono|são|zijn) "
    r"(?:both |all )?(?:the )?(?:correct|right|true|correct[ae]s|richtig|correte|corrette|corretas|"
    r"juist)|"
    r"[都均]?是?(?:正[确確]|[对對])的?)"
    r"(?: answers?| options?| choices?| ones?)?$"
)


@dataclass(frozen=True)
class Options:
    """Holds the options of a question: their labels, by default capital letters in order, and their
    texts, which may be unknown."""

    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.texts)


def options_of(choices: Any) -> Options:
    """Parse the options of a prompt: a list of texts, with or without letters, a mapping of letters
    to texts, or lines."""
    if isinstance(choices, str):
        value = literal(choices.strip()) if choices.strip()[:1] in ("[", "{") else None
        choices = (
            value
            if isinstance(value, (list, dict))
            else [line for line in choices.split("\n") if line.strip()]
        )
    if isinstance(choices, Mapping):
        return _options(tuple((str(k).strip(), str(v)) for k, v in choices.items()), True)
    return _options(tuple(("", str(v)) for v in choices or ()), False)


@lru_cache(maxsize=1024)
def _options(pairs: tuple[tuple[str, str], ...], mapped: bool) -> Options:
    texts = [text for _, text in pairs]
    if mapped:
        labels = [bare(label).upper().strip("().") for label, _ in pairs]
        return Options(tuple(labels), tuple(texts))
    labels = list(LETTERS[: len(texts)])
    match = [LABELLED.match(text) for text in texts]
    if len(texts) > 1 and all(match):
        text_of = [match[1].upper() for match in match if match]
        if text_of in (labels, [str(i + 1) for i in range(len(texts))]):
            texts = [match[2] for match in match if match]
    return Options(tuple(labels), tuple(texts))


def options_named(span: str, options: Options = Options()) -> frozenset[str]:
    """Return the labels that a short answer names; empty if it names none clearly.

    The letter wins over an option's text. An answer that contradicts itself (B with the text of A;
    "B is wrong, C") names none.
    """
    return _named(span, options)


@lru_cache(maxsize=8192)
def _named(span: str, options: Options) -> frozenset[str]:
    if len(span) > SHORT:
        span = span[-SHORT:].partition("\n")[2]  # the last lines may still name it
    span = _ticked(span) or _led(span, options) or span
    labels = _said(span, options)
    if not labels and (bold := emphasised(span)):
        labels = _said(bold, options)
    if not labels and (contrast := CONTRAST.search(bare(span))):
        rival = _said(re.sub(r"^\W*(?:rather than|instead of|\w+) ", "", contrast[0]), options)
        labels = _said(bare(span)[: contrast.start()], options) if rival else labels
    return labels


def _said(span: str, options: Options) -> frozenset[str]:
    body = SUFFIX.sub(r"\1", re.sub(r"^\$(?=[A-Za-z])", "", bare(plain(span))))
    if re.fullmatch(r"\([^()]*\)", body):
        body = bare(body[1:-1])
    value = literal(body) if body[:1] in ("[", "{") else None
    if isinstance(value, list) and value and all(isinstance(v, (str, int)) for v in value):
        several = [_single(bare(plain(str(v))), options) for v in value]
        return frozenset().union(*several) if all(several) else frozenset()
    return _single(body, options)


# a row of a table of verdicts
CORRECT = re.compile(
    r"\|\s*\**(?:correct|right|yes|true|selected|chosen|[\u2705\u2713\u2714\u2611]\ufe0f?)\**\s*(?:\||$)",
    re.I,
)
TICK = re.compile(r"[\u2705\u2713\u2714\u2611]\ufe0f?")


def _ticked(span: str) -> str:
    """Return the only ticked line of a list of options, or of a one-line text, without its tick;
    empty for any other text."""
    lines = [line for line in span.split("\n") if line.strip()]
    if len(lines) > 1 and all(line.strip().startswith("|") for line in lines):
        right = [line for line in lines if CORRECT.search(line)]
        return right[0].strip(" |").split("|")[0].strip() if len(right) == 1 else ""
    if not TICK.search(span):
        return ""
    ticked = [line for line in lines if TICK.search(line)]
    listed = all(LABELLED.match(TICK.sub("", line)) for line in lines)
    return TICK.sub("", ticked[0]).strip() if len(ticked) == 1 and (listed or not lines[1:]) else ""


def _led(span: str, options: Options) -> str:
    """Return the label that is the whole first line, if a blank line or "Explanation" follows and
    no other line is a label; else empty."""
    first, _, rest = span.strip().partition("\n")
    if (
        len(first) > 12
        or rest.count("\n") > LINES
        or not re.match(r"\s*\n|\W*(?:explanation|reason|because|since)", rest, re.I)
    ):
        return ""
    lines = (bare(plain(line)) for line in (first, *rest.split("\n")))
    labels = [label for line in lines if len(line) < 12 and (label := _label(line, options))]
    corrected = labels and CORRECTS.search(rest) and _rivals(labels[0], sentences_of(rest), options)
    led = len(labels) == 1 and _label(bare(plain(first)), options)
    return labels[0] if led and not corrected else ""


def _single(body: str, options: Options) -> frozenset[str]:
    if not body:
        return frozenset()
    if label := _label(body, options):
        return frozenset({label})
    by_text = _by_text(body, options)
    if by_text:
        return frozenset({by_text})
    rest = bare(LEAD.sub("", THEN.sub("", body), count=1))
    if rest != body and rest:
        if label := _label(rest, options):
            return frozenset({label})
        if by_text := _by_text(rest, options):
            return frozenset({by_text})
    for part in dict.fromkeys((rest, body)):
        for read in (_several, _with_text):
            if named := read(part, options):
                return named
    return _marked(body, options)


def _label(text: str, options: Options) -> str:
    """Return the label that a text consists of: B, (b), [B], <B>, B), B., 2."""
    inner = re.fullmatch(r"[(\[{<]?\s*([A-Za-z]|\d{1,2})\s*[)\]}>.:]*", text)
    return _known(inner[1], options) if inner else ""


def _known(name: str, options: Options) -> str:
    """Return the question's label of this name; a number names an option by its place if no option
    is a number."""
    label = name.upper()
    if label in options.labels:
        return label
    if name.isdigit():
        if not options.any:
            return label
        numeric = any(quantity_in(text).value is not None for text in options.texts)
        return (
            ""
            if numeric or not 0 < int(name) <= len(options.labels)
            else options.labels[int(name) - 1]
        )
    return "" if options.any or not name.isalpha() else label


def _by_text(text: str, options: Options) -> str:
    """Return the label of the only option with this text; numbers are equal by value."""
    names = [
        label
        for label, text_of in zip(options.labels, options.texts)
        if normal(text_of) == normal(text)
    ]
    if not names:
        said_names = {without_article(name) for name in names_of(text, said=False)} - {""}
        names = [
            label
            for label, text_of in zip(options.labels, options.texts)
            if without_article(normal(text_of)) in said_names
        ]
    amounts = () if names else _amounts(options)
    answered = quantity_in(text) if amounts else None
    if answered is not None and answered.status == "ok" and answered.value is not None:
        names = [label for label, amount in amounts if answered.value.equals(amount)]
    return names[0] if len(names) == 1 else ""


@lru_cache(maxsize=1024)
def _amounts(options: Options) -> tuple[tuple[str, Quantity], ...]:
    """Return labels and numbers of the options that are numbers."""
    read = ((label, quantity_in(text)) for label, text in zip(options.labels, options.texts))
    return tuple((label, r.value) for label, r in read if r.status == "ok" and r.value is not None)


def _several(text: str, options: Options) -> frozenset[str]:
    """Read a list of labels: A, C; A and C; both A and C are correct; (A)(C); AC; ac."""
    if named := BOTH.match(text):
        text = named["labels"]
    if LISTED.fullmatch(listed := LINKS.sub(",", text)):
        match = re.findall(r"(?<![A-Za-z])([A-Za-z])(?![A-Za-z])", listed)
    elif re.fullmatch(r"[A-Z]{2,}|(?:[(\[][A-Za-z][)\]]\s*){2,}|[A-Z](?: [A-Z])+", text) or (
        re.fullmatch(r"[a-j]{2,6}", text)
        and text not in WORDS_LIKE_RUNS
        and list(text) == sorted(set(text))
    ):
        match = re.findall(r"[A-Za-z]", text)
    else:
        return frozenset()
    labels = [_known(name, options) for name in match]
    return frozenset(labels) if all(labels) else frozenset()


def _with_text(text: str, options: Options) -> frozenset[str]:
    """Read a label followed by words: B. a dog; B a dog; B is correct; (B) because ..."""
    first = re.match(
        r"[(\[<]?([A-Za-z]|\d{1,2})(?:\s*[)\]>.:,]+|\s*\n|\s+-+\s|\s*-+\s|\s|(?=\())\s*(?=\S)", text
    ) or (re.match(r"([A-Z])[.):](?=[^\W\d_])", text))
    if not first:
        return frozenset()
    label = _known(first[1], options)
    rest = bare(text[first.end() :])
    marked = not re.fullmatch(r"[(\[<]?[A-Za-z\d]+\s+", first[0]) or "\n" in first[0]
    weak = not marked and not first[1].isupper()  # "a dog", "2 dogs"
    if not label or weak and not (options.any and _by_text(rest, options) == label):
        return frozenset()
    if not rest or TAIL.match(rest):
        return frozenset({label})
    if REFUSED.match(rest):
        return frozenset()
    if aside := re.fullmatch(r"[(\[]([^()\[\]]+)[)\]]", rest):
        rest, marked = bare(aside[1]), True
    if options.any:
        return _agreeing(label, rest, marked, options)
    if not marked and not re.match(r"(?:because|since|as|,|-)", rest, re.I):
        return frozenset()
    return frozenset() if _mentions(rest, options) else frozenset({label})


def _agreeing(label: str, rest: str, marked: bool, options: Options) -> frozenset[str]:
    """Check the words after a letter against the options: they may be its text or a reason, but not
    another option's text or label."""
    same = _by_text(rest, options)
    if same:
        return frozenset({label} if same == label else ())
    text_of = normal(options.texts[options.labels.index(label)])
    words = f" {normal(rest)} "
    if text_of and words.startswith(f" {text_of}"):
        behind = words[len(text_of) + 1 :]
        return frozenset() if _mentions(behind, options) else frozenset({label})
    if not marked and not re.match(r"(?:because|since|as|,|-)", rest, re.I):
        return frozenset()
    if _mentions(rest, options):
        return frozenset()
    if text_of and f" {text_of} " in words.replace(",", " ").replace(".", " "):
        return frozenset({label})
    names = {normal(text) for text in options.texts} - {text_of, ""}
    return frozenset() if any(f" {name} " in words for name in names) else frozenset({label})


def _mentions(text: str, options: Options) -> bool:
    """Tell whether a text names an option by its letter: (A), A), "option A", "answer A", a capital
    by itself that is not an article or pronoun."""
    for match in re.finditer(r"(?<![\w'])[(\[]?([A-Z])(?![\w'])", text):
        name, end = match[1], match.end()
        if not _known(name, options):
            continue
        pronoun = name in "AI" and re.match(r"\s+[a-z]", text[end:]) is not None
        if not pronoun or match[0][0] in "([":
            return True
    return (
        re.search(r"\b(?:answer|option|choice)\s*(?:is|:)?\s*[(\[]?[a-z](?![\w'])", text, re.I)
        is not None
    )


MARKED = re.compile(
    r"[(\[]\s*(?:(?i:option|choice|answer)\s+)?([A-Za-z])\s*[)\]]|\b(?:option|choice|letter)\s+[(\[]?([A-Z])(?![\w'])"
)
SENTENCES = re.compile(r"(?<=[.!?\n])\s+(?=\S)")


def _marked(text: str, options: Options) -> frozenset[str]:
    """Read the one label that sentences mark, (B) or "option B", or that the last line is."""
    sentences = sentences_of(text)
    if len(sentences) > 1 and len(sentences[-2]) > 3:
        last = bare(LEAD.sub("", THEN.sub("", bare(sentences[-1])), count=1))
        label = _label(last, options)
        if label and not _rivals(label, sentences[:-1], options):
            return frozenset({label})
    labels = set()
    for match in MARKED.finditer(text):
        name = match[1] or match[2]
        clause = re.split(r"[.;!?\n,]", text[max(0, match.start() - 80) : match.start()])[-1]
        if DENIED.search(clause) or REFUSED.match(text[match.end() : match.end() + 40].lstrip("*")):
            return frozenset()
        if name.isupper() or options.any:
            labels.add(_known(name, options))
            whole = next((s for s in sentences if match[0] in s), "")
            if _rivals(_known(name, options), [bare(MARKED.sub("", whole))], options):
                return frozenset()
    labels.discard("")
    if len(labels) != 1:
        return _decided(text, options) or _predicate(text, options)
    return frozenset(labels)


def _rivals(label: str, sentences: list[str], options: Options) -> bool:
    """Tell whether one of the sentences is another label or another option's text."""
    return any(
        (_label(way, options) or _by_text(way, options)) not in ("", label)
        for sentence in sentences[-12:]
        for way in (bare(sentence), *predicates(sentence))
    )


DECIDES = re.compile(
    r"\bI(?:'d| would| will|'ll)? (?:choose|chose|select|pick|go with)\s+"
    r"(?:(?:option|answer|choice)\s+)?([A-Z]|[(\[][A-Za-z][)\]])(?![\w'])([^.!?\n]*)[.!?]?\s*$"
)
# the clause that closes an answer in Chinese: ..., so choose C
CHOSEN = re.compile(
    r"(?:^|[,.;\n\uff0c\u3002\uff1b]\s*)(?:所以|因此|故|综上|綜上)?[,\uff0c]?(?:我|[应應][该該]?)?"
    r"[选選](?:[择擇]|[项項]|答案)?[:\uff1a]?\s*[(\uff08]?([A-Z])[)\uff09]?[.\u3002]?\s*$"
)
UNSURE = re.compile(r"\b(?:if|unless|whether|or|and)\b", re.I)


def _decided(text: str, options: Options) -> frozenset[str]:
    """Read the label that the writer settles on in the end."""
    if chosen := CHOSEN.search(text):
        return frozenset({_known(chosen[1], options)} - {""})
    match = DECIDES.search(text)
    if not match:
        return frozenset()
    clause = re.split(r"[.;!?\n,]", text[: match.start()])[-1]
    if any(DENIED.search(part) or UNSURE.search(part) for part in (clause, match[2])) or _mentions(
        match[2], options
    ):
        return frozenset()
    return frozenset({_known(match[1].strip("()[]"), options)} - {""})


def _predicate(text: str, options: Options) -> frozenset[str]:
    """Read "B is correct", and an option's text at the end of "The animal is a dog.\""""
    match = re.findall(r"(?<![\w'])([A-Z]) is (?:the )?(?:correct|right|best|answer)", text)
    labels = {_known(name, options) for name in match} - {""}
    if (
        len(labels) == 1
        and not DENIED.search(text)
        and not re.search(r"\b(?:or|either|if|unless)\b", text)
        and not _mentions(re.sub(rf"(?<!\w){match[0]}(?!\w)", "", text), options)
    ):
        return frozenset(labels)
    return _ending(text, options)


def _ending(text: str, options: Options) -> frozenset[str]:
    """Read the option that is the predicate of the last sentence, and the only one that it
    names."""
    if _mentions(text, options):
        return frozenset()
    labels = {_by_text(way, options) for way in predicates(text)} - {""}
    words = f" {normal((sentences_of(text) or [''])[-1])} "
    rivals = {normal(rival) for at, rival in zip(options.labels, options.texts) if {at} != labels}
    clear = len(labels) == 1 and not any(f" {rival} " in words for rival in rivals)
    return frozenset(labels if clear else ())


def options(text: str, choices: Any = None) -> frozenset[str]:
    """Return the labels that the final answer of a text names."""
    return options_named(stated(text).value, options_of(choices))
