"""A run saves besides ``train.save_every`` by the clock, and at its best held-out score so far."""

import json

import pytest
import torch
import yaml

from mmrl.core.errors import UserError
from mmrl.experiment import build, checkpoint, lifecycle, loop

REWARD = "tests.fixtures.toys:reward"
SIZES = {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "save_every": 0}


@pytest.fixture
def toy(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"text": f"p{i}", "label": i / 8 - 1} for i in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {
        "policy": "tests.fixtures.toys:ToyFlow",
        "data": {"prompts": {"path": str(prompts), "held_out": 0.25}},
        "reward": {REWARD: {"weight": 2.0}},
        "objective": {"policy_gradient": {"clip_range": 0.2}},
        "train": SIZES,
        "evaluate": {"prompts": 2, "num_samples": 1},
        "log": {"tensorboard": False},
        "run": str(tmp_path / "run"),
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(plain))
    return tmp_path / "toy.yaml"


def kept(run):
    return [path.name[-1] for path in checkpoint.every(run / "checkpoints")]


def test_the_best_by_the_held_out_score_stays(toy, monkeypatch):
    scores = iter([0.1, 0.5, 0.3, 0.2, 0.4, 0.6])

    def scripted(self):
        (name,) = self.session.scorer.weights
        return {f"eval/{name}": next(scores)}

    monkeypatch.setattr(loop.Run, "_evaluate", scripted)
    best = ["train.save_best=true", "train.evaluate_every=1", "train.save_total_limit=1"]
    run = lifecycle.train(toy, [*best, "train.iterations=4"])
    assert kept(run) == ["4", "2"]  # the newest, and that of 0.5
    folder = run / "checkpoints"
    assert checkpoint.named(folder, "best") == checkpoint.path_of(folder, 2)
    assert json.loads((folder / "best.json").read_text()) == {"iteration": 2, "score": 1.0}
    arrays, _ = checkpoint.load(checkpoint.path_of(folder, 2))
    policy = build.trained(run, at="best").policy
    for name, value in policy.weights.full().items():
        torch.testing.assert_close(value, arrays["weights"][name], rtol=0, atol=0)
    # a resume knows it: 0.4 is no better, 0.6 is
    lifecycle.train(run, ["train.iterations=5"], resume=True)
    assert kept(run) == ["5", "2"]
    lifecycle.train(run, ["train.iterations=6"], resume=True)
    assert kept(run) == ["6"] and checkpoint.named(folder, "best").name == "iteration-000006"


def test_a_score_needs_evaluations(toy, tmp_path):
    with pytest.raises(UserError, match="train.save_best .* set train.evaluate_every"):
        lifecycle.train(toy, ["train.save_best=true", "train.iterations=1"])
    with pytest.raises(UserError, match="no best checkpoint: train with train.save_best=true"):
        checkpoint.named(tmp_path / "checkpoints", "best")


def test_the_clock_saves_too(toy):
    run = lifecycle.train(toy, ["train.save_minutes=1e-9", "train.iterations=2"])
    assert kept(run) == ["2", "1"]
    rare = ["train.save_minutes=1000", "train.iterations=2", f"run={run}-3"]
    assert kept(lifecycle.train(toy, rare)) == ["2"]
