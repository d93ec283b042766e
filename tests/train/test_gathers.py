"""Two processes that share weights (FSDP2) make the same collective calls in the same order,
however unlike their rows are: otherwise gloo aborts, and NCCL waits for ever."""

import json

import pytest

from tests.fixtures import gathers_worker, warm


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What both processes gathered, by case: one pair goes through all families."""
    folder = tmp_path_factory.mktemp("gathers")
    done = warm.ranks(["-m", "tests.fixtures.gathers_worker", folder])
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = []
    for rank in (0, 1):
        every = map(json.loads, (folder / f"{rank}.jsonl").read_text().splitlines())
        ranks.append({line["case"]: line for line in every})
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", gathers_worker.CASES)
def test_processes_gather_alike(lines, case):
    one, two = (rank[case] for rank in lines)
    assert not one["error"] and not two["error"], one["error"] or two["error"]
    assert one["calls"] == two["calls"]
    assert any(call.startswith("unshard") for call in one["calls"])
    assert any(call.startswith("post_backward") for call in one["calls"]), "nothing was trained"
