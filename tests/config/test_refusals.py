"""Which option of ``train`` goes with what: ``refusals.txt`` has every option that is refused,
where, and with which sentence, and what a resume may change. ``python -m
tests.config.test_refusals`` prints the table of now."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mmrl import config
from mmrl.apps.dry_run import hollow
from mmrl.apps.ray.rollouts import misfits
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, POLICIES, load_built_in, options
from mmrl.experiment import changes

TABLE = Path(__file__).with_name("refusals.txt")
SIZES = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 8, "iterations": 10}
CHOSEN: dict[str, Any] = {  # of every option a value that is not its default
    "prompts_per_iteration": 8,
    "group_size": 2,
    "train_batch_size": 4,
    "iterations": 20,
    "seed": 1,
    "reward_overlap_chunks": 2,
    "epochs": 2,
    "micro_batch_size": "auto",
    "warmup_steps": 1,
    "lr_schedule": "linear",
    "slow_fast": {},
    "reward_gradients": {},
    "max_grad_norm": 2.0,
    "precision": "bf16",
    "gradient_checkpointing": True,
    "context_parallel": {},
    "shard_size": 1,
    "ema": 0.5,
    "ema_update_interval": 2,
    "loss_agg_mode": "token_sum",
    "skip_zero_advantage": True,
    "loss_denominator": 64,
    "mask_truncated_completions": True,
    "max_new_tokens_schedule": [[0, 8]],
    "dynamic_sampling_rounds": 2,
    "dynamic_sampling_min_std": 0.1,
    "preferences": {},
    "ground_truth_rollout": "answer",
    "stages": [
        {"adaptive_sampling": {}},
        {"temporal_contrast": {"reward": "answer"}},
        {"replay_buffer": {}},
        {"response_reuse": {}},
        {"speculative": {}},
        {"prompt_value": {"base": "trained"}},
        {"policy_drift": {}},
        {"demonstrations": {"field": "answer"}},
        {"refinement": {"corrections": {}}},
    ],
    "logprob_tolerance": 0.5,
    "recompute_old_logprob": True,
    "save_every": 7,
    "save_minutes": 5.0,
    "save_total_limit": 2,
    "save_best": True,
    "evaluate_every": 3,
    "sample_every": 3,
    "max_reward_failure_rate": 0.1,
    "timeout": 60.0,
    "time_limit": 60.0,
    "budget": {"samples": 99},
}
IN_PARTS = [{"partial_rollout": {"tokens": 4}}]
# which change what others mean
APART = {"group_size": 2, "stages": IN_PARTS, "preferences": {}}
FLOW = {
    "policy": {"sd3": {"path": "owner/flow"}},
    "data": {"prompts": {"path": str(Path(__file__))}},
    "reward": {"jpeg_compressibility": 1.0},
    "objective": "policy_gradient",
    "advantage": "grpo",
    "optimizer": "adamw",
    "train": SIZES,
}
TEXT = FLOW | {"policy": {"vlm": {"path": "owner/text"}}, "reward": {"length": 1.0}}
ALONE = SIZES | {"group_size": 1, "train_batch_size": 4}
PAIRS = SIZES | {"group_size": 2, "preferences": {}}
CORRECTED = {"policy_gradient": {"importance_sampling": {"mode": "truncate", "cap": 2.0}}}
RAY = {"rollout_workers": 1}
# the configuration that an option is added to
SITUATIONS: dict[str, dict[str, Any]] = {
    "flow": FLOW,
    "vlm": TEXT,
    "masked_lm": TEXT | {"policy": {"masked_lm": {"path": "owner/masked"}}},
    "janus": FLOW | {"policy": {"janus": {"path": "owner/images"}}},
    "amused": FLOW | {"policy": {"amused": {"path": "owner/hidden"}}},
    "supervised": TEXT | {"objective": "sft", "train": ALONE},
    "preferences": TEXT | {"objective": "dpo", "train": PAIRS},
    "trees of flows": FLOW | {"policy": {"sd3": {"path": "owner/flow", "tree": {"splits": 1}}}},
    "trees of texts": TEXT | {"policy": {"vlm": {"path": "owner/text", "tree": {}}}},
    "refilled": TEXT | {"policy": {"vlm": {"path": "owner/text", "refill": "rows"}}},
    "fixed rows": FLOW | {"policy": {"sd3": {"path": "owner/flow", "fixed_batch_rows": 4}}},
    "partial rollouts": TEXT | {"objective": CORRECTED, "train": SIZES | {"stages": IN_PARTS}},
    "gradient of the reward": FLOW | {"objective": "draft", "reward": {"digits": 1.0}},
    "Ray elsewhere": TEXT | {"ray": RAY},
    "Ray ahead": TEXT | {"objective": CORRECTED, "ray": RAY | {"staleness": 1}},
}


@pytest.fixture(scope="module", autouse=True)
def everything():
    load_built_in()


def problems(plain: dict[str, Any]) -> set[str]:
    """What is wrong with a configuration, without the places."""
    configuration = config.from_mapping(deepcopy(plain))
    lines = list(misfits(configuration)) if "ray" in plain else []
    try:
        config.check(configuration)
    except UserError as error:
        lines += str(error).split("\n")
    return {line.removeprefix("Python: ") for line in lines if not line.endswith("problems:")}


def refused(situation: str) -> list[str]:
    """What is wrong as soon as options are set: one of ``APART``, or all others together."""
    plain = SITUATIONS[situation]
    alone = ("group_size", "preferences")
    together = {name: value for name, value in CHOSEN.items() if name not in alone}
    lines = set()
    for chosen in (together, *({name: value} for name, value in APART.items())):
        train = {**plain["train"], **chosen}
        train["stages"] = [*plain["train"].get("stages", ()), *chosen.get("stages", ())]
        lines |= problems(plain | {"train": train})
    return sorted(lines)


def without_weights() -> Iterator[str]:
    """What a dry run makes of every option that it does not take as it is."""
    chosen = config.from_mapping(FLOW | {"train": SIZES | CHOSEN}).section("train", TrainOptions)
    plain = hollow._plain(chosen)
    for field in fields(TrainOptions):
        if getattr(chosen, field.name) != getattr(plain, field.name):
            yield f"{field.name}: {getattr(plain, field.name)!r}"


def resumed() -> Iterator[str]:
    """What a change of every option means for a run that goes on, where it is more than a
    warning."""
    whole = {"train": {"lr_schedule": "constant"}}
    changed = [("train", name) for name in CHOSEN if name != "stages"]
    changed += [("policy", name, o) for name, policy in POLICIES.items() for o in options(policy)]
    found = {(path[0], path[-1], changes.effect(path, None, 1, whole)) for path in changed}
    for part, name, effect in sorted(found):
        if effect != "warned":
            yield f"{part}.{name}: {effect}"


@cache
def known() -> dict[str, list[str]]:
    parts = TABLE.read_text(encoding="utf-8").split("\n== ")
    return {lines[0]: lines[1:] for lines in (part.strip().split("\n") for part in parts[1:])}


def test_every_option_is_in_the_table():
    assert CHOSEN.keys() == {field.name for field in fields(TrainOptions)}
    assert known().keys() == {*SITUATIONS, "dry run", "resume"}


def test_an_option_is_refused_where_it_was(subtests):
    for situation in SITUATIONS:
        with subtests.test(situation):
            assert list(refused(situation)) == known()[situation]


def test_a_dry_run_leaves_out_what_it_did():
    assert list(without_weights()) == known()["dry run"]


def test_a_resume_may_change_what_it_might():
    assert list(resumed()) == known()["resume"]


def test_an_objective_that_declares_nothing_is_refused():
    mine = type("Mine", (), {"points": None, "loss": lambda self, policy, point: None})
    assert "derive from mmrl.objectives.Objective" in OBJECTIVES.unfit(mine)
    assert not any(OBJECTIVES.unfit(entry) for entry in OBJECTIVES.values())


if __name__ == "__main__":
    load_built_in()
    print("Written by python -m tests.config.test_refusals.")
    tables = {situation: refused(situation) for situation in SITUATIONS}
    for title, rows in (tables | {"dry run": without_weights(), "resume": resumed()}).items():
        print("", f"== {title}", *rows, sep="\n")
