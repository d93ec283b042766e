"""Whatever is wrong in a configuration, the outcome is success or one UserError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.config import build_rewards, load
from mmrl.config.options import TrainOptions
from mmrl.config.schema import resolve
from mmrl.config.values import Place
from mmrl.config.yamltext import read, write
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES

SHIPPED = (Path(__file__).parents[2] / "configs").rglob("*.yaml")
# those are for `mmrl serve-reward`
CONFIGS = sorted(path for path in SHIPPED if path.parent.name != "serve")


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
            config = load(path)  # checked in tests/dry_run
            assert config.section("train", TrainOptions).iterations > 0
            written = read(path.read_text(), "x")[0]
            count = len(places(written))
            plain = config.plain
            leaves = sum(not isinstance(parent(plain, p)[p[-1]], dict) for p in places(plain))
            stages = len(written.get("stages") or ()) or 1
            assert leaves <= 32 and count <= 32 + 16 * stages  # the changes of each stage are few


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
@given(spec=PLAIN, option=st.sampled_from(["size", "sde_type", "lora", "noise_window", "steps"]))
def test_any_value_for_any_option(spec, option):
    problems: list[str] = []
    outcome(resolve, {"sd3": {"path": "x", option: spec}}, POLICIES, Place(), problems)
    outcome(resolve, spec, POLICIES, Place(), problems)
    outcome(build_rewards, spec)


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
