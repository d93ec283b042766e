"""What mmrl costs beside the network is measured whole: shares add up, and the page has them. No
timing is asserted here."""

import json

import pytest
import torch

from tests.scripts.test_bench import load

overhead = load("bench_overhead")


def test_shares_of_an_iteration_add_up_and_are_written(tmp_path):
    threads = torch.get_num_threads()
    words = ["--cases", "vlm", "--width", "128", "--repeats", "1", "--out", str(tmp_path / "page")]
    report = overhead.main(words)
    torch.set_num_threads(threads)
    case = report["cases"]["vlm"]
    assert set(case["shares"]) == {"forward", "backward", "optimizer"}
    assert all(share > 0 for share in case["shares"].values())
    assert case["overhead"] + sum(case["shares"].values()) == pytest.approx(1)
    assert json.loads((tmp_path / "page.json").read_text())["cases"]["vlm"] == case
    text = (tmp_path / "page.md").read_text()
    assert f"| vlm | {case['parameters'] / 1e6:.0f} |" in text


def test_of_calls_inside_each_other_the_outermost_counts():
    spent = overhead.Spent()
    inner, outer = torch.nn.Identity(), torch.nn.Sequential(torch.nn.Identity())
    depths = []
    for module in (outer, *outer, inner):
        module.register_forward_pre_hook(spent.enter)
        module.register_forward_pre_hook(lambda *_: depths.append(spent.depth))
        module.register_forward_hook(spent.leave)
    outer(torch.ones(1))
    inner(torch.ones(1))
    assert depths == [1, 2, 1]
    assert spent.depth == 0


def test_answers_that_end_by_themselves_are_shown_by_their_mean_length():
    measuring = load("measuring")
    machine = {
        "command": "bench_vlm.py",
        "time": "now",
        "commit": "0",
        "cpu": "one",
        "cores": 1,
        "gpus": [],
        "versions": {"torch": "2", "transformers": "5"},
    }
    work = {"ends": True, "tokens": 512, "image_tokens": 16, "prompts": 2, "copies": 4}
    case = {
        "work": work,
        "prompt_tokens": 43,
        "answer_tokens": {"mmrl": 250.2, "trl": 260.0},
        "factor": 2.0,
        "factors": [1.5, 2.0, 2.5],
    }
    report = {"threads": 1, "trl": "1", "device": "cpu", "model": "tiny", "repeats": 3}
    before = {
        "machine": machine | {"time": "then"},
        "threads": 2,
        "curves": {"ends": [case], "group size": [case]},
        "memory": [{"copies": 8, "peak_bytes": 2**21}],
    }
    report |= {"machine": machine, "curves": {"ends": [case]}}
    report["earlier"] = load("bench_vlm")._earlier(before, report)
    page = measuring.vlm_page(report)
    assert page.count("## ends") == 1 == page.count("## group size")
    assert "on then, commit 0, 2 threads" in page and "| 8 | 2.0 |" in page
    report["earlier"] = load("bench_vlm")._earlier(before | {"curves": {"ends": [case]}}, report)
    report["memory"] = before["memory"]
    assert "Not measured again" in measuring.vlm_page(report)  # its memory is
    report["earlier"].pop("memory")
    assert "Not measured again" not in measuring.vlm_page(report)
    assert "250 and 260 on average, at most 512 | 2.00 (1.50 - 2.50) |" in page
