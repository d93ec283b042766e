"""Processes of a run that die, never come, or find their port in use: one sentence, no waiting."""

import signal
import socket

from tests.fixtures import warm

# one of two processes of a run; the second leaves in the middle as WAY says
PROGRAM = """
import os, signal, sys, torch
import torch.distributed as dist
from mmrl.core import distributed, peers
from mmrl.core.errors import UserError

peers.NEWS = float(os.environ.get("NEWS", peers.NEWS))
try:
    with peers.watched(float(os.environ.get("LIMIT", 100))):
        dist.init_process_group("gloo")
        for step in range(3):
            distributed.all_sum(torch.ones(1))
            if step == 1 and os.environ["RANK"] == "1" and os.environ["WAY"] != "stays":
                if os.environ["WAY"] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise UserError("my picture is broken")
    print("done")
    distributed.leave()
except UserError as error:
    print(f"error: {error}")
    sys.exit(2)
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def begun(ranks=(0, 1), port=None, **env):
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port or free_port()}"}
    return [warm.start(["-c", PROGRAM], **env, RANK=str(rank)) for rank in ranks]


def ended(processes):
    return [(process.wait(), process.stdout, process.stderr) for process in processes]


def test_who_dies_never_comes_or_finds_its_port_in_use_is_named():
    """All at once: most of it is waiting."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        killing, failing = begun(WAY="killed"), begun(WAY="fails")
        alone, lost = (begun(ranks=[rank], WAY="stays", LIMIT="1") for rank in (0, 1))
        colliding = ended(begun(port=port, WAY="stays", LIMIT="1", NEWS="1"))
    (status, said, _), (killed, _, _) = ended(killing)
    assert killed == -signal.SIGKILL and status == 2
    assert said.startswith("error: process 1 of 2 has died") and said.count("\n") == 1
    (status, said, _), (failed, own, _) = ended(failing)
    assert failed == status == 2 and own == "error: my picture is broken\n"
    assert said.startswith("error: process 1 of 2 has ended with an error, which it has printed")
    ((status, said, _),) = ended(alone)
    assert status == 2 and said.startswith("error: of 2 processes, 1 did not come within 1 s")
    ((status, said, _),) = ended(lost)
    assert status == 2 and "process 1 of 2 found no process 0 at 127.0.0.1" in said
    (first, said, _), (second, other, _) = colliding
    assert first == second == 2 and said.startswith(f"error: port {port}")
    assert "is in use" in said and f"MASTER_PORT={port + 1}" in said
    assert f"found no process 0 at 127.0.0.1:{port}" in other
