"""``mmrl train --engine ray`` against the same training without: equal to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.apps.ray import command
from mmrl.core.errors import UserError
from mmrl.experiment.lifecycle import train
from tests.fixtures import waiting
from tests.fixtures.ray_run import CONFIG

ROOT = Path(__file__).parents[2]
TIMES = ("time/", "seconds", "cpu_seconds", "memory/", "throughput/", "share/")
HALF = ["ray.cpus_per_trainer=0.5", "ray.cpus_per_rollout_worker=0.5", "ray.timeout=120"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A user's folder, and the run of one process that others are compared with."""
    folder = tmp_path_factory.mktemp("desk")
    lines = [json.dumps({"text": f"prompt {i}", "label": i % 5}) for i in range(12)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    text = CONFIG.replace("FOLDER", f'"{folder}"')
    (folder / "run.yaml").write_text(text.replace("ITEMS", "weight: 1.0"))
    (folder / "dies.yaml").write_text(text.replace("ITEMS", "dies_at: 3"))
    before = os.getcwd()
    os.chdir(folder)
    train(Path("run.yaml"), ["run=alone"])
    yield folder
    os.chdir(before)


def on_ray(name, run, *changes):
    return command.train("ray", Path(name), [f"run={run}", *HALF, *changes])


def metrics(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines
    ]


def equal(first, second):
    """Whether two runs logged the same numbers and ended with the same weights and optimizer."""
    if metrics(first) != metrics(second):
        return False
    files = list((first / "checkpoints").rglob("*.safetensors"))
    assert files
    for file in files:
        ours, theirs = load_file(file), load_file(second / file.relative_to(first))
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[k], theirs[k]) for k in ours):
            return False
    return True


def test_two_trainers_are_those_of_torchrun(cluster, desk):
    assert on_ray("run.yaml", "trainers", "ray.trainers=2") == 0
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = ["--nproc-per-node", "2", "-m", "mmrl", "train", "run.yaml", "run=torchrun"]
    subprocess.run(
        [*launcher, *arguments],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path},
        capture_output=True,
    )
    assert equal(desk / "trainers", desk / "torchrun")


def test_two_trainers_with_half_of_the_model_each_are_one_process(cluster, desk):
    halves = ["ray.trainers=2", "ray.strategy=fsdp2"]
    net = "policy.module.net=tests.fixtures.ray_run:sharded_tiny"
    assert on_ray("run.yaml", "sharded", *halves, net) == 0
    last = desk / "sharded" / "checkpoints" / "iteration-000004"
    assert (last / "weights").is_dir()  # a part of every process
    for ours, theirs in zip(metrics(desk / "sharded"), metrics(desk / "alone"), strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_a_trainer_that_dies_goes_on_and_workers_sample_the_same(cluster, desk, capsys):
    ray = pytest.importorskip("ray")
    assert on_ray("dies.yaml", "died", "ray.rollout_workers=2", "ray.staleness=0") == 0
    printed = capsys.readouterr().out
    assert "trainer 0 (process " in printed and "the last words of a trainer" in printed
    assert "going on from the last checkpoint (1 of 3 restarts)" in printed
    assert (desk / "calls").stat().st_size > 3
    assert equal(desk / "alone", desk / "died")
    # what the dead trainer had reserved for its rollout workers is free again
    waiting.until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def test_samples_drawn_ahead_are_corrected_and_two_such_runs_are_equal(cluster, desk):
    ahead = ["ray.rollout_workers=1", "ray.staleness=2"]
    ahead += ["train.iterations=16", "train.save_every=8"]
    for run in ("ahead", "again"):
        assert on_ray("run.yaml", run, *ahead) == 0
    lines = metrics(desk / "ahead")
    assert [line["rollout/staleness"] for line in lines] == [0, 1] + [2] * 14
    assert "importance" not in lines[0] and all(line["importance"] > 0 for line in lines[1:])
    assert max(abs(line["importance"] - 1) for line in lines[1:]) > 1e-6
    assert lines[0]["reward/mean"] == metrics(desk / "alone")[0]["reward/mean"]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.03  # it learns
    assert equal(desk / "ahead", desk / "again")


def test_too_many_deaths_are_an_error_with_the_last_output(cluster, desk, capsys):
    (desk / "calls").unlink(missing_ok=True)
    with pytest.raises(UserError, match="ray.max_restarts=0 are used up") as caught:
        on_ray("dies.yaml", "lost", "ray.max_restarts=0")
    assert "the last words of a trainer" in str(caught.value)
