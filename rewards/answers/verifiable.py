"""Scores each text with a number and a status, NaN only for a broken prompt: the base of verifiable
rewards."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from rewards.answers.boxes import assign
from rewards.answers.coords import Unscorable, answer_space, convert, extent, scale, truth_space
from rewards.answers.notations import Shape, statuses
from rewards.answers.reading import Parsed, Status, worst
from rewards.card import card_of

log = logging.getLogger(__name__)
LONGEST = 1000  # characters of a prompt's description


class Verdict(NamedTuple):
    """Holds score, status and note; ``score`` is NaN if the prompt cannot be scored, and ``note``
    then says why."""

    score: float
    status: Status = "ok"
    note: str = ""


class Verifiable(ABC):
    """Checks a text against the prompt's ground truth; the base of such rewards.

    A subclass writes ``judge(text, prompt) -> Verdict`` and ``ground_truth(prompt) -> str``, and
    raises ``Unscorable`` in either where the prompt's ground truth is missing or broken.

    ``spatial``: answers are image coordinates. ``shaping``: the form or length is scored, not the
    answer.
    """

    spatial = False
    shaping = False

    def __call__(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] float32 on the CPU; NaN if the prompt is at fault, never if the answer is."""
        verdicts = self.verdicts(texts, prompts)
        self._complain(verdicts, prompts)
        return torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float32)

    def status(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Status]:
        """Return how well each answer could be parsed, for metrics and reports."""
        return [verdict.status for verdict in self.verdicts(texts, prompts)]

    def verdicts(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Verdict]:
        """Return score, status and note of every text."""
        self._check(texts, prompts)
        return [self._verdict(text, prompt) for text, prompt in zip(texts, prompts)]

    def _check(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> None:
        if isinstance(texts, (Tensor, np.ndarray, str)) or not all(
            isinstance(text, str) for text in texts
        ):
            kind = (
                "images or videos"
                if isinstance(texts, (Tensor, np.ndarray))
                else type(texts).__name__
            )
            raise UserError(
                f"{self._name()} judges a list of texts, one for each prompt, not {kind}; "
                "use it with a policy that writes text, such as vlm"
            )
        if len(texts) != len(prompts):
            raise UserError(f"{self._name()} got {len(texts)} texts for {len(prompts)} prompts")

    @abstractmethod
    def judge(self, text: str, prompt: Prompt) -> Verdict:
        """Judge a text whose prompt has all fields that the card requires."""

    @abstractmethod
    def ground_truth(self, prompt: Prompt) -> str:
        """Return the ground truth as the policy should write it: this must score the maximum."""

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        """Return ways to cheat that belong to this kind of answer, by name; each must score less
        than the ground truth."""
        return {}

    def _verdict(self, text: str, prompt: Prompt) -> Verdict:
        try:
            for field in card_of(self).needs:
                need(prompt, field)
            return self.judge(text, prompt)
        except Unscorable as error:
            return self._unscorable(error)

    @staticmethod
    def _unscorable(error: Unscorable) -> Verdict:
        return Verdict(math.nan, "ok", str(error)[:LONGEST])

    def _name(self) -> str:
        return f"reward {type(self).__name__}"

    def _complain(self, verdicts: Sequence[Verdict], prompts: Sequence[Prompt]) -> None:
        """Name every kind of broken prompt once."""
        reported = self.__dict__.setdefault("_reported", set())
        for verdict, prompt in zip(verdicts, prompts):
            if math.isnan(verdict.score) and verdict.note not in reported and len(reported) < 100:
                reported.add(verdict.note)
                log.warning("%s cannot score %s: %s", self._name(), row_name(prompt), verdict.note)


def row_name(prompt: Prompt) -> str:
    """Return where a prompt came from (``where`` or ``origin``, file:line), else its question."""
    place = prompt.get("where") or prompt.get("origin")
    return str(place)[:LONGEST] if place else f"the prompt {str(prompt.get('text', ''))[:80]!r}"


def need(prompt: Prompt, field: str) -> Any:
    """Return a field of the prompt, or raise ``Unscorable``."""
    if prompt.get(field) is None:
        has = ", ".join(str(key)[:80] for key in islice(prompt, 20))
        raise Unscorable(f'it has no "{field}"; it has {has or "nothing"}')
    return prompt[field]


def finite(values: Any, size: int, field: str) -> tuple[float, ...]:
    """Return ``size`` finite numbers of a ground truth, or raise ``Unscorable`` naming the
    field."""
    try:
        numbers = tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unscorable(f'"{field}" holds {values!r}; expected {size} numbers') from error
    if len(numbers) != size or not all(math.isfinite(v) for v in numbers):
        raise Unscorable(f'"{field}" holds {values!r}; expected {size} finite numbers')
    return numbers


def true_boxes(prompt: Prompt, field: str = "boxes") -> np.ndarray:
    """Return the right boxes, [M, 4] float64, in the space of the prompt; a single box needs no
    outer list."""
    value = need(prompt, field)
    value = [value] if len(value) == 4 and not any(isinstance(v, Sized) for v in value) else value
    boxes = [finite(box, 4, field) for box in value]
    for box in boxes:
        if box[2] <= box[0] or box[3] <= box[1]:
            raise Unscorable(f'"{field}" holds {list(box)}, which is not x0 < x1, y0 < y1')
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)


def in_truth(shapes: Sequence[Shape], prompt: Prompt) -> tuple[np.ndarray, list[Status]]:
    """Convert predicted coordinates, [N, 2 or 4], to the space of the ground truths, with the
    status of each."""
    target = truth_space(prompt)
    default_space = "rel1" if shares(shapes, prompt) else answer_space(prompt)
    width = len(shapes[0].values) if shapes else 4
    predicted = np.array([shape.values for shape in shapes], dtype=np.float64).reshape(-1, width)
    spaces = [shape.space or default_space for shape in shapes]
    table = np.empty_like(predicted)
    states: list[Status] = ["ok"] * len(shapes)
    for space in dict.fromkeys(spaces):
        rows = [i for i, each in enumerate(spaces) if each == space]
        table[rows] = predicted[rows] * np.tile(scale(prompt, space, target), width // 2)
        for i, state in zip(rows, statuses(predicted[rows], extent(prompt, space))):
            states[i] = state
    nowhere = -1.0 if width == 4 else np.inf  # an empty box, a point at infinity
    return np.where((np.abs(table) < 1e12).all(1, keepdims=True), table, nowhere), states


def shares(shapes: Sequence[Shape], prompt: Prompt) -> bool:
    """Tell whether an answer can only be relative to the picture: its space is not given, the right
    one is in pixels and larger than 2, the picture's size is known, and the numbers lie within 0
    and 1, some strictly between."""
    values = [value for shape in shapes if shape.space is None for value in shape.values]
    if not all(0 <= value <= 1 for value in values) or all(value in (0, 1) for value in values):
        return False
    if isinstance(prompt.get("view"), dict) or truth_space(prompt) != "original":
        return False
    if extent(prompt, "original") is None:
        return False
    if prompt.get("boxes") is not None:
        boxes = true_boxes(prompt)
        return len(boxes) > 0 and bool((boxes[:, 2:] - boxes[:, :2] > 2).all())
    right = prompt["points"] if prompt.get("points") is not None else [prompt.get("point") or (0,)]
    return len(right) > 0 and all(max(map(float, point)) > 2 for point in right)


def in_answer(values: Iterable[float], prompt: Prompt) -> list[float]:
    """Convert right coordinates to the space of the model's answers, to write the ground truth."""
    converted = convert(values, scale(prompt, truth_space(prompt), answer_space(prompt)))
    return [int(v) if float(v).is_integer() else round(v, 6) for v in converted]


def count_status(status: Status, predicted: int, expected: int) -> Status:
    return status if predicted == expected else worst(status, "wrong_count")


def matched(
    parsed: Parsed[Any],
    prompt: Prompt,
    right: int,
    scores: Callable[[np.ndarray], np.ndarray],
) -> Verdict:
    """Judge the shapes of an answer by the one-to-one pairing with the ``right`` ones of largest
    sum: that sum over the larger of both counts. ``scores``: of shapes [N, 2 or 4] in the space of
    the ground truths -> [N, right]."""
    if parsed.value is None:
        return Verdict(0.0, parsed.status)
    rows, states = in_truth(parsed.value, prompt)
    status = count_status(worst(parsed.status, *states), len(rows), right)
    if not len(rows) or not right:
        return Verdict(float(len(rows) == right), status)
    table = scores(rows)
    total = sum(table[pair] for pair in assign(table))
    return Verdict(float(total) / max(table.shape), status)


def tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"
