"""The long experiments of trust: their frame, on sections that cost nothing."""

import json
import random
from types import SimpleNamespace

import pytest

from scripts.dev import soak_parts
from scripts.dev.soak_parts import long, mutations
from scripts.dev.soak_parts.page import Experiment, write


def test_a_section_replaces_its_own_figures_only(tmp_path):
    page = tmp_path / "trust.md"
    write(page, "b", "Shows b", [Experiment("first", 3, 0, "fine", {"most": 1.5})], 2.0)
    write(page, "a", "Shows a", [Experiment("second", 1, 1, "a traceback")], 1.0)
    write(page, "b", "Shows b", [Experiment("third", 4, 0, "fine")], 2.0)
    text = page.read_text()
    assert text.index("| a (") < text.index("| b (")
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


def test_a_section_is_run_and_its_failures_are_the_exit_status(tmp_path, monkeypatch, capsys):
    experiments = [Experiment("fine", 2, 0, "as expected"), Experiment("not", 2, 1, "a hang")]
    section = SimpleNamespace(run=lambda soak: experiments[: int(soak.seconds)])
    monkeypatch.setattr(soak_parts.importlib, "import_module", lambda name: section)
    page = tmp_path / "trust.md"
    assert soak_parts.main(["kills", "--seconds", "1", "--page", str(page)]) == 0
    assert soak_parts.main(["kills", "--seconds", "2", "--page", str(page)]) == 1
    assert "kills: not: 2 tries, 1 failed; a hang" in capsys.readouterr().out


def test_what_grows_is_noticed():
    flat = long._flat("seconds", 8, [1.0] * 8, " s", 1.25)
    slower = long._flat("seconds", 8, [9.0, 9.0, 1.0, 1.0, 1.0, 1.2, 1.4, 1.4], " s", 1.25)
    more = long._flat("memory", 8, [1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 30.0, 30.0], "", 16, True)
    assert (flat.failed, slower.failed, more.failed) == (0, 1, 1)


def test_every_mutation_is_of_the_seed():
    plain = {"a": {"b": [1, 2]}, "c": 3}
    changed = [mutations.mutated(plain, random.Random(seed)) for seed in range(50)]
    assert changed == [mutations.mutated(plain, random.Random(seed)) for seed in range(50)]
    assert plain == {"a": {"b": [1, 2]}, "c": 3} and sum(x != plain for x in changed) > 40
