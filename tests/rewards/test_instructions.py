"""Rows made for rewards without right answers: twins, instructions of the model's own, points."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from rewards import co_reward
from rewards.judges import instructions
from rewards.judges.instructions import (
    Filters,
    augmented,
    points,
    read,
    rouge_l,
    self_instruct,
    twins,
    written,
)
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
    prompts = [{**row, "group": g} for g, row in enumerate(twinned[:2]) for _ in range(3)]
    assert co_reward()(["37", "37", "5", "5", "5", "37"], prompts).tolist() == [0, 0, 1, 0, 0, 1]


def test_a_twin_that_nobody_wrote_is_left_out():
    rows = [{"text": "What is it?"}]
    assert len(twins(rows, Scripted(lambda words, n: None), versions=3)) == 1
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


def naive_lcs(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            same = table[i][j] + 1
            table[i + 1][j + 1] = same if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_rouge_is_its_definition(subtests):
    for first, second in [
        ("a b c d", "a c d b"),
        ("A b!", "a b"),
        ("x", "y z"),
        ("a a b a", "a b a a"),
        ("", ""),
    ]:
        with subtests.test(first=first, second=second):
            a, b = (text.casefold().replace("!", "").split() for text in (first, second))
            common = naive_lcs(a, b)
            if common:
                precision, recall = common / len(a), common / len(b)
                expected = 2 * precision * recall / (precision + recall)
            else:
                expected = 0.0
            assert rouge_l(first, second) == pytest.approx(expected, abs=1e-9)


def test_filters_say_what_is_wrong(subtests):
    for text, cause in [
        ("Why so?", "length"),
        ("word " * 151, "length"),
        ("- What is the sum of all?", "start"),
        ("What is shown in the image?", "forbidden word"),
        ("What is 2 times 3, and why so?", "too similar"),
        ("Name the seventh prime number after ten.", ""),
    ]:
        with subtests.test(text=text, cause=cause):
            assert Filters().refuses(text, [row["text"] for row in SEEDS]) == cause


def test_new_instructions_pass_every_filter():
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]

    def answer(words, n):
        if "Think first" in words:
            if "alpha" in words:
                return "<answer>1</answer>"  # known
            if "beta" in words:
                return f"<answer>{n}</answer>"  # no two agree
            return f"<answer>{n % 2}</answer>"
        return f"Instruction: {names[n % 8]} {names[n % 8]} {names[n % 8]} tell {n % 8}"

    model = Scripted(answer)
    rules = Filters(answers=4, low=0.3, high=0.8)
    fresh, refused = self_instruct(SEEDS, model, 3, rules, seed=1)
    assert len(fresh) == 3 and all(row["origin"] == "self_instruct" for row in fresh)
    texts = [row["text"] for row in fresh]
    assert not any("alpha" in t or "beta" in t for t in texts) and len(set(texts)) == 3
    assert refused["too easy"] == 1 and refused["too hard"] == 1
    again, _ = self_instruct(SEEDS, Scripted(answer), 3, rules, seed=1)
    assert again == fresh
    stuck, refused = self_instruct(SEEDS, Scripted(lambda words, n: SEEDS[0]["text"]), 2, rules)
    assert stuck == [] and refused == Counter({"too similar": 8})
    with pytest.raises(UserError, match="at least one row"):
        self_instruct([], model, 1)


# points


def test_an_instruction_is_taken_apart():
    replies = [
        '{"points": [" It names three towns. ", "It is polite.", "It is polite.", ""]}',
        "I would rather not",
        '{"points": []}',
    ]
    rows = [{"text": f"Write to town {i}", "id": i} for i in range(3)]
    listed, missing = points(rows, Scripted(lambda words, n: replies[n]), most=5)
    assert listed[0] == {**rows[0], "checklist": ["It names three towns.", "It is polite."]}
    assert listed[1:] == rows[1:] and missing == 2
    many = json.dumps({"points": [f"point {i}" for i in range(9)]})
    _, missing = points(rows[:1], Scripted(lambda words, n: many), most=5)
    assert missing == 1  # more than were allowed: not the form that was asked for


def test_what_is_written_is_read_without_its_frame():
    assert written('New instruction 2: "Do it."') == "Do it."
    with pytest.raises(Unreadable):
        written(' "" ')


def test_files_are_read_and_written(tmp_path, monkeypatch, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [{"text": "Describe it.", "image": "a.png"}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert read(data)[0]["image"] == str(tmp_path / "a.png")
    model = Scripted(lambda words, n: '{"points": ["It says what it sees."]}')
    monkeypatch.setattr(instructions, "server", lambda url, temperature: model)
    instructions._points(data, tmp_path / "out.jsonl", "http://x")
    assert read(tmp_path / "out.jsonl")[0]["checklist"] == ["It says what it sees."]
    assert "1 rows, 0 without points" in capsys.readouterr().out and model.asked[0][1] == 1
    with pytest.raises(UserError, match="say one"):
        instructions._twins(data, tmp_path / "out.jsonl")
    data.write_text("{")
    with pytest.raises(UserError, match=r"data.jsonl:1 is not JSON"):
        read(data)
    data.write_bytes('\ufeff{"text": "one\u2028line"}\r\n'.encode())
    assert read(data) == [{"text": "one\u2028line"}]
    data.write_bytes('{"text": "caf\xe9"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"data.jsonl cannot be read: 'utf-8' codec"):
        read(data)


def test_the_program_augments_pictures(tmp_path):
    Image.new("RGB", (8, 8), (90, 90, 90)).save(tmp_path / "a.png")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "What?", "image": "a.png"}))
    command = ["rewards.judges.instructions", "twins"]
    files = [str(tmp_path / "data.jsonl"), str(tmp_path / "twins.jsonl")]
    done = program(*command, *files, "--augment")
    assert done.returncode == 0, done.stderr
    made_rows = read(tmp_path / "twins.jsonl")
    assert len(made_rows) == 2 and Path(made_rows[1]["images"][0]).is_file()
    wrong = program(*command, *files)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: twins are")
