"""The long experiments of trust: their frame, on sections that cost nothing."""

import json

import pytest

from scripts import soak_parts
from scripts.soak_parts.page import Experiment, write


def test_a_section_replaces_its_own_figures_only(tmp_path):
    page = tmp_path / "trust.md"
    write(page, "b", "Shows b", [Experiment("first", 3, 0, "fine", {"most": 1.5})], 2.0)
    write(page, "a", "Shows a", [Experiment("second", 1, 1, "a traceback")], 1.0)
    write(page, "b", "Shows b", [Experiment("third", 4, 0, "fine")], 2.0)
    text = page.read_text()
    assert text.index("## a") < text.index("## b")
    assert "| third | 4 | 0 | fine |" in text and "| second | 1 | 1 | a traceback |" in text
    assert "first" not in text
    record = json.loads(page.with_suffix(".json").read_text())
    assert [row["name"] for row in record["b"]["experiments"]] == ["third"]


def test_an_experiment_that_tried_nothing_has_not_passed():
    assert Experiment("x", 2, 0, "").passed
    assert not Experiment("x", 2, 1, "").passed and not Experiment("x", 0, 0, "").passed


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        soak_parts.main(["nothing"])
    assert "known: kills" in capsys.readouterr().err
