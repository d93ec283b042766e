"""Optimizers on shards: tests/train/test_processes.py compares them with one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import OPTIMIZERS, load_built_in
from mmrl.experiment.build import Session, check_started, read
from mmrl.train.device import check_launcher
from mmrl.train.optimizers import WHOLE_ONLY, unshardable
from mmrl.train.whole import WholeSteps
from tests.fixtures.process_worker import OPTIMIZED

load_built_in()
ROOT = Path(__file__).parents[2] / "configs"


def test_every_optimizer_is_measured_on_shards_or_refused(monkeypatch):
    # of the other cases there; and pages are of CUDA
    plain = {"adamw", "sgd", "paged_adamw_8bit"}
    assert set(OPTIMIZERS) == plain | set(OPTIMIZED) | set(WHOLE_ONLY)
    assert all(unshardable(name) is None for name in OPTIMIZED)
    assert "prodigyopt sums" in str(unshardable("prodigy"))
    configuration = read(ROOT / "sd3" / "flow_grpo.yaml", ["optimizer=prodigy"])
    options = configuration.section("train", TrainOptions)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_started(configuration, options)  # copies
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError, match="optimizer prodigy: .* use another optimizer"):
        check_started(configuration, options)


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


def test_offloaded_parameters_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "1")
    check_launcher()  # copies, which the option says nothing to
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    file = ROOT / "flux" / "flow_grpo.yaml"  # of the hub
    with pytest.raises(UserError, match="fsdp_offload_params: true is not supported"):
        Session.of(read(file, []))
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    check_launcher()
