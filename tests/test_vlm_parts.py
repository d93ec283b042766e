"""What of a vision-language model is trained: parts, adapters, learning rates, and their resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrl.config import build_dataclass
from mmrl.device import _built
from mmrl.optimizers import adamw
from mmrl.policies.base import ParameterGroup
from mmrl.policies.vlm.families import part_of
from mmrl.policies.vlm.parts import Part, Parts, groups_of, idle, set_trainable, summary
from mmrl.registry import UserError

from . import tiny_vlms
from .test_vlm_inputs import inputs

NAMES = list(tiny_vlms.BUILDERS)


def fresh(name: str) -> nn.Module:
    import transformers as hf

    return hf.AutoModelForImageTextToText.from_pretrained(tiny_vlms.folder(name)).eval()


def answered(net: nn.Module, name: str) -> torch.Tensor:
    return net(**inputs(name).encode({"text": "x", "images": [tiny_vlms.image(90, 60)]})).logits


def trainable(net: nn.Module) -> set[str]:
    return {name for name, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_trained_has_a_gradient(name):
    """DDP waits for every trainable parameter: those that take no part in answers must be known."""
    net = fresh(name)
    set_trainable(net, Parts("full", "full", "full"))
    answered(net, name).logsumexp(-1).sum().backward()
    assert not [key for key, p in net.named_parameters() if p.requires_grad and p.grad is None]
    assert {key for key, p in net.named_parameters() if not p.requires_grad} == idle(net)


@pytest.mark.parametrize("name", NAMES)
def test_each_part_is_trained_as_it_was_told(name):
    net, base = fresh(name), answered(fresh(name), name)
    set_trainable(net, Parts(Part("lora", rank=4), "full", "frozen"))
    parts = {key: part_of(key) for key in trainable(net)}
    assert set(parts.values()) == {"language", "projector"}
    assert all(("lora_" in key) == (part == "language") for key, part in parts.items())
    assert torch.equal(answered(net, name), base)  # adapters start at zero
    answered(net, name).logsumexp(-1).sum().backward()
    grads = {key for key, p in net.named_parameters() if p.grad is not None}
    assert grads == trainable(net)


def test_adapters_have_their_parts_ranks():
    net = fresh("qwen2_5_vl")
    set_trainable(net, Parts(Part("lora", rank=4, alpha=2.0), "frozen", Part("lora", rank=2, targets=["qkv", "proj"])))
    ranks = {key: p.shape[0] for key, p in net.named_parameters() if "lora_A" in key}
    assert {rank for key, rank in ranks.items() if part_of(key) == "language"} == {4}
    assert {rank for key, rank in ranks.items() if part_of(key) == "vision"} == {2}
    assert all(".qkv." in key or ".proj." in key for key in ranks if part_of(key) == "vision")
    adapted = [m for key, m in net.named_modules() if "language" in key and isinstance(getattr(m, "scaling", 0), dict)]
    scales = {m.scaling["default"] for m in adapted}
    assert scales == {0.5}


def test_mistakes_are_told():
    net = fresh("llava")
    with pytest.raises(UserError, match="train.vision: no linear layer of that part is named .*there are .*q_proj"):
        set_trainable(net, Parts("full", "full", Part("lora", targets=["nope"])))
    with pytest.raises(UserError, match="train.vision: Linear has no such part"):
        set_trainable(nn.Linear(2, 2), Parts("full", "frozen", "full"))
    for wrong, said in (
        ({"language": "all", "projector": "full", "vision": "full"}, "train.language"),
        ({"language": "full", "projector": "full"}, "vision"),
        (dict.fromkeys(("language", "projector", "vision"), "frozen"), "every part is frozen"),
        ({"language": {"lr": 1e-4, "factor": 2.0}, "projector": "full", "vision": "full"}, "lr or factor"),
    ):
        with pytest.raises(UserError, match=said):
            build_dataclass(Parts, wrong, "train")


def test_options_are_words_or_words_with_options():
    mapping = {"language": {"how": "lora", "rank": 8}, "projector": "full", "vision": {"how": "full", "factor": 0.1}}
    found = build_dataclass(Parts, mapping, "train").named()
    assert found == {"language": Part("lora", rank=8), "projector": Part(), "vision": Part(factor=0.1)}


def test_learning_rates_go_to_their_parts():
    net, parts = fresh("qwen2_vl"), Parts(Part("lora"), Part(lr=5e-4), Part(factor=0.1))
    set_trainable(net, parts)
    groups = groups_of(net, parts)
    assert [group.name for group in groups] == ["language", "projector", "vision"]
    optimizer = _built(lambda found: adamw(found, lr=1e-3), groups)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 5e-4, 1e-4])
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert count == sum(p.numel() for p in net.parameters() if p.requires_grad)
    plain = _built(lambda found: adamw(found, lr=1e-3), [ParameterGroup([nn.Parameter(torch.zeros(2))])])
    assert len(plain.param_groups) == 1 and plain.param_groups[0]["lr"] == 1e-3
    assert "language 16.4 k of" in summary(net) and "together" in summary(net)
