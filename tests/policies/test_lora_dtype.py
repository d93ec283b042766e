"""Adapters under autocast take their inputs as they come: the same numbers without two casts."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from mmrl.policies.lora import Lora, add_lora, casting_inputs, keep_input_dtype


def outputs_and_gradients(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.float().pow(2).sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.requires_grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_and_gradients_are_those_of_inputs_cast_to_float32(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(dtype)
    add_lora(net, Lora(4, targets=["0", "2"]))
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)  # a new adapter's is zero, and its input's gradient with it
    x = torch.randn(5, 16, dtype=dtype)
    kept = deepcopy(net)
    keep_input_dtype(kept)
    assert not any(layer.cast_input_dtype_enabled for layer in (kept[0], kept[2]))
    for mine, plain in zip(outputs_and_gradients(kept, x), outputs_and_gradients(net, x)):
        assert torch.equal(mine, plain)


def test_passes_outside_autocast_cast_within_the_block_only():
    net = nn.Sequential(nn.Linear(16, 16)).to(torch.bfloat16)
    add_lora(net, Lora(4, targets=["0"]))
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    wanted = net(x)
    with casting_inputs(net):  # of a run in full precision, which casts anyway
        pass
    assert torch.equal(net(x), wanted)
    keep_input_dtype(net)
    with casting_inputs(net):
        assert torch.equal(net(x), wanted)
    assert not net[0].cast_input_dtype_enabled
