"""Rewards of the untrained policy, from the script to a training run that reads them."""

import json
import sys

import pytest

from mmrl.apps.prepare import reference_rewards
from mmrl.core.registry import locate
from tests.fixtures.command import mmrl

CONFIG = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 3, lora: 2}}
data: {prompts: {path: prompts.txt, held_out: 0.3}}
reward: {jpeg_compressibility: 0.5}
advantage: {aapo: {base: {filtered: {keep: [3, 2]}}, file: reference.jsonl}}
objective: {policy_gradient: {clip_range: 1e-3}}
optimizer: {adamw: {lr: 1e-3}}
train: {prompts_per_iteration: 2, group_size: 4, train_batch_size: 8, iterations: 1, save_every: 1}
log: {tensorboard: false}
"""


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["reference_rewards", *map(str, words)])
    reference_rewards.main()


@pytest.mark.slow
def test_a_reference_is_measured_and_trained_against(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    locate("world:digits/sd3-test")
    (tmp_path / "run.yaml").write_text(CONFIG)
    texts = [f"a {color} {digit}" for color in ("red", "blue") for digit in ("one", "two", "six")]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    words = ["run.yaml", "advantage=grpo", "--num-samples", 3, "--batch", 2]
    for out in ("reference.jsonl", "again.jsonl"):
        run(monkeypatch, *words, "--out", out)
    lines = [json.loads(line) for line in (tmp_path / "reference.jsonl").read_text().splitlines()]
    assert {line["text"] for line in lines} < set(texts) and len(lines) >= 3
    assert all(len(line["reward"]) == 3 and max(line["reward"]) < 0 for line in lines)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "reference.jsonl").read_bytes()
    mmrl("train", "run.yaml", "run=first", cwd=tmp_path)
    mmrl("train", "first", "--resume", "train.iterations=2", cwd=tmp_path)
    metrics = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in metrics] == [1, 2]
    with pytest.raises(SystemExit, match="error: .*lr"):
        run(monkeypatch, *words, "--out", "x.jsonl", "train.lr=1")
