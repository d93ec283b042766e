"""Faults injected into a real reward server, in a process of its own: no wrong number enters a group, nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from mmrl.advantages import dance
from mmrl.registry import UserError
from mmrl.scoring import Scorer
from rewards import remote
from tests.reward_servers import free_port, numbers, serving
from tests.test_advantages import rollout
from tests.tiny_rewards import pictures

ROOT = Path(__file__).resolve().parents[1]
B, COPIES = 24, 4
MEDIA, ASKED = pictures(B, 8, 8), [{"text": f"p{i // COPIES}", "n": (7 * i) % 11} for i in range(B)]
TRUE = torch.tensor([float(prompt["n"]) for prompt in ASKED])
GROUPS = torch.arange(B) // COPIES
FAULTS = ["slow", "shape", "nested", "nan", "huge", "text", "error", "oversized", "malformed", "cut"]


def start(port):
    program = [sys.executable, "-m", "tests.faulty_server", str(port)]
    process = subprocess.Popen(program, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return process
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the faulty server did not start")


@pytest.fixture(scope="module")
def running():
    """The process, of which a test may make an end."""
    found = {}
    yield found
    for process in found.values():
        process.kill()
        process.wait(10)


@pytest.fixture
def faulty(running):
    if not running or next(iter(running.values())).poll() is not None:
        running.clear()
        port = free_port()
        running[port] = start(port)
    return f"http://127.0.0.1:{next(iter(running))}"


def told(url, mode, every=2):
    return httpx.get(f"{url}/mode/{mode}/{every}").json()["spoiled"]


def asking(url, **options):
    return remote(url, **{"timeout": 0.75, "retries": 0, "batch_size": 2, "concurrency": 2, "backoff": 0.0} | options)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_wrong_number_enters_a_group(faulty, fault):
    """Every second answer is spoiled: those samples are NaN, all others right, and the advantages are the others'."""
    told(faulty, fault)
    server = asking(faulty)
    start = time.monotonic()
    found = Scorer({"far": server, "near": lambda media, prompts: torch.ones(len(prompts))}, max_failures=1.0)(
        MEDIA, ASKED, GROUPS
    )
    took = time.monotonic() - start
    spoiled = told(faulty, "none")
    missing = found["far"].isnan()
    assert torch.equal(found["far"][~missing], TRUE[~missing]) and found["near"].isfinite().all()
    assert 0 < missing.sum() < B and took < 20
    rows = rollout(GROUPS.tolist())
    advantage, kept = dance(found["far"], rows)[:, 0], dance(TRUE[~missing], rollout(GROUPS[~missing].tolist()))[:, 0]
    assert torch.equal(advantage.isnan(), missing)
    torch.testing.assert_close(advantage[~missing], kept)
    assert server.servers[0].failures == spoiled and server.servers[0].cause, "every event is counted"


@pytest.mark.parametrize("fault", FAULTS[1:])  # a lone server that is silent is not asked again in the same call
def test_a_repetition_finds_the_number_the_fault_had_hidden(faulty, fault):
    told(faulty, fault, every=5)
    server = asking(faulty, retries=4, concurrency=1)
    values = server(MEDIA, ASKED)
    spoiled = told(faulty, "none")
    assert torch.equal(values, TRUE) and server.servers[0].failures == spoiled > 0


def test_a_run_stops_or_goes_on_as_configured(faulty):
    told(faulty, "error", every=1)
    with pytest.raises(UserError, match=f"'far' could not score .* {B} samples, more than max_failures"):
        Scorer({"far": asking(faulty)}, max_failures=0.5)(MEDIA, ASKED)
    with pytest.raises(UserError, match=f"no value for {B} of {B} samples: {faulty}: 500, out of memory"):
        Scorer({"far": asking(faulty, on_failure="stop")}, max_failures=1.0)(MEDIA, ASKED)
    scorer = Scorer({"far": asking(faulty)}, max_failures=1.0)
    assert scorer(MEDIA, ASKED)["far"].isnan().all() and scorer.failures["far"].count == B
    told(faulty, "none")
    assert torch.equal(scorer(MEDIA, ASKED)["far"], TRUE), "a server that has recovered is believed again"


def test_a_process_that_dies_in_the_middle_of_a_batch_is_named_and_its_share_goes_elsewhere(faulty, running, caplog):
    told(faulty, "die", every=3)
    with serving({"numbers": numbers}) as other:
        server = asking([faulty, other], retries=3, concurrency=1)
        stream = (scorer := Scorer({"far": server})).stream(B)  # while other parts are still to come
        for rows in (slice(0, 12), slice(12, 24)):
            stream.put(MEDIA[rows], ASKED[rows], GROUPS[rows])
        assert torch.equal(stream.result()["far"], TRUE) and scorer.failures == {}
    assert next(iter(running.values())).wait(10) == 3 and server.servers[0].dead and faulty in caplog.text
    begin = time.monotonic()
    assert asking(faulty)(MEDIA, ASKED).isnan().all() and time.monotonic() - begin < 10
