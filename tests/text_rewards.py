"""A right answer and the prompt it belongs to, for every registered reward of text; a new reward goes here."""

from __future__ import annotations

from typing import Any

VIEW = {"coords": "original", "sizes": [[640, 480]], "resized": [[320, 240]], "frames": 1, "duration": 20.0}
BOXES = [[10, 20, 110, 220], [300, 40, 340, 90.5]]

# name -> (options, prompts that hold every field the reward needs)
SMALLEST: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "answer": ({}, [{"answer": "a red seven"}, {"answer": 7}, {"answer": "12"}]),
    "choice": ({}, [{"answer": "B", "choices": ["a", "the other", "c"]}, {"answer": ["A", "C"]}, {"answer": "D"}]),
    "classification": ({}, [{"answer": "Boeing 737-800"}, {"answer": "grey wolf", "aliases": ["timber wolf"]}]),
    "count": ({"fuzzy": True}, [{"answer": 3}, {"answer": "12"}, {"answer": 100}]),
    "grounding": ({}, [{"boxes": BOXES}, {"boxes": BOXES[:1]}, {"boxes": BOXES[1:]}]),
    "label_set": ({}, [{"labels": ["flu", "cold"]}, {"labels": ["gout"]}]),
    "referring": ({}, [{"boxes": BOXES[:1]}, {"boxes": BOXES[1:]}]),
}


def prompts_of(name: str) -> list[dict[str, Any]]:
    return [{"text": f"question {i}?", "view": VIEW, **p} for i, p in enumerate(SMALLEST[name][1])]
