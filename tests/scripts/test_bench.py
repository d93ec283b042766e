"""The straightforward loop that mmrl is timed against does the same work: no timing is asserted
here."""

import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mmrl.policies import native

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name):
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench = load("bench_iteration")
WORK = bench.Work(prompts=2, copies=4, plain_rows=3)
ARGS = bench.arguments(["--steps", "3"])


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_both_loops_end_at_the_same_weights(guidance, micro_batch):
    agreement = bench.agreement(
        partial(bench.digits_policy, ARGS, guidance), replace(WORK, micro_batch=micro_batch)
    )
    assert (
        agreement["weights"] < 1e-10
        and agreement["latents"] < 1e-10
        and agreement["weights_moved"] > 1e-5
    )


def test_loops_that_do_different_work_are_refused(monkeypatch):
    monkeypatch.setattr(
        bench, "log_prob", lambda x, mean, std: -((x - mean) ** 2).flatten(1).mean(1) / std**2
    )
    with pytest.raises(SystemExit, match="do not do the same work"):
        bench.agreement(partial(bench.digits_policy, ARGS, 1.0), WORK)


def test_passes_and_rows_are_counted_and_the_results_written(tmp_path):
    threads = torch.get_num_threads()
    words = (
        "--steps 3 --prompts 2 --copies 4 --plain-rows 2 --repeats 1 --threads 1 --explain --out"
    ).split()
    report = bench.main([*words, str(tmp_path / "bench")])
    torch.set_num_threads(threads)
    guided = report["cases"]["guidance 4.5"]["runs"]
    plain = report["cases"]["no guidance"]["runs"]
    assert (
        guided["plain loop, 2 rows"]["passes"]
        == 4 * 3 + 4 * 2
        == plain["plain loop, 2 rows"]["passes"]
    )
    assert guided["mmrl"]["passes"] == 2 * 3 + 2 * 2
    assert {run["rows"] for run in guided.values()} == {2 * 8 * 5} and {
        run["rows"] for run in plain.values()
    } == {40}
    assert (
        json.loads((tmp_path / "bench.json").read_text())["cases"].keys() == report["cases"].keys()
    )
    page = (tmp_path / "bench.md").read_text()
    assert (
        page.count("times as fast") == 2
        and "mmrl, micro_batch 2" in page
        and report["machine"]["cpu"] in page
    )


def test_overlapped_rewards_give_the_same_numbers(monkeypatch):
    from tests.fixtures.tiny_rewards import asked, pictures

    rewards = load("bench_rewards")
    monkeypatch.setattr(rewards, "SLOW", 0.04)
    report = rewards.overlap({}, pictures(8), asked(8), parts=4)
    # how much sooner is for an idle machine to say
    assert report["times"] > 0 and report["rewards"] == ["distant"]
    whole = {
        "overlap": report,
        "cache": {"x": {"miss": 1.0, "hit": 0.005, "share": 0.005}},
        "small": ["clip_score"],
    }
    shown = rewards.page(
        whole
        | {
            "samples_per_second": {"clip_score": 2.0},
            "size": 8,
            "samples": 8,
            "machine": {"cpu": "x"},
        }
    )
    assert (
        "| `clip_score`* | 2 |" in shown
        and ("| x | 1.0000 | 0.0050 | 0.50% |") in shown
        and "* cpu: x" in shown
    )


def test_sampled_tokens_equal_those_of_the_libraries(monkeypatch, tmp_path):
    """The script stops where they differ."""
    discrete = load("bench_discrete")
    threads = torch.get_num_threads()
    sizes = {
        "janus": discrete.Size("janus", 64, 1, 2, 2, 50),
        "amused": discrete.Size("amused", 64, 1, 4, 4, 20, 3),
        "llamagen": discrete.Size("llamagen", 64, 1, 2, 2, 50),
        "var": discrete.Size("var", 64, 1, 2, 2, 50),
    }
    monkeypatch.setattr(discrete, "CASES", sizes)
    words = (
        "--cases janus amused llamagen var --copies 3 --repeats 1 --threads 1 --no-warm "
        "--check-side 4 --out"
    ).split()
    report = discrete.main([*words, str(tmp_path / "speed")])
    torch.set_num_threads(threads)
    assert {case["equal"].partition(" from")[0] for case in report["cases"].values()} == {
        "all 12 tokens",
        "all 48 tokens",
        "all 15 tokens",
    }
    page = (tmp_path / "speed.md").read_text()
    assert page.count("from equal random numbers") == 4 and "| janus | 64, 1 | 4 |" in page
    if native.able():  # elsewhere the inductor would compile for a while
        discrete.main(
            ["--compile", *words[:1], *words[3:4], *words[5:], str(tmp_path / "compiled")]
        )
        page = (tmp_path / "compiled.md").read_text()
        assert page.count(" 0 of 12 tokens are others than not compiled") == 1
        assert "first rollouts" in page
        torch.set_num_threads(threads)
    monkeypatch.setattr(
        discrete.Janus, "ours", lambda self, *_: torch.zeros(3, 4, dtype=torch.long)
    )
    with pytest.raises(SystemExit, match="not the same work"):
        discrete.measure(sizes["janus"], discrete.arguments(words[:-1]))
