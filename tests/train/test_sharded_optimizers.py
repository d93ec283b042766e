"""Optimizers on shards (FSDP2) do what they do in one process, and their state is sharded too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmrl.core.errors import UserError
from mmrl.core.registry import OPTIMIZERS, load_built_in
from mmrl.experiment.build import read
from mmrl.train.device import check_launcher
from mmrl.train.optimizers import WHOLE_ONLY, unshardable
from mmrl.train.whole import WholeSteps
from tests.fixtures import optimizer_worker as worker
from tests.fixtures import warm

load_built_in()
# adamw_8bit computes in float32, where gradients of two processes are rounded otherwise, and a
# number at the border of two 8-bit values falls on the other side: a hundredth of a step of 1e-3
APART = dict.fromkeys(worker.SINGLE, 1e-5)


@pytest.mark.slow
def test_optimizers_on_two_shards_equal_one_process(tmp_path):
    """Weights after two iterations, and after one more from a checkpoint that the other number of
    processes has written."""
    pytest.importorskip("bitsandbytes")
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, start, words in (
        (one, warm.run, []),
        (two, warm.ranks, ["--start", one, "--sharded"]),
    ):
        folder.mkdir()
        done = start(["-m", "tests.fixtures.optimizer_worker", folder, *words])
        assert done.returncode == 0, done.stderr[-6000:]
    for name in worker.STEPS:
        single, double = (load_file(folder / f"{name}.safetensors") for folder in (one, two))
        double |= {f"back/{k}": v for k, v in worker.next_step(name, two).items()}
        single |= {f"back/{k}": v for k, v in single.items() if k.startswith("next/")}
        assert single.keys() == double.keys()
        for key, value in single.items():
            difference = float((value - double[key]).abs().max())
            assert difference <= APART.get(name, 1e-12), (name, key, difference)


def test_every_optimizer_is_measured_on_shards_or_refused():
    """A new one is added to the worker of the test above, or to those that are refused."""
    plain = {"adamw", "sgd"}  # compared by test_processes.py
    assert set(OPTIMIZERS) == plain | set(worker.STEPS) | set(WHOLE_ONLY)
    assert all(unshardable(name) is None for name in worker.STEPS)
    assert "prodigyopt sums" in str(unshardable("prodigy"))


@pytest.mark.parametrize("name", ["adafactor", "muon", "adamw_8bit"])
def test_without_shards_the_step_is_the_librarys(name):
    """The class that steps whole weights leaves its base optimizer unchanged."""
    pytest.importorskip("bitsandbytes")
    built = OPTIMIZERS[name]([nn.Parameter(torch.randn(8, 8))], lr=1e-2)
    inner = getattr(built, "steppers", {True: built})[True]
    assert isinstance(inner, WholeSteps)
    library = type(inner).__mro__[2]
    assert library.__module__.startswith(("torch.optim", "bitsandbytes"))
    torch.manual_seed(0)
    weight, gradient = torch.randn(64, 8), torch.randn(64, 8)
    ends = []
    for kind in (type(inner), library):
        parameter = nn.Parameter(weight.clone())
        stepper = kind([parameter], lr=1e-2)
        for _ in range(3):
            parameter.grad = gradient.clone()
            stepper.step()
        ends.append(parameter.detach())
    assert torch.equal(*ends) and not torch.equal(ends[0], weight)


@pytest.mark.parametrize("written", ["True", "1"])
def test_offloaded_parameters_are_refused_before_anything_is_loaded(written, monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", written)
    check_launcher()  # copies, which the option says nothing to
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError, match="fsdp_offload_params: true is not supported"):
        check_launcher()
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    check_launcher()


def test_the_launcher_is_looked_at_before_the_policy_is_built(monkeypatch):
    from mmrl.experiment.build import Session

    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    file = Path(__file__).parents[2] / "configs" / "flux" / "flow_grpo.yaml"  # of the hub
    with pytest.raises(UserError, match="fsdp_offload_params"):
        Session.of(read(file, []))
