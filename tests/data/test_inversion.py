"""Multiple-choice questions turned around: what was wrong is right, and the other way round."""

import json

import pytest

from mmrl.data.vision.inversion import inverted
from mmrl.data.vision.source import Vision

CHOICES = ["a cube", "a ball", "a ring", "nothing"]


def question(text="What did the ball hit?", answer="C", **changes):
    return {"text": text, "choices": CHOICES, "answer": answer, **changes}


def right(prompt):
    """The right options' texts."""
    return {prompt["choices"]["ABCDEF".index(letter)] for letter in prompt["answer"].split(", ")}


def test_the_right_option_becomes_the_only_wrong_one():
    listed = "What did the ball hit?\nA a cube\nB a ball\nC a ring\nD nothing"
    counts = set()
    for n in range(60):
        given = [question(listed), question(answer="a ring"), question(answer="(C)")]
        for prompt in inverted(given, 1.0, seed=n):
            lines = prompt["text"].split("\n")
            assert lines[0] == "What didn't the ball hit?"
            letters = "ABCD"[: len(prompt["choices"])]
            assert lines[1:] == [f"{a} {b}" for a, b in zip(letters, prompt["choices"])]
            assert "a ring" in prompt["choices"] and set(prompt["choices"]) <= set(CHOICES)
            assert right(prompt) == set(prompt["choices"]) - {"a ring"}
            counts.add(len(right(prompt)))
    assert counts == {1, 2, 3}


@pytest.mark.parametrize(
    "given",
    [
        question("Where was it, and why?", answer="A, B"),  # several are right already
        question("Count the rings."),
        {"text": "What is this?", "answer": "a ring"},
        question("What is this?", answer="a sphere"),
    ],
)
def test_what_cannot_be_turned_around_stays(given):
    assert inverted([given], 1.0) == [given]


def test_a_share_is_inverted_the_same_every_time_and_only_to_train_on(tmp_path):
    prompts = [question(f"What is number {n}?") for n in range(400)]
    once = inverted(prompts, 0.5)
    assert once == inverted(prompts, 0.5)
    assert 160 < sum("inverted" in prompt for prompt in once) < 240
    listed = "A a cube\nB a ball\nC a ring\nD nothing"
    rows = [question(f"What is number {n}?\n{listed}") for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Vision(tmp_path / "rows.jsonl", invert=1.0, held_out=0.25)
    assert all("isn't" in prompt["text"] for prompt in data.train)
    assert data.held_out and all("isn't" not in prompt["text"] for prompt in data.held_out)
