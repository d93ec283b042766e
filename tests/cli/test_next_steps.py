"""What a newcomer reads after a command, or after a mistake: the next command, as it is typed."""

import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import mmrl
from mmrl.api.arguments import needed, prompts_of
from mmrl.api.auditing import Audits
from mmrl.apps.check_reward import Audit, Line, Offence
from mmrl.apps.dry_run.page import _whole_run
from mmrl.cli import commands
from mmrl.cli.app import app
from mmrl.core.broken_rows import first_of
from mmrl.core.errors import UserError
from mmrl.experiment import build
from tests.core.test_imports import ROOT

DIGITS = ROOT / "configs" / "digits" / "flow_grpo.yaml"


def test_what_is_wrong_with_many_rows_alike_is_said_once():
    alike = [f"p.csv:{i}: no text" for i in range(2, 32)]
    text = first_of(["p.csv:1: empty", *alike])
    assert text.splitlines() == [
        "p.csv:1: empty",
        "    p.csv:2: no text (and 29 more rows like it: "
        "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 ...)",
    ]
    assert first_of([f"a:{i}: reason {i}" for i in range(24)]).count("\n") == 20


def test_prompts_of_a_file_for_data_that_makes_its_own():
    with pytest.raises(UserError, match=r"data=\{prompts: \{path: prompts.csv\}\}"):
        build.read(DIGITS, ["data.path=prompts.csv"])


def test_the_base_of_an_evaluation_has_a_name(tmp_path):
    assert "world:digits/sd3" in commands.base_of(DIGITS)
    run = tmp_path / "second"
    run.mkdir()
    text = DIGITS.read_text(encoding="utf-8")
    (run / "config.yaml").write_text(f"{text}\nstart: runs/first\n", encoding="utf-8")
    assert commands.base_of(run) == f"the weights that {run} began with, those of runs/first"


def test_what_a_whole_run_takes():
    assert _whole_run(932 * 1000, 1) == "about 10.8 days, 259 GPU hours"
    assert _whole_run(3600, 8) == "about 1 hours, 8 GPU hours"


def test_names_of_rewards_and_rows_are_those_of_files():
    rows = [{"question": "Where?", "bbox": [0, 0, 5, 5], "width": 9, "height": 9}] * 2
    (first, _) = prompts_of(rows)
    assert first["text"] == "Where?" and first["boxes"] == [[0, 0, 5, 5]]
    audits = mmrl.check_reward("referring", rows)
    assert [each.reward for each in audits] == ["referring"]
    kept = prompts_of([{"prompt": "a", "answer": "b", "solution": "c"}])
    assert kept == [{"prompt": "a", "text": "a", "answer": "b", "solution": "c"}]


def test_rows_without_a_ground_truth_are_a_sentence():
    def about(media, prompts):
        return [0.0] * len(media)

    with pytest.raises(UserError, match="hold no ground truth .*`answer`, `boxes`"):
        mmrl.check_reward(about, ["a", "b"], media="text")


def test_long_answers_are_cut_where_audits_are_printed():
    line = Line("probe", "rule", [math.nan], [Offence("row 1", "x" * 1500, 0.0)])
    assert max(map(len, repr(Audits([Audit("r", [line])])).splitlines())) < 200


def test_a_package_that_is_missing_is_one_error():
    with pytest.raises(UserError, match="needs nosuchpackage") as error:
        needed("nosuchpackage", "run.metrics")
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_view_suggests_runs_alone(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "sources").mkdir()
    with pytest.raises(UserError, match="known: none"):
        CliRunner().invoke(app, ["view", str(tmp_path / "nothere")], catch_exceptions=False)


def test_a_wrong_name_is_said_before_torch_is_loaded():
    code = (
        "import sys\nfrom mmrl.cli.app import main\n"
        "sys.argv = ['mmrl', 'train', 'digits/flow_gpro']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "False\n"
    assert "did you mean 'digits/flow_grpo'" in done.stderr


def test_help_flows_over_the_lines_of_docstrings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200, raising=False)
    text = CliRunner().invoke(app, ["evaluate", "--help"]).output
    assert "base model and trained model. Or score a public benchmark" in text
