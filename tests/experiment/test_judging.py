"""Rewards of a configuration before they are built, and those that only measure."""

import json
from types import SimpleNamespace

import pytest

from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, REWARDS
from mmrl.experiment import build
from mmrl.experiment.build import Session, check_needs, read, scorer
from mmrl.scoring import Scorer
from rewards import Scheduled

HEAD = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 3}}
data: {prompts: {path: prompts.jsonl, held_out: 0}}
advantage: grpo
objective: {policy_gradient: {clip_range: 1e-3}}
optimizer: {adamw: {lr: 1e-3}}
train: {prompts_per_iteration: 2, group_size: 4, train_batch_size: 8, iterations: 1}
"""


def written(folder, sections, prompt):
    """A configuration with these rewards, over two prompts with these fields."""
    (folder / "prompts.jsonl").write_text(json.dumps({"text": "a", **prompt}) + "\n")
    path = folder / "run.yaml"
    path.write_text(HEAD + json.dumps(sections)[1:-1].replace('"reward"', "\nreward", 1) + "\n")
    return path


def test_a_field_that_an_option_names_is_the_one_that_is_needed(tmp_path):
    options = {"source": "a", "source_text": "b", "target_text": "c"}
    chosen = {"reward": {"directional_clip": options, "ocr": {"field": "d"}}}
    known = read(written(tmp_path, chosen, dict.fromkeys("abcd", "x")), [])
    check_needs(known, known.build("data", DATA), {})
    lacking = read(written(tmp_path, chosen, dict.fromkeys("abc", "x")), [])
    with pytest.raises(UserError, match="needs the field 'd'"):
        check_needs(lacking, lacking.build("data", DATA), {})


def test_a_reward_that_remembers_is_not_only_measured(tmp_path):
    chosen = {"jpeg_compressibility": 1.0}
    schedule = {"of": ["jpeg_compressibility"], "start": [1], "end": [0], "iterations": 2}
    path = written(tmp_path, {"reward": {**chosen, "scheduled": {**schedule, "weight": 0}}}, {})
    read(path, [])
    with pytest.raises(UserError, match="put it below `reward:` with weight 0"):
        read(path, [f"evaluate.reward.scheduled={json.dumps(schedule)}"])


def test_judges_are_no_part_of_what_is_trained_on(tmp_path):
    path = written(tmp_path, {"reward": {"jpeg_compressibility": 0.5}}, {})
    configuration = read(path, ["evaluate.reward.jpeg_incompressibility=1.0"])
    options = configuration.section("train", TrainOptions)
    evaluation = configuration.section("evaluate", EvaluateOptions)
    trained = scorer(configuration, ("reward",), options)
    session = Session(configuration, None, None, trained, options, evaluation)
    judges = session.judges()
    assert judges.weights == {"jpeg_compressibility": 0.5, "jpeg_incompressibility": 0.0}


def test_what_rewards_remember_is_there_when_a_run_is_evaluated(tmp_path, monkeypatch):
    """The weights of a schedule are those of the checkpoint, not those of its first iteration."""
    parts = [REWARDS["jpeg_compressibility"], REWARDS["jpeg_incompressibility"]]
    schedule = Scheduled(parts, start=[1.0, 0.0], end=[0.0, 1.0], iterations=4)
    weights = SimpleNamespace(load=lambda arrays, name="live": None)
    session = SimpleNamespace(
        scorer=Scorer({"scheduled": schedule}),
        policy=SimpleNamespace(weights=weights, pass_sizes=SimpleNamespace(rows=8)),
        options=TrainOptions(2, 4, 8, 1),
    )
    meta = {"rewards": {"scheduled": {"iteration": 4}}}
    monkeypatch.setattr(build.checkpoint, "choose", lambda folder: (tmp_path, []))
    monkeypatch.setattr(build.checkpoint, "load", lambda *_, **__: ({"weights": {}}, meta))
    monkeypatch.setattr(build, "config_of", lambda run: run)
    monkeypatch.setattr(build, "base", lambda path, overrides, judged: session)
    assert schedule.weights() == [1, 0]
    assert build.trained(tmp_path) is session and schedule.weights() == [0, 1]
