"""What shards take by arithmetic, against torch's own trackers in a world that is pretended."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmrl.apps.dry_run import estimate, rehearsal
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.estimate import Run, measured
from mmrl.apps.dry_run.rehearsal import Stage, rehearse, units_of
from mmrl.core.registry import load_built_in

load_built_in()
RANKS = 8
ROWS, TOKENS, TEXT = 2, 1024, 128
FILE = Path(__file__).parents[2] / "configs" / "digits" / "flow_grpo.yaml"
SIZES = ["train.prompts_per_iteration=8", "train.group_size=8", "train.train_batch_size=64"]
FLUX = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_single_layers": 2,
    "axes_dims_rope": (8, 12, 12),
    "in_channels": 16,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}


class Traffic(TorchDispatchMode):
    """Notes the bytes of collective calls: the largest tensor of each, which all of them make or
    share out."""

    def __init__(self):
        super().__init__()
        self.sizes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.sizes[func.overloadpacket.__name__] += max(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def world():
    if dist.is_initialized():
        pytest.skip("this process has a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run():
    report = dry_run(FILE, [*SIZES, "train.micro_batch_size=2"], RANKS)
    return measured(report, decode=False)


def flux():
    """A Flux of several blocks and the inputs of one pass, on fakes."""
    net = diffusers.FluxTransformer2DModel(**FLUX)
    inputs = {
        "hidden_states": torch.empty(ROWS, TOKENS, 16),
        "encoder_hidden_states": torch.empty(ROWS, TEXT, 64),
        "pooled_projections": torch.empty(ROWS, 32),
        "timestep": torch.empty(ROWS),
        "img_ids": torch.zeros(TOKENS, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    return net, lambda net: net(**inputs).sample


def by_arithmetic(run: Run, net, score) -> tuple[dict[str, float], float, float]:
    """Memory by part, bytes gathered and bytes reduced of one pass with gradients, as ``--devices``
    says them of shards."""
    measured = rehearse(Stage(net, ROWS, lambda: score(net)))
    report = replace(run.report, counted=None, stored=0)
    run = replace(run, measured=measured, report=report)
    memory = estimate.memory_of(run, RANKS)
    once = {"sampling": 0.0, "trained": 1.0, "frozen": 0.0}
    return memory, *estimate._travel(replace(run, report=steps_of_one()), RANKS, True, once)


def steps_of_one():
    plan, train = SimpleNamespace(steps=1), SimpleNamespace(epochs=1)
    return SimpleNamespace(plan=plan, train=train, critic_steps=0)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_shards_by_arithmetic_are_those_of_torchs_tracker_on_a_pretended_world(
    run, world, whole, monkeypatch
):
    if whole:  # as a network without lists of blocks
        monkeypatch.setattr(rehearsal, "shard_classes", lambda net: [])
    with FakeTensorMode(allow_non_fake_inputs=True):
        memory, gathered, reduced = by_arithmetic(run, *flux())
        net, score = flux()
        for unit in units_of(net):
            fully_shard(unit, mesh=world)
        fully_shard(net, mesh=world)
        tracker, traffic = FSDPMemTracker(net), Traffic()
        with tracker, traffic:
            score(net).sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    by_part = {getattr(part, "value", part): size for part, size in peak.items()}
    assert by_part["Sharded Param"] == pytest.approx(memory["parameters"])
    # torch's hooks hold gradients longer, so that its fullest moment may be one operation later
    passing = by_part["Activation"] + by_part["Temp"]
    assert passing == pytest.approx(memory["activations"] + memory["temporary"], rel=0.02)
    without = sum(memory.values()) - memory["optimizer"] - memory["autoencoder"]
    assert by_part["Total"] == pytest.approx(without, rel=0.02 if whole else 0.1)
    if whole:  # and the buffer in which it came
        arrived = by_part["Unsharded Param"] + by_part["All Gather"]
        assert memory["gathered layers"] == pytest.approx(arrived)
    # what is around the blocks stays gathered from the forward to the backward pass
    share = (RANKS - 1) / RANKS
    assert share * traffic.sizes["_allgather_base_"] == pytest.approx(gathered, rel=1e-3)
    assert share * traffic.sizes["_reduce_scatter_base_"] == pytest.approx(reduced, rel=0.01)
