"""Runs whose steps draw no noise are refused in one sentence if the objective trains on such steps;
evaluation, drawing and objectives of finished samples need none."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import yaml

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.policies.base import RolloutContext
from mmrl.policies.capabilities import NOISELESS
from mmrl.zoo.objectives import DPO
from samplers.kernels import flow_ddim
from samplers.noise import Rng
from samplers.windows import random_window, window
from tests.fixtures import tiny_diffusers, toys
from tests.fixtures.command import mmrl, refused
from tests.policies.diffusion.test_any_pipeline import PROMPTS, RED, make, trainer_of

load_built_in()
SIZE = {"height": 16, "width": 16}
DECISIONS = RolloutContext(reads="decisions")


def begun(strength=0.25, **options):
    """A pipeline that begins on the way of four steps, by DDIM, whose last step has no noise."""
    call = SIZE | {"strength": strength}
    return make("z_image-from", call, sde_type=flow_ddim, noise_level=1.0, **options)


def test_a_strength_that_leaves_ddim_one_step_is_refused_for_what_reads_decisions():
    policy = begun()
    assert policy.steps == 1
    with pytest.raises(UserError, match="policy options steps and noise_level: the objective n"):
        trainer_of(policy).iterate()
    for context in (RolloutContext(), RolloutContext(reads="sample")):
        with torch.no_grad():
            assert not policy.rollout(PROMPTS, 2, Rng.of("same"), context).mask.any()
    with torch.no_grad(), policy.evaluating():
        assert policy.rollout(PROMPTS, 2, Rng.of("same"), DECISIONS).sample.isfinite().all()
    metrics = trainer_of(begun(0.5)).iterate()
    assert metrics["grad_norm"] > 0 and metrics["ratio/max_deviation"] == 0.0


def flow(**options):
    return toys.make("flow", steps=3, **options)


SILENT = {
    "level": {"noise_level": 0.0},
    "last": {"sde_type": flow_ddim, "noise_window": partial(window, start=-1)},
    "none": {"noise_window": lambda steps, iteration, rng: torch.zeros(steps, dtype=torch.bool)},
}


@pytest.mark.parametrize("case", SILENT)
def test_a_level_or_a_window_without_noise_is_refused(case):
    with pytest.raises(UserError, match="of which this policy has none: give it a stochastic"):
        flow(**SILENT[case]).rollout(toys.prompts(2), 2, Rng.of("same"), DECISIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"noise_window": partial(window, start=1, stop=2)},
        {"sde_type": flow_ddim, "noise_window": partial(random_window, size=2)},
    ],
)
def test_a_window_that_holds_a_step_with_noise_is_trained(options):
    for iteration in range(4):
        context = RolloutContext(iteration, reads="decisions")
        rollout = flow(**options).rollout(toys.prompts(2), 2, Rng.of("x", iteration), context)
        assert rollout.mask.any(1).all()


def test_a_loss_of_groups_by_denoising_errors_reads_finished_samples():
    """Its class trains on decisions; built with draws of fresh noise it trains on none."""
    by_errors, by_path = DPO(num_noise_draws=2), DPO()
    assert (by_errors.requires.states_read(), by_path.requires.states_read()) == (
        "sample",
        "decisions",
    )
    policy = flow(noise_level=0.0)
    context = RolloutContext(reads=by_errors.requires.states_read())
    rollout = policy.rollout(toys.prompts(2), 2, Rng.of("same"), context)
    assert rollout.latents.states.shape[1] == 0 and rollout.sample.isfinite().all()


@pytest.fixture
def folder(tmp_path):
    RED.save(tmp_path / "red.png")
    row = {"text": "a red seven", "image": "red.png", "file_name": "red.png"}
    (tmp_path / "prompts.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    (tmp_path / "judge.py").write_text(
        "def brightness(media, prompts):\n    return media.flatten(1).mean(1)\n"
    )
    options = {
        "path": str(tiny_diffusers.folder("z_image-from")),
        "call": SIZE | {"strength": 0.25},
        "steps": 4,
        "sde_type": "flow_ddim",
        "noise_level": 1.0,
    }
    whole = {
        "policy": {"pipeline": options},
        "data": {"prompts": {"path": "prompts.jsonl"}},
        "reward": {"judge.py:brightness": 1.0},
        "advantage": "dance_grpo",
        "objective": "policy_gradient",
        "optimizer": {"adamw": {"lr": 1e-3}},
        "train": {
            "iterations": 1,
            "prompts_per_iteration": 2,
            "group_size": 2,
            "train_batch_size": 4,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(whole))
    return tmp_path


def test_the_command_says_it_and_draws_and_trains_what_needs_no_noise(folder):
    message = refused("train", "run.yaml", "run=first", cwd=folder)
    place = "policy options steps and noise_level"
    assert message.endswith(f"error: {place}: the objective {NOISELESS}\n")
    message = refused("train", "run.yaml", "policy.pipeline.noise_level=0", cwd=folder)
    assert f"the objective PolicyGradient {NOISELESS}" in message
    shown = ["--prompt", "a red seven", "--image", "red.png", "--num-samples", "1"]
    mmrl("sample", "run.yaml", *shown, "--out", "drawn", cwd=folder)
    assert list((folder / "drawn").glob("*.png"))
    answers = ["data={captions: {path: prompts.jsonl}}", "train.group_size=1"]
    still = ["policy.pipeline.noise_level=0", "policy.pipeline.call.strength=0.5"]  # two steps
    learnt = {"nft": still, "sft": [*answers, "train.train_batch_size=2"]}
    for objective, words in learnt.items():
        run = ["run.yaml", f"run={objective}", f"objective={objective}"]
        mmrl("train", *run, *words, cwd=folder)
        (line,) = (folder / objective / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["grad_norm"] > 0, objective
