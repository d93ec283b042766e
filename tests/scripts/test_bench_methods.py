"""The comparison of methods: its configurations can be read, and its page says what the runs
say."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_methods  # noqa: E402
import methods_page  # noqa: E402

from mmrl.core.registry import OBJECTIVES, POLICIES, load_built_in  # noqa: E402
from mmrl.objectives.group_loss import GroupLoss  # noqa: E402
from mmrl.run.build import read  # noqa: E402
from mmrl.utils.paths import find_config  # noqa: E402

load_built_in()


@pytest.mark.parametrize("name", bench_methods.METHODS)
def test_a_method_is_a_shipped_configuration_and_takes_its_changes(name):
    method = bench_methods.METHODS[name]
    configuration = read(find_config(f"digits/{method.config}"), method.overrides(0)).plain
    assert (
        configuration["train"]["prompts_per_iteration"] * configuration["train"]["group_size"] == 96
    )  # equally many pictures
    assert configuration["optimizer"]["adamw"]["lr"] == method.lr


def test_every_objective_of_flow_models_is_compared():
    files = {find_config(f"digits/{method.config}") for method in bench_methods.METHODS.values()}
    used = {next(iter(yaml.safe_load(file.read_text())["objective"])) for file in files}
    # group losses are for every kind of model and are compared by ``mmrl compare``; supervised
    # fine-tuning and distillation follow no reward
    distills = ("distill", "consistency", "dmd")
    alone = {
        name: entry
        for name, entry in OBJECTIVES.items()
        if not issubclass(entry, GroupLoss) and not entry.supervised and name not in distills
    }
    flow = {name for name, entry in alone.items() if entry.needs in ("", "gaussian")}
    assert used == flow and POLICIES["sd3"].capabilities.decisions == "gaussian"


@pytest.mark.parametrize("name", bench_methods.RACERS)
def test_a_racer_can_be_read(name):
    config, changes = bench_methods.RACERS[name]
    method = bench_methods.Method(config, "", 1e-4, (*bench_methods.TWENTY, *changes))
    plain = read(find_config(f"digits/{config}"), method.overrides(0)).plain
    (policy,) = plain["policy"].values()
    assert policy["steps"] == 20 and plain["train"]["prompts_per_iteration"] == 2
    assert config != "branch_grpo" or policy["tree"]["factor"] == 2


def test_distances_of_pictures():
    media = torch.zeros(2, 3, 3, 4, 4)
    media[0, 0] = 1.0  # one of three differs by 1 in every pixel: two of three pairs
    assert bench_methods.apart(media).flatten().tolist() == pytest.approx([2 / 3, 0.0])


def run(seed, up, method="Flow-GRPO"):
    before = {
        name: [0.2, 0.4, 0.6] for name in ("digits", "digits_judge", "clip_score", "diversity")
    }
    after = {name: [value + up for value in values] for name, values in before.items()} | {
        "digits": [0.2 + up, 0.5, 0.7]
    }
    return {
        "method": method,
        "seed": seed,
        "config": "flow_grpo",
        "curve": [[0, 0.0, 0.4], [12, 30.0, 0.5]],
        "images": 100,
        "forwards": 1200,
        "decisions": 400,
        "wall": 60.0,
        "cpu": 30.0,
        "resident_bytes": 2**30,
        "machine": {},
        "tensor_bytes": None if seed else 2**20,
        "before": before,
        "after": after,
    }


def test_the_page_says_what_the_runs_say():
    runs = {"Flow-GRPO": [run(0, 0.1), run(1, 0.2)]}
    assert methods_page.gain(runs["Flow-GRPO"], "digits") == pytest.approx(
        (0.35 / 3, 4.302653 * 0.0288675 / 3**0.5)  # Student's t of two degrees
    )
    costs = {
        "forwards": 20.0,
        "decisions": 19.0,
        "time_rollout": 1.0,
        "time_reward": 0.1,
        "time_update": 2.0,
    }
    timed = (("DanceGRPO, all steps", 4.0), ("BranchGRPO", 2.0))
    speed = {"machine": {}} | {
        name: {"cpu": [seconds], "wall": [seconds], **costs} for name, seconds in timed
    }
    race = {"seed": 0, "curve": [[2, 5.0, 0.4], [3, 6.0, 0.51], [4, 9.0, 0.6]]}
    lines = methods_page.page(
        runs, {"speed": speed, "sprints": [race]}, {"Flow-GRPO": (methods_page.FAMILIES[0], 4e-4)}
    )
    text = "\n".join(lines)
    assert (
        "+0.117 ± 0.072" in text
        and ("| BranchGRPO | 2.00 (2.00 - 2.00) | 2.00 | 20.0 | 19.0 |") in text
    )
    assert "| four steps, no KL | 0 | 0.500 | 30.0 | 6.0 | 5.0 | 0.510 | 3 of 12 |" in text
    assert "not within 3.3" in methods_page.arrival(race, {"curve": [[12, 30.0, 0.9]], "cpu": 30.0})
    drawing = methods_page.picture("curves", runs)
    assert (
        drawing.startswith("<svg")
        and drawing.count("<polyline") == 1
        and "Flow-GRPO 0.5<" in drawing
    )
