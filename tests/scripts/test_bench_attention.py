"""scripts/bench_attention.py, small: both sides compute the same, and the page says what was
compared."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mmrl.policies.vlm import cpu_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_attention as bench

SMALL = ["--tokens", "9", "--prompt-tokens", "5", "--repeats", "1"]
serves = pytest.mark.skipif(
    not cpu_attention.serves(16, torch.zeros(1)), reason="no AVX-512, or no C++ compiler"
)


@serves
def test_both_sides_are_measured_and_written(tmp_path):
    out = tmp_path / "attention"
    bench.main([*SMALL, "--out", str(out)])
    found = json.loads(out.with_suffix(".json").read_text())["prompt_tokens"]["5"]
    assert found["apart"] < 1e-5 and found["forward"]["factor"] > 0
    text = out.with_suffix(".md").read_text()
    assert "| prompt tokens | pass | torch, ms |" in text and "| 5 | backward |" in text


@serves
def test_an_earlier_source_takes_the_place_of_torch(tmp_path):
    earlier = tmp_path / "earlier.cpp"
    shutil.copy(cpu_attention.SOURCE, earlier)
    plain = earlier.read_text()
    earlier.write_text(
        plain.replace("sums[(t - first) * D + d] /", "2 * sums[(t - first) * D + d] /")
    )
    assert earlier.read_text() != plain
    x, rows, start = bench.inputs(5, 9)
    ours = bench.by_mmrl(x, rows, start, torch.zeros(0))
    with bench.source(earlier):
        doubled = bench.by_mmrl(x, rows, start, torch.zeros(0))
    torch.testing.assert_close(doubled, 2 * ours)
    out = tmp_path / "attention"
    bench.main([*SMALL, "--before", str(cpu_attention.SOURCE), "--out", str(out)])
    assert "before (attention.cpp), ms" in out.with_suffix(".md").read_text()


def test_a_source_that_is_not_there_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--before", str(tmp_path / "none.cpp")])
    assert "--before: there is no file" in capsys.readouterr().err
