"""What ``mmrl evaluate`` writes: JSON for everybody, means of prompts, paired differences."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from mmrl.cli.tables import change_sentences
from mmrl.core.errors import UserError
from mmrl.core.files import check_writable, write_json
from mmrl.experiment.evaluation import Scores, row

NAN = math.nan


def scores(*rows, name="taste"):
    return Scores({name: torch.tensor(rows)}, torch.zeros(len(rows)), {})


def test_a_row_is_json_for_every_reader_and_has_the_paired_difference(tmp_path):
    before = scores([0.1, 0.3], [0.9, 0.7], [NAN, NAN], [0.4, NAN])
    after = scores([0.3, 0.4], [0.9, 1.0], [0.5, 0.5], [0.5, 0.5])
    line = row("trained", None, after, before)
    write_json(tmp_path / "a.json", line)
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == line
    base = row("base", None, before)
    assert base["prompt_means"]["taste"] == [0.2, 0.8, None, 0.4]
    assert '"taste": [ 0.35, 0.95, 0.5, 0.5 ]' in (tmp_path / "a.json").read_text()
    pairs = np.array([0.15, 0.15, 0.1])
    width = stats.t.ppf(0.975, 2) * pairs.std(ddof=1) / 3**0.5
    change = line["difference"]["taste"]
    assert change["prompts"] == 3 and change["mean"] == pytest.approx(pairs.mean(), rel=1e-5)
    assert change["high"] - change["mean"] == pytest.approx(width, rel=1e-5)
    # the intervals of the two means overlap all the same: prompts differ more than the models
    assert line["rewards"]["taste"]["low"] < base["rewards"]["taste"]["high"]
    (sentence,) = change_sentences([base, line])
    assert sentence == "taste: +0.133 [+0.062, +0.205], paired over 3 prompts"


def test_what_is_unknown_is_null_and_said():
    line = row("trained", 2.0, scores([0.5, 0.7]), scores([0.1, 0.3]))
    assert line["rewards"]["taste"]["low"] is None and line["difference"]["taste"]["high"] is None
    json.dumps(line, allow_nan=False)
    (sentence,) = change_sentences([row("base", 2.0, scores([0.1, 0.3])), line])
    assert sentence == "taste: +0.4, paired over 1 prompt: too few to say how sure that is"


def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "inside", tmp_path / "file"):
        with pytest.raises(UserError, match="cannot write to .*file.* is a file"):
            check_writable(folder)
    check_writable(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
