"""Frozen weights in 4 and 8 bits: what is stored, what a pass computes, what training does to the
adapters only."""

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
KINDS = {"nf4": 0.12, "fp4": 0.16, "8bit": 0.012}  # largest relative error of a gaussian weight


def test_a_missing_package_and_trained_weights_are_told_before_loading(monkeypatch):
    with pytest.raises(UserError, match="train adapters, by the option lora"):
        if quantization.find_spec("bitsandbytes") is None:
            monkeypatch.setattr(quantization, "find_spec", lambda name: True)
        build({"flux": {"path": "/nowhere", "quantization": "nf4"}}, POLICIES)
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    for family in ("flux", "vlm"):
        options = {"path": "/nowhere", "quantization": "nf4", "lora": 2}
        with pytest.raises(UserError, match="bitsandbytes: pip install 'multimodal-rl.low-memory"):
            build({family: options}, POLICIES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_stores_few_bits_and_passes_gradients_through(kind):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Sequential(nn.Linear(96, 64)), nn.Sequential(nn.Linear(64, 32)))
    plain = nn.Sequential(nn.Sequential(nn.Linear(96, 64)), nn.Sequential(nn.Linear(64, 32)))
    plain.load_state_dict(blocks.state_dict())
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


def brightness(media, prompts):
    if isinstance(media, torch.Tensor):
        return media.flatten(1).mean(1)
    return torch.tensor([sum(map(ord, text)) % 97 / 97 for text in media])


def policy_of(family, **options):
    torch.manual_seed(0)  # of the adapters
    if family == "vlm":
        folder = tiny_vlms.folder("qwen2_5_vl")
        return POLICIES["vlm"](str(folder), max_new_tokens=4, lora=4, **options)
    sizes = {"size": 16, "steps": 3, "text_length": 16, "noise_window": all_but_last}
    return POLICIES[family](tiny_diffusers.folder(family), lora=Lora(4), **sizes, **options)


def trainer_of(policy):
    sizes = {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 8}
    return Trainer(
        policy,
        [{"text": "a red cat"}, {"text": "a dog"}],
        Scorer({"bright": brightness}),
        advantages.grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(**sizes, iterations=1, micro_batch_size=4),
    )


@pytest.mark.parametrize(
    ("family", "kind"), [("flux", "nf4"), ("qwen_image", "8bit"), ("vlm", "fp4")]
)
def test_adapters_train_on_frozen_bytes_and_the_first_ratio_is_1(family, kind, capsys):
    """The gap to the unquantised base is printed: ``pytest -s`` shows it."""
    pytest.importorskip("bitsandbytes")
    plain = policy_of(family)
    policy = policy_of(family, quantization=kind)
    layers = [m for m in policy.net.modules() if isinstance(m, QuantizedLinear)]
    assert layers and all(not p.requires_grad for m in layers for p in m.parameters())
    before = [layer.weight.clone() for layer in layers]
    rollout = trainer_of(plain).collect().rollout
    gaps = []
    for point in plain.path(rollout):
        pair = [policy_.dist(point).log_prob(point.target) for policy_ in (plain, policy)]
        gaps.append((pair[0] - pair[1])[point.mask].abs())
    gap = float(torch.cat(gaps).detach().max())
    print(f"{family}, {kind}: log-probs differ from the unquantised base by at most {gap:.2g}")
    assert gap > 0
    trainer = trainer_of(policy)
    adapters = policy.weights.full()
    metrics = trainer.iterate()
    assert metrics["ratio/max_deviation"] < 1e-5
    assert metrics["grad_norm"] > 0
    assert all(torch.equal(a, layer.weight) for a, layer in zip(before, layers, strict=True))
    moved = policy.weights.full()
    assert any(not torch.equal(adapters[name], moved[name]) for name in moved)
    # names and shapes of the state are those of a network that was never quantised
    state = policy.net.state_dict()
    expected = {name: value.shape for name, value in plain.net.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == expected
