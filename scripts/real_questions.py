"""Writes questions about numbers in plain English, each with one number as its answer.

    python scripts/real_questions.py [FOLDER]        default: weights/

``questions.jsonl`` and ``questions_held_out.jsonl`` hold the rows that ``data: {vision: ...}``
reads. Questions of the two share no pair of numbers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ASKED = {
    "sum": ("What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?"),
    "larger": ("Which number is larger, {a} or {b}?", "Which is more: {a} or {b}?"),
}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "weights")
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random("questions")
    rows: dict[tuple[str, int, int], dict[str, str]] = {}
    while len(rows) < 1000:
        task = draw.choice(sorted(ASKED))
        a, b = draw.sample(range(2, 40) if task == "sum" else range(10, 1000), 2)
        text = draw.choice(ASKED[task]).format(a=a, b=b)
        answer = str(a + b if task == "sum" else max(a, b))
        rows.setdefault(
            (task, min(a, b), max(a, b)), {"text": text, "answer": answer, "task": task}
        )
    every = list(rows.values())
    for name, part in (("questions", every[200:]), ("questions_held_out", every[:200])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{folder / name}.jsonl: {len(part)} questions")


if __name__ == "__main__":
    main()
