"""What a newcomer reads after a command, or after a mistake: the next command, as it is typed."""

import pytest

import mmrl
from mmrl.api.arguments import prompts_of
from mmrl.cli import commands
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
