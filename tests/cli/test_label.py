"""Pairs are labelled by a reward and trained on, from the command line; what cannot be is
reported."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.core.registry import locate
from tests.fixtures.command import mmrl, refused

SAMPLING = {
    "policy": {"sd3": {"path": "world:digits/sd3-test", "size": 32, "steps": 3}},
    "data": {"prompts": {"path": "prompts.txt", "held_out": 0.3}},
    "reward": {"judge.py:greenness": 1.0},
    "objective": "policy_gradient",
    "optimizer": {"adamw": {"lr": 1e-3}},
    "train": {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 1},
}
PAIRS = SAMPLING | {
    "policy": {"sd3": SAMPLING["policy"]["sd3"] | {"sde_type": "ode", "noise_level": 0.0}},
    "data": {"preferences": {"path": "pairs.jsonl", "held_out": 0.3}},
    "objective": {"diffusion_dpo": {"beta": 50.0}},
    "train": SAMPLING["train"] | {"preferences": {}, "evaluate_every": 1},
}
JUDGE = "def greenness(media, prompts):\n    return media[:, 1].flatten(1).mean(1)\n"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with pairs that a reward of the user's chose among samples of a base model."""
    locate("world:digits/sd3-test")
    folder = tmp_path_factory.mktemp("desk")
    (folder / "judge.py").write_text(JUDGE)
    (folder / "prompts.txt").write_text("\n".join(f"a red {n}" for n in ("one", "two", "six")))
    without = {key: value for key, value in PAIRS.items() if key != "reward"}
    for name, plain in (("sampling", SAMPLING), ("pairs", PAIRS), ("plain", without)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(plain))
    words = ("label", "sampling.yaml", "--num-samples", 3, "--out", "pairs.jsonl")
    shown = mmrl(*words, cwd=folder).stdout
    assert "pairs.jsonl: 2 pairs; 0 prompts without a better sample" in shown
    return folder


def pairs_of(desk, name="pairs.jsonl"):
    return [json.loads(line) for line in (desk / name).read_text().splitlines()]


def greenness(file):
    with Image.open(file) as image:
        return sum(image.convert("RGB").split()[1].tobytes()) / image.width / image.height / 255


def test_the_best_is_chosen_and_the_worst_rejected(desk):
    pairs = pairs_of(desk)
    assert {pair["prompt"] for pair in pairs} < {"a red one", "a red two", "a red six"}
    for pair in pairs:
        sides = [greenness(desk / pair[side]) for side in ("chosen", "rejected")]
        assert sides == pytest.approx(pair["rewards"], abs=2e-3) and sides[0] > sides[1]


@pytest.mark.slow
def test_they_are_trained_on_with_a_reward_that_is_measured_or_without(desk, monkeypatch):
    mmrl("train", "pairs.yaml", "run=with", cwd=desk)
    last = json.loads((desk / "with" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["iteration"] == 1 and {"eval/greenness", "eval/dpo/right"} <= set(last)
    assert last["samples/total"] == 4 and last["samples/left_out"] == 0
    mmrl("train", "plain.yaml", "run=without", cwd=desk)
    plain = json.loads((desk / "without" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "eval/greenness" not in plain and plain["loss"] == last["loss"]
    monkeypatch.chdir(desk)
    assert dry_run(Path("plain.yaml")).counted.sampling == 0


def test_what_label_cannot_do_is_said(desk):
    words = ("label", "sampling.yaml", "--num-samples", 2, "--out")
    assert "exists: nothing of it is overwritten" in refused(*words, "pairs.jsonl", cwd=desk)
    assert "name a .jsonl file" in refused(*words, "pairs.csv", cwd=desk)
    for option, why in (
        (("--by", "redness"), "--by redness: the configuration has greenness"),
        (("--split", "test"), "--split test: expected train or held_out"),
    ):
        assert why in refused(*words, "more.jsonl", *option, cwd=desk)
    assert not (desk / "more.jsonl").exists()
    none = mmrl(*words, "none.jsonl", "--margin", 5, "--limit", 1, cwd=desk).stdout
    assert "0 pairs; 1 prompts without" in none and pairs_of(desk, "none.jsonl") == []


def test_rows_without_a_better_answer_are_named_with_their_line(desk):
    lines = pairs_of(desk)
    words = ("train", "pairs.yaml", "data.preferences.path=broken.jsonl")
    for changes, sentence in [({"rejected": "gone.png"}, "no file"), ({"rejected": None}, "'reje")]:
        broken = [lines[0], lines[1] | changes]
        (desk / "broken.jsonl").write_text("\n".join(map(json.dumps, broken)))
        assert "broken.jsonl:2" in (said := refused(*words, cwd=desk)) and sentence in said
