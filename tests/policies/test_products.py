"""Products by oneDNN: those of torch, forwards and backwards, of the weights as they are now."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmrl.core.registry import locate
from mmrl.policies import products
from mmrl.policies.diffusion.models.sd3 import SD3
from mmrl.policies.image_tokens.models.janus import Janus
from mmrl.policies.masked.amused import Amused
from mmrl.policies.products import Linear, kept_layout, linear, quicken, together
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.fixtures.image_tokens import tiny_janus

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
PROMPTS = [{"text": "a red seven"}, {"text": "a blue two left of a green nine"}]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """On any CPU, and for layers of any size."""
    calls = []
    plain = products._product
    monkeypatch.setattr(products, "faster", lambda: True)
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "WORK", 1)
    monkeypatch.setattr(products, "PASSES", 1)
    monkeypatch.setattr(products, "_product", lambda *args: calls.append(1) or plain(*args))
    return calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_janus(tmp_path_factory.mktemp("janus"), 32)


def small():
    """Two layers, of one input, are without bias."""
    return nn.Sequential(
        nn.Linear(40, 24, False), nn.ReLU(), nn.Linear(24, 40), nn.Linear(40, 16, False)
    )


def normal(name, *shape):
    return Rng.of(name).normal(torch.zeros(1), (torch.Size(shape).numel(),)).view(shape)


def gradients(compute, x, *weights):
    """The product, its gradients, and gradients of their length."""
    leaves = [x.detach().requires_grad_(), *(w.detach().requires_grad_() for w in weights)]
    y = compute(*leaves)
    first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return [y, *first, *second]


@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 40), (1100, 40), (40,)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_and_their_gradients_are_torchs(shape, with_bias, everywhere):
    x = normal("x", *shape)
    weights = [normal("w", 24, 40) / 6, *([normal("b", 24)] if with_bias else [])]

    def ours(x, weight, bias=None):
        return linear(x, weight, bias)

    found = gradients(ours, x, *weights)
    assert everywhere
    for a, b in zip(found, gradients(F.linear, x, *weights), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item(), rtol=0)
    turned = x.expand(2, *x.shape).transpose(0, -2)  # not contiguous
    torch.testing.assert_close(
        linear(turned, *weights, *[None][with_bias:]), F.linear(turned, *weights), atol=1e-5, rtol=0
    )


def test_a_product_may_be_changed_in_place(everywhere):
    layer = nn.Linear(40, 24)
    x = normal("x", 2, 5, 40)
    expected = layer(x).mul(2).square().sum()
    quicken(layer)
    product = layer(x)
    assert everywhere and product.shape == (2, 5, 24)
    (gradient,) = torch.autograd.grad(product.mul_(2).square().sum(), layer.weight)
    (wanted,) = torch.autograd.grad(expected, layer.weight)
    torch.testing.assert_close(gradient, wanted, atol=1e-3, rtol=1e-4)


def test_a_kept_layout_ends_with_its_block(everywhere):
    """An update between two rollouts is seen by the second, also behind one that failed."""
    net = small()
    names = list(net.state_dict())
    plain = small()
    quicken(net)
    assert type(net[0]) is Linear and list(net.state_dict()) == names
    x = normal("x", 3, 40)
    for update in range(3):
        with torch.no_grad():
            for p in net.parameters():
                p.data.mul_(1 + update)  # leaves no trace in the parameter's version
        plain.load_state_dict(net.state_dict())
        with pytest.raises(KeyError), kept_layout(net), kept_layout(net):
            for _ in range(2):
                found = net(x)
                torch.testing.assert_close(found, plain(x), atol=1e-5, rtol=1e-5)
                with torch.no_grad():
                    joint = together(x, (net[3], net[0]))
                for part, layer in zip(joint, (plain[3], plain[0]), strict=True):
                    torch.testing.assert_close(part, layer(x), atol=1e-5, rtol=1e-5)
            assert net[0].layout is not None and net[3].joint_layout is not None
            raise KeyError
        assert net[0].layout is None and net[3].joint_layout is None


@torch.no_grad()
def test_a_few_passes_keep_no_layout(monkeypatch):
    monkeypatch.setattr(products, "PASSES", 3)
    net = small()
    quicken(net)
    for passes in (2, 3):
        with kept_layout(net, passes):
            net(normal("x", 3, 40))
            assert (net[0].layout is not None) == (passes == 3)


def test_what_knows_torchs_operations_sees_them(everywhere):
    layer = nn.Linear(40, 24)
    quicken(layer)
    x = normal("x", 3, 40)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 3 * 40 * 24
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    assert torch.compile(layer.float(), backend="eager", fullgraph=True)(x).shape == (3, 24)
    assert layer(x[:0]).shape == (0, 24)
    assert not everywhere


def rolled(policy):
    """A rollout, its scores, and their gradient."""
    rollout = policy.rollout(PROMPTS, 3, Rng.of("products"))
    loss = 0.0
    scored = []
    for point in policy.path(rollout):
        score = policy.dist(point).log_prob(point.target)
        scored.append(torch.where(point.mask, score, 0.0))
        assert torch.allclose(scored[-1], torch.where(point.mask, point.logprob, 0.0), atol=1e-4)
        loss = loss + scored[-1].square().sum()
    trained = [p for p in policy.net.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return rollout.sample, torch.cat(scored, 1), [g for g in found if g is not None]


@pytest.mark.parametrize("kind", ["janus", "adapters", "amused", "flow"])
def test_policies_sample_score_and_learn_alike(kind, folder, everywhere, monkeypatch):
    """Also in a second rollout, of other weights."""
    if kind == "flow":
        policy = SD3(locate("world:digits/sd3-test"), size=32, steps=3, guidance_scale=2.0)
    elif kind == "amused":
        policy = Amused(str(tiny_diffusers.folder("amused-2")), steps=2, guidance_scale=2.0)
    else:
        policy = Janus(folder, guidance_scale=2.0, lora=2 if kind == "adapters" else None)
    for _ in range(2):
        with torch.no_grad():
            for p in policy.net.parameters():
                p.data.mul_(1.1)
        everywhere.clear()
        tokens, scores, found = rolled(policy)
        assert everywhere
        with monkeypatch.context() as patch:
            patch.setattr(products, "faster", lambda: False)
            plain_tokens, plain_scores, expected = rolled(policy)
        torch.testing.assert_close(tokens, plain_tokens, atol=1e-4, rtol=0)  # ids, or latents
        torch.testing.assert_close(scores, plain_scores, atol=1e-4, rtol=0)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3 * b.abs().max().item() + 1e-6, rtol=0)
