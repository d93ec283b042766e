"""Rows made for rewards without right answers: twins, instructions of the model's own, points."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from rewards.judges import instructions
from rewards.judges.instructions import Filters, augmented, points, read, self_instruct, twins
from rewards.judges.question import Unreadable
from tests.fixtures.command import program


class Scripted:
    """A model that answers by a function of the question's words and the number of the question."""

    usage = None

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def ask(self, questions):
        values = []
        for question in questions:
            words = "".join(part for part in question.parts if isinstance(part, str))
            pictures = sum(not isinstance(part, str) for part in question.parts)
            text = self.answer(words, len(self.asked))
            self.asked.append((words, pictures))
            try:
                values.append(None if text is None else question.value(text))
            except Unreadable:
                values.append(None)
        return values


# twins


def test_twins_keep_their_numbers_and_differ():
    rows = [{"text": "What is 2 + 35?", "answer": 37}, {"text": "How many legs has a cat?"}]
    replies = [
        'New question: "Add 35 to 2."',
        "Add 3 to 2.",  # another question
        "how many legs has a cat?",  # the same words
        "A cat has how many legs?",
    ]
    twinned = twins(rows, Scripted(lambda words, n: replies[n]), versions=2)
    assert [(r["twin"], r["version"], r["text"]) for r in twinned] == [
        ("0", "0", "What is 2 + 35?"),
        ("0", "1", "Add 35 to 2."),
        ("1", "0", "How many legs has a cat?"),
        ("1", "1", "A cat has how many legs?"),
    ]
    assert twinned[1]["answer"] == 37 and "twin" not in rows[0]
    assert len(twins(rows[:1], Scripted(lambda words, n: None), versions=3)) == 1
    with pytest.raises(UserError, match='no "text"'):
        twins([{"question": "?"}], Scripted(lambda words, n: "a"))


def test_pictures_are_augmented_alike_every_time(tmp_path):
    Image.linear_gradient("L").resize((40, 20)).convert("RGB").save(tmp_path / "a.png")
    rows = [{"text": "how bright?", "image": str(tmp_path / "a.png")}, {"text": "no picture"}]
    one = augmented(rows, tmp_path / "one", seed=3)
    two = augmented(rows, tmp_path / "two", seed=3)
    assert [(r["twin"], r["version"]) for r in one] == [("0", "0"), ("0", "1"), ("1", "0")]
    assert "image" not in one[1] and one[1]["text"] == "how bright?"
    files = [Image.open(rows[1]["images"][0]) for rows in (one, two)]
    assert files[0].size == (40, 20) and files[0].tobytes() == files[1].tobytes()
    assert files[0].tobytes() != Image.open(tmp_path / "a.png").tobytes()


# self-instruction

SEEDS = [{"text": f"What is {i} times {i + 1}, and why?"} for i in range(2, 6)]


def test_new_instructions_pass_every_filter():
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]

    def answer(words, n):
        if "Think first" not in words:
            return f"Instruction: {names[n % 8]} {names[n % 8]} {names[n % 8]} tell {n % 8}"
        # alpha is known, and of beta no two answers agree
        return f"<answer>{1 if 'alpha' in words else n if 'beta' in words else n % 2}</answer>"

    rules = Filters(answers=4, low=0.3, high=0.8)
    fresh, refused = self_instruct(SEEDS, Scripted(answer), 3, rules, seed=1)
    texts = {row["text"] for row in fresh}
    assert len(texts) == 3 and all(row["origin"] == "self_instruct" for row in fresh)
    assert not any("alpha" in text or "beta" in text for text in texts)
    assert refused["too easy"] == 1 and refused["too hard"] == 1
    again, _ = self_instruct(SEEDS, Scripted(answer), 3, rules, seed=1)
    assert again == fresh
    stuck, refused = self_instruct(SEEDS, Scripted(lambda words, n: SEEDS[0]["text"]), 2, rules)
    assert stuck == [] and refused == Counter({"too similar": 8})
    with pytest.raises(UserError, match="at least one row"):
        self_instruct([], Scripted(answer), 1)


# points


def test_an_instruction_is_taken_apart():
    replies = [
        '{"points": [" It names three towns. ", "It is polite.", "It is polite.", ""]}',
        "I would rather not",
        '{"points": []}',
        json.dumps({"points": [f"point {i}" for i in range(9)]}),  # more than were allowed
    ]
    rows = [{"text": f"Write to town {i}", "id": i} for i in range(4)]
    listed, missing = points(rows, Scripted(lambda words, n: replies[n]), most=5)
    assert listed[0] == {**rows[0], "checklist": ["It names three towns.", "It is polite."]}
    assert listed[1:] == rows[1:] and missing == 3


def test_files_are_read_and_written(tmp_path, monkeypatch, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_bytes('\ufeff{"text": "one\u2028line", "image": "a.png"}\r\n'.encode())
    assert read(data) == [{"text": "one\u2028line", "image": str(tmp_path / "a.png")}]
    model = Scripted(lambda words, n: '{"points": ["It says what it sees."]}')
    monkeypatch.setattr(instructions, "server", lambda url, temperature: model)
    instructions._points(data, out, "http://x")
    assert read(out)[0]["checklist"] == ["It says what it sees."]
    assert "1 rows, 0 without points" in capsys.readouterr().out and model.asked[0][1] == 1
    files = [str(data), str(tmp_path / "twins.jsonl")]
    done = program("rewards.judges.instructions", "twins", *files, "--augment")
    assert done.returncode == 0, done.stderr
    made_rows = read(tmp_path / "twins.jsonl")
    assert len(made_rows) == 2 and Path(made_rows[1]["images"][0]).is_file()
    wrong = program("rewards.judges.instructions", "twins", *files)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: twins are")
    for content, says in (
        (b"{", r"data.jsonl:1 is not JSON"),
        ('{"text": "caf\xe9"}'.encode("latin-1"), r"data.jsonl cannot be read: 'utf-8' codec"),
    ):
        data.write_bytes(content)
        with pytest.raises(UserError, match=says):
            read(data)
