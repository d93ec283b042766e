"""Passing through a few of a network's equal blocks gives what passing through all of them does, to
the byte and operation by operation, for the networks here."""

from __future__ import annotations

from functools import partial
from itertools import islice
from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from mmrl.apps.dry_run import blocks, rehearsal
from mmrl.apps.dry_run.fakes import Fakes
from mmrl.apps.dry_run.page import device_lines
from mmrl.apps.dry_run.rehearsal import Stage, rehearse
from mmrl.config.options import TrainOptions
from mmrl.core.cards import devices
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.policies.lora import Lora, add_lora

load_built_in()
FLUX = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 6,
    "num_single_layers": 7,
    "axes_dims_rope": (8, 12, 12),
    "in_channels": 16,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}
HALF = TrainOptions(2, 2, 4, 1, precision="bf16", gradient_checkpointing=True)
KEPT = TrainOptions(2, 2, 4, 1, precision="bf16")  # all activations


def flux(lora: int | None, precision: bool, checkpointing: bool, **sizes: int) -> Stage:
    """A Flux of two rows of blocks, whose gradients share storages at their borders."""
    fakes = Fakes()
    with torch.device("meta"):
        net = diffusers.FluxTransformer2DModel(**FLUX | sizes)
        if lora:
            add_lora(net, Lora(lora))
    fakes.fill(net)
    if checkpointing:
        net.enable_gradient_checkpointing()
        net.train()
    inputs = {
        "hidden_states": fakes.empty(2, 64, 16),
        "encoder_hidden_states": fakes.empty(2, 24, 64),
        "pooled_projections": fakes.empty(2, 32),
        "timestep": fakes.empty(2),
        "img_ids": torch.zeros(64, 3),
        "txt_ids": torch.zeros(24, 3),
    }

    def score():
        half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision)
        with fakes.running(), half:
            return net(**inputs).sample

    return Stage(net, 2, score, checkpointing=checkpointing)


def vlm(folder, train: TrainOptions, options: dict, layers: int = 8, depth: int = 16) -> Stage:
    """A small Qwen2.5-VL: prompts read once for all answers, and a tower of two kinds of blocks."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "hidden_size": 64,
        "num_heads": 4,
        "depth": depth,
        "out_hidden_size": 64,
        "intermediate_size": 96,
        "fullatt_block_indexes": [5, depth - 1],
    }
    Qwen2_5_VLConfig(text_config=text, vision_config=vision).save_pretrained(folder)
    chosen = {"path": str(folder), "max_new_tokens": 12} | options
    stage = rehearsal.tokens(str(folder), POLICIES["vlm"], chosen, train, 4, 2)
    assert stage is not None
    return stage


def both(make, monkeypatch) -> int:
    """Hold that the fast way equals the slow one; return how many blocks were stood in for."""
    made = []
    stand_in = blocks.Look.stand_in

    def counted(*arguments):
        made.append(1)
        return stand_in(*arguments)

    monkeypatch.setattr(blocks.Look, "stand_in", counted)
    fast = rehearse(make(), spare=True)
    count = len(made)
    slow = rehearse(make(), spare=False)
    assert len(made) == count
    assert fast == slow
    return count


@pytest.mark.parametrize(
    ("lora", "half", "checkpointing"),
    [(2, True, False), (2, True, True)],
)
def test_a_flow_network_is_measured_as_if_all_of_it_was_passed_through(
    lora, half, checkpointing, monkeypatch
):
    assert both(partial(flux, lora, half, checkpointing), monkeypatch) == 1 + 2


@pytest.mark.parametrize(
    ("train", "options", "sizes", "least"),
    # trained whole, the way back holds values of the cache, and autocast alone casts of biases
    [(HALF, {"lora": 2}, (6, 10), 6), (KEPT, {}, (6, 1), 2)],
    ids=["adapters", "whole"],
)
def test_shared_prompts_and_towers_are_measured_alike(
    train, options, sizes, least, monkeypatch, tmp_path
):
    assert both(lambda: vlm(tmp_path, train, options, *sizes), monkeypatch) >= least


class Row(nn.Module):
    """Linear layers in a row; ``odd`` says at which place another computation hides."""

    def __init__(self, count: int, odd: int = -1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if place == self.odd:
                x = x.sin() + x.cos()
        return x


def row(count: int, odd: int) -> Stage:
    fakes = Fakes()
    net = Row(count, odd)
    fakes.fill(net)
    x = fakes.empty(4, 8)
    return Stage(net, 4, lambda: net(x))


@pytest.mark.parametrize(("count", "stood_in"), [(5, 0), (9, 4)])
def test_few_blocks_are_all_passed_through(count, stood_in, monkeypatch):
    assert both(partial(row, count, -1), monkeypatch) == stood_in


def test_a_network_whose_blocks_cannot_be_spared_is_passed_through_and_says_why(monkeypatch):
    def refused(*_):
        raise AttributeError("no such output")

    monkeypatch.setattr(blocks.Look, "stand_in", refused)
    fast = rehearse(row(9, -1), spare=True)
    slow = rehearse(row(9, -1), spare=False)
    assert fast.update.fell_back == "AttributeError: no such output" and not slow.update.fell_back
    assert fast.update.memory == slow.update.memory
    run = SimpleNamespace(measured=fast)
    guess = SimpleNamespace(sharded=False, devices=devices("H100"))
    line = list(islice(device_lines(run, guess, 1, False), 2))[1]
    assert "all blocks were measured one by one" in line and line.endswith(
        "AttributeError: no such output"
    )


def test_the_tracker_sees_the_peak_that_torchs_own_sees():
    few = {"num_layers": 2, "num_single_layers": 2}
    stage = flux(None, False, False, **few)
    ours = rehearse(stage, spare=False).update.memory["total"]
    stage = flux(None, False, False, **few)
    tracker = MemTracker()
    tracker.track_external(stage.net)
    with tracker:
        stage.score().sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    # torch's hooks hold gradients a little longer
    assert ours == pytest.approx(peak["Total"], rel=0.02)
