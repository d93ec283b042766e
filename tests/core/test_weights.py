import pytest
import torch
from torch import nn

from mmrl.core.weights import Weights


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def shifted(module, by=1.0):
    with torch.no_grad():
        for p in module.parameters():
            p += by


def test_using_nests_and_survives_an_exception():
    module = net()
    weights = Weights(module)
    x = torch.randn(5, 3)
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
    weights = Weights(module)
    x = torch.randn(5, 3)
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


def test_a_swap_in_parts_exchanges_every_tensor_and_holds_no_third_copy(monkeypatch):
    """A part is as large as it may be, and no larger: 3 x 4 and 4 floats, then 4 and 1."""
    from mmrl.core import weights as module_under_test

    module = net()
    weights = Weights(module)
    base = weights.full()
    weights.keep("ref")
    shifted(module)
    live = weights.full()
    held = []
    copied = module_under_test.copies
    monkeypatch.setattr(module_under_test, "SPARE", 64)
    monkeypatch.setattr(module_under_test, "copies", lambda part: held.append(part) or copied(part))
    with weights.using("ref"):
        assert all(torch.equal(value, base[name]) for name, value in module.state_dict().items())
        assert all(torch.equal(value, live[name]) for name, value in weights.saved["ref"].items())
    assert [[tensor.numel() for tensor in part] for part in held] == 2 * [[12, 4], [4, 1]]
    assert all(torch.equal(value, live[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(value, base[name]) for name, value in weights.saved["ref"].items())
