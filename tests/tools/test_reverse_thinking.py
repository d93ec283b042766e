"""Thoughts that a model writes, shown the answer."""

import json
import sys

import pytest

from mmrl.apps.prepare import reverse_thinking
from tests.fixtures import tiny_vlms

CONFIG = """
policy: {{vlm: {{path: {path}, max_new_tokens: 8, coordinate_space: original}}}}
data: {{vision: {{path: {rows}, held_out: 0.0}}}}
train: {{prompts_per_iteration: 2, train_batch_size: 2, iterations: 1}}
stages:
  sft: {{objective: sft, train: {{group_size: 1}}}}
  rl: {{objective: policy_gradient, reward: answer, train: {{group_size: 2}}}}
"""


@pytest.fixture
def file(tmp_path):
    tiny_vlms.image(70, 60).save(tmp_path / "a.png")
    rows = [
        {"text": f"question {i}?", "image": "a.png", "answer": str(i), "kind": "digit"}
        for i in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "run.yaml"
    folder = tiny_vlms.folder("qwen2_5_vl")
    path.write_text(CONFIG.format(path=folder, rows=tmp_path / "rows.jsonl"))
    return path


def test_rows_get_what_the_model_wrote_when_it_saw_the_answer(file, tmp_path, monkeypatch):
    shown = []

    def written(session, prompts, batch):
        shown.extend(prompts)
        yield from ["it is round", None, "two lines", ""]

    monkeypatch.setattr(reverse_thinking, "thoughts", written)
    target = tmp_path / "thoughts.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", str(file), "--out", str(target)])
    reverse_thinking.main()
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["thought"] for line in lines] == ["it is round", "two lines"]
    first = lines[0]
    assert first["text"].startswith("question") and first["kind"] == "digit"
    assert first["images"] == [str((tmp_path / "a.png").resolve())] and "origin" not in first
    assert "The right answer is: " + first["answer"] in shown[0]["text"]
