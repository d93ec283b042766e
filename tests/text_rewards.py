"""A right answer and the prompt it belongs to, for every registered reward of text; a new reward
goes here."""

from __future__ import annotations

from typing import Any

from rewards import Answer, Count, Grounding

VIEW = {
    "coords": "original",
    "sizes": [[640, 480]],
    "resized": [[320, 240]],
    "frames": 1,
    "duration": 20.0,
}
TABLE = "<table><tr><th>a</th><th>b</th></tr><tr><td colspan='2'>3.5</td></tr></table>"
DRAWING = '<svg viewBox="0 0 10 10"><rect x="1" y="1" width="5" height="4" fill="red"/></svg>'
MASK = [[0, 0, 1], [1, 1, 1]]
BOXES = [[10, 20, 110, 220], [300, 40, 340, 90.5]]

ROUTES = {"routes": {"find": Grounding(), "count": Count(fuzzy=True)}, "default": Answer()}

# name -> (options, prompts that hold every field the reward needs)
SMALLEST: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "answer": ({}, [{"answer": "a red seven"}, {"answer": 7}, {"answer": "12"}]),
    "choice": (
        {},
        [
            {"answer": "B", "choices": ["a", "the other", "c"]},
            {"answer": ["A", "C"]},
            {"answer": "D"},
        ],
    ),
    "classification": (
        {},
        [{"answer": "Boeing 737-800"}, {"answer": "grey wolf", "aliases": ["timber wolf"]}],
    ),
    "confidence": ({}, [{"boxes": BOXES, "labels": ["a cat", "dog"]}, {"boxes": BOXES[:1]}]),
    "count": ({"fuzzy": True}, [{"answer": 3}, {"answer": "12"}, {"answer": 100}]),
    "detection": ({}, [{"boxes": BOXES, "labels": ["a cat", "dog"]}, {"boxes": BOXES[:1]}]),
    "grounding": ({}, [{"boxes": BOXES}, {"boxes": BOXES[:1]}, {"boxes": BOXES[1:]}]),
    "gui": (
        {},
        [{"action": "click", "boxes": BOXES[:1]}, {"action": {"type": "type", "text": "hello"}}],
    ),
    "label_set": ({}, [{"labels": ["flu", "cold"]}, {"labels": ["gout"]}]),
    "point": ({}, [{"boxes": BOXES}, {"point": [30, 40]}, {"points": [[30, 40], [300, 50]]}]),
    "referring": ({}, [{"boxes": BOXES[:1]}, {"boxes": BOXES[1:]}]),
    "segmentation": ({}, [{"mask": [[10, 10, 100, 20, 80, 90.5]]}, {"mask": MASK}]),
    "temporal": ({}, [{"spans": [[2, 5.5]]}, {"spans": [[1, 3], [7, 19]]}]),
    "tracking": ({}, [{"tracks": {"0": BOXES[0], "1.5": BOXES[1]}}, {"tracks": BOXES}]),
    "chart": ({}, [{"answer": 12.5}, {"answer": "France"}, {"answer": [1, 20, "x"]}]),
    "cosine_length": ({}, [{"answer": 3}]),
    "format": ({}, [{"answer": 3}, {}]),
    "key_steps": ({}, [{"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"]]}]),
    "length": ({}, [{}, {"answer": 3}]),
    "maths": ({}, [{"answer": "\\frac{1}{2}"}, {"answer": "x^2+1"}, {"answer": 12}]),
    "transcription": ({}, [{"answer": "Total: 12.50 EUR"}, {"answer": "two\nlines"}]),
    "overlong": ({"limit": 64, "buffer": 16}, [{}, {"answer": 3}]),
    "repetition": ({}, [{}, {"answer": 3}]),
    "routed": (
        ROUTES,
        [{"task": "find", "boxes": BOXES}, {"task": "count", "answer": 4}, {"answer": "a cat"}],
    ),
    "svg": ({"size": 64}, [{"svg": DRAWING}]),
    "table": ({}, [{"answer": TABLE}, {"answer": "| a | b |\n|---|---|\n| 1 | 2 |"}]),
    "text_similarity": (
        {},
        [{"answer": "A red bus waits at the corner."}, {"answer": "Two dogs."}],
    ),
    "think_or_not": ({}, [{}, {"answer": 3}]),
    "video_qa": (
        {},
        [{"answer": "B", "choices": ["x", "y"], "spans": [[1, 4]]}, {"answer": "a dog"}],
    ),
    "vqa": ({}, [{"answers": ["red"] * 7 + ["pink"] * 3}, {"answers": ["two"]}]),
}


def prompts_of(name: str) -> list[dict[str, Any]]:
    return [{"text": f"question {i}?", "view": VIEW, **p} for i, p in enumerate(SMALLEST[name][1])]
