"""scripts/bench_quantization.py, small: the gap of a random FLUX, and the page of invented runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_quantization as bench


def test_the_gap_is_measured_and_written(tmp_path):
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "quantization"
    bench.main(["--worlds", "flux", "--kinds", "nf4", "--out", str(out)])
    gap = json.loads(out.with_suffix(".json").read_text())["gaps"]["flux"]["nf4"]
    assert gap["bits"] == pytest.approx(4.5, abs=0.05) and gap["ratio"] < 1e-6
    assert 0 < gap["logprob_mean"] <= gap["logprob_max"] < 0.1
    assert 0 < gap["samples"]["rms"] < gap["samples"]["rms_of_others"]
    written = out.with_suffix(".json").read_text()
    bench.main(["--worlds", "flux", "--kinds", "nf4", "--out", str(out)])  # nothing is done again
    gaps = json.loads(written)["gaps"]
    assert json.loads(out.with_suffix(".json").read_text())["gaps"] == gaps
    assert "| flux | nf4 | 4.50 |" in out.with_suffix(".md").read_text()


def test_differences_are_paired_by_seed_and_prompt():
    def run(after):
        parts = {"before": [0.0, 0.0], "after": after, "on_plain_base": [1.0, 0.0]}
        return parts | {"curve": [0.0] * 3, "cpu_seconds": 2.0}

    runs = {
        "none": {"0": run([0.2, 0.4]), "1": run([0.3, 0.6])},
        "nf4": {"0": run([0.1, 0.3]), "1": run([0.2, 0.5])},
        "8bit": {"0": run([0.2, 0.4])},  # not finished: left out
    }
    text = "\n".join(bench._learning("sd3", runs))
    assert "of 3 iterations, 2 seeds" in text and "| 8bit" not in text
    assert "| nf4 | 0.000 | 0.275 | 0.200, 0.350 | -0.100 [-3.277, +3.077] | 0.500 | 2 |" in text


def test_samples_are_compared_by_pixels_or_by_texts():
    zeros, ones = torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
    assert bench.differ(zeros, ones)["rms"] == 1.0
    assert bench.differ(["a", "b"], ["a", "c"]) == {"changed": 0.5, "answers": 2}
