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

ROOT = Path(__file__).parents[2]
IMPOSSIBLE = {
    "objective.policy_gradient.clip_range=1e300": "clip_range: at most 1e+30",
    "reward=os:getcwd": "its parameters must be (media, prompts)",
    "reward={bounded: {of: 'os:getcwd'}}": "its parameters must be (media, prompts)",
    "objective=os:getcwd": "an objective is a class with points and loss; this has no points",
    "policy=os:getcwd": "a policy is a class with rollout and decode",
    "advantage=os:getcwd": "its parameters must be (rewards, rollout)",
    "policy={sd3: {path: 'world:digits/sd3', sde_type: 'os:getcwd'}}": "its parameters must be",
    "policy={sd3: {path: 'world:digits/sd3', steps: 1000000000000000000}}": "sd3.steps: expected",
    "objective={seppo: {pool: 1000000000000000000}}": "seppo.pool: expected",
    "data={digits_moving: {images: 1000000000000000000}}": "at most 1000",
    "advantage=decimal:Decimal": "its parameters must be (rewards, rollout)",
    "optimizer=os:getcwd": "its parameters must be (parameters)",
    "objective={policy_gradient: {surrogate: 'os:getcwd'}}": "its parameters must be (logp,",
    "reward=os:sep": "'os:sep' is a str, not a reward",
    "evaluate=0": "evaluate: expected options",
    "log=0": "log: expected options",
    "train=0": "train: expected options",
    "alarms=false": "alarms: expected options",
    "advantage=0": "advantage: expected a",
    "optimizer=0": "optimizer: expected a",
    "objective={policy_gradient: {advantage_clip: 1e300}}": "advantage_clip",
    "objective={awm: {num_noise_draws: 1000000000000000000}}": "num_noise_draws",
    "objective={awm: {timestep_sampler: {early_steps: {share: 7}}}}": "early_steps.share",
    "policy={sd3: {path: 'world:digits/sd3', timestep_schedule: 'os:getcwd'}}": "timestep_schedule",
    "data=os:getcwd": "data: expected a data source",
    "plugins=0": "expected the name of a module",
    "train.group_size=1000000000000000000": "samples of an iteration: at most",
    "evaluate.num_samples=1000000000000000000": "less than or equal to 1000000",
    "optimizer={adamw: {betas: [-0.9, 0.9]}}": "optimizer.adamw.betas.0: expected a value greater",
    "optimizer={adamw: {betas: [0.9, 1.0]}}": "optimizer.adamw.betas.1: expected a value less",
    "optimizer={adamw: {lr: -1}}": "optimizer.adamw.lr: expected a value greater",
    "policy={sd3: {path: ''}}": "policy.sd3.path: expected a folder",
    "policy={sd3: {path: 'world:digits/sd3', lora: 1000000000000000000}}": "a rank between 1 and",
    "policy={sd3: {path: 'world:digits/sd3', lora: {rank: 0}}}": "a rank between 1 and",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return killing.configuration(tmp_path_factory.mktemp("refused"), "ToyFlow", 3)


def test_a_dry_run_survives_a_name_that_no_system_can_hold(file):
    report = dry_run(file, [f"policy={{sd3: {{path: '{'x' * 10_000}'}}}}"])
    assert report.policy == "sd3" and report.path == "x" * 10_000


def test_a_dry_run_refuses_what_can_never_work(file, subtests):
    for override, words in IMPOSSIBLE.items():
        with subtests.test(override):
            with pytest.raises(UserError) as error:
                dry_run(file, [override])
            assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": "os:getcwd"}, "reward 'os:getcwd' is code of the configuration's author"),
        ({"reward": {"./judge.py:good": 1.0}}, "is code of the configuration's author"),
        ({"plugins": ["judge.py"]}, "plugins: ['judge.py'] is code of the configuration's author"),
        ({"policy": "judge.py:Policy"}, "judge.py:Policy' is code of the configuration's author"),
        ({"data": "judge:data"}, "data source 'judge:data' is code"),
        (
            {"policy": {"masked_lm": {"path": "owner/name", "remote_code": True}}},
            "policy.masked_lm.remote_code: runs code of the model's author",
        ),
    ],
)
def test_safe_runs_no_code_of_others(tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.setenv(registry.SAFE, "1")
    plain = {
        "policy": {"sd3": {"path": "world:digits/sd3"}},
        "data": "digits",
        "reward": {"jpeg_compressibility": 1.0},
        "objective": "policy_gradient",
        "train": {
            "prompts_per_iteration": 4,
            "group_size": 4,
            "train_batch_size": 8,
            "iterations": 1,
        },
    }
    Path("mine.yaml").write_text(yaml.safe_dump(plain | change))
    with pytest.raises(UserError) as error:
        dry_run(Path("mine.yaml"))
    assert words in str(error.value)


def test_safe_is_an_option_of_the_command(file, monkeypatch):
    monkeypatch.setenv(registry.SAFE, "")  # as before when the test ends
    said = command.refused("--safe", "train", file, "--dry-run", cwd=file.parent)
    assert "which --safe refuses" in said


@pytest.mark.parametrize(
    ("objective", "refused"),
    [
        ({"masked": {"estimator": "d1"}}, True),
        ({"masked": {"estimator": {"tracerl": {"shrink": 1}}}}, True),
        ("sft", True),
        ("masked", False),
        ({"masked": {"estimator": {"trajectory": {"passes": 2}}}}, False),
        ("policy_gradient", False),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_causal", [True, False])
def test_blocks_that_see_nothing_behind_them_are_scored_as_they_were_sampled(
    tmp_path, monkeypatch, objective, refused, block_causal
):
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"text": "a", "answer": "b"}')
    options = {"path": "owner/name", "block_causal": block_causal}
    plain = {
        "policy": {"masked_lm": options},
        "data": {"prompts": {"path": "questions.jsonl"}},
        "reward": {"length": {"low": 1, "high": 2}},
        "objective": objective,
        "train": {
            "prompts_per_iteration": 4,
            "group_size": 1 if objective == "sft" else 4,
            "train_batch_size": 4,
            "iterations": 1,
        },
    }
    Path("mine.yaml").write_text(yaml.safe_dump(plain))
    try:
        config.check(config.load(Path("mine.yaml")))
        said = ""
    except UserError as error:
        said = str(error)
    assert ("pass sees one hidden block" in said) == (refused and block_causal), said
