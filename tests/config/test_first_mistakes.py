"""Mistakes of a newcomer's first day: all are reported at once, in good English."""

from __future__ import annotations

import pytest

from mmrl.config import build
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.experiment.build import read

load_built_in()


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}.py:Mine"

    return write


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


BROKEN = """\
class Mine:
    def __init__(self, weights: str):
        self.weights = open(weights).read()

    def __call__(self, media, prompts):
        return media.mean((1, 2, 3))
"""


def test_a_class_of_the_user_that_cannot_be_built_is_named_with_its_line(module):
    """Its own errors are one sentence; those of mmrl's classes stay what they are."""
    sentence = r"Mine could not be built: FileNotFoundError.*absent.pt.*network.py:3\)"
    with pytest.raises(UserError, match=sentence):
        build({module("network", BROKEN): {"weights": "absent.pt"}}, REWARDS)
