"""The commands as a user meets them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from mmrl.core.registry import locate
from tests.fixtures import waiting, warm
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_ctrl_c_saves_and_says_how_to_go_on(desk, number, status):
    name = f"stopped-{number}"
    words = ["-m", "mmrl", "train", "mine.yaml", f"run={name}", "train.iterations=100000"]
    process = warm.start(words, desk)
    log = desk / name / "metrics.jsonl"
    waiting.until(lambda: process.poll() is not None or (log.exists() and "\n" in log.read_text()))
    process.send_signal(number)
    returned = process.wait()
    shown = process.stdout + process.stderr
    assert returned == status, shown
    assert f"mmrl train --resume {name}" in shown and "Traceback" not in shown
    done = metrics(desk / name)[-1]["iteration"]
    assert (desk / name / "checkpoints" / f"iteration-{done:06d}" / "state.json").exists()


@pytest.mark.slow
def test_a_torn_checkpoint_is_named_and_the_one_before_taken(desk):
    mmrl("train", "mine.yaml", "run=torn", cwd=desk)
    weights = desk / "torn" / "checkpoints" / "iteration-000002" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    shown = mmrl("train", "--resume", "torn", "train.iterations=3", cwd=desk).stdout
    assert (
        "iteration-000002 is torn" in shown
        and ("resumed from torn/checkpoints/iteration-000001") in shown
    )
    assert [line["iteration"] for line in metrics(desk / "torn")] == [1, 2, 3]


BROKEN = {
    "misspelt key": (["objective.policy_gradient.clip_rang=1"], "did you mean 'clip_range'?"),
    "wrong type": (["policy.sd3.steps=eight"], "policy.sd3.steps"),
    "unknown name": (
        ["objective=grpo"],
        "unknown objective 'grpo'; it is called 'policy_gradient' here",
    ),
    "missing file": (["data.prompts.path=nowhere.txt"], "nowhere.txt"),
    "impossible batches": (
        ["train.train_batch_size=3"],
        "train.train_batch_size 3 does not divide",
    ),
    "folder of nothing": (["policy.sd3.path=."], "model_index.json"),
    "file for a folder": (["policy.sd3.path=./judge.py"], "judge.py is a file"),
    "reward of nobody": (["reward={'judge.py:blueness': 1.0}"], "known: greenness"),
    "window outside": (["policy.sd3.noise_window={window: {start: 5}}"], "window"),
    "LoRA nowhere": (
        ["policy.sd3.lora={rank: 2, targets: [nothing]}"],
        "lora.targets match no module",
    ),
    "no such override": (["train.iteratons=3"], "did you mean 'iterations'?"),
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


@pytest.mark.slow
def test_a_failure_in_the_middle_loses_nothing(desk):
    (desk / "flaky.py").write_text(
        "from pathlib import Path\n\ndef flaky(media, prompts):\n    count = Path('calls')\n"
        "    done = len(count.read_text()) if count.exists() else 0\n    "
        "count.write_text('x' * (done + 1))\n"
        "    assert done < 2 or Path('mended').exists(), 'server gone'\n    return "
        "media.flatten(1).mean(1)\n"
    )
    reward = "reward={'flaky.py:flaky': 1.0}"
    sizes = ["train.save_every=0", "train.evaluate_every=0", "train.iterations=4"]
    message = refused("train", "mine.yaml", "run=flaky", reward, *sizes, cwd=desk)
    assert "server gone" in message and "mmrl train --resume flaky" in message
    assert (desk / "flaky" / "checkpoints" / "iteration-000002" / "state.json").exists()
    (desk / "mended").touch()
    mmrl("train", "--resume", "flaky", cwd=desk)
    assert [line["iteration"] for line in metrics(desk / "flaky")] == [1, 2, 3, 4]


def test_list_doctor_and_help(tmp_path):
    assert "grpo" in mmrl("list", "objectives", cwd=tmp_path).stdout
    assert torch.__version__.partition("+")[0] in mmrl("doctor", cwd=tmp_path).stdout
    shown = mmrl("--help", cwd=tmp_path).stdout
    for command in ("train", "sample", "evaluate", "export", "list", "doctor", "report"):
        assert command in shown


def test_help_imports_nothing_heavy():
    code = (
        "import sys, mmrl.cli.app; print([m for m in ('torch', 'diffusers', 'transformers') if m "
        "in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
