"""Translates SLURM's variables for each task of ``srun -n N mmrl train`` to torchrun's, which
everything else reads."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from mmrl.core.errors import UserError

PORTS = (15000, 15000)  # first port, and number: below the systems' ephemeral ports


def join() -> None:
    """Join the tasks of srun, if this is one of several and no launcher has set a rank."""
    variables = place(os.environ)
    os.environ.update(variables)
    if variables.get("RANK") == "0":
        where = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        print(
            f"srun: {variables['WORLD_SIZE']} tasks, one run; they meet at {where}", file=sys.stderr
        )


def place(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of srun; {} if it is the only one, if this is not a
    task of srun (a batch script has variables of the whole job, but no step), or if RANK is already
    set."""
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    if size == 1 or "SLURM_STEP_ID" not in env or "RANK" in env or "WORLD_SIZE" in env:
        return {}
    nodes = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or 1)
    job, step = (int(env.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    first, many = PORTS
    # with srun's --gpus-per-task each task sees only its own card, as number 0
    sees_one = re.fullmatch(r"[^,]+", env.get("CUDA_VISIBLE_DEVICES", "")) is not None
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0" if sees_one else env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_neighbours(env, size, nodes)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_node(env, nodes),
        "MASTER_PORT": env.get("MASTER_PORT") or str(first + (7 * job + step) % many),
    }


def _neighbours(env: Mapping[str, str], size: int, nodes: int) -> int:
    """Count the tasks on this node, as "4(x2),3" has them: four on each of two nodes, three on the
    next."""
    listed = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(tasks)] * int(times or 1)
    node = int(env.get("SLURM_NODEID") or 0)
    return counts[node] if node < len(counts) else -(-size // nodes)


def _first_node(env: Mapping[str, str], nodes: int) -> str:
    """Return the address of the first node, which has task 0; UserError if no list names it."""
    if nodes == 1:
        return "127.0.0.1"
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    if not listed:
        raise UserError(
            "srun: neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST names the nodes; set "
            "MASTER_ADDR to the name of the first"
        )
    return first_host(listed)


def first_host(nodes: str) -> str:
    """Return the first name of a list in SLURM's short form: gpu03 of "gpu[03-07,9],cpu1"."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert name is not None  # it also matches the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0])
