"""The parts of scripts/dev/gpu_check.py with small models on this machine's CPU, so that they do
not break on a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fixtures import supervised_job

SCRIPTS = Path(__file__).parents[2] / "scripts" / "dev"


@pytest.fixture(scope="module")
def check():
    sys.path.insert(0, str(SCRIPTS))
    module = importlib.import_module("gpu_check")
    module.parts = importlib.import_module("gpu_parts.listing")
    yield module
    sys.path.remove(str(SCRIPTS))


def test_without_a_gpu_it_says_so_and_all_is_well(check, capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check.main(["--out", str(tmp_path)]) == 0
    assert "no CUDA device here" in capsys.readouterr().out and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        check.main(["--small"])  # would overwrite real results


@pytest.mark.slow
def test_parts_run_in_small(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check.parts.worlds, "PRECISIONS", ("fp32",))
    parts = ["world_of_one", "sleep"]
    words = ["--small", "--here", "--repeats", "1", "--out", str(tmp_path), "--only", *parts]
    assert check.main(words) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(report) == parts
    worlds = report["world_of_one"]
    assert all(world["ratio/max_deviation"] == 0 for name, world in worlds.items() if "," in name)
    for name, wrapper in (
        ("DDP", "DistributedDataParallel"),
        ("FSDP2", "FSDPSD3Transformer2DModel"),
    ):
        assert worlds[f"{name}, fp32"]["wrapped"] == wrapper
        assert worlds[f"{name}, fp32"]["apart"] == 0.0, "one copy or shard is the whole"
    for placement in report["sleep"]["text encoders"].values():
        assert placement["known text is the same"] and placement["encoded twice"] == 2
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"## {name} (" in page for name in parts)


def test_a_part_that_fails_is_written_down_and_the_status_says_so(check, tmp_path, monkeypatch):
    def not_here(setting):
        raise check.parts.NotInstalled("a package")

    for name, part in (
        ("gap", lambda setting: 1 / 0),
        ("tiny", lambda setting: sys.exit(2)),
        ("memory", lambda setting: {"fine": 1}),
        ("vllm", not_here),
    ):
        monkeypatch.setitem(check.PARTS, name, check.parts.Part(part, 10))
    words = ["--small", "--here", "--out", str(tmp_path), "--only", "gap", "tiny", "memory", "vllm"]
    assert check.main(words) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert "ZeroDivisionError" in parts["gap"]["failed"] and parts["memory"]["fine"] == 1
    assert "SystemExit" in parts["tiny"]["failed"]
    assert parts["vllm"]["not installed"] == "a package"


def test_what_begins_after_the_end_is_left_out(check, tmp_path):
    words = ["--small", "--out", str(tmp_path), "--minutes", "0.1", "--only", "image", "gap"]
    assert check.main(words) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert all(part["left out"].startswith("no time") for part in parts.values())


def test_a_part_that_hangs_or_dies_takes_no_other_with_it(check):
    worker = check.Worker(supervised_job.job)
    try:
        first, second = (worker.ask("works", 60)["process"] for _ in range(2))
        assert first == second != os.getpid()
        dies = worker.ask("dies", 60)
        assert "status 7" in dies["failed"] and dies["begun"] == "dies"
        assert worker.ask("works", 60)["process"] != first
        hangs = worker.ask("hangs", 0.3)
        assert hangs["hung"] and "not over" in hangs["failed"] and hangs["begun"] == "hangs"
        failing = worker.ask("fails", 60)["process"]
        assert worker.ask("works", 60)["process"] not in (first, failing)
    finally:
        worker.end()


def test_the_straightforward_loop_for_wan_does_the_same_work(check):
    agreement = check.parts.iterations.bench.agreement(
        partial(check.models.wan, check.models.SMALL, steps=3),
        check.Setting(check.models.SMALL, Path()).work(),
        check.models.PlainWan,
    )
    assert agreement["weights"] < 1e-10 and agreement["weights_moved"] > 1e-6


def test_a_part_notes_what_it_finds_before_it_fails(check):
    def part():
        yield {"safe": 1}
        raise RuntimeError("out of memory")

    noted = []
    report = check.recorded(part, noted.append)
    assert noted == [{"safe": 1}] and report["safe"] == 1
    assert report["failed"] == "RuntimeError: out of memory"


def test_the_calls_of_a_gpu_machine_name_parts_that_there_are(check):
    """Each call of scripts/dev/gpu is a list of parts; all in small take minutes, one is tried."""
    calls = re.findall(r"^    (\w+)\) parts=\((.*)\)", (SCRIPTS / "gpu/call").read_text(), re.M)
    assert [name for name, _ in calls] == ["exact", "speed", "memory"]
    assert not {part for _, parts in calls for part in parts.split()} - set(check.PARTS)


@pytest.mark.slow
def test_answers_and_kernels_run_in_small(check, tmp_path):
    words = ["--small", "--here", "--out", str(tmp_path), "--only", "attention", "answers"]
    assert check.main(words) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    for kernels in ("image", "update", "next token"):
        chosen = parts["attention"][kernels]["torch's choice"]
        assert chosen["gradients are finite"] and chosen["forward"] > 0
    assert parts["answers"]["second iteration"]["grad_norm"] > 0


def test_a_cut_wheel_keeps_what_matches(tmp_path):
    cut = runpy.run_path(str(SCRIPTS / "gpu/cut_wheel.py"))["cut"]
    wheel = tmp_path / "a-1-py3-none-any.whl"
    names = ["a/x.so", "a/y.so", "a/z.py"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
        archive.writestr("a-1.dist-info/RECORD", "".join(f"{name},sha256=,1\n" for name in names))
    cut(wheel, "x\\.so")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == ["a/x.so", "a/z.py", "a-1.dist-info/RECORD"]
        assert b"y.so" not in archive.read("a-1.dist-info/RECORD")
