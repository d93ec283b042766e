"""The parts of scripts/gpu_check.py with small models on this machine's CPU, so that they do not
break on a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def check():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("gpu_check")
    sys.path.remove(str(SCRIPTS))


def test_without_a_gpu_it_says_so_and_all_is_well(check, capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check.main(["--out", str(tmp_path)]) == 0
    assert "no CUDA device here" in capsys.readouterr().out and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        check.main(["--small"])  # would overwrite real results


@pytest.mark.slow
def test_every_part_runs_in_small(check, tmp_path):
    parts = ["attention", "backends", "video", "gap"]
    assert check.main(["--small", "--repeats", "1", "--out", str(tmp_path), "--only", *parts]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(report) == parts
    assert report["attention"]["milliseconds"]["torch's choice"] > 0
    for network in ("image", "video"):
        assert (
            report["backends"][network]["sdpa"]["apart"] == 0
            and report["backends"][network]["auto"] == "sdpa"
        )
        assert "needs a CUDA device" in report["backends"][network]["xformers"]
    assert report["video"]["share of the peak"] > 0 and report["video"]["ratio"] > 0
    assert report["video"]["teraflop an iteration"] > 0
    assert set(report["gap"]["video, bf16 weights"]) == {"1", "2", "4", "8", "16"}
    assert report["gap"]["image, bf16 weights"]["8"] == 0.0
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("times as fast") == 1 and "matmul peak" in page


def test_a_part_that_fails_is_written_down_and_the_status_says_so(check, tmp_path, monkeypatch):
    monkeypatch.setitem(check.PARTS, "gap", lambda args: 1 / 0)
    monkeypatch.setitem(check.PARTS, "memory", lambda args: {"fine": 1})
    assert check.main(["--small", "--out", str(tmp_path), "--only", "gap", "memory"]) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert "ZeroDivisionError" in parts["gap"]["failed"] and parts["memory"]["fine"] == 1


def test_the_straightforward_loop_for_wan_does_the_same_work(check):
    agreement = check.bench.agreement(
        partial(check.models.wan, check.models.SMALL, steps=3),
        check.work(argparse_like(check)),
        check.models.PlainWan,
    )
    assert agreement["weights"] < 1e-10 and agreement["weights_moved"] > 1e-6


def argparse_like(check):
    from types import SimpleNamespace

    return SimpleNamespace(scale=check.models.SMALL)
