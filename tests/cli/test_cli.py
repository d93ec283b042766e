"""The commands as a user meets them."""

import json
from pathlib import Path

import pytest
import yaml

from mmrl.core.registry import locate
from tests.fixtures.command import mmrl, refused

ROOT = Path(__file__).parents[2]
CONFIG = """
policy:
  sd3: {path: "world:digits/sd3-test", size: 32, steps: 3, noise_window: all_but_last, lora: 2}
data: {prompts: {path: prompts.txt, held_out: 0.3}}
reward: {jpeg_compressibility: 1.0, "judge.py:greenness": 0.5}
advantage: dance_grpo
objective: {policy_gradient: {clip_range: 1e-3, kl: 0.01}}
optimizer: {adamw: {lr: 1e-3}}
train:
  {prompts_per_iteration: 2, group_size: 4, train_batch_size: 4, iterations: 2, save_every: 1,
   sample_every: 1, evaluate_every: 2}
evaluate: {prompts: 2, num_samples: 2, guidance: [2.0], reward: {jpeg_incompressibility: 1.0}}
"""
JUDGE = "def greenness(media, prompts):\n    return media[:, 1].flatten(1).mean(1)\n"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A user's folder with a configuration, prompts, a custom reward, and one finished run."""
    locate("world:digits/sd3-test")
    folder = tmp_path_factory.mktemp("desk")
    (folder / "mine.yaml").write_text(CONFIG)
    (folder / "judge.py").write_text(JUDGE)
    (folder / "prompts.txt").write_text(
        "\n".join(f"a {c} {d}" for c in ("red", "blue") for d in ("one", "two", "six"))
    )
    mmrl("train", "mine.yaml", "run=first", cwd=folder, process=True)
    return folder


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_leaves_everything_behind(desk):
    run = desk / "first"
    lines = metrics(run)
    assert [line["iteration"] for line in lines] == [1, 2]
    assert lines[1]["eval/greenness"] > 0 and lines[0]["ratio/max_deviation"] >= 0
    names = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    expected = {
        "config.yaml",
        "machine.json",
        "events.jsonl",
        "samples/before.png",
        "samples/after.png",
        "samples/iter-000001.png",
        "checkpoints/iteration-000002/weights.safetensors",
    }
    assert expected <= names
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["iterations"] == 2


@pytest.mark.slow
def test_evaluate_report_export_and_sample(desk):
    shown = mmrl("evaluate", "first", cwd=desk).stdout
    rows = json.loads((desk / "first" / "evaluation.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["base", "base, guidance 2", "trained"]
    for row in rows:
        assert set(row["rewards"]) == {
            "jpeg_compressibility",
            "greenness",
            "jpeg_incompressibility",
        }
        for estimate in row["rewards"].values():
            assert estimate["low"] <= estimate["mean"] <= estimate["high"] and estimate["n"] == 4
    assert "trained" in shown and "greenness" in shown
    page = Path(mmrl("report", "first", cwd=desk).stdout.splitlines()[0])
    assert "<html" in (desk / page).read_text()
    mmrl("export", "first", "--out", "lora", cwd=desk)
    assert (desk / "lora" / "pytorch_lora_weights.safetensors").exists()
    assert "not empty" in refused("export", "first", "--out", "lora", cwd=desk)
    files = mmrl(
        "sample", "first", "-p", "a red one", "--num-samples", "2", "--out", "made", cwd=desk
    ).stdout.split()
    again = mmrl(
        "sample", "mine.yaml", "-p", "a red one", "--num-samples", "2", "--out", "base", cwd=desk
    ).stdout.split()
    assert len(files) == 2 and all((desk / f).stat().st_size > 100 for f in [*files, *again])


@pytest.mark.slow
def test_stop_and_resume_equal_a_run_in_one_go(desk):
    mmrl("train", "mine.yaml", "run=whole", "train.iterations=4", cwd=desk)
    mmrl("train", "--resume", "first", "train.iterations=4", cwd=desk)
    states = [desk / run / "checkpoints" / "iteration-000004" for run in ("whole", "first")]
    for part in ("weights", "optimizer", "snapshot-ref"):
        stopped_bytes, whole_bytes = (
            (state / f"{part}.safetensors").read_bytes() for state in states
        )
        assert stopped_bytes == whole_bytes
    first = metrics(desk / "first")
    whole = metrics(desk / "whole")
    assert [m["reward/mean"] for m in first] == [m["reward/mean"] for m in whole]


BROKEN = {
    "misspelt key": (["objective.policy_gradient.clip_rang=1"], "did you mean 'clip_range'?"),
    "folder of nothing": (["policy.sd3.path=."], "model_index.json"),
    "file for a folder": (["policy.sd3.path=./judge.py"], "judge.py is a file"),
    "window outside": (["policy.sd3.noise_window={window: {start: 5}}"], "window"),
    "LoRA nowhere": (
        ["policy.sd3.lora={rank: 2, targets: [nothing]}"],
        "lora.targets match no module",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_configuration_is_one_message(desk, case):
    overrides, message = BROKEN[case]
    process = case == "misspelt key"
    assert message in refused(
        "train", "mine.yaml", "run=never", *overrides, cwd=desk, process=process
    )
    assert not (desk / "never" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_other_mistakes_are_one_message(desk):
    (desk / "broken.txt").write_text("fine\n")
    (desk / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert "broken.jsonl:2" in refused(
        "train", "mine.yaml", "run=never", "data.path=broken.jsonl", cwd=desk
    )
    assert "already holds a run" in refused("train", "mine.yaml", "run=first", cwd=desk)
    assert "mmrl train --resume" in refused("train", "first", cwd=desk)
    assert "no configuration 'nothing'" in refused("train", "nothing", cwd=desk)
    assert "is not a run" in refused("report", ".", cwd=desk) or "no run" in refused(
        "report", ".", cwd=desk
    )
    assert "has no config.yaml" in refused("train", "--resume", ".", cwd=desk)
    assert "did you mean 'rewards'?" in refused("list", "reward", cwd=desk)


@pytest.mark.slow
def test_a_reward_that_fails_too_often_stops_the_run_with_its_cause(desk):
    (desk / "judge.py").write_text(
        JUDGE + "def broken(media, prompts):\n    raise RuntimeError('no such server')\n"
    )
    message = refused(
        "train", "mine.yaml", "run=failing", "reward={'judge.py:broken': 1.0}", cwd=desk
    )
    assert "no such server" in message and "judge.py" in message
