import pytest
import torch
from torch import nn

from mmrl.weights import Weights


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def shifted(module, by=1.0):
    with torch.no_grad():
        for p in module.parameters():
            p += by


def test_using_a_snapshot_gives_its_outputs_and_restores_to_the_bit():
    module = net()
    weights, x = Weights(module), torch.randn(5, 3)
    before = module(x)
    weights.keep("ref")
    shifted(module)
    after = module(x)
    with weights.using("ref"):
        assert torch.equal(module(x), before)
    assert torch.equal(module(x), after)


def test_using_nests_and_survives_an_exception():
    module = net()
    weights, x = Weights(module), torch.randn(5, 3)
    outputs = {}
    for name in ("ref", "old"):
        weights.keep(name)
        outputs[name] = module(x)
        shifted(module)
    live = module(x)
    with weights.using("ref"), weights.using("old"), weights.using("old"):
        assert torch.equal(module(x), outputs["old"])
        with weights.using("ref"):
            assert torch.equal(module(x), outputs["ref"])
        with weights.using("live"):
            assert torch.equal(module(x), live)
    with pytest.raises(ZeroDivisionError), weights.using("ref"):
        _ = 1 / 0
    assert torch.equal(module(x), live) and weights.current == "live"


def test_a_swap_between_forward_and_backward_leaves_the_gradient():
    module = net()
    weights, x = Weights(module), torch.randn(5, 3)
    weights.keep("ref")
    shifted(module)
    plain = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    loss = module(x).sum()
    with weights.using("ref"), torch.no_grad():
        module(x)
    for a, b in zip(plain, torch.autograd.grad(loss, list(module.parameters())), strict=True):
        assert torch.equal(a, b)


def test_track_moves_towards_the_live_weights():
    module = net()
    weights = Weights(module)
    weights.keep("ema")
    start = weights.full("ema")
    shifted(module)
    weights.track("ema", 0.75)
    for key, value in weights.full("ema").items():
        torch.testing.assert_close(value, start[key] + 0.25)


def test_full_and_load_are_inverse_and_mismatches_are_named():
    module = net()
    weights = Weights(module)
    saved = weights.full()
    shifted(module)
    weights.load(saved)
    weights.load(saved, "ref")
    for key, value in weights.full("ref").items():
        assert torch.equal(value, saved[key]) and torch.equal(weights.full()[key], value)
    with pytest.raises(ValueError, match="differ from the model's"):
        weights.load({k: v for k, v in saved.items() if k != "0.bias"})
    with pytest.raises(ValueError, match="0.bias: shape"):
        weights.load(saved | {"0.bias": torch.zeros(9)})
    with pytest.raises(KeyError, match="no snapshot called 'nobody'; kept: ref"), weights.using("nobody"):
        pass


def test_frozen_parameters_are_not_kept():
    module = net()
    module[0].requires_grad_(False)
    assert set(Weights(module).full()) == {"2.weight", "2.bias"}
