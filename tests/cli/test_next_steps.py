"""What a newcomer reads after a command, or after a mistake: the next command, as it is typed."""

import pytest

from mmrl.core.broken_rows import first_of
from mmrl.core.errors import UserError
from mmrl.experiment import build
from tests.core.test_imports import ROOT

DIGITS = ROOT / "configs" / "digits" / "flow_grpo.yaml"


def test_what_is_wrong_with_many_rows_alike_is_said_once():
    alike = [f"p.csv:{i}: no text" for i in range(2, 32)]
    first, second = first_of(["p.csv:1: empty", *alike]).splitlines()
    assert first == "p.csv:1: empty" and "p.csv:2: no text (and 29 more rows like it: 3, " in second
    assert first_of([f"a:{i}: reason {i}" for i in range(24)]).count("\n") == 20


def test_prompts_of_a_file_for_data_that_makes_its_own():
    with pytest.raises(UserError, match=r"data=\{prompts: \{path: prompts.csv\}\}"):
        build.read(DIGITS, ["data.path=prompts.csv"])
