"""The first look says what the check says, or nothing, and needs no torch."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mmrl.config import first_look
from mmrl.config.known import TABLE
from mmrl.config.yamltext import read as parsed
from mmrl.config.yamltext import write
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.experiment.build import read
from scripts.dev import known_plug_ins

load_built_in()
ROOT = Path(__file__).resolve().parents[2]
# those of configs/serve are for `mmrl serve-reward`
SHIPPED = [p for p in sorted((ROOT / "configs").rglob("*.yaml")) if p.parent.name != "serve"]
GOOD = """\
policy: {sd3: {path: "world:digits/sd3-test", steps: 3, sde_type: {flow_sde: {}}}}
data: digits
reward: {digits: 1.0}
objective: {policy_gradient: {clip_range: 1e-4}}
advantage: {filtered: {base: grpo}}
train: {prompts_per_iteration: 2, group_size: 4, train_batch_size: 4, iterations: 2}
"""


def said(call: Callable[..., object], *args: object) -> list[str]:
    """The sentences of a refusal, none where there is none."""
    try:
        call(*args)
    except UserError as error:
        lines = str(error).splitlines()
        return lines[1:] if lines[0].endswith(" problems:") else lines
    return []


def test_the_table_is_current():
    assert TABLE.read_text(encoding="utf-8") == known_plug_ins.page(), (
        "run: python scripts/dev/known_plug_ins.py"
    )
    with suppress(OSError):  # of a checkout that cannot be written
        os.utime(TABLE)  # so that commands believe it again after a pull, which makes code newer


MISTAKES = [
    ("clip_range", "clip_rang", []),
    ("sd3:", "sd4:", []),
    ("reward: {digits: 1.0}\n", "", []),
    ("steps: 3", "steps: three", []),
    ("flow_sde: {}", "flow_sde: {et: 1}", []),
    ("base: grpo", "base: gropo", []),
    ("steps: 3", "lora: {rank: 0}", []),
    ("data: digits", "data: {prompts: {path: nowhere.txt}}", []),
    ("digits: 1.0", "digits: {weight: much, batch_size: 0}", []),
    ("digits: 1.0", "red: {use: jpeg}", []),
    ("train_batch_size: 4", "train_batch_size: 3", []),
    ("train:", "train: 3 #", []),
    ("train:", "preset: trl/gropo\ntrain:", []),
    ("", "", ["train.iterationz=3", "nowhere.x=1", "evaluate.reward.digitz=1"]),
    ("", "", ["log.evry=2", "evaluate.reward={digits: {wait: 1}}"]),
]


def test_a_common_mistake_is_said_as_the_check_says_it(tmp_path, subtests):
    path = tmp_path / "mine.yaml"
    for old, new, overrides in MISTAKES:
        with subtests.test(old=old, new=new):
            path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
            sentences = said(first_look.look, path, overrides)
            assert sentences and sentences == said(read, path, overrides)


VALUES = [None, True, -1, 2, 1.5, 10**30, 10**400, float("nan"), "", "x", "1e-4", "é\u2028"]
VALUES += ["../..", "no.mod:fn", [], ["x"], [None], {}, {"a": {}}, {1: 2}, {"weight": "x"}]


def mutated(file: Path, rng: random.Random) -> dict[str, object]:
    """A shipped configuration with another value, a misspelt name or something left out."""
    plain = parsed(file.read_text(), str(file))[0]
    inner = plain
    key = rng.choice(list(inner))
    while isinstance(inner[key], dict) and inner[key] and rng.random() < 0.8:
        inner = inner[key]
        key = rng.choice(list(inner))
    value = inner.pop(key)
    kind = rng.randrange(3)
    if kind:
        inner[key if kind == 1 else f"{key}x"] = rng.choice(VALUES) if kind == 1 else value
    return plain


def test_nothing_is_said_that_the_check_does_not_say(tmp_path, monkeypatch, subtests):
    """3,400 such mutations were tried when this was written: none found a sentence more, nor an
    error without one."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mine.yaml"
    for seed in range(24):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            path.write_text(write(mutated(rng.choice(SHIPPED), rng)))
            assert set(said(first_look.look, path)) <= set(said(read, path, []))


USER = "from mmrl.core.registry import OBJECTIVES\nOBJECTIVES.register('own_goal')(object)\n"


def test_of_what_the_user_registers_nothing_is_said(tmp_path):
    (tmp_path / "own.py").write_text(USER)
    path = tmp_path / "mine.yaml"
    for old, new in [
        ("data: digits", "plugins: own.py\ndata: digits"),
        ("data: digits", "data: own.py:Source"),
        ("sd3:", "own.py:Policy:"),
    ]:
        text = GOOD.replace(old, new)
        path.write_text(text.replace("policy_gradient: {clip", "own_goal: {clap"))
        assert not said(first_look.look, path)
        path.write_text(text.replace("iterations", "iteratons"))
        assert len(said(first_look.look, path)) == 2  # and missing iterations


PROGRAM = """
import sys
from mmrl.config import first_look
from mmrl.cli.app import main
first_look.is_outdated = bool
try:
    main()
except SystemExit:
    print(*{"torch", "numpy", "PIL", "rewards", "mmrl.policies.base"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    "words",
    [
        "evaluate digits/flow_grpo train.iterationz=3",
        "compare digits/flow_grpo --vary train.epochs=2 train.iterationz=3",
    ],
)
def test_a_mistake_is_said_before_anything_heavy_is_loaded(words):
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "error: command line: train.iterationz=3" in done.stderr and not done.stdout.strip()
