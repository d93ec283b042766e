"""Reads what an option does from where it is declared.

Two places count: a comment on the option's line or above it, and ``name: text`` in a docstring of
its class (or of its ``__init__``) or function. A subclass's text comes before its base's.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any, Literal, get_args, get_origin

from mmrl.config.values import show
from mmrl.core.registry import ALL, options

MARK = re.compile(r"(?:^|(?<=[.;:)]\s)|(?<=\n))((?:`*\w+`*)(?:(?:,| and|, and)\s+`*\w+`*)*):\s")

SENTENCE = re.compile(r"(?<=[^ .][.])(?<!Dr\.)\s+(?=[A-Z])")
TITLE = re.compile(r'(\d{4}[a-z]?), "[^"]+"')  # of a paper, after its year
SOURCE = re.compile(r"[A-Z][\w'-]*(?: (?:et al\.|and|[A-Z][\w'-]*))* \d{4}[a-z]?")
# outside parentheses
CLAUSE = re.compile(r"""(?:;\s+|\.\s+(?=["`]|null|false))(?![^(\[{]*[)\]}])""")
VALUE = re.compile(r"""or |one of |null|None|\W?\w+\W?: |["`]+\w+["`]+""")
LONGEST = 24  # words of a cell that has several clauses


def described(entry: Any) -> dict[str, str]:
    """Return the text of every option of a plug-in or record; "" where there is none."""
    sources = [dict(_texts(part)) for part in _parts(entry)]
    return {
        name: next((texts[name] for texts in sources if texts.get(name)), "")
        for name in options(entry)
    }


def prose(entry: Any) -> str:
    """Return the docstring without the texts of options, which a table shows."""
    parts = [entry, *getattr(entry, "term_types", ())]
    return "\n\n".join(
        filter(None, (_unmarked(inspect.getdoc(part) or "", _names(part)) for part in parts))
    )


def summary(entry: Any, words: int = 30) -> str:
    """Return the beginning of ``prose`` as one paragraph: its first sentence, and whole sentences
    within ``words``; of the next one only the paper. Titles of papers are left out."""
    text = TITLE.sub(r"\1", " ".join(prose(entry).split()))
    kept, *rest = SENTENCE.split(text)
    for sentence in rest:
        if len(f"{kept} {sentence}".split()) > words:
            source = SOURCE.match(sentence)
            return f"{kept} {source[0]}." if source else kept
        kept = f"{kept} {sentence}"
    return kept


def shortened(rows: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return rows of options with the clauses of their texts that fit, or explain a value."""
    return {name: (default, clauses(text)) for name, (default, text) in rows.items()}


def clauses(text: str) -> str:
    """Return the first clause of a text, and later ones within ``LONGEST`` words or that begin
    with what they explain: ``null: ...``, ``"path" lets ...``."""
    kept, *rest = CLAUSE.split(text)
    for clause in rest:
        if len(f"{kept} {clause}".split()) <= LONGEST or VALUE.match(clause):
            kept = f"{kept}; {clause}"
    return kept


def _parts(entry: Any) -> Iterator[Any]:
    """Yield what may declare an option: the classes from the entry to its bases, then terms."""
    if not inspect.isclass(entry):
        yield entry
        return
    yield from entry.__mro__[:-1]
    yield from getattr(entry, "term_types", ())


@cache
def _texts(part: Any) -> Mapping[str, str]:
    """Map the options that a class or function declares itself to their texts."""
    names = _names(part)
    texts: dict[str, str] = {}
    docs = [part.__doc__]
    if inspect.isclass(part):
        docs = [vars(part).get("__doc__"), getattr(vars(part).get("__init__"), "__doc__", "")]
    for text in docs:
        texts |= _marked(inspect.cleandoc(text or ""), names)
    # a docstring first: an annotated attribute may have a comment and the name of an option
    return {name: text for name, text in _comments(part).items() if name in names} | texts


def _names(part: Any) -> set[str]:
    """Return the names that marks may have."""
    own = vars(part).get("__init__") if inspect.isclass(part) else part
    annotated = set(getattr(part, "__annotations__", {}))
    return annotated | set(_parameters(own)) | set(options(part))


def _parameters(function: Any) -> list[str]:
    return list(getattr(getattr(function, "__code__", None), "co_varnames", ()))


def _marked(doc: str, names: set[str]) -> dict[str, str]:
    """Cut a docstring at its ``name:`` marks of known options."""
    texts: dict[str, str] = {}
    for paragraph in doc.split("\n\n"):
        marks = _marks(paragraph, names)
        for number, (match, chosen) in enumerate(marks):
            end = marks[number + 1][0].start() if number + 1 < len(marks) else len(paragraph)
            text = " ".join(paragraph[match.end() : end].split())
            text = TITLE.sub(r"\1", SENTENCE.split(text)[0]).rstrip(";. ")
            for name in chosen:
                texts.setdefault(name, text)
    return texts


def _marks(paragraph: str, names: set[str]) -> list[tuple[re.Match[str], list[str]]]:
    return [
        (match, chosen)
        for match in MARK.finditer(paragraph)
        if (chosen := re.findall(r"\w+", re.sub(r"\band\b", "", match[1]))) and set(chosen) <= names
    ]


def _unmarked(doc: str, names: set[str]) -> str:
    """Cut off what follows the first mark of a paragraph."""
    paragraphs = []
    for paragraph in doc.split("\n\n"):
        marks = _marks(paragraph, names)
        kept = paragraph[: marks[0][0].start()] if marks else paragraph
        if kept.strip():
            paragraphs.append(kept.rstrip())
    return "\n\n".join(paragraphs)


def _comments(part: Any) -> dict[str, str]:
    """Map the fields of a class, or the parameters of its constructor or of a function, to the
    comments on their line or above it."""
    try:
        lines = textwrap.dedent(inspect.getsource(part)).splitlines()
        (node,) = ast.parse("\n".join(lines)).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    texts = {}
    for name, first, last in _declarations(node):
        behind = _comment(lines[last - 1])
        if not behind:
            above = []
            while first > 1 and lines[first - 2].strip().startswith("#"):
                first -= 1
                above.insert(0, lines[first - 1].strip().lstrip("# "))
            behind = " ".join(above)
        if behind:
            texts[name] = behind.rstrip(".")
    return texts


def _declarations(node: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, last line)."""
    body = node.body if isinstance(node, ast.ClassDef) else [node]
    for item in body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, item.lineno, item.end_lineno or item.lineno
        elif isinstance(item, ast.FunctionDef) and item.name in (
            "__init__",
            getattr(node, "name", ""),
        ):
            for argument in [*item.args.args, *item.args.kwonlyargs]:
                yield argument.arg, argument.lineno, argument.end_lineno or argument.lineno


def _comment(line: str) -> str:
    """Return the comment behind code, outside strings."""
    match = re.match(r"""^(?:[^#"']|"[^"]*"|'[^']*')*#\s*(.*)$""", line)
    return "" if match is None or re.match(r"type:|noqa", match[1]) else match[1]


def default_of(option: inspect.Parameter) -> str:
    """Write a default as a configuration does."""
    value = option.default
    if value is inspect.Parameter.empty:
        return "required"
    names = [n for known in ALL.values() for n, entry in known.items() if entry is value]
    if names:
        return f"`{names[0]}`"
    if callable(value) or repr(value) == "<factory>":
        return {dict: "`{}`", list: "`[]`"}.get(get_origin(option.annotation), "")
    if isinstance(value, str):
        return f"`{value}`" if value and "\n" not in value else "a text" if value else "empty"
    text = show(list(value) if isinstance(value, tuple) else value)
    return f"`{text}`".replace("|", r"\|")


def choices(option: inspect.Parameter, text: str) -> str:
    """Name the words that an option takes and its text does not name."""
    words = [str(word) for word in _words(option.annotation)]
    if not words or all(re.search(rf"\b{re.escape(word)}\b", text) for word in words):
        return ""
    return f"; one of {', '.join(words)}"


def _words(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for part in get_args(annotation) for word in _words(part)]


def table_rows(entry: Any) -> dict[str, tuple[str, str]]:
    """Map every option to its default and what it does."""
    texts = described(entry)
    return {
        name: (default_of(p), texts[name] and texts[name] + choices(p, texts[name]))
        for name, p in options(entry).items()
    }


def beside(entry: Any, bases: Iterable[type]) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Return the rows of a plug-in that no base explains, and the defaults it changes."""
    inherited: dict[str, tuple[str, str]] = {}
    for base in bases:
        inherited |= table_rows(base)
    rows, changed = {}, {}
    for name, cells in table_rows(entry).items():
        if name not in inherited or cells[1] not in ("", inherited[name][1]):
            rows[name] = cells
        elif cells[0] != inherited[name][0]:
            changed[name] = cells[0]
    return rows, changed


def table(rows: Mapping[str, tuple[str, str]]) -> str:
    """Write rows of options as a table in Markdown; neighbours with one text share a row."""
    lines = []
    for text, same in groupby(rows.items(), key=lambda row: row[1][1]):
        names, cells = zip(*same, strict=True)
        defaults = [default for default, _ in cells]
        defaults = defaults[:1] if len(set(defaults)) == 1 else defaults
        chosen = ", ".join(f"`{name}`" for name in names)
        lines.append(f"{chosen} | {', '.join(defaults)} | {markdown(text)}")
    return "\n".join(["option | default | meaning", "---|---|---", *lines]) + "\n"


def markdown(text: str) -> str:
    """Write a docstring as Markdown: code in single backquotes, emphasis and bars escaped."""
    text = re.sub(r"\bNone\b", "null", re.sub(r"``([^`]*)``", r"`\1`", text))
    lines = text.splitlines()
    return "\n".join(map(_escaped, lines))


def _escaped(line: str) -> str:
    if line.startswith("    "):
        return line
    parts = line.split("`")
    parts[::2] = [part.replace("*", r"\*").replace("|", r"\|") for part in parts[::2]]
    return "`".join(parts)
