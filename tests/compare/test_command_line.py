"""``mmrl compare`` and ``--best-of`` as a user meets them, on a tiny model."""

import json

import pytest
import yaml

from mmrl.apps.compare import runs
from mmrl.core.registry import locate
from tests.fixtures import warm
from tests.fixtures.command import mmrl, refused

pytestmark = pytest.mark.slow
CONFIG = {
    "policy": {
        "sd3": {"path": "world:digits/sd3-test", "size": 32, "steps": 3, "lora": 2}
        | {"noise_window": "all_but_last"}
    },
    "data": {"digits": {"captions": 40}},
    "reward": {"jpeg_compressibility": 1.0},
    "advantage": "dance_grpo",
    "objective": {"policy_gradient": {"clip_range": 0.001}},
    "optimizer": {"adamw": {"lr": 0.001}},
    "train": {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 4, "iterations": 9},
    "evaluate": {"prompts": 3, "num_samples": 2, "reward": {"jpeg_incompressibility": 1.0}},
    "log": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    locate("world:digits/sd3-test")
    folder = tmp_path_factory.mktemp("desk")
    (folder / "a.yaml").write_text(yaml.safe_dump(CONFIG))
    words = "compare a.yaml --vary optimizer.adamw.lr=0.1 --seeds 1 --budget samples=9"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "COMMAND", (*warm.command(), "-m", "mmrl"))
        mmrl(*words.split(), cwd=folder)
    return folder


def test_the_page_has_costs_pictures_and_a_verdict(desk):
    folder = desk / "comparison"
    content = json.loads((folder / "compare.json").read_text())
    cost = content["costs"]["a"]
    assert cost["iterations"] == 2 and cost["samples"] == 16 and cost["forwards"] > 0
    assert cost["cpu_seconds"] > 0 and cost["ended_by"] == "budget of 9 samples spent"
    assert "One seed" in content["verdict"][-1] and (folder / "compare.png").is_file()
    measures = content["means"]["test"]["a"]
    assert measures["reward"]["trained"]["mean"] == pytest.approx(
        -measures["jpeg_incompressibility"]["trained"]["mean"], abs=1e-3
    )
    assert "diversity" in measures and "<img" in (folder / "compare.html").read_text()
    config = (folder / "a" / "seed-0" / "run" / "config.yaml").read_text()
    assert yaml.safe_load(config)["evaluate"]["split"] == "development"


def test_best_of_is_better_by_its_reward(desk):
    run = desk / "comparison" / "a" / "seed-0" / "run"
    mmrl("evaluate", run, cwd=desk)
    plain = json.loads((run / "evaluation.json").read_text())["rows"][1]["rewards"]
    mmrl("evaluate", run, "--best-of", 4, "--by", "jpeg_incompressibility", cwd=desk)
    report = json.loads((run / "evaluation.json").read_text())
    best = report["rows"][1]["rewards"]
    assert report["best_of"] == 4 and report["by"] == "jpeg_incompressibility"
    name = "jpeg_incompressibility"
    assert best[name]["mean"] > plain[name]["mean"]
    made = mmrl(
        *f"sample {run} -p a --num-samples 1 --best-of 2 --by contrast --out best".split(),
        cwd=desk,
    ).stdout.split()
    assert len(made) == 1
    assert "belong together" in refused("evaluate", run, "--best-of", 4, cwd=desk)
    assert "unknown reward" in refused("evaluate", run, "--best-of", 4, "--by", "x", cwd=desk)
