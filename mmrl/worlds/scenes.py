"""Describes scenes in words: captions, the objects they name, questions with answers, held-out
captions.

A Prompt describes a scene::

    {"text": "a large red seven in the top left", "relation": None, "count": 1,
     "objects": [{"digit": 7, "color": "red", "size": "large", "place": "top left"}]}

``None`` means "not specified": any picture is right there. ``mmrl.worlds.render`` draws it and adds
``boxes``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from mmrl.core.types import Prompt
from samplers.noise import Rng

CANVAS = 32  # pixels, width and height
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLORS = {
    "red": (0.95, 0.2, 0.2),
    "green": (0.2, 0.85, 0.3),
    "blue": (0.3, 0.45, 1.0),
    "yellow": (0.95, 0.85, 0.2),
}
SIZES = {"small": 12.0, "large": 22.0}  # side of the enlarged 8x8 scan, pixels
PLAIN = 16.0  # ... of a digit whose size is not specified
# Where the centre of a digit counts as being "in the top left": x0, y0, x1, y1 in pixels.
PLACES = {
    "top left": (0.0, 0.0, 13.0, 13.0),
    "top right": (19.0, 0.0, 32.0, 13.0),
    "middle": (12.0, 12.0, 20.0, 20.0),
    "bottom left": (0.0, 19.0, 13.0, 32.0),
    "bottom right": (19.0, 19.0, 32.0, 32.0),
}
RELATIONS = ("above", "below", "left of", "right of")
WORDS = {"left of": "to the left of", "right of": "to the right of"}
Kind = Literal["single", "sized", "pairs", "triples", "mixed"]
Thing = dict[str, Any]  # digit, color, size, place
HELD_OUT = 5  # every fifth caption, by its hash


def thing(digit: int, color: str, size: str | None = None, place: str | None = None) -> Thing:
    return {"digit": digit, "color": color, "size": size, "place": place}


def phrase(item: Thing) -> str:
    """Write ``a large red seven``, without the place."""
    return " ".join(filter(None, ("a", item["size"], item["color"], DIGITS[item["digit"]])))


def single(item: Thing) -> Prompt:
    where = f" in the {item['place']}" if item["place"] else ""
    return {"text": phrase(item) + where, "objects": [item], "relation": None, "count": 1}


def pair(first: Thing, second: Thing, relation: str | None) -> Prompt:
    """Describe two digits; ``relation`` says where the first is, seen from the second. ``None``:
    ``two digits: ... and ...``."""
    a = phrase(first)
    b = phrase(second)
    text = f"{a} {WORDS.get(relation, relation)} {b}" if relation else f"two digits: {a} and {b}"
    return {"text": text, "objects": [first, second], "relation": relation, "count": 2}


def triple(items: list[Thing]) -> Prompt:
    a, b, c = map(phrase, items)
    return {
        "text": f"three digits: {a}, {b} and {c}",
        "objects": items,
        "relation": None,
        "count": 3,
    }


def singles() -> list[Prompt]:
    """Return all 240 captions of one digit: 10 digits x 4 colours x (no place, 5 places)."""
    return [
        single(thing(d, c, None, place))
        for d, c, place in itertools.product(range(10), COLORS, (None, *PLACES))
    ]


def sized() -> list[Prompt]:
    """Return all 480 captions of a digit with its size: as ``singles``, small or large."""
    space = itertools.product(range(10), COLORS, SIZES, (None, *PLACES))
    return [single(thing(*choice)) for choice in space]


def several(count: int, n: int, rng: Rng) -> list[Prompt]:
    """Return ``count`` captions of ``n`` = 2 or 3 digits, all different digits, drawn without
    repetition."""
    prompt_of_text: dict[str, Prompt] = {}
    colors = list(COLORS)
    step = 0
    while len(prompt_of_text) < count:
        # [rows, 2n + 1]: digits, colours, relation
        u = rng.uniform(rng.rows(2 * count, 1), (2 * n + 1,), step)
        step += 1
        for row in u.tolist():
            rest = list(range(10))
            digits = [rest.pop(int(x * len(rest))) for x in row[:n]]
            items = [thing(d, colors[int(x * len(colors))]) for d, x in zip(digits, row[n:])]
            choices = (*RELATIONS, None)
            relation = choices[int(row[-1] * len(choices))]
            prompt = pair(items[0], items[1], relation) if n == 2 else triple(items)
            prompt_of_text.setdefault(prompt["text"], prompt)
    return list(prompt_of_text.values())[:count]


def is_held_out(text: str) -> bool:
    """Tell whether a caption belongs to a fixed fifth of all captions, by hash: no seed, kind or
    number of captions moves one to the other side."""
    return (
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % HELD_OUT
        == 0
    )


def captions(kind: Kind, count: int, seed: int = 0) -> list[Prompt]:
    """Return ``count`` different captions of a kind in a random order; of ``single`` only 240
    exist, of ``sized`` 480.

    ``mixed`` is the four other kinds in equal parts.
    """
    rng = Rng.of(seed, "captions", kind)
    if kind == "mixed":
        kinds: tuple[Kind, ...] = ("single", "sized", "pairs", "triples")
        prompts = [p for i, k in enumerate(kinds) for p in captions(k, (count + i) // 4, seed)]
    elif kind in ("single", "sized"):
        prompts = singles() if kind == "single" else sized()
    else:
        return several(count, {"pairs": 2, "triples": 3}[kind], rng)
    return [prompts[i] for i in rng.permutation(len(prompts)).tolist()][:count]


def questions(scene: Prompt) -> list[Prompt]:
    """Return the questions a rendered scene answers: ``question``, ``answer`` (a word, or a box x0
    y0 x1 y1 in pixels), ``type``.

    Names are used only where they are unambiguous, so every question has exactly one ground truth.
    """
    return [{"question": q, "answer": a, "type": kind} for q, a, kind in _questions(scene)]


def _questions(scene: Prompt) -> Iterator[tuple[str, Any, str]]:
    objects = scene["objects"]
    boxes = scene.get("boxes")
    yield "how many digits are there?", str(len(objects)), "count"
    yield "what do the digits add up to?", str(sum(item["digit"] for item in objects)), "sum"
    for i, item in enumerate(objects):
        color = item["color"]
        digit = DIGITS[item["digit"]]
        if sum(o["digit"] == item["digit"] for o in objects) == 1:
            yield f"what colour is the {digit}?", color, "color"
        if sum(o["color"] == color for o in objects) == 1:
            yield f"which digit is {color}?", digit, "digit"
        if item["place"]:
            yield f"in which part of the picture is the {digit}?", item["place"], "place"
        alone = sum((o["digit"], o["color"]) == (item["digit"], color) for o in objects) == 1
        if boxes and alone:
            yield f"where is the {color} {digit}?", boxes[i], "box"
    if scene["relation"]:
        first, second = (DIGITS[item["digit"]] for item in objects)
        yield f"where is the {first}, seen from the {second}?", scene["relation"], "relation"
