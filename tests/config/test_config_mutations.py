"""Mutated configurations: whatever is wrong, the outcome is success or one UserError, never another
exception."""

from __future__ import annotations

import copy
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.config import build, build_dataclass, build_rewards, check, dump, load
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.config.yamltext import read, write
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import Registry

SHIPPED = (Path(__file__).parents[2] / "configs").rglob("*.yaml")
# those are for `mmrl serve-reward`
CONFIGS = sorted(path for path in SHIPPED if path.parent.name != "serve")
INNER = Registry("kernel")
FAKE = Registry("policy")


@INNER.register("flow_sde")
def flow_sde(x, *, power: float = 1.0):
    return x


@INNER.register("window")
def window(x, *, start: int = 0, stop: int | None = None):
    return x


@dataclass
class Adapter:
    rank: int
    alpha: float | None = None
    targets: list[str] | None = None


@FAKE.register("sd3")
class Fake:
    def __init__(
        self,
        path: str,
        size: int = 32,
        steps: int = 8,
        noise_level: float = 0.7,
        sde_type: Annotated[Any, INNER] = flow_sde,
        noise_window: Annotated[Any, INNER] = window,
        guidance_scale: float = 1.0,
        lora: Adapter | int | None = None,
        logprob_guidance: Literal["guided", "conditional"] = "guided",
        same_initial_noise: bool = False,
        timestep_schedule: Any = None,
        dtype: str = "",
        scales: dict[str, list[float]] | tuple[int, int] | None = None,
    ):
        assert (
            isinstance(path, str)
            and type(size) is int
            and type(noise_level) is float
            and type(same_initial_noise) is bool
        )
        assert (
            callable(sde_type)
            and callable(noise_window)
            and (lora is None or isinstance(lora, (int, Adapter)))
        )
        assert logprob_guidance in ("guided", "conditional") and (
            scales is None or isinstance(scales, (dict, tuple))
        )


NUMBERS = [0, -1, 1, 2, 7, 10**30, -(10**30), 10**400, 1.5, -2.5, 1e300, 1e-300]
TEXTS = ["", " ", "x", "é\u2028\U0001f600", "1e-4", "null", "a: b", "{", "window", "sd3", "digits"]
PLACES = ["../..", "./gone.txt", "os:sep", ":", "no.module:fn"]
NESTS = [[], {}, [1], ["x"], [[]], [None], {"a": 1}, {"": None}, {1: 2}, {None: []}]
SPECS = [{"weight": "x"}, {"window": {"start": "x"}}, {"grpo": 3}, {"sd3": {}, "digits": {}}]
VALUES: list[Any] = [None, True, False, float("nan"), float("inf"), *NUMBERS, *TEXTS, *PLACES]
VALUES += [*NESTS, *SPECS, {"flow_sde": {"power": 10**400}}]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all keys of a nest of mappings."""
    if not isinstance(value, dict):
        return []
    return [
        place
        for key, item in value.items()
        for place in ((*path, key), *places(item, (*path, key)))
    ]


def parent(plain: Any, path: tuple) -> Any:
    for key in path[:-1]:
        plain = plain[key]
    return plain


def misspell(word: Any, chance: random.Random) -> Any:
    letters = list(str(word))
    i = chance.randrange(max(len(letters), 1))
    letters[i : i + 1] = chance.choice([[], ["x"], ["é"], letters[i : i + 1] * 2, [" "], ["."]])
    return "".join(letters)


def mutate(plain: dict, chance: random.Random) -> dict:
    """One to three random changes: renamed, deleted, replaced, swapped, wrapped or added keys."""
    plain = copy.deepcopy(plain)
    for _ in range(chance.randint(1, 3)):
        all_places = places(plain)
        if not all_places:
            break
        path = chance.choice(all_places)
        mapping = parent(plain, path)
        key = path[-1]
        kind = chance.choice(["name", "delete", "value", "swap", "wrap", "unwrap", "add", "text"])
        if kind == "name":
            mapping[misspell(key, chance)] = mapping.pop(key)
        elif kind == "delete":
            del mapping[key]
        elif kind == "value":
            mapping[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind == "swap":
            donor = chance.choice(all_places)
            value = copy.deepcopy(parent(plain, donor)[donor[-1]])
            mapping[key] = value
        elif kind == "wrap":
            mapping[key] = chance.choice(
                [[mapping[key]], {key: mapping[key]}, {"sd3": mapping[key]}]
            )
        elif kind == "unwrap" and isinstance(mapping[key], dict) and mapping[key]:
            mapping[key] = next(iter(mapping[key].values()))
        elif kind == "add":
            mapping[chance.choice(["extra", "", 3, None, "weight"])] = copy.deepcopy(
                chance.choice(VALUES)
            )
        else:
            mapping[key] = str(mapping[key])
    return plain


def outcome(call, *args: Any, **kwargs: Any) -> Any:
    """The result, or None for a UserError that says something; anything else is a traceback and
    fails the test."""
    try:
        return call(*args, **kwargs)
    except UserError as error:
        assert str(error).strip()
        return None


@pytest.fixture(scope="module")
def real():
    registry.load_built_in()


def test_every_config_of_the_repository_is_right(real, subtests):
    for path in CONFIGS:
        with subtests.test(f"{path.parent.name}/{path.stem}"):
            config = load(path)
            check(config)
            assert config.section("train", TrainOptions).iterations > 0
            written = read(path.read_text(), "x")[0]
            count = len(places(written))
            plain = config.plain
            leaves = sum(not isinstance(parent(plain, p)[p[-1]], dict) for p in places(plain))
            stages = len(written.get("stages") or ()) or 1
            assert leaves <= 32 and count <= 32 + 16 * stages  # the changes of each stage are few


def test_100_mutated_configs_give_a_config_or_a_user_error(real, tmp_path):
    chance = random.Random(0)
    wrong = 0
    right = 0
    good = [(path.parent, read(path.read_text(), "x")[0]) for path in CONFIGS]
    # or most would be refused for their missing prompts
    shutil.copytree(CONFIGS[0].parents[1], tmp_path / "configs")
    for i in range(100):
        folder, plain = good[i % len(good)]
        plain = mutate(plain, chance)
        path = tmp_path / "configs" / folder.name / "mutated.yaml"
        path.write_text(write(plain), encoding="utf-8")
        config = outcome(load, path)
        if config is None or outcome(lambda c: check(c) or True, config) is None:
            wrong += 1
        else:
            right += 1
            assert load(_again(path.parent, dump(config))).plain["train"] == config.plain["train"]
    # the mutations are neither harmless nor all fatal
    assert wrong > 50 and right > 2, (wrong, right)


def _again(folder: Path, text: str) -> Path:
    path = folder / "again.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_mutated_configs_are_built_or_refused():
    chance = random.Random(1)
    plains = [read(path.read_text(), "x")[0] for path in CONFIGS]
    good = [plain for plain in plains if "sd3" in plain["policy"]]  # what the fake registry knows
    rewards = Registry("reward", {"digits": flow_sde, "clip_score": window, "digits_judge": Fake})
    built = 0
    for i in range(150):
        plain = mutate(good[i % len(good)], chance)
        built += outcome(build, plain.get("policy"), FAKE, "policy") is not None
        outcome(build_rewards, plain.get("reward"), rewards)
        outcome(build_dataclass, EvaluateOptions, plain.get("evaluate"), "evaluate")
        options = outcome(build_dataclass, TrainOptions, plain.get("train"), "train")
        if options is not None:
            outcome(arithmetic, options, chance.choice([1, 2, 3, 8]))
    assert built > 18


def test_mutated_text_is_read_or_refused(tmp_path, real):
    chance = random.Random(2)
    for i in range(60):
        text = list(CONFIGS[i % len(CONFIGS)].read_text())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text))
            text[at : at + chance.choice([0, 1, 5])] = chance.choice(
                list("\t\n:{}[]&*!|>'\"%@`#,?-é\x07\0") + ["<<: ", "? ", "- "]
            )
        path = tmp_path / "mutated.yaml"
        path.write_text("".join(text), encoding="utf-8")
        if (config := outcome(load, path)) is not None:
            outcome(check, config)


def test_odd_bytes_are_refused(tmp_path):
    path = tmp_path / "odd.yaml"
    for content in (
        b"",
        b"\xff\xfe\x00",
        b"\0" * 10,
        b"a: \xc3",
        b"--- a\n--- b\n",
        b"&a *a",
        b"? {",
    ):
        path.write_bytes(content)
        with pytest.raises(UserError):
            load(path)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(
    spec=PLAIN,
    option=st.sampled_from(
        ["size", "eta", "kernel", "sde", "lora", "logp_dist", "shared_noise", "scales"]
    ),
)
def test_any_value_for_any_option(spec, option):
    outcome(build, {"sd3": {"path": "x", option: spec}}, FAKE, "policy")
    outcome(build, spec, FAKE, "policy")
    outcome(build_rewards, spec, INNER)


@QUICK
@given(value=PLAIN)
def test_anything_written_is_read_back(value):
    again, _ = read(write({"a": value}), "x")
    assert repr(again) == repr({"a": value})  # repr, since nan is not equal to itself


@QUICK
@given(
    text=st.text(alphabet="abcpolicytrain.=:[]{}'\" \n\té1-", max_size=25),
    section=st.sampled_from(["", "train.", "policy.", "reward.", "evaluate.reward."]),
)
def test_any_override(text, section):
    outcome(load, CONFIGS[0], [section + text])
    outcome(load, CONFIGS[0], [f"{section}{text}=3"])
