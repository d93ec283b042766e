"""Tasks of srun find each other by SLURM's variables."""

import pytest

from mmrl.core.errors import UserError
from mmrl.core.slurm import first_host, place
from tests.fixtures import warm

# what srun sets for the sixth of seven tasks, the second on the second of two nodes
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
}


def test_a_task_finds_its_place():
    found = place(TASK)
    port = int(found.pop("MASTER_PORT"))
    ranks = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert found == ranks | {"MASTER_ADDR": "gpu03"}
    assert 1024 < port < 32768  # not one of those that Linux gives out
    assert int(place(TASK | {"SLURM_JOB_ID": "4712"})["MASTER_PORT"]) != port
    assert place(TASK | {"MASTER_ADDR": "here", "MASTER_PORT": "99"})["MASTER_PORT"] == "99"
    # of three of its tasks' cards a task sees its own alone
    assert place(TASK | {"CUDA_VISIBLE_DEVICES": "2"})["LOCAL_RANK"] == "0"
    assert place(TASK | {"CUDA_VISIBLE_DEVICES": "0,1,2"})["LOCAL_RANK"] == "1"
    assert place(TASK | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1"})["LOCAL_WORLD_SIZE"] == "3"
    for nodes, first in [
        ("gpu[03-07,9],cpu1", "gpu03"),
        ("a1,a2", "a1"),
        ("rack[1-2]n[3,4]-ib", "rack1n3-ib"),
        ("one", "one"),
    ]:
        assert first_host(nodes) == first


def test_what_is_no_task_among_several_is_left_alone():
    batch = {k: v for k, v in TASK.items() if "STEP" not in k}  # a batch script, without srun
    alone = TASK | {"SLURM_STEP_NUM_TASKS": "1"}  # of a job of seven, such as srun -n 1
    for env in ({}, batch, alone, TASK | {"RANK": "0"}, TASK | {"WORLD_SIZE": "2"}):
        assert place(env) == {}
    nowhere = {k: v for k, v in TASK.items() if "NODELIST" not in k}
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        place(nowhere)


PROGRAM = """
import torch
from mmrl.core import distributed, peers
from mmrl.core import slurm

slurm.join()
peers.meet()
torch.distributed.init_process_group("gloo")
print(distributed.process(), int(distributed.all_sum(torch.tensor(2 + distributed.process()[0]))))
distributed.leave()
"""


def test_two_tasks_work_together():
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    tasks = [
        warm.start(["-c", PROGRAM], **env, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))
        for n in (0, 1)
    ]
    assert [task.wait() for task in tasks] == [0, 0], tasks[0].stderr
    assert [task.stdout for task in tasks] == ["(0, 2) 5\n", "(1, 2) 5\n"]
    assert "srun: 2 tasks, one run; they meet at 127.0.0.1:" in tasks[0].stderr
    assert "srun" not in tasks[1].stderr
