"""Defines sets of stateful parts that a killed run must restore: averages, curricula, replay,
control of entropy and KL, constraints, scheduled and conflicting rewards, alarms.

A set is a function of family and file of prompts that returns changes of the configuration of
``killing.configuration``. Incompatible parts are in different sets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Changes = dict[str, Any]
TOKENS = ("ToyMasked", "ToyCausal")
REWARD = "tests.fixtures.toys:reward"


def _source(prompts: Path) -> dict[str, Any]:
    return {"prompts": {"path": str(prompts), "held_out": 0.25}}


def averages(family: str, prompts: Path) -> Changes:
    """Group sizes by what was learnt, nested memories of advantages, replay, EMA, reuse."""
    return {}


def control(family: str, prompts: Path) -> Changes:
    """Entropy and KL held at a target, a moving reference, a bandit over categories, repeated
    prompts, scheduled reward weights, fast and slow steps."""
    entropy = {"entropy": {"target": 1.0, "step": 0.01}} if family in TOKENS else {}
    kl = {"weight": 0.05, "target": 0.01, "refresh": {"every": 3, "decay": 0.5}}
    scheduled = {"of": [REWARD, REWARD], "start": [1, 0], "end": [0, 2], "iterations": 6}
    bandit = {"sec": {"of": _source(prompts), "field": "kind"}}
    return {
        "data": {"replay": {"of": bandit, "below": 10.0}},
        "reward": {"scheduled": scheduled},
        "objective": {"policy_gradient": {"kl": kl, "clip_range": 0.2, **entropy}},
        "advantage": {"running": {}},
        "train__slow_fast": {"fast_steps": 2, "iterations": 5},
        "train__stages": [],
    }


def constraints(family: str, prompts: Path) -> Changes:
    """Rewards under constraints and on a Pareto front, weighted by their gradients, strata of
    tasks, resampled prompts, numbers of samples by a knapsack, alarms."""
    fulfilled = {"main": REWARD, "judges": [REWARD], "at_least": [-2.0]}
    return {
        "data": {"knapsack": {"of": _source(prompts), "threshold": 0.3, "most": 8}},
        "reward": {
            "constrain": fulfilled,
            "hypervolume": {"of": [REWARD, REWARD], "weights": [1.0, 1.0]},
        },
        "advantage": {"strata": {"by": "kind"}},
        "train__reward_gradients": {"rate": 0.5},
        "train__dynamic_sampling_rounds": 2,
        "train__dynamic_sampling_min_std": 0.05,
        "train__stages": [],
        "alarms": {"window": 20},
    }


def nothing_to_learn(family: str, prompts: Path) -> Changes:
    """Equal rewards for all samples: the alarm that counts iterations without a gradient, and a
    plain loss that they leave at 0."""
    return {
        "reward": {"tests.fixtures.toys:equal_reward": 1.0},
        "objective": {"policy_gradient": {"kl": 0.0}},
        "train__stages": [],
        "alarms": {"patience": 3},
    }


SETS: dict[str, Callable[[str, Path], Changes]] = {
    function.__name__: function for function in (averages, control, constraints, nothing_to_learn)
}
