"""``mmrl compare`` and ``--best-of`` as a user meets them, on a tiny model."""

import json

import pytest
import yaml

from mmrl.apps.compare import runs
from mmrl.core.registry import locate
from tests.fixtures import warm
from tests.fixtures.command import mmrl

pytestmark = pytest.mark.slow
CONFIG = {
    "policy": {"sd3": {"path": "world:digits/sd3-test", "size": 32, "steps": 3, "lora": 2}},
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
