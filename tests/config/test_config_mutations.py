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


def keys(value: Any) -> int:
    """How many keys a nest of mappings has."""
    return sum(1 + keys(item) for item in value.values()) if isinstance(value, dict) else 0


def leaves(value: Any) -> int:
    return sum(map(leaves, value.values())) if isinstance(value, dict) else 1


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


def test_every_config_of_the_repository_is_short(real, subtests):
    """tests/dry_run checks them."""
    for path in CONFIGS:
        with subtests.test(f"{path.parent.name}/{path.stem}"):
            config = load(path)
            assert config.section("train", TrainOptions).iterations > 0
            written = read(path.read_text(), "x")[0]
            stages = len(written.get("stages") or ()) or 1  # the changes of each stage are few
            assert leaves(config.plain) <= 32 and keys(written) <= 32 + 16 * stages


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
