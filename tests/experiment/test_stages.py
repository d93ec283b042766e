"""Several trainings in one configuration, each from the weights of the one before."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from mmrl import config
from mmrl.cli import commands
from mmrl.core.errors import UserError
from mmrl.experiment import build, checkpoint, lifecycle
from mmrl.monitoring.report.page import write_report
from tests.fixtures import tiny_module

NET = f"{Path(tiny_module.__file__).resolve()}:Tiny"
REWARD = {"tests.fixtures.demonstrations:reddish": 1.0}


@pytest.fixture
def plain(tmp_path):
    return configured(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run of both stages."""
    folder = tmp_path_factory.mktemp("stages")
    return lifecycle.train(written(configured(folder), folder), [f"run={folder / 'run'}"])


def configured(tmp_path):
    """Pictures to learn from, then a reward, on a network of a few numbers."""
    rows = []
    for i in range(8):
        Image.new("RGB", (8, 8), (30 * i, 255 - 30 * i, 99)).save(tmp_path / f"{i}.png")
        rows.append({"file_name": f"{i}.png", "text": f"picture {i}", "label": i % 5})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "policy": {"module": {"net": NET, "shape": [3, 4, 4], "steps": 3}},
        "data": {"captions": {"path": str(tmp_path), "held_out": 0.3}},
        "train": {
            "prompts_per_iteration": 4,
            "train_batch_size": 4,
            "group_size": 1,
            "save_every": 1,
            "evaluate_every": 1,
        },
        "evaluate": {"num_samples": 2},
        "log": {"tensorboard": False},
        "stages": {
            "sft": {"objective": "sft", "train": {"iterations": 2, "ema": 0.5}},
            "rl": {
                "objective": {"policy_gradient": {"kl": 0.1}},
                "reward": REWARD,
                "policy": {"module": {"noise_level": 0.5}},
                "train": {"iterations": 2, "group_size": 4, "train_batch_size": 16},
            },
        },
    }


def written(plain, folder, name="run.yaml"):
    file = folder / name
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    return file


def weights_of(run):
    arrays, _ = checkpoint.load(checkpoint.choose(run / "checkpoints")[0])
    return arrays


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_stage_begins_with_the_weights_of_the_one_before(plain, run, tmp_path):
    first, second = run / "1-sft", run / "2-rl"
    assert lifecycle.is_finished(first) and lifecycle.is_finished(second)
    rows = metrics_of(first)
    assert len(rows) == 2 and all(row["eval/loss"] > 0 and row["loss"] > 0 for row in rows)
    assert "reward/mean" not in rows[0] and len(metrics_of(second)) == 2
    assert metrics_of(second)[-1]["eval/reddish"] > 0
    # the moving average is what is taken up, and the reference of the KL
    session = build.base(second / "config.yaml")
    averaged = weights_of(first)["snapshot-ema"]
    for name, value in session.policy.weights.full("ref").items():
        assert torch.equal(value, averaged[name][...])
    known = yaml.safe_load((second / "config.yaml").read_text())
    assert known["policy"]["module"] == plain["policy"]["module"] | {"noise_level": 0.5}
    assert "stages" not in known and known["train"]["save_every"] == 1
    rows, target = commands.evaluate(run)
    assert rows[0]["rewards"]["reddish"] and target == second / "evaluation.json"
    assert commands.export(run, tmp_path / "export").is_dir()
    with pytest.raises(UserError, match="no reward to measure"):
        commands.evaluate(first)
    # moved together, they still find each other
    elsewhere = run.rename(tmp_path / "elsewhere")
    page = write_report(elsewhere).read_text()
    assert "1-sft" in page and "2-rl" in page
    elsewhere.rename(run)


def test_a_run_that_was_stopped_goes_on_where_it_was(plain, run, tmp_path):
    file = written(plain, tmp_path)
    stopped = tmp_path / "stopped"
    limit = "stages.rl.train.time_limit=1e-9"
    lifecycle.train(file, [f"run={stopped}", limit])
    assert lifecycle.is_finished(stopped / "1-sft")
    assert not lifecycle.is_finished(stopped / "2-rl")
    with pytest.raises(UserError, match="changes belong to one of them"):
        lifecycle.train(stopped, ["train.seed=1"], resume=True)
    part = stopped / "2-rl" / "config.yaml"
    part.write_text(part.read_text().replace("time_limit: 1.0e-09", "time_limit: null"))
    lifecycle.train(stopped, resume=True)
    assert lifecycle.is_finished(stopped / "2-rl")
    one, two = weights_of(run / "2-rl"), weights_of(stopped / "2-rl")
    for name in one["weights"]:
        assert torch.equal(one["weights"][name][...], two["weights"][name][...]), name
    before = (stopped / "2-rl" / "metrics.jsonl").read_text()
    lifecycle.train(stopped, resume=True)  # nothing is left to do
    assert (stopped / "2-rl" / "metrics.jsonl").read_text() == before


def test_a_configuration_with_stages_is_read_one_by_one(plain, tmp_path):
    file = written(plain, tmp_path)
    assert config.load(file)["objective"] == {"policy_gradient": {"kl": 0.1}}  # the last
    sft = config.load(file, ["stage=sft", "train.save_every=7"])
    assert sft["objective"] == "sft" and sft["reward"] == {}
    assert sft["train"]["save_every"] == 7 and sft["train"]["iterations"] == 2
    place, _, line = sft.where("train.iterations").rpartition(":")
    assert place == str(file) and "iterations" in file.read_text().split("\n")[int(line) - 1]
    rl = config.load(file, ["stage=rl", "stages.rl.train.iterations=9"])
    assert rl.where("train.iterations") == "command line: stages.rl.train.iterations=9"
    with pytest.raises(UserError, match="stage=rx: no such stage; known: rl, sft"):
        config.load(file, ["stage=rx"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": {"sd": {"path": "a/b"}}}, "stages.rl.policy is sd, but stage sft trains"),
        ({"policy": {"module": {"lora": 4}}}, "policy.module.lora is 4, but null in stage sft"),
        ({"run": "x"}, "stages.rl.run: is no section of a stage"),
        ({"trian": {}}, "is no section of a stage; did you mean 'train'"),
    ],
)
def test_what_cannot_follow_is_refused_before_anything_is_trained(plain, tmp_path, change, message):
    plain["stages"]["rl"] |= change
    file = written(plain, tmp_path)
    with pytest.raises(UserError, match=message):
        lifecycle.train(file, [f"run={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_run_may_begin_with_the_weights_of_any_other(plain, tmp_path):
    first = {key: value for key, value in plain.items() if key != "stages"}
    first |= plain["stages"]["sft"] | {"train": first["train"] | {"iterations": 1}}
    file = written(first, tmp_path)
    run = lifecycle.train(file, [f"run={tmp_path / 'first'}"])
    session = build.base(file, [f"start={run}"])
    trained = weights_of(run)["weights"]
    for name, value in session.policy.weights.full().items():
        assert torch.equal(value, trained[name][...])
    with pytest.raises(UserError, match="do not fit this policy"):
        build.base(file, [f"start={run}", "policy.lora={rank: 2, targets: [body.0]}"])


def test_a_supervised_stage_is_checked_before_training(plain, tmp_path):
    (tmp_path / "3.png").write_text("no picture")
    file = written(plain, tmp_path)
    with pytest.raises(UserError, match=r"metadata.jsonl:4: .*3.png: not a picture"):
        lifecycle.train(file, ["stage=sft", f"run={tmp_path / 'run'}"])
    sizes = [f"stages.sft.train.{size}" for size in ("group_size=4", "train_batch_size=16")]
    with pytest.raises(UserError, match="train.group_size: 4, but supervised"):
        lifecycle.train(file, ["stage=sft", *sizes])
