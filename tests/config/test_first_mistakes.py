"""Mistakes of a newcomer's first day: all are reported at once, in good English."""

from __future__ import annotations

import textwrap

import pytest

from mmrl.config import build
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, REWARDS, load_built_in
from mmrl.experiment.build import read

load_built_in()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return f"{name}.py:Mine"

    return write


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_dataclass_on_a_dataclass_of_ours_has_one_more_option(module, future):
    """The annotations of the base are of the base's module: the child has not imported Literal."""
    name = module(
        f"weighted{len(future)}",
        future + "from dataclasses import dataclass\n"
        "from mmrl.zoo.objectives.forward_process.awm import AWM\n"
        "@dataclass\nclass Mine(AWM):\n    extra: float = 1.0\n",
    )
    objective = build({name: {"extra": 2, "weighting": "t"}}, OBJECTIVES)
    assert (objective.extra, objective.weighting, objective.clip_range) == (2.0, "t", 1.0)
    with pytest.raises(UserError, match="weighting: expected one of 'uniform', 't'"):
        build({name: {"weighting": "x"}}, OBJECTIVES)


FILE = """\
polcy: {sd3: {}}
policy: {sd3: {path: "world:digits/sd3-test", stepz: 3}}
data: digits
objective: {policy_gradient: {clip_rang: 1e-4}}
train: 3
"""


def test_an_unknown_section_hides_no_other_mistake(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    with pytest.raises(UserError) as raised:
        read(path, ["nowhere.x=1", "log.evry=2"])
    lines = str(raised.value).splitlines()
    assert lines[0] == "7 problems:"
    parts = ("nowhere", "polcy", "stepz", "'reward' is missing", "clip_rang", "log.evry")
    for part in (*parts, "train: expected options, {option: value}, got 3"):
        assert sum(part in line for line in lines) == 1, part
    # a known mistake is not followed by everything else that could be written
    assert "did you mean 'steps'?" in str(raised.value) and len(max(lines, key=len)) < 300


def test_a_broken_plug_in_is_said_before_the_names_it_would_have_registered(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE + "plugins: missing.py\n")
    with pytest.raises(UserError, match="missing.py") as raised:
        read(path, [])
    assert "stepz" not in str(raised.value) and "polcy" in str(raised.value)


def test_a_class_of_the_user_that_cannot_be_built_is_named_with_its_line(module):
    """Its own errors are one sentence; those of mmrl's classes stay what they are."""
    name = module(
        "network",
        """
        class Mine:
            def __init__(self, weights: str):
                self.weights = open(weights).read()

            def __call__(self, media, prompts):
                return media.mean((1, 2, 3))
        """,
    )
    with pytest.raises(UserError, match=r"Mine could not be built: FileNotFoundError.*absent.pt.*"):
        build({name: {"weights": "absent.pt"}}, REWARDS)
    with pytest.raises(UserError, match=r"network.py:4\)"):
        build({name: {"weights": "absent.pt"}}, REWARDS)
