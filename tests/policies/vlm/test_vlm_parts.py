"""What of a vision-language model is trained: parts, adapters, learning rates, and their resume."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl import advantages
from mmrl.config import build_dataclass
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.experiment import checkpoint, state
from mmrl.experiment.build import admitted
from mmrl.objectives import PolicyGradient
from mmrl.policies.vlm.families import PARTS, part_of
from mmrl.policies.vlm.media import Budgets
from mmrl.policies.vlm.parts import Part, Parts, groups_of, set_trainable, summary
from mmrl.policies.vlm.policy import VLM
from mmrl.scoring import Scorer
from mmrl.train.device import _built
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_inputs import inputs, loaded


def fresh(name: str) -> nn.Module:
    return copy.deepcopy(loaded(name))


def answered(net: nn.Module, name: str) -> torch.Tensor:
    return net(**inputs(name).encode({"text": "x", "images": [tiny_vlms.image(90, 60)]})).logits


@pytest.mark.parametrize("name", ["idefics3", "mllama"])
def test_each_part_is_trained_as_it_was_told(name):
    net = fresh(name)
    base = answered(net, name)
    set_trainable(net, Parts(Part("lora", rank=4), "full", "frozen"))
    trained = {key for key, p in net.named_parameters() if p.requires_grad}
    parts = {key: part_of(key) for key in trained}
    assert set(parts.values()) == {"language", "projector"}
    assert all(("lora_" in key) == (part == "language") for key, part in parts.items())
    assert torch.equal(answered(net, name), base)  # adapters start at zero
    answered(net, name).logsumexp(-1).sum().backward()
    assert {key for key, p in net.named_parameters() if p.grad is not None} == trained


def test_adapters_have_their_parts_ranks():
    net = fresh("qwen2_5_vl")
    vision = Part("lora", rank=2, targets=["qkv", "proj"])
    set_trainable(net, Parts(Part("lora", rank=4, alpha=2.0), "frozen", vision))
    ranks = {key: p.shape[0] for key, p in net.named_parameters() if "lora_A" in key}
    assert {(part_of(key), rank) for key, rank in ranks.items()} == {("language", 4), ("vision", 2)}
    assert all(".qkv." in key or ".proj." in key for key in ranks if part_of(key) == "vision")
    layer = net.model.language_model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 0.5


def test_mistakes_are_told():
    net = fresh("llava")
    with pytest.raises(UserError, match="train.vision: lora.targets match no module .*q_proj"):
        set_trainable(net, Parts("full", "full", Part("lora", targets=["nope"])))
    with pytest.raises(UserError, match="train.vision: Linear has no such part"):
        set_trainable(nn.Linear(2, 2), Parts("full", "frozen", "full"))
    for wrong, complaint in (
        ({"language": "all", "projector": "full", "vision": "full"}, "train.language"),
        ({"language": "full", "projector": "full"}, "vision"),
        (dict.fromkeys(PARTS, "frozen"), "every part is frozen"),
        (dict.fromkeys(PARTS, {"lr": 1e-4, "factor": 2.0}), "lr or factor"),
    ):
        with pytest.raises(UserError, match=complaint):
            build_dataclass(Parts, wrong, "train")


def test_learning_rates_go_to_their_parts():
    net = fresh("qwen2_vl")
    written = {"language": {"how": "lora"}, "projector": {"lr": 5e-4}, "vision": {"factor": 0.1}}
    parts = build_dataclass(Parts, written, "train")
    set_trainable(net, parts)
    groups = groups_of(net, parts)
    assert [group.name for group in groups] == ["language", "projector", "vision"]
    optimizer = _built(lambda found: adamw(found, lr=1e-3), groups)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 5e-4, 1e-4])
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert count == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert "language 16.4 k of" in summary(net) and "together" in summary(net)


def trainer() -> Trainer:
    torch.manual_seed(0)  # of the adapters
    parts = Parts(Part("lora", rank=2), "full", Part(factor=0.1))
    policy = VLM(str(tiny_vlms.folder("qwen2_5_vl")), max_new_tokens=4, train=parts)
    pictures = [tiny_vlms.image(60 + 30 * i, 60, i) for i in range(2)]
    questions = [{"text": f"what is {i}?", "images": [pictures[i]]} for i in range(2)]
    questions += [{"text": "no image?"}, {"text": "a <image> b <image>", "images": pictures}]
    sizes = {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 8}
    sizes |= {"micro_batch_size": 4, "iterations": 4, "lr_schedule": "linear"}

    def letters(texts, _):
        return torch.tensor([float(sum(map(ord, text)) % 7) for text in texts])

    return Trainer(
        policy,
        questions,
        Scorer({"letters": letters}),
        advantages.flow_grpo,
        PolicyGradient(clip_range=0.2),
        partial(adamw, lr=1e-2),
        TrainOptions(**sizes),
    )


def test_a_run_with_parts_starts_at_ratio_one_and_resumes_to_the_bit(tmp_path):
    whole = trainer()
    first = trainer()
    before = whole.policy.weights.full()
    assert whole.update.lrs == pytest.approx([1e-2, 1e-2, 1e-3])
    metrics = [whole.iterate() for _ in range(2)]
    assert metrics[0]["ratio/max_deviation"] < 1e-5
    first.iterate()
    path = checkpoint.save(tmp_path, first.iteration, *state.capture(first))
    second = trainer()
    state.restore(second, *checkpoint.load(path))
    second.iterate()
    after = whole.policy.weights.full()
    again = second.policy.weights.full()
    assert all(torch.equal(after[key], again[key]) for key in after)
    changed = {part_of(k) for k in after if not torch.equal(after[k], before[k])}
    assert changed == set(PARTS)
    (rates, wanted) = ([g["lr"] for g in t.update.optimizer.param_groups] for t in (second, whole))
    assert rates == pytest.approx(wanted) and rates[2] < rates[0]
    second.policy.export(tmp_path / "export")  # what is trained beside adapters with them
    exported = VLM(str(tmp_path / "export"), max_new_tokens=4)
    assert not any("lora" in name for name, _ in exported.net.named_parameters())
    with torch.no_grad():
        for prompt in second.prompts:
            encoded = second.policy.inputs.encode(prompt)
            one, other = (p.net.hf(**encoded).logits for p in (second.policy, exported))
            assert (one - other).abs().max() < 1e-5


def test_prompts_above_a_budget_leave_the_data():
    place = str(tiny_vlms.folder("qwen2_5_vl"))
    policy = VLM(place, max_new_tokens=4, budgets=Budgets(prompt_tokens=40))
    rows = [{"text": "short"}, {"text": "long" * 20, "origin": "d.jsonl:2"}]
    assert admitted(policy, SimpleNamespace(train=rows, held_out=[])).train == rows[:1]
    with pytest.raises(UserError, match="every prompt was left out: .*d.jsonl:2"):
        admitted(policy, SimpleNamespace(train=rows[1:], held_out=[]))
    with pytest.raises(UserError, match="exclude each other"):
        VLM(place, lora=2, train=Parts("full", "full", "full"))
