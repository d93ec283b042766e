"""Defines ``point`` and ``gui``, which check a point or an action."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable, scale, truth_space
from rewards.answers.notations import Shape
from rewards.answers.reading import NUMBER, Status, fenced, final, loose_json, normal, worst
from rewards.answers.shapes import points
from rewards.answers.verifiable import (
    Verdict,
    Verifiable,
    finite,
    in_answer,
    in_truth,
    matched,
    need,
    tagged,
    true_boxes,
)
from rewards.card import card

Form = Literal["inside", "gaussian", "distance"]
CLICKS = {
    "click",
    "tap",
    "left click",
    "double click",
    "right click",
    "long press",
    "press",
    "select",
    "hover",
}
# names of agents' calls for the same action
SAME = {"left click": "click", "tap": "click"} | dict.fromkeys(
    ("write", "typewrite", "input", "input text", "enter text"), "type"
)
# the argument of an action on a line by itself
ARGUMENT = re.compile(
    r"\s*\n\s*(?:coordinates?|point|position|location|text|content|value)\s*[:=]\s*([^\n]+)\Z", re.I
)
WORDS = ("text", "value", "content", "input", "direction", "app", "key")


def true_points(prompt: Prompt) -> np.ndarray:
    """Return [M, 2] of ``points``, or of ``point``."""
    value = prompt.get("points")
    value = value if value is not None else [need(prompt, "point")]
    return np.array([finite(point, 2, "points") for point in value], dtype=np.float64).reshape(
        -1, 2
    )


def pixels(prompt: Prompt) -> np.ndarray:
    """Return factors [2] from the space of the ground truths to pixels of the original, if its size
    is known."""
    try:
        return np.array(scale(prompt, truth_space(prompt), "original"))
    except Unscorable:
        return np.ones(2)


def inside(predicted: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Map [N, 2], [M, 4] -> [N, M]: 1 if the point lies in the box or on its border."""
    return (
        ((predicted[:, None] >= boxes[None, :, :2]) & (predicted[:, None] <= boxes[None, :, 2:]))
        .all(-1)
        .astype(float)
    )


def gaussian(predicted: np.ndarray, boxes: np.ndarray, spread: float) -> np.ndarray:
    """Compute [N, M]: exp(-d^2 / 2) with d the distance from the middle in units of ``spread``
    times the sides (GUI-G2)."""
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    sides = boxes[:, 2:] - boxes[:, :2]
    off = (predicted[:, None] - middle[None]) / (spread * sides[None])
    closeness: np.ndarray = np.exp(-0.5 * (off**2).sum(-1))
    return closeness


def near(predicted: np.ndarray, right: np.ndarray, radius: float) -> np.ndarray:
    """Map [N, 2], [M, 2] in pixels -> [N, M]: 1 - distance / radius, not below 0."""
    distance = np.linalg.norm(predicted[:, None] - right[None], axis=-1)
    closeness: np.ndarray = np.clip(1 - distance / radius, 0, None)
    return closeness


class Pointing:
    """Scores how well points hit the targets: boxes if the prompt has them, else points. Options as
    in ``point``."""

    def __init__(self, form: Form, radius: float, spread: float):
        self.form = form
        self.radius = radius
        self.spread = spread

    def scores(self, predicted: np.ndarray, prompt: Prompt) -> np.ndarray:
        """Score [N, 2] in the space of the ground truths -> [N, M] in 0..1."""
        to_pixels = pixels(prompt)
        if prompt.get("boxes") is None:
            distance = near(predicted * to_pixels, true_points(prompt) * to_pixels, self.radius)
            return (distance > 0).astype(float) if self.form == "inside" else distance
        right = true_boxes(prompt)
        if self.form == "inside":
            return inside(predicted, right)
        if self.form == "gaussian":
            return gaussian(predicted, right, self.spread)
        middle = (right[:, :2] + right[:, 2:]) / 2
        return near(predicted * to_pixels, middle * to_pixels, self.radius)


def targets(prompt: Prompt) -> np.ndarray:
    """Return points [M, 2] that score the maximum."""
    if prompt.get("boxes") is None:
        return true_points(prompt)
    right = true_boxes(prompt)
    middle: np.ndarray = (right[:, :2] + right[:, 2:]) / 2
    return middle


@REWARDS.register("point")
@card(media="text", low=0, high=1, source="GUI-R1 (arXiv:2504.10458), GUI-G2 (arXiv:2507.15846)")
class Point(Verifiable):
    """Check that points lie in the right boxes or near the right points (``boxes``, ``point(s)``).

    Points and targets are paired one to one with the largest sum; reward = sum / max(number
    predicted, number right), so a second click never pays. An answer of boxes counts as their
    centres.

    Args:
        form: "inside": 1 in the box (or within ``radius`` of the point); "gaussian": falls with the
            distance from the middle of the box in units of its sides (GUI-G2; at points as
            "distance"); "distance": 1 - d / radius.
        radius: pixels of the original image; 140 is GUI-R1's.
        spread: standard deviation of the Gaussian, in sides of the box.
    """

    spatial = True

    def __init__(
        self,
        form: Form = "inside",
        radius: Annotated[float, Gt(0)] = 140.0,
        spread: Annotated[float, Gt(0)] = 0.5,
    ):
        self.pointing = Pointing(form, radius, spread)

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = len(targets(prompt))
        return matched(points(text), prompt, right, lambda rows: self.pointing.scores(rows, prompt))

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(json.dumps([{"point_2d": in_answer(box, prompt)} for box in targets(prompt)]))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = [in_answer(box, prompt) for box in targets(prompt)]
        spam = [*right, *([x + 2 * i, y + 2 * i] for x, y in right[:1] for i in range(1, 9))]
        return (
            {"spam of points": tagged(json.dumps(spam)), "no points": tagged("[]")} if right else {}
        )


@REWARDS.register("gui")
@card(
    media="text",
    needs="action",
    low=0,
    high=1,
    source="UI-R1 (arXiv:2503.21620), GUI-R1 (arXiv:2504.10458)",
)
class Gui(Verifiable):
    """Check an action on a graphical interface: its type, and a click's place or an input's text.

    ``action`` of the prompt is a name (``click``) or a record (``{"type": "type", "text":
    "hello"}``); a click's target is in ``boxes`` or ``point``. The answer is JSON (``{"action":
    "click", "point": [x, y]}``, also ``coordinate``, ``action_type``, ``text`` ...) or a call
    (``click(120, 40)``, ``type("hello")``).

    reward = type_weight * [type is right] + (1 - type_weight) * [type is right] * argument: a right
    place with a wrong type earns nothing. An action without an argument is judged by its type
    alone.

    Args:
        type_weight: share of the type; 0.5 is the proportion of UI-R1.
        form, radius, spread: of a click, as in ``point``.
        text_threshold: similarity of a text below which it earns nothing (1: only the exact text
            counts).
    """

    spatial = True

    def __init__(
        self,
        type_weight: Annotated[float, Ge(0), Le(1)] = 0.5,
        form: Form = "inside",
        radius: Annotated[float, Gt(0)] = 140.0,
        spread: Annotated[float, Gt(0)] = 0.5,
        text_threshold: Annotated[float, Ge(0), Le(1)] = 0.5,
    ):
        self.type_weight = type_weight
        self.text_threshold = text_threshold
        self.pointing = Pointing(form, radius, spread)

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        target = true_action(prompt)
        action, status = said_action(text)
        if action is None:
            return Verdict(0.0, "unparseable")
        # check the prompt whatever the answer
        judged = self._argument(action, target, prompt)
        if kind(action) != kind(target):
            return Verdict(0.0, status)
        argument, argument_status = judged
        return Verdict(
            self.type_weight + (1 - self.type_weight) * argument, worst(status, argument_status)
        )

    def _argument(
        self, action: dict[str, Any], target: dict[str, Any], prompt: Prompt
    ) -> tuple[float, Status]:
        words = said_words(target)
        if kind(target) in CLICKS:
            place = _place(action)
            if place is None:
                targets(prompt)
                return 0.0, "unparseable"
            at, states = in_truth([place], prompt)
            return float(self.pointing.scores(at, prompt).max(initial=0.0)), states[0]
        if words is None:
            return 1.0, "ok"
        from rapidfuzz.distance import Levenshtein

        near = Levenshtein.normalized_similarity(normal(said_words(action) or ""), normal(words))
        return float(near) if near >= self.text_threshold and said_words(action) else 0.0, "ok"

    def ground_truth(self, prompt: Prompt) -> str:
        action: dict[str, Any] = {"action": kind(true_action(prompt))}
        if action["action"] in CLICKS:
            action["point"] = in_answer(targets(prompt)[0], prompt)
        words = said_words(true_action(prompt))
        return tagged(json.dumps(action | ({"text": words} if words is not None else {})))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = kind(true_action(prompt))
        answers = {
            "another action": tagged(
                json.dumps({"action": "scroll" if right != "scroll" else "click"})
            )
        }
        if right in CLICKS:
            answers["a click nowhere"] = tagged(
                json.dumps({"action": right, "point": [-1e6, -1e6]})
            )
            answers["a click without a place"] = tagged(json.dumps({"action": right}))
        return answers


def kind(action: dict[str, Any]) -> str:
    """Return the type of an action, ``left_click`` and ``tap`` as ``click``, ``write`` as
    ``type``."""
    keys = ("action", "action_type", "type", "name")
    name = normal(next((action[key] for key in keys if key in action), ""))
    return SAME.get(name, name)


def said_words(action: dict[str, Any]) -> str | None:
    """Return the text of an input, the direction of a scroll, the name of an app or key."""
    words = next((action[key] for key in WORDS if action.get(key) not in (None, "")), None)
    return None if words is None or isinstance(words, (dict, list)) else str(words)


def true_action(prompt: Prompt) -> dict[str, Any]:
    value = need(prompt, "action")
    action = {"action": value} if isinstance(value, str) else value
    if not isinstance(action, dict) or not kind(action):
        raise Unscorable(f'"action" is {value!r}; expected a name or {{"type": ..., "text": ...}}')
    return action


def said_action(text: str) -> tuple[dict[str, Any] | None, Status]:
    """Return the one action of an answer; a list of several is no action."""
    answer = final(text)
    body = fenced(answer.value)
    if "{" in body:
        parsed = loose_json(body)
        value = (
            parsed.value[0]
            if isinstance(parsed.value, list) and len(parsed.value) == 1
            else parsed.value
        )
        if not isinstance(value, dict):
            return None, "unparseable"
        inner = value.get("arguments") or value.get("parameters")
        value = {**value, **inner} if isinstance(inner, dict) else value
        return (
            {str(k).casefold(): v for k, v in value.items()},
            worst(answer.status, parsed.status),
        )
    body = re.split(r"\bactions?\s*:", body, flags=re.I)[-1].strip()
    body = ARGUMENT.sub(r"(\1)", body)
    call = re.fullmatch(
        r"(?:pyautogui\.)?([A-Za-z_]+)\s*(?:\((.*)\)|(<point>.*|\[.*\]))?", body, flags=re.S
    )
    if not call:
        return None, "unparseable"
    inside = (call[2] or call[3] or "").strip()
    numbers = re.fullmatch(
        rf"(?:x\s*=\s*)?[\[(]?\s*({NUMBER})\s*,\s*(?:y\s*=\s*)?({NUMBER})\s*[\])]?", inside
    )
    if numbers:
        return {"action": call[1], "point": [float(numbers[1]), float(numbers[2])]}, answer.status
    if inside and kind({"action": call[1]}) in CLICKS:
        return {"action": call[1], "point": inside}, answer.status
    words = re.sub(r"^\w+\s*=\s*", "", inside).strip("\"'[] ")
    return {"action": call[1]} | ({"text": words} if words else {}), answer.status


def _place(action: dict[str, Any]) -> Shape | None:
    """Return where a click goes; a box counts as its middle."""
    keys = ("point", "coordinate", "coordinates", "position", "point_2d", "bbox", "bbox_2d", "box")
    coordinates = next((action[key] for key in keys if key in action), None)
    if coordinates is None and "x" in action and "y" in action:
        coordinates = [action["x"], action["y"]]
    parsed = points(json.dumps(coordinates)) if coordinates is not None else None
    shape = parsed.value[0] if parsed and parsed.value and len(parsed.value) == 1 else None
    return shape if shape and all(math.isfinite(v) for v in shape.values) else None
