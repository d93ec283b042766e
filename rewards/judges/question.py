"""Defines questions to a judge, its answers and its costs, local or remote."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from mmrl.core.thoughts import outside
from rewards.answers.reading.parts import answers, final

if TYPE_CHECKING:
    from PIL import Image
    from pydantic import BaseModel

SHARE = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:/|out of)\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
AGAIN = (
    "That answer cannot be used: {problem}. Give the whole answer again, in the form that "
    "was asked for."
)


class Unreadable(Exception):
    """Signals an answer in another form than requested; the message says what is wrong."""


@dataclass(frozen=True)
class Question:
    """Holds one question. ``parts``: texts and pictures in the order in which the model sees them.

    ``choices``: the answer is the probability of each of these words; ``value`` is then a
    dictionary of them. ``tagged``: reasons come first, and the verdict follows in <answer>.
    ``schema``: the answer must be JSON of this pydantic model; ``value`` maps its fields. Otherwise
    ``read`` parses the text to a value, or raises ``Unreadable``.
    """

    parts: tuple[str | Image.Image, ...]
    choices: tuple[str, ...] = ()
    schema: type[BaseModel] | None = None
    read: Callable[[str], Any] = str
    tokens: int = 512  # maximum of an answer
    tagged: bool = False

    def value(self, text: str) -> Any:
        """Parse a free-text answer. Raises Unreadable."""
        text = conclusion_of(text) if self.tagged else answer_of(text)
        if self.choices:
            return named_choice(text, self.choices)
        if self.schema is not None:
            return read_json(text, self.schema)
        return self.read(text)

    def wording(self) -> str:
        """Return what to add to the question if the form of the answer cannot be enforced."""
        if self.schema is None:
            return ""
        keys = ", ".join(
            f'"{name}": {_kind(field)}' for name, field in self.schema.model_fields.items()
        )
        return f"\n\nAnswer with one JSON object and nothing else: {{{keys}}}"


def _kind(field: Any) -> str:
    return str(field.description or field.annotation.__name__)


@dataclass
class Usage:
    """Counts a judge's requests and costs; may be read at any time, from any thread."""

    requests: int = 0  # sent, repetitions included
    answers: int = 0  # questions with a value
    unanswered: int = 0  # questions without one: no answer, refused, or unreadable
    retries: int = 0  # requests sent again after a failure
    asked_again: int = 0  # unreadable answers, asked again
    unreadable: int = 0  # questions given up for that reason
    refused: int = 0  # questions the server refused one by one
    bytes_sent: int = 0  # bodies of requests, pictures included
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0  # in the currency of the given prices
    cause: str = ""  # why the last question without a value has none
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **numbers: float) -> None:
        with self._lock:
            for name, number in numbers.items():
                vars(self)[name] += number

    def numbers(self) -> dict[str, float]:
        with self._lock:
            counts = {
                name: count for name, count in vars(self).items() if name not in ("_lock", "cause")
            }
        if counts["bytes_sent"]:  # a local judge sends none
            counts["bytes_per_request"] = counts["bytes_sent"] / counts["requests"]
        return counts


class Asker(Protocol):
    """Answers questions about pictures by a model, behind a server or in this process."""

    usage: Usage

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """Return the value of every question; None if there is no readable answer."""
        ...


# -----------------------------------------------------------------------------------------------
# reading answers


def thought_apart(text: str) -> str:
    """Return what follows the thoughts of a reasoning model. Raises Unreadable if they do not end:
    a draft in them is not a verdict."""
    pieces, ended = outside(text)
    if not ended:
        raise Unreadable("it ends before its reasons do; raise `tokens` of the reward")
    return pieces[-1]


def answer_of(text: str) -> str:
    """Return what follows the reasoning of a model, without answer tags. Raises Unreadable if the
    reasoning was truncated."""
    return final(thought_apart(text)).value


def conclusion_of(text: str) -> str:
    """Return the content of the only <answer> after the reasons, not drafts or quotes within them.
    Raises Unreadable if the reasons were truncated, or two answers contradict each other."""
    different = set(answers(thought_apart(text)))
    if len(different) != 1:
        raise Unreadable(f"{len(different) or 'no'} answers stand after its reasons")
    return different.pop()


def named_choice(text: str, choices: Sequence[str]) -> dict[str, float]:
    """Give 1 to the only choice that the text begins with or, failing that, names; 0 to the
    others."""
    words = [_plain(word) for word in re.findall(r"[^\s,.:;!?*\"'`()]+", text)]
    known = {_plain(choice): choice for choice in choices}
    named = {known[word] for word in words if word in known}
    first = known.get(words[0]) if words else None
    if first is None and len(named) != 1:
        raise Unreadable(f"it must be one of {', '.join(choices)}, and was {text[:80]!r}")
    chosen = first if first is not None else named.pop()
    return {choice: float(choice == chosen) for choice in choices}


def token_choices(candidates: dict[str, float], choices: Sequence[str]) -> dict[str, float] | None:
    """Give the choices the probabilities of first tokens, upper and lower case added; None if none
    occurs.

    A token that is a prefix of exactly one choice counts for it.
    """
    mass = dict.fromkeys(choices, 0.0)
    known = {_plain(choice): choice for choice in choices}
    for token, probability in candidates.items():
        word = _plain(token)
        begun = [choice for name, choice in known.items() if word and name.startswith(word)]
        chosen = known.get(word) or (begun[0] if len(begun) == 1 else None)
        if chosen is not None:
            mass[chosen] += probability
    total = sum(mass.values())
    return {choice: part / total for choice, part in mass.items()} if total > 0 else None


def _plain(word: str) -> str:
    return word.strip(" \t\r\n\"'`*.,:;!?()\u0120\u2581").casefold()


def read_json(text: str, schema: type[BaseModel]) -> dict[str, Any]:
    """Read the JSON object in a text, fenced or among words, validated by a pydantic model; nothing
    is repaired, and a reason may be missing."""
    from pydantic import ValidationError

    start = text.find("{")
    end = text.rfind("}")
    if start < 0 or end < start:
        raise Unreadable("it holds no JSON object")
    try:
        return schema.model_validate_json(text[start : end + 1]).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Unreadable(f"{where + ': ' if where else ''}{first['msg']}") from error


def asked_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of the request: fields that are optional when read are required
    here."""
    strict = schema.model_json_schema()
    for entry in strict["properties"].values():
        entry.pop("default", None)
    return strict | {"required": list(strict["properties"]), "additionalProperties": False}


@lru_cache(maxsize=64)
def scores_schema(names: tuple[str, ...], low: float, high: float) -> Any:
    """Return the schema of ``{"reason": text, name: number from low to high, ...}``."""
    from pydantic import BeforeValidator, Field, create_model

    number = Annotated[float, BeforeValidator(partial(score_out_of, high=high))]
    scale = f"a number from {low:g} to {high:g}"
    scores: dict[str, Any] = {
        name: (number, Field(ge=low, le=high, description=scale)) for name in names
    }
    return create_model("Answer", reason=(str, Field("", description="one sentence")), **scores)


def score_out_of(value: Any, high: float) -> Any:
    """Return the number of "8/10" or "8 out of 10" as a judge writes it on a scale that ends at
    ``high``; anything else unchanged."""
    share = SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if share is None:
        return value
    if float(share[2]) != high:
        raise ValueError(f"{value!r} is not on the scale that ends at {high:g}")
    return float(share[1])
