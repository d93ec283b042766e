"""Prompt files, broken lines, the split, and an order that only seed and iteration decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.data.base import batch
from mmrl.data.prompts import Prompts, read, split
from tests.fixtures.mistakes import message


def texts(prompts) -> list[str]:
    return [prompt["text"] for prompt in prompts]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines_are_prompts_and_keep_their_other_keys(tmp_path):
    path = written(tmp_path, "p.txt", "\ufeffa cat\r\n\n  a dog \n\t\na line\u2028separator")
    assert texts(read(path)) == ["a cat", "a dog", "a line\u2028separator"]
    lines = ['{"text": "a", "tag": 1}', '{"prompt": " b ", "include": [{"count": 2}]}', '"c"', ""]
    prompts = read(written(tmp_path, "p.jsonl", "\n".join(lines)))
    assert texts(prompts) == ["a", " b ", "c"]
    assert prompts[0]["tag"] == 1 and prompts[1]["include"] == [{"count": 2}]
    path = written(tmp_path, "q.jsonl", '{"caption": "d", "text": "no"}')
    assert texts(read(path, "caption")) == ["d"]


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": "a"', "p.jsonl:3: broken JSON at column 13"),
        ("{'text': 'a'}", "p.jsonl:3: broken JSON at column 2"),
        ("plain words", "p.jsonl:3: broken JSON at column 1"),
        ('{"caption": "a", "n": 1}', "p.jsonl:3: no key 'text' or 'prompt'; this line has caption"),
        ("[1]", 'p.jsonl:3: expected {"text": "..."} or a string, got list'),
        ("3", "p.jsonl:3: expected"),
        ('{"text": ""}', "p.jsonl:3: 'text' must be text that is not empty"),
        ('{"text": 3}', "p.jsonl:3: 'text' must be text that is not empty, got 3"),
        ("[" * 20000, "p.jsonl:3: "),
    ],
)
def test_a_broken_line_is_named_and_shown(tmp_path, line, said):
    shown = message(read, written(tmp_path, "p.jsonl", f'{{"text": "fine"}}\n\n{line}\n'))
    assert said in shown and shown.splitlines()[1].strip().startswith(line[:40])


def test_files_that_cannot_be_read_are_named(tmp_path):
    assert "p.txt:2: byte 0xe9 is not UTF-8; save it as UTF-8" in message(
        read, written(tmp_path, "p.txt", "fine\ncaf\xe9\n".encode("latin1"))
    )
    assert "empty.txt holds no prompt" in message(read, written(tmp_path, "empty.txt", "\n \n"))
    assert "No such file" in message(read, tmp_path / "gone.txt")
    assert "rows are read from .txt" in message(read, tmp_path / "p.doc")
    assert "no rows there; expected train.jsonl" in message(Prompts, tmp_path)


def test_a_folder_has_its_own_held_out_file(tmp_path):
    rows = [json.dumps({"prompt": f"p{i}", "tag": "x"}) for i in range(40)]
    written(tmp_path, "train_metadata.jsonl", "\n".join(rows))
    written(tmp_path, "train.txt", "not this one")
    assert len(Prompts(tmp_path).train) + len(Prompts(tmp_path).held_out) == 40
    written(tmp_path, "test.txt", "t1\nt2")
    source = Prompts(tmp_path)
    assert len(source.train) == 40 and source.train[0]["tag"] == "x"
    assert texts(source.held_out) == ["t1", "t2"]
    assert len(Prompts(tmp_path, held_out=0.5).held_out) > 8  # what is asked for wins
    other = written(tmp_path, "b.txt", "p3\nc")
    with pytest.warns(UserWarning, match="1 texts of .*b.txt are also in"):
        assert texts(Prompts(tmp_path, other).held_out) == ["p3", "c"]


def test_the_split_keeps_equal_texts_together_and_never_moves_one():
    prompts = [{"text": f"prompt {i % 500}", "n": i} for i in range(1000)]
    train, held = split(prompts, 0.2)
    assert len(train) + len(held) == 1000 and not set(texts(train)) & set(texts(held))
    assert 60 < len(set(texts(held))) < 140
    more_train, more_held = split(prompts + [{"text": f"new {i}"} for i in range(500)], 0.2)
    assert set(texts(train)) <= set(texts(more_train)) and set(texts(held)) <= set(texts(more_held))
    assert [p["n"] for p in train] == sorted(p["n"] for p in train)
    for share, held in ((0.05, 1), (0.99, 1), (0.0, 0)):
        assert [len(side) for side in split([{"text": "a"}, {"text": "b"}], share)] == [
            2 - held,
            held,
        ]


def test_every_epoch_is_a_permutation_and_the_position_is_the_iteration():
    prompts = [{"text": str(i)} for i in range(7)]
    once = [batch(prompts, 3, i, seed=0) for i in range(9)]
    assert [batch(prompts, 3, i, seed=0) for i in reversed(range(9))] == once[::-1]
    assert [batch(prompts, 3, i, seed=1) for i in range(9)] != once
    whole = batch(prompts, 27, 0, seed=0)  # larger than the data: the same order, wrapped around
    assert whole == [prompt for part in once for prompt in part]
    epochs = [texts(whole[7 * e : 7 * e + 7]) for e in range(3)]
    assert all(sorted(epoch) == sorted(texts(prompts)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert "no prompts" in message(batch, [], 3, 0, 0)
