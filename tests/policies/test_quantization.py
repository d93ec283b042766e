"""Frozen weights in 4 and 8 bits: what is stored, what a pass computes, what training does to the
adapters only."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from mmrl import advantages
from mmrl.config.building import build
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.policies import quantization
from mmrl.policies.lora import Lora
from mmrl.policies.quantization import QuantizedLinear, quantize
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from samplers.windows import all_but_last
from tests.fixtures import tiny_diffusers, tiny_vlms

load_built_in()
KINDS = {"nf4": 0.12, "8bit": 0.012}  # largest relative error of a gaussian weight


def test_a_missing_package_and_trained_weights_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="train adapters, by the option lora"):
        build({"flux": {"path": "/nowhere", "quantization": "nf4"}}, POLICIES)
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    for family in ("flux", "vlm"):
        options = {"path": "/nowhere", "quantization": "nf4", "lora": 2}
        with pytest.raises(UserError, match="bitsandbytes: pip install 'multimodal-rl.low-memory"):
            build({family: options}, POLICIES)


@pytest.mark.parametrize("kind", ["nf4", "8bit"])
def test_a_layer_stores_few_bits_and_passes_gradients_through(kind):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Sequential(nn.Linear(96, 64)), nn.Sequential(nn.Linear(64, 32)))
    plain = deepcopy(blocks)
    quantize(blocks, kind)
    layer = blocks[0][0]
    assert isinstance(layer, QuantizedLinear)
    bits = 8 * (layer.weight.nbytes + layer.scales.nbytes) / (96 * 64)
    assert bits <= {"8bit": 8.2}.get(kind, 4.6)
    weight = plain[0][0].weight
    gap = float((layer.restored() - weight).norm() / weight.norm())
    assert 0 < gap < KINDS[kind]
    # the gradient is that of a plain layer of the restored weight, whatever the number of rows
    plain.load_state_dict(blocks.state_dict())
    rows = torch.randn(5, 96)
    for count in (1, 5):
        few, same = (rows[:count].clone().requires_grad_() for _ in range(2))
        blocks(few).square().sum().backward()
        plain(same).square().sum().backward()
        torch.testing.assert_close(few.grad, same.grad)
    blocks.double()  # the bytes stay what they are
    torch.testing.assert_close(blocks(rows.double()).float(), plain(rows))


def policy_of(family, **options):
    torch.manual_seed(0)  # of the adapters
    if family == "vlm":
        folder = tiny_vlms.folder("qwen2_5_vl")
        return POLICIES["vlm"](str(folder), max_new_tokens=4, lora=4, **options)
    sizes = {"size": 16, "steps": 3, "text_length": 16, "noise_window": all_but_last}
    return POLICIES[family](tiny_diffusers.folder(family), lora=Lora(4), **sizes, **options)


@pytest.mark.parametrize(("family", "kind"), [("flux", "8bit"), ("vlm", "fp4")])
def test_adapters_train_on_frozen_bytes_and_the_first_ratio_is_1(family, kind):
    pytest.importorskip("bitsandbytes")
    plain = policy_of(family)
    policy = policy_of(family, quantization=kind)
    layers = [m for m in policy.net.modules() if isinstance(m, QuantizedLinear)]
    assert layers and all(not p.requires_grad for m in layers for p in m.parameters())
    before = [layer.weight.clone() for layer in layers]
    trainer = Trainer(
        policy,
        [{"text": "a red cat"}, {"text": "a dog"}],
        Scorer({"place": lambda media, _: torch.arange(float(len(media)))}),
        advantages.grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(prompts_per_iteration=2, group_size=4, train_batch_size=8, iterations=1),
    )
    rollout = trainer.collect().rollout
    (point, *_) = plain.path(rollout)
    one, other = (each.dist(point).log_prob(point.target)[point.mask] for each in (plain, policy))
    assert not torch.equal(one, other)
    adapters = policy.weights.full()
    metrics = trainer.iterate()
    assert metrics["ratio/max_deviation"] < 1e-5
    assert metrics["grad_norm"] > 0
    assert all(torch.equal(a, layer.weight) for a, layer in zip(before, layers, strict=True))
    moved = policy.weights.full()
    assert any(not torch.equal(adapters[name], moved[name]) for name in moved)
    # names and shapes of the state are those of a network that was never quantised
    one, other = ({n: v.shape for n, v in p.net.state_dict().items()} for p in (policy, plain))
    assert one == other
