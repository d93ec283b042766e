"""Defines ``bleu`` and ``structured``: a text against references word by word, JSON against JSON
layer by layer."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import final, normal, real, strict_json
from rewards.answers.reading.objects import python_value
from rewards.answers.reading.parts import last_box
from rewards.answers.verifiable import Verdict, Verifiable, need, tagged
from rewards.card import card

LONGEST = 20_000  # words of a text that count
ENTITIES = {"&quot;": '"', "&lt;": "<", "&gt;": ">", "&amp;": "&"}
# mteval-v13a: split from the neighbours
MARKS = re.compile(r"[{-~\[-` -&(-+:-@/]")
APART = {code: f" {chr(code)} " for code in range(128) if MARKS.match(chr(code))}
POINT_AFTER = re.compile(r"([^0-9][.,])")
POINT_BEFORE = re.compile(r"([.,][^0-9])")
DASH = re.compile(r"(?<=[0-9])-")


def words_13a(text: str) -> list[str]:
    """Split a text into words and punctuation as in machine translation (mteval-v13a)."""
    line = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, letter in ENTITIES.items():
        line = line.replace(entity, letter)
    line = f" {line} ".translate(APART)
    parts = POINT_AFTER.split(line)
    parts[1::2] = [f"{pair[0]} {pair[1]} " for pair in parts[1::2]]
    parts = POINT_BEFORE.split("".join(parts))
    parts[1::2] = [f" {pair[0]} {pair[1]}" for pair in parts[1::2]]
    return DASH.sub(" - ", "".join(parts)).split()[:LONGEST]


def ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of a list of words."""
    return Counter(zip(*(words[i:] for i in range(order))))


def bleu(text: str, references: Sequence[str], order: int = 4, smooth: bool = True) -> float:
    """Compute BLEU of one text, 0..1 (Papineni et al. 2002).

    exp(min(0, 1 - r / c)) (prod_n p_n)^(1 / order): c the words of the text, r those of the
    shortest reference, p_n the share of its n-grams that are in a reference, each as often as in
    the one that has it most. ``smooth``: p_n = (matches + 1) / (n-grams + 1) (Lin and Och 2004).
    """
    words = words_13a(text)
    right = [words_13a(reference) for reference in references]
    if not words:
        return 0.0
    total = 0.0
    for n in range(1, order + 1):
        most: Counter[tuple[str, ...]] = Counter()
        for reference in right:
            most |= ngrams(reference, n)
        counts = Counter(filter(most.__contains__, zip(*(words[i:] for i in range(n)))))
        matches = sum(min(counts[gram], count) for gram, count in most.items()) + smooth
        possible = max(len(words) - n + 1, 0) + smooth
        if not matches:
            return 0.0
        total += math.log(matches / possible)
    shortest = min(len(reference) for reference in right)
    return math.exp(total / order + min(0.0, 1 - shortest / len(words)))


@REWARDS.register("bleu")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="[BLEUBERI](https://arxiv.org/abs/2505.11080); BLEU: Papineni et al. 2002",
)
class Bleu(Verifiable):
    """Score an answer by BLEU against one reference or several (BLEUBERI).

    As BLEUBERI (Chang et al. 2025) computes it: words of mteval-v13a, n-grams up to 4, add-one
    smoothing, the length of the shortest reference. ``answer`` of the prompt is a text or a list of
    texts. With smoothing, answers of fewer words than ``order`` get the longer n-grams for free:
    use a lower order for short answers.

    Args:
        order: longest n-grams, in words.
        smooth: False: 0 for an answer that shares no n-gram of some length.
    """

    def __init__(self, order: Annotated[int, Ge(1), Le(9)] = 4, smooth: bool = True):
        self.order = order
        self.smooth = smooth

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        references = self._references(prompt)
        answer = final(text)
        if not answer.value:
            return Verdict(0.0, "unparseable")
        return Verdict(bleu(answer.value, references, self.order, self.smooth), answer.status)

    def _references(self, prompt: Prompt) -> list[str]:
        value = need(prompt, "answer")
        texts = [str(text) for text in (value if isinstance(value, (list, tuple)) else [value])]
        if not texts or not all(words_13a(text) for text in texts):
            raise Unscorable(f'"answer" is {value!r}; expected a text or a list of texts')
        return texts

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(self._references(prompt)[0])

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = self._references(prompt)[0]
        return {"twice": tagged(f"{right} {right}"), "with more words": tagged(f"{right} xx yy")}


# ---------------------------------------------------------------- structure

LAYERS = ("validity", "format", "integrity", "content")


@REWARDS.register("structured")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="[RL-Struct](https://arxiv.org/abs/2512.00319)",
)
class Structured(Verifiable):
    """Score JSON in layers: valid, nothing else, right keys, right values (RL-Struct).

    R = sum_k w_k s_k / sum_k w_k. validity: 1 where the answer holds a JSON value, or a Python one
    such as {'a': 1}, which is short of the format, else R = 0;
    format: 1 if there is nothing else but a code fence; integrity: the IoU of the sets of leaf
    paths with their types, right and answered; content: the share of the right leaves with the
    right value, names compared in normal form. RL-Struct (Hu and Wu 2025) has these dimensions; how
    each is measured and the weights are our reading. ``answer`` of the prompt is an object, a list,
    or their JSON.

    Args:
        weights: layer -> weight; a layer left out has weight 0.
        ordered: a layer counts only if all before it are full, in the order above.
        tolerance: relative error up to which numbers are equal.
    """

    def __init__(
        self,
        weights: dict[str, float] | None = None,
        ordered: bool = False,
        tolerance: Annotated[float, Ge(0)] = 0.0,
    ):
        chosen = dict.fromkeys(LAYERS, 1.0) if weights is None else weights
        if odd := [name for name in chosen if name not in LAYERS]:
            raise UserError(
                f"structured: there is no layer {odd[0]!r} in `weights`; known: {', '.join(LAYERS)}"
            )
        if any(weight < 0 for weight in chosen.values()) or not sum(chosen.values()) > 0:
            raise UserError("structured: `weights` must be 0 or more, and one of them above 0")
        self.weights = {name: chosen.get(name, 0.0) for name in LAYERS}
        self.ordered = ordered
        self.tolerance = tolerance

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = self._right(prompt)
        answer = final(text)
        parsed = strict_json(answer.value)
        if parsed.status != "ok":
            parsed = python_value(answer.value)
        if not isinstance(parsed.value, (dict, list)):
            return Verdict(0.0, "unparseable")
        shares = {
            "validity": 1.0,
            "format": float(alone(answer.value)),
            "integrity": integrity(parsed.value, right),
            "content": self._content(parsed.value, right),
        }
        total = 0.0
        for name in LAYERS:
            total += self.weights[name] * shares[name]
            if self.ordered and shares[name] < 1:
                break
        return Verdict(total / sum(self.weights.values()), answer.status)

    def _content(self, value: Any, right: Any) -> float:
        written = dict(leaves(value))
        pairs = [(written.get(place), leaf) for place, leaf in leaves(right)]
        return sum(self._equal(value, leaf) for value, leaf in pairs) / len(pairs)

    def _equal(self, value: Any, leaf: Any) -> bool:
        if isinstance(leaf, str):
            return isinstance(value, str) and normal(value) == normal(leaf)
        number = None if isinstance(leaf, bool) else real(leaf)
        if number is None:
            return type(value) is type(leaf) and bool(value == leaf)
        answered = None if isinstance(value, bool) else real(value)
        return answered is not None and abs(answered - number) <= self.tolerance * abs(number)

    def _right(self, prompt: Prompt) -> Any:
        value = need(prompt, "answer")
        if isinstance(value, str):
            value = strict_json(value).value
        if not isinstance(value, (dict, list)) or not value:
            raise Unscorable(f'"answer" is {prompt["answer"]!r}; expected an object, list or JSON')
        return value

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(json.dumps(self._right(prompt)))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = json.dumps(self._right(prompt))
        return {
            "no JSON": tagged("the values you asked for"),
            "an empty object": tagged("{}"),
            "words around it": tagged(f"Here it is: {right}."),
            "cut off": tagged(right[:-1]),
            "wrapped": tagged(f'{{"answer": {right}}}'),
        }


def alone(text: str) -> bool:
    """Tell whether a text is only JSON, bare, in a code fence or in GLM's box."""
    body = text.strip()
    box = last_box(body)
    if box and (box.start, box.end) == (0, len(body)):
        body = box.inside
    if match := re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", body, re.S):
        body = match[1]
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and value of every leaf; an empty object or list is also a leaf."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*place, str(key)))
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from leaves(item, (*place, i))
    else:
        yield place, value


def integrity(value: Any, right: Any) -> float:
    """Return the IoU of the sets of leaf paths with their types."""
    first, second = ({(place, kind(leaf)) for place, leaf in leaves(v)} for v in (value, right))
    return len(first & second) / len(first | second)


def kind(leaf: Any) -> str:
    """Return the JSON type of a leaf."""
    if isinstance(leaf, bool):
        return "boolean"
    if isinstance(leaf, (int, float)):
        return "number"
    if isinstance(leaf, str):
        return "string"
    return "object" if isinstance(leaf, dict) else "array" if isinstance(leaf, list) else "null"
