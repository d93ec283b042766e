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

from mmrl.config import first_look, known
from mmrl.config.known import TABLE, Known
from mmrl.config.schema import unseen
from mmrl.config.yamltext import read as parsed
from mmrl.config.yamltext import write
from mmrl.core.errors import UserError
from mmrl.core.registry import ALL, load_built_in, options
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


def test_a_stand_in_takes_what_its_class_takes():
    table = Known()
    for registry in ALL.values():
        stand_ins = table.kinds[registry.kind]
        for name in stand_ins:
            real, like = options(registry[name]), options(stand_ins[name])
            assert list(like) == list(real), (registry.kind, name)
            for option, parameter in real.items():
                default = like[option].default
                assert (default is parameter.empty) == (parameter.default is parameter.empty)
                assert (default is None) == (parameter.default is None), (name, option)


def test_nothing_is_said_of_what_is_shipped(monkeypatch, subtests):
    monkeypatch.chdir(ROOT)
    for file in SHIPPED[::4]:
        with subtests.test(str(file)):
            first_look.look(file, every_stage=True)


def test_a_common_mistake_is_said_as_the_check_says_it(tmp_path, subtests):
    for old, new, overrides in [
        ("clip_range", "clip_rang", []),
        ("clip_range", "clip", []),
        ("sd3:", "sd4:", []),
        ("policy_gradient", "grpo", []),
        ("reward: {digits: 1.0}\n", "", []),
        ("reward:", "rewards:", []),
        ("steps: 3", "steps: three", []),
        ("flow_sde: {}", "flow_sda: {}", []),
        ("flow_sde: {}", "flow_sde: {et: 1}", []),
        ("base: grpo", "base: gropo", []),
        ("path: ", "pth: ", []),
        ("steps: 3", "lora: {rank: 0}", []),
        ("steps: 3", "lora: {rnk: 4}", []),
        ("steps: 3", "lora: many", []),
        ("data: digits", "data: {prompts: {path: nowhere.txt}}", []),
        ("digits: 1.0", "digits: {weight: much, batch_size: 0}", []),
        ("digits: 1.0", "red: {use: jpeg}", []),
        ("iterations: 2", "iterations: -2", []),
        ("train_batch_size: 4", "train_batch_size: 3", []),
        ("train:", "train: 3 #", []),
        ("train:", "run: 3\ntrain:", []),
        ("train:", "train: {", []),
        ("train:", "preset: trl/gropo\ntrain:", []),
        ("", "", ["train.iterationz=3", "nowhere.x=1", "evaluate.reward.digitz=1"]),
        ("", "", ["log.evry=2", "evaluate.reward={digits: {wait: 1}}"]),
    ]:
        with subtests.test(old=old, new=new):
            path = tmp_path / "mine.yaml"
            path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
            sentences = said(first_look.look, path, overrides)
            assert sentences and sentences == said(read, path, overrides)


VALUES = [None, True, -1, 2, 1.5, 10**30, "", "x", "1e-4", [], ["x"], {}, {"a": {}}, "no.mod:fn"]


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
    """3,400 such mutations were tried when this was written: none found a sentence more."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mine.yaml"
    for seed in range(25):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            path.write_text(write(mutated(rng.choice(SHIPPED), rng)))
            assert set(said(first_look.look, path)) <= set(said(read, path, []))


USER = "from mmrl.core.registry import OBJECTIVES\nOBJECTIVES.register('own_goal')(object)\n"


@pytest.mark.parametrize(
    "old, new",
    [
        ("data: digits", "plugins: own.py\ndata: digits"),
        ("data: digits", "data: own.py:Source"),
        ("sd3:", "own.py:Policy:"),
    ],
)
def test_of_what_the_user_registers_nothing_is_said(tmp_path, old, new):
    (tmp_path / "own.py").write_text(USER)
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new).replace("policy_gradient: {clip", "own_goal: {clap"))
    assert not said(first_look.look, path)
    path.write_text(GOOD.replace(old, new).replace("iterations", "iteratons"))
    assert len(said(first_look.look, path)) == 2  # and missing iterations


def test_of_names_that_packages_may_bring_nothing_is_said(monkeypatch):
    monkeypatch.setattr(known, "offered", lambda: {"mmrl.rewards": []})
    table = Known()
    assert table.kinds["policy"].find("theirs") is unseen
    assert table.kinds["policy"].find("sd3") is not unseen
    monkeypatch.setattr(known, "offered", lambda: {"pytest11": []})
    with pytest.raises(UserError, match="unknown policy 'sd4'"):
        table.kinds["policy"].find("sd4")


def test_a_table_older_than_the_code_is_not_believed(monkeypatch, tmp_path):
    monkeypatch.setattr(known, "OURS", (tmp_path,))
    code = tmp_path / "new_policy.py"
    code.touch()
    monkeypatch.setattr(known, "TABLE", tmp_path / "known.json")
    (tmp_path / "known.json").touch()
    assert not known.is_outdated()
    later = code.stat().st_mtime + 3600
    os.utime(code, (later, later))
    assert known.is_outdated()


def loaded_after(*words: str) -> tuple[str, str]:
    """What the command says of a mistake, and which heavy libraries it has loaded then."""
    code = (
        "import sys\nfrom mmrl.config import first_look\nfirst_look.is_outdated = bool\n"
        f"sys.argv[1:] = {list(words)}\nfrom mmrl.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'numpy', 'PIL', 'rewards', 'mmrl.policies.base', 'mmrl.zoo'}\n"
        "    print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.stderr, done.stdout.strip()


@pytest.mark.parametrize(
    "words",
    [
        ("train", "digits/flow_grpo", "train.iterationz=3"),
        ("evaluate", "digits/flow_grpo", "train.iterationz=3"),
        ("check-reward", "digits/flow_grpo", "reward.digitz=1"),
        ("compare", "digits/flow_grpo", "--vary", "train.epochs=2", "train.iterationz=3"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_said_before_anything_heavy_is_loaded(words):
    message, heavy = loaded_after(*words)
    assert f"error: command line: {words[-1]}" in message and not heavy
