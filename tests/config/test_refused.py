"""Values that can never work, and third-party code: one sentence when the configuration is read."""

from pathlib import Path

import pytest
import yaml

from mmrl import config
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.core import registry
from mmrl.core.errors import UserError
from scripts.dev.soak_parts import killing
from tests.fixtures import command
from tests.fixtures.mistakes import message

ROOT = Path(__file__).parents[2]
IMPOSSIBLE = {
    "objective.policy_gradient.clip_range=1e300": "clip_range: at most 1e+30",
    "reward=os:getcwd": "its parameters must be (media, prompts)",
    "objective=os:getcwd": "an objective is a class with points and loss; this has no points",
    "policy=os:getcwd": "a policy is a class with rollout and decode",
    "advantage=os:getcwd": "its parameters must be (rewards, rollout)",
    "policy={sd3: {path: 'world:digits/sd3', sde_type: 'os:getcwd'}}": "its parameters must be",
    "policy={sd3: {path: 'world:digits/sd3', steps: 1000000000000000000}}": "sd3.steps: expected",
    "data={digits_moving: {images: 1000000000000000000}}": "at most 1000",
    "objective={policy_gradient: {surrogate: 'os:getcwd'}}": "its parameters must be (logp,",
    "reward=os:sep": "'os:sep' is a str, not a reward",
    "evaluate=0": "evaluate: expected options",
    "optimizer=0": "optimizer: expected a",
    "objective={awm: {timestep_sampler: {early_steps: {share: 7}}}}": "early_steps.share",
    "policy={sd3: {path: 'world:digits/sd3', timestep_schedule: 'os:getcwd'}}": "timestep_schedule",
    "plugins=0": "expected the name of a module",
    "train.group_size=1000000000000000000": "samples of an iteration: at most",
    "optimizer={adamw: {betas: [-0.9, 0.9]}}": "optimizer.adamw.betas.0: expected a value greater",
    "optimizer={adamw: {betas: [0.9, 1.0]}}": "optimizer.adamw.betas.1: expected a value less",
    "policy={sd3: {path: ''}}": "policy.sd3.path: expected a folder",
    "policy={sd3: {path: 'world:digits/sd3', lora: {rank: 0}}}": "a rank between 1 and",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return killing.configuration(tmp_path_factory.mktemp("refused"), "ToyFlow", 3)


def test_a_dry_run_refuses_what_can_never_work(file, subtests):
    for override, words in IMPOSSIBLE.items():
        with subtests.test(override):
            assert words in message(dry_run, file, [override])


PLAIN = {
    "policy": {"sd3": {"path": "world:digits/sd3"}},
    "data": "digits",
    "reward": {"jpeg_compressibility": 1.0},
    "objective": "policy_gradient",
    "train": {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 4, "iterations": 1},
}
REMOTE = {"policy": {"masked_lm": {"path": "owner/name", "remote_code": True}}}
FOREIGN = [
    ({"reward": "os:getcwd"}, "reward 'os:getcwd' is code of the configuration's author"),
    ({"reward": {"./judge.py:good": 1.0}}, "is code of the configuration's author"),
    ({"plugins": ["judge.py"]}, "plugins: ['judge.py'] is code of the configuration's author"),
    ({"policy": "judge.py:Policy"}, "judge.py:Policy' is code of the configuration's author"),
    ({"data": "judge:data"}, "data source 'judge:data' is code"),
    (REMOTE, "policy.masked_lm.remote_code: runs code of the model's author"),
]


def test_safe_runs_no_code_of_others(tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.setenv(registry.SAFE, "1")
    for change, words in FOREIGN:
        Path("mine.yaml").write_text(yaml.safe_dump(PLAIN | change))
        with subtests.test(words):
            assert words in message(dry_run, Path("mine.yaml"))


def test_safe_is_an_option_of_the_command(file, monkeypatch):
    monkeypatch.setenv(registry.SAFE, "")  # as before when the test ends
    said = command.refused("--safe", "train", file, "--dry-run", cwd=file.parent)
    assert "which --safe refuses" in said


OBJECTIVES = [
    ({"masked": {"estimator": "d1"}}, True),
    ({"masked": {"estimator": {"tracerl": {"shrink": 1}}}}, True),
    ("sft", True),
    ("masked", False),
    ({"masked": {"estimator": {"trajectory": {"passes": 2}}}}, False),
    ("policy_gradient", False),
]


@pytest.mark.parametrize("block_causal", [True, False])
def test_blocks_that_see_nothing_behind_them_are_scored_as_they_were_sampled(
    tmp_path, monkeypatch, block_causal, subtests
):
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"text": "a", "answer": "b"}')
    plain = PLAIN | {
        "policy": {"masked_lm": {"path": "owner/name", "block_causal": block_causal}},
        "data": {"prompts": {"path": "questions.jsonl"}},
        "reward": {"length": {"low": 1, "high": 2}},
    }
    for objective, refused in OBJECTIVES:
        train = PLAIN["train"] | ({"group_size": 1} if objective == "sft" else {})
        plain |= {"objective": objective, "train": train}
        with subtests.test(objective=objective):
            try:
                said = ""
                config.check(config.from_mapping(plain))
            except UserError as error:
                said = str(error)
            assert ("pass sees one hidden block" in said) == (refused and block_causal), said
