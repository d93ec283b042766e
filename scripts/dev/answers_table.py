"""Writes the table of docs/verifiable-rewards.md that shows what rewards accept, from the answers
in the tests. `python scripts/dev/answers_table.py`"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "rewards" / "answers.txt"
PAGE = ROOT / "docs" / "verifiable-rewards.md"
BEGIN, END = "<!-- answers -->", "<!-- /answers -->"
PROMPTS = 2  # of a reward
SHOWN = 2  # answers of a cell
LONGEST = 44  # maximum characters of a shown answer or prompt


class Row(NamedTuple):
    """Holds a line of the table: a text, its reward and prompt, and its score."""

    reward: str
    prompt: str  # JSON
    score: float
    text: str


def rows(path: Path = TABLE) -> Iterator[Row]:
    """Yield reward, prompt, score and text of every line of the table."""
    reward = prompt = ""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            reward, _, prompt = line[3:].partition(" ")
        elif line and not line.startswith("#"):
            score, _, text = line.partition(" ")
            yield Row(reward, prompt, float(score), text.replace("\u23ce", "\n"))


def table() -> str:
    """Return the table: for the first prompts of every reward, answers that are accepted, and
    others."""
    lines = ["| reward | right is | read as right | not right |", "|---|---|---|---|"]
    every = list(rows())
    written: Counter[str] = Counter()
    for reward, prompt in dict.fromkeys((row.reward, row.prompt) for row in every):
        mine = [row for row in every if (row.reward, row.prompt) == (reward, prompt)]
        cells = [shown(row.text for row in mine if (row.score == 1) == right) for right in (1, 0)]
        if not all(cells) or len(prompt) > LONGEST or written[reward] == PROMPTS:
            continue
        written[reward] += 1
        fields = json.loads(prompt)
        right = ", ".join(f"{key} {code(json.dumps(fields[key]))}" for key in fields)
        lines.append(f"| `{reward}` | {right.replace(chr(10), ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(texts: Iterator[str]) -> str:
    """Write short answers, spread over the list, as code."""
    short = [text for text in texts if 0 < len(text) <= LONGEST and not set(text) & {"\n", "`"}]
    step = max(1, len(short) // SHOWN)
    return ", ".join(map(code, short[::step][:SHOWN]))


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
