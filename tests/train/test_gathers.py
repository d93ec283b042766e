"""Two processes that share weights (FSDP2) make the same collective calls in the same order,
however unlike their rows are: otherwise gloo aborts, and NCCL waits for ever."""

import json

import pytest

from tests.fixtures import gathers_worker, warm


@pytest.mark.slow
def test_processes_gather_alike(tmp_path):
    """One pair goes through all families."""
    done = warm.ranks(["-m", "tests.fixtures.gathers_worker", tmp_path])
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = []
    for rank in (0, 1):
        every = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        ranks.append({line["case"]: line for line in every})
    for case in gathers_worker.CASES:
        one, two = (rank[case] for rank in ranks)
        assert not one["error"] and not two["error"], (case, one["error"] or two["error"])
        assert one["calls"] == two["calls"], case
        for kind in ("unshard", "post_backward"):  # or nothing was trained
            assert any(call.startswith(kind) for call in one["calls"]), (case, kind)
