"""Faults injected into a real reward server, in a separate process: no wrong number enters a group,
nothing hangs."""

from __future__ import annotations

import signal

import httpx
import pytest
import torch

from mmrl.advantages import dance_grpo
from mmrl.core.errors import UserError
from mmrl.scoring import Scorer
from rewards import remote
from tests.advantages.test_advantages import rollout
from tests.fixtures import waiting, warm
from tests.fixtures.reward_servers import free_port, numbers, serving
from tests.fixtures.tiny_rewards import pictures

B = 24
COPIES = 4
MEDIA = pictures(B, 8, 8)
ASKED = [{"text": f"p{i // COPIES}", "n": (7 * i) % 11} for i in range(B)]
TRUE = torch.tensor([float(prompt["n"]) for prompt in ASKED])
GROUPS = torch.arange(B) // COPIES
FAULTS = "shape nested nan huge text error oversized malformed cut".split()


def start(port):
    process = warm.start(["-m", "tests.fixtures.faulty_server", port])

    def answers():
        assert process.poll() is None, "the faulty server did not start"
        try:
            return waiting.get(f"http://127.0.0.1:{port}/health")
        except httpx.HTTPError:
            return None

    waiting.until(answers)
    return process


@pytest.fixture(scope="module")
def running():
    """The process, of which a test may make an end."""
    servers = {}
    yield servers
    for process in servers.values():
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture
def faulty(running):
    if not running or next(iter(running.values())).poll() is not None:
        running.clear()
        port = free_port()
        running[port] = start(port)
    return f"http://127.0.0.1:{next(iter(running))}"


def told(url, mode, every=2):
    return waiting.get(f"{url}/mode/{mode}/{every}").json()["spoiled"]


def asking(url, **options):
    defaults = {
        "timeout": waiting.HANG,
        "retries": 0,
        "retry_seconds": 0,
        "batch_size": 2,
        "concurrency": 2,
        "backoff": 0.0,
    }
    return remote(url, **defaults | options)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_wrong_number_enters_a_group(faulty, fault):
    """Every second answer is spoiled: those samples are NaN, all others right, and the advantages
    are the others'; every event is counted."""
    told(faulty, fault)
    server = asking(faulty)
    parts = {"far": server, "near": lambda media, prompts: torch.ones(len(prompts))}
    rewards = Scorer(parts, max_failures=1.0)(MEDIA, ASKED, GROUPS)
    spoiled = told(faulty, "none")
    missing = rewards["far"].isnan()
    assert torch.equal(rewards["far"][~missing], TRUE[~missing]) and 0 < missing.sum() < B
    assert rewards["near"].isfinite().all()
    advantage = dance_grpo(rewards["far"], rollout(GROUPS.tolist()))[:, 0]
    expected = dance_grpo(TRUE[~missing], rollout(GROUPS[~missing].tolist()))[:, 0]
    assert torch.equal(advantage.isnan(), missing)
    torch.testing.assert_close(advantage[~missing], expected)
    assert server.servers[0].failures == spoiled > 0 and server.servers[0].cause


@pytest.mark.parametrize("fault", FAULTS)
def test_a_repetition_finds_the_number_the_fault_had_hidden(faulty, fault):
    told(faulty, fault, every=5)
    server = asking(faulty, retries=4, concurrency=1)
    values = server(MEDIA, ASKED)
    spoiled = told(faulty, "none")
    assert torch.equal(values, TRUE) and server.servers[0].failures == spoiled > 0


def test_a_run_stops_or_goes_on_as_configured(faulty):
    """A server that has recovered is believed again."""
    told(faulty, "error", every=1)
    stops = f"no value for {B} of {B} samples: {faulty}: 500, out of memory"
    with pytest.raises(UserError, match=stops):
        Scorer({"far": asking(faulty, on_failure="stop")}, max_failures=1.0)(MEDIA, ASKED)
    scorer = Scorer({"far": asking(faulty)}, max_failures=1.0)
    assert scorer(MEDIA, ASKED)["far"].isnan().all() and scorer.failures["far"].count == B
    told(faulty, "none")
    assert torch.equal(scorer(MEDIA, ASKED)["far"], TRUE)


def test_a_process_that_dies_in_the_middle_of_a_batch_is_named_and_its_share_goes_elsewhere(
    faulty, running, caplog
):
    told(faulty, "die", every=3)
    (process,) = running.values()

    def patient(media, prompts):
        waiting.until(lambda: process.poll() is not None)
        return numbers(media, prompts)

    with serving({"numbers": patient}) as survivor:
        server = asking([faulty, survivor], retries=3, concurrency=1)
        # while other parts are still to come
        stream = (scorer := Scorer({"far": server})).stream(B)
        for rows in (slice(0, 12), slice(12, 24)):
            stream.put(MEDIA[rows], ASKED[rows], GROUPS[rows])
        assert torch.equal(stream.result()["far"], TRUE) and scorer.failures == {}
    assert process.wait() == 3 and server.servers[0].dead and faulty in caplog.text
    assert asking(faulty)(MEDIA, ASKED).isnan().all()
