"""A right answer and the prompt it belongs to, for every registered reward of text; a new reward goes here."""

from __future__ import annotations

from typing import Any

VIEW = {"coords": "original", "sizes": [[640, 480]], "resized": [[320, 240]], "frames": 1, "duration": 20.0}
MASK = [[0, 0, 1], [1, 1, 1]]
BOXES = [[10, 20, 110, 220], [300, 40, 340, 90.5]]

# name -> (options, prompts that hold every field the reward needs)
SMALLEST: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "answer": ({}, [{"answer": "a red seven"}, {"answer": 7}, {"answer": "12"}]),
    "choice": ({}, [{"answer": "B", "choices": ["a", "the other", "c"]}, {"answer": ["A", "C"]}, {"answer": "D"}]),
    "classification": ({}, [{"answer": "Boeing 737-800"}, {"answer": "grey wolf", "aliases": ["timber wolf"]}]),
    "confidence": ({}, [{"boxes": BOXES, "labels": ["a cat", "dog"]}, {"boxes": BOXES[:1]}]),
    "count": ({"fuzzy": True}, [{"answer": 3}, {"answer": "12"}, {"answer": 100}]),
    "detection": ({}, [{"boxes": BOXES, "labels": ["a cat", "dog"]}, {"boxes": BOXES[:1]}]),
    "grounding": ({}, [{"boxes": BOXES}, {"boxes": BOXES[:1]}, {"boxes": BOXES[1:]}]),
    "gui": ({}, [{"action": "click", "boxes": BOXES[:1]}, {"action": {"type": "type", "text": "hello"}}]),
    "label_set": ({}, [{"labels": ["flu", "cold"]}, {"labels": ["gout"]}]),
    "point": ({}, [{"boxes": BOXES}, {"point": [30, 40]}, {"points": [[30, 40], [300, 50]]}]),
    "referring": ({}, [{"boxes": BOXES[:1]}, {"boxes": BOXES[1:]}]),
    "segmentation": ({}, [{"mask": [[10, 10, 100, 20, 80, 90.5]]}, {"mask": MASK}]),
    "temporal": ({}, [{"spans": [[2, 5.5]]}, {"spans": [[1, 3], [7, 19]]}]),
    "tracking": ({}, [{"tracks": {"0": BOXES[0], "1.5": BOXES[1]}}, {"tracks": BOXES}]),
}


def prompts_of(name: str) -> list[dict[str, Any]]:
    return [{"text": f"question {i}?", "view": VIEW, **p} for i, p in enumerate(SMALLEST[name][1])]
