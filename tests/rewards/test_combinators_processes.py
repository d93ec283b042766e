"""Rewards that see a whole iteration, on two true processes: every row gets what one process
gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures import warm

PROGRAM = """
import json, sys
import torch
from mmrl.scoring import Scorer
from rewards import hypervolume, noisy_appeals

rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world
    )

def field(name):
    return lambda media, prompts: torch.tensor([float(prompt[name]) for prompt in prompts])

scorer = Scorer({
    "appeal": noisy_appeals(field("accepted"), field("right"), share=0.5),
    "volume": hypervolume([field("right"), field("size")]),
})
rows = [
    {"text": f"q{i}", "right": i % 2, "accepted": i % 2 and i % 5 > 0, "size": i / 24}
    for i in range(24)
]
part = rows if world == 1 else rows[:7] if rank == 0 else rows[7:]
lists = []
for iteration in range(2):
    values = scorer([f"a{p['text']}" for p in part], part)
    scorer.remember()
    lists.append({name: x.tolist() for name, x in values.items()})
print(json.dumps({"values": lists, "state": scorer.state_dict()}))
"""


def start(rank: int, world: int, file: Path) -> warm.Process:
    return warm.start(["-c", PROGRAM, rank, world, file])


def said_by(process: warm.Process) -> dict:
    assert process.wait() == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_two_processes_pay_what_one_pays(tmp_path):
    processes = [start(0, 1, tmp_path / "none")]
    processes += [start(rank, 2, tmp_path / "meeting") for rank in range(2)]
    whole, first, second = (said_by(process) for process in processes)
    assert first["state"] == second["state"]
    for before, a, b in zip(whole["values"], first["values"], second["values"], strict=True):
        for name, values in before.items():
            assert a[name] + b[name] == pytest.approx(values, abs=1e-6), name
    assert first["state"]["appeal"] == whole["state"]["appeal"]
    (point,) = first["state"]["volume"]["front"]
    assert point == pytest.approx(whole["state"]["volume"]["front"][0], abs=1e-9)
    assert whole["values"][0]["volume"] != whole["values"][1]["volume"]
