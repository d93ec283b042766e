"""The pictures and questions that scripts/real_pictures.py and real_questions.py write."""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import real_pictures
import real_questions


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_question_about_numbers_has_its_answer_and_no_pair_is_in_both(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
    real_questions.main()
    pairs = []
    for name in ("questions", "questions_held_out"):
        numbers = []
        for row in rows(tmp_path / f"{name}.jsonl"):
            a, b = map(int, re.findall(r"\d+", row["text"]))
            assert row["answer"] == str(a + b if row["task"] == "sum" else max(a, b))
            numbers.append((row["task"], *sorted((a, b))))
        pairs.append(set(numbers))
    assert len(pairs[0]) == 800 and len(pairs[1]) == 200 and not pairs[0] & pairs[1]


def test_boxes_counts_and_sides_are_those_of_the_pictures(tmp_path):
    (tmp_path / "pictures").mkdir()
    colors = {"dog": (255, 0, 0), "cat": (0, 255, 0), "bus": (0, 0, 255)}
    things = {name: Image.new("RGBA", (100, 80), (*rgb, 255)) for name, rgb in colors.items()}
    grey = [Image.new("RGB", (200, 200), (128, 128, 128))]
    draw = random.Random(0)
    asked = set()
    for number in range(40):
        found = real_pictures.scene(f"p{number}", tmp_path, things, grey, draw, number % 2 == 0)
        pixels = np.asarray(Image.open(tmp_path / found[0]["image"])).astype(int)
        for row in found:
            asked.add(row["task"])
            named = re.search(r"\b(dog|cat|bus)(e?s)?\b", row["text"])
            thing = named[1] if named else None
            if row["task"] == "box":
                x0, y0, x1, y1 = row["boxes"][0]
                inside = pixels[y0:y1, x0:x1].reshape(-1, 3)
                far = np.abs(inside - colors[thing]).sum(1)
                assert (far < 60).mean() > 0.9 and row["answer"] == str(row["boxes"][0])
            if row["task"] == "count":
                painted = (np.abs(pixels - colors[thing]).sum(-1) < 60).sum()
                assert (painted > 0) == (row["answer"] != "0")
            if row["task"] == "side":
                left = min(
                    colors, key=lambda n: _first_column(np.abs(pixels - colors[n]).sum(-1) < 60)
                )
                assert row["answer"] == f"the {left}"
    assert asked == {"name", "count", "side", "box"}


def _first_column(painted):
    columns = painted.any(0).nonzero()[0]
    return columns[0] if len(columns) else 1000
