"""Frozen weights in few bits, as ``--dry-run`` counts them, against what a real quantised network
stores and allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.estimate import measure, memory_of
from mmrl.apps.dry_run.tracked import tracked
from mmrl.config.yamltext import write
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.policies.quantization import Blocks, blocks_of, bytes_of, parameters, quantize
from tests.fixtures import tiny_diffusers, tiny_vlms

load_built_in()
KINDS = ("nf4", "fp4", "8bit")
IMAGES = "{jpeg_compressibility: 1.0}"
FLUX = {"size": [16, 32], "steps": 2, "text_length": 16}
TEXTS = "{length: {low: 1, high: 9}}"


def frozen_bytes(net: nn.Module) -> int:
    return sum(p.nbytes for name, p in net.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(64, 48), (37, 5)])
def test_bytes_of_a_layer_are_those_that_bitsandbytes_stores(kind, sizes):
    pytest.importorskip("bitsandbytes")
    net = nn.Sequential(nn.Sequential(nn.Linear(*sizes, bias=False)))
    before = parameters(net)
    quantize(net, kind)
    assert frozen_bytes(net) == bytes_of(sizes[0] * sizes[1], kind)
    assert parameters(net) == before and blocks_of(net) == Blocks(before, before)


def config_of(tmp_path: Path, policy: dict[str, object], reward: str = IMAGES) -> Path:
    (tmp_path / "p.txt").write_text("a red seven\na blue two\n")
    data = {"prompts": {"path": str(tmp_path / "p.txt")}}
    train = {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 4, "iterations": 1}
    text = write({"policy": policy, "data": data, "train": train})
    text += f"reward: {reward}\nadvantage: grpo\n"
    text += "objective: policy_gradient\noptimizer: adamw_8bit\n"
    (tmp_path / "c.yaml").write_text(text)
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("name", ["flux", "vlm"])
def test_a_rehearsal_counts_the_bytes_of_a_real_network(name, tmp_path):
    pytest.importorskip("bitsandbytes")
    place, options, reward = {
        "flux": (tiny_diffusers.folder("flux"), FLUX, IMAGES),
        "vlm": (tiny_vlms.folder("qwen2_5_vl"), {"max_new_tokens": 4}, TEXTS),
    }[name]
    chosen = options | {"path": str(place), "lora": 2, "quantization": "nf4"}
    run = measure(config_of(tmp_path, {name: chosen}, reward), [], 1)
    policy = POLICIES[name](**chosen)
    stored = sum(p.nbytes for p in policy.net.parameters())
    assert run.measured.bytes_parameters == pytest.approx(stored, rel=0.01)
    assert run.measured.parameters == parameters(policy.net)
    trained = sum(p.numel() for p in policy.net.parameters() if p.requires_grad)
    assert memory_of(run)["optimizer"] == pytest.approx(2 * (1 + 4 / 256) * trained, rel=0.02)
    with pytest.raises(UserError, match="train adapters, by the option lora"):
        dry_run(config_of(tmp_path, {name: chosen | {"lora": None}}, reward))


@pytest.mark.parametrize("half", [False, True])
def test_one_restored_layer_at_a_time(half):
    """Six layers take no more than one does: nothing of full size is kept for the way back, and
    autocast makes no copy in float32 on the way."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    width = 256
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(6)))
    net.to(torch.bfloat16 if half else torch.float32)
    quantize(net, "nf4")
    rows = torch.randn(1, width, requires_grad=True)

    def update():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            net(rows).sum().backward()

    memory = tracked(update, [net]).memory
    stored = sum(p.nbytes for p in net.parameters())
    beside = memory["total"] - stored
    restored = width * width * (2 if half else 4)
    assert restored <= beside < 1.5 * restored
