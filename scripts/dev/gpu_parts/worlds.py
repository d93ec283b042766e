"""The parts of gpu_check.py under torch.distributed: DDP, FSDP2, and context parallelism (Ulysses).
One device is a world of one, with the same wrappers, hooks and NCCL calls as many."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import bench_iteration as bench
import random_models as models
import torch
from torch import Tensor

from gpu_parts.setting import Report, Setting, free, peak_of, trainer_of
from mmrl.core import distributed

SHARDS = {  # variables set by `accelerate launch --use_fsdp --fsdp_version 2`
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}

PRECISIONS = ("fp32", "bf16")


def world_of_one(setting: Setting) -> Iterator[Report]:
    """Run an iteration alone, under DDP and under FSDP2, in each precision: largest difference of
    the trained weights from those of the run alone, relative to how far these moved, the first
    ratio, seconds, memory. In bf16 FSDP2 gathers adapters in bf16, which the run alone keeps in
    float32."""
    make = partial(models.sd3, setting.scale)
    report: Report = {}
    for precision in PRECISIONS:
        alone, expected = _iterated(setting, make, precision)
        report[f"alone, {precision}"] = alone
        yield report
        for name, environment in (("DDP", {}), ("FSDP2", SHARDS)):
            with distributed_world(**environment), _sharded_anywhere(name == "FSDP2"):
                measured, change = _iterated(setting, make, precision)
            report[f"{name}, {precision}"] = measured | {"apart": _apart(change, expected)}
            yield report


def context_parallel(setting: Setting) -> Report:
    """Run an iteration of Wan alone, and with its sequence split over a group of one by diffusers'
    context parallelism: the same numbers as ``world_of_one``."""
    make = partial(models.wan, setting.scale)
    alone, expected = _iterated(setting, make, "bf16")
    with distributed_world(), _groups_of_one() as exchanges:

        def split() -> Any:
            policy = make()
            policy.net.to(models.device())
            torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            policy.enable_context_parallel(1, 1)
            return policy

        measured, change = _iterated(setting, split, "bf16")
    apart = _apart(change, expected)
    return {"alone": alone, "split": measured | {"apart": apart, "exchanges": len(exchanges)}}


Weights = dict[str, Tensor]


def _iterated(setting: Setting, make: Callable[[], Any], precision: str) -> tuple[Report, Weights]:
    """Run an iteration of plain gradient descent; return its measurements, and the change of the
    trained weights."""
    policy = make()
    work = setting.work(copies=max(2, setting.scale.copies // 2), precision=precision)
    with mock.patch.object(bench, "adamw", _descent):  # Adam turns any rounding into a full step
        trainer = trainer_of(policy, work)
    before = policy.weights.full()
    metrics = trainer.iterate()
    after = policy.weights.full()
    report = {
        "wrapped": type(policy.trained).__name__,
        "processes": distributed.process()[1],
        "ratio/max_deviation": metrics["ratio/max_deviation"],
        "seconds": min(setting.times(trainer.iterate)),
        "peak_bytes": peak_of(trainer.iterate),
    }
    change = {name: (after[name] - before[name]).cpu() for name in after}
    del policy, trainer
    free()
    return report, change


def _descent(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _apart(change: Weights, expected: Weights) -> float:
    """Return the largest difference of two changes, as a share of the largest one expected."""
    most = max(float(each.abs().max()) for each in expected.values())
    return max(float((change[n] - expected[n]).abs().max()) for n in expected) / most


@contextmanager
def distributed_world(**environment: str) -> Iterator[None]:
    """Set up a world of one, as by a launcher."""
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    launched = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not torch.cuda.is_available():
        launched["ACCELERATE_USE_CPU"] = "true"
    _forget()
    try:
        with mock.patch.dict(os.environ, launched | environment):
            yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        _forget()


def _forget() -> None:
    """Reset accelerate's state."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


@contextmanager
def _sharded_anywhere(sharded: bool) -> Iterator[None]:
    """Also shard on a CPU, which accelerate never does."""
    if not sharded or torch.cuda.is_available():
        yield
        return
    from tests.fixtures.process_worker import Sharded

    with mock.patch("mmrl.train.trainer.Device", Sharded):
        yield


@contextmanager
def _groups_of_one() -> Iterator[list[str]]:
    """Let diffusers split a sequence over one process, which it refuses; yield a list that grows
    with every attention that exchanged its parts."""
    from diffusers import ContextParallelConfig
    from diffusers.models import attention_dispatch

    def exchanged(*tensors: Tensor | None, **options: Any) -> Any:
        names = inspect.signature(original).parameters
        values = dict(zip(names, tensors, strict=False)) | options
        arguments = [values.get(name, known.default) for name, known in names.items()]
        exchanges.append("attention")
        return attention_dispatch.TemplatedUlyssesAttention.apply(*arguments)

    exchanges: list[str] = []
    original = attention_dispatch._templated_context_parallel_attention
    with (
        mock.patch.object(ContextParallelConfig, "__post_init__", lambda config: None),
        mock.patch.object(attention_dispatch, "_templated_context_parallel_attention", exchanged),
    ):
        yield exchanges
