"""What of a vision-language model is trained: parts, adapters, learning rates, and their resume."""

from __future__ import annotations

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
from mmrl.policies.contracts import ParameterGroup
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
    import transformers as hf

    return hf.AutoModelForImageTextToText.from_pretrained(tiny_vlms.folder(name)).eval()


def answered(net: nn.Module, name: str) -> torch.Tensor:
    return net(**inputs(name).encode({"text": "x", "images": [tiny_vlms.image(90, 60)]})).logits


def trainable(net: nn.Module) -> set[str]:
    return {name for name, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "idefics3", "mllama"])
def test_each_part_is_trained_as_it_was_told(name):
    net = fresh(name)
    base = answered(loaded(name)[0], name)
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
    set_trainable(
        net,
        Parts(
            Part("lora", rank=4, alpha=2.0), "frozen", Part("lora", rank=2, targets=["qkv", "proj"])
        ),
    )
    ranks = {key: p.shape[0] for key, p in net.named_parameters() if "lora_A" in key}
    assert {rank for key, rank in ranks.items() if part_of(key) == "language"} == {4}
    assert {rank for key, rank in ranks.items() if part_of(key) == "vision"} == {2}
    assert all(".qkv." in key or ".proj." in key for key in ranks if part_of(key) == "vision")
    adapted = [
        m
        for key, m in net.named_modules()
        if "language" in key and isinstance(getattr(m, "scaling", 0), dict)
    ]
    scales = {m.scaling["default"] for m in adapted}
    assert scales == {0.5}


def test_mistakes_are_told():
    net = fresh("llava")
    with pytest.raises(
        UserError, match="train.vision: lora.targets match no module of the vision; .*q_proj"
    ):
        set_trainable(net, Parts("full", "full", Part("lora", targets=["nope"])))
    with pytest.raises(UserError, match="train.vision: Linear has no such part"):
        set_trainable(nn.Linear(2, 2), Parts("full", "frozen", "full"))
    for wrong, complaint in (
        ({"language": "all", "projector": "full", "vision": "full"}, "train.language"),
        ({"language": "full", "projector": "full"}, "vision"),
        (dict.fromkeys(("language", "projector", "vision"), "frozen"), "every part is frozen"),
        (
            {"language": {"lr": 1e-4, "factor": 2.0}, "projector": "full", "vision": "full"},
            "lr or factor",
        ),
    ):
        with pytest.raises(UserError, match=complaint):
            build_dataclass(Parts, wrong, "train")


def test_options_are_words_or_words_with_options():
    mapping = {
        "language": {"how": "lora", "rank": 8},
        "projector": "full",
        "vision": {"how": "full", "factor": 0.1},
    }
    parts = build_dataclass(Parts, mapping, "train").named()
    assert parts == {
        "language": Part("lora", rank=8),
        "projector": Part(),
        "vision": Part(factor=0.1),
    }


def test_learning_rates_go_to_their_parts():
    net = fresh("qwen2_vl")
    parts = Parts(Part("lora"), Part(lr=5e-4), Part(factor=0.1))
    set_trainable(net, parts)
    groups = groups_of(net, parts)
    assert [group.name for group in groups] == ["language", "projector", "vision"]
    optimizer = _built(lambda found: adamw(found, lr=1e-3), groups)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 5e-4, 1e-4])
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert count == sum(p.numel() for p in net.parameters() if p.requires_grad)
    plain = _built(
        lambda found: adamw(found, lr=1e-3), [ParameterGroup([nn.Parameter(torch.zeros(2))])]
    )
    assert len(plain.param_groups) == 1 and plain.param_groups[0]["lr"] == 1e-3
    assert "language 16.4 k of" in summary(net) and "together" in summary(net)


# -------------------------------------------------------------------------------------------------
# in a training run


def trainer() -> Trainer:
    torch.manual_seed(0)  # of the adapters
    parts = Parts(Part("lora", rank=2), "full", Part(factor=0.1))
    policy = VLM(str(tiny_vlms.folder("qwen2_5_vl")), max_new_tokens=4, train=parts)
    questions = [
        {"text": f"what is {i}?", "images": [tiny_vlms.image(60 + 30 * i, 60, i)]} for i in range(2)
    ]
    sizes = {
        "prompts_per_iteration": 2,
        "group_size": 4,
        "train_batch_size": 8,
        "micro_batch_size": 4,
        "iterations": 4,
        "lr_schedule": "linear",
    }
    rewards = Scorer(
        {
            "vowels": lambda texts, _: torch.tensor(
                [float(sum(map(ord, text)) % 7) for text in texts]
            )
        }
    )
    return Trainer(
        policy,
        [
            *questions,
            {"text": "and no image?"},
            {"text": "a <image> b <image>", "images": questions[0]["images"] * 2},
        ],
        rewards,
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
    moved = {
        name: [(after[k] - before[k]).abs().max() for k in after if part_of(k) == name]
        for name in PARTS
    }
    assert all(max(changes) > 0 for changes in moved.values())
    assert [group["lr"] for group in second.update.optimizer.param_groups] == pytest.approx(
        [group["lr"] for group in whole.update.optimizer.param_groups]
    )
    assert (
        second.update.optimizer.param_groups[2]["lr"]
        < second.update.optimizer.param_groups[0]["lr"]
    )


def test_what_is_trained_beside_adapters_is_exported_with_them(tmp_path):
    training = trainer()
    training.iterate()
    training.policy.export(tmp_path)
    again = VLM(str(tmp_path), max_new_tokens=4)
    tensors = [training.policy.inputs.encode(prompt) for prompt in training.prompts]
    with torch.no_grad():
        for encoded in tensors:
            gap = training.policy.net.hf(**encoded).logits - again.net.hf(**encoded).logits
            assert gap.abs().max() < 1e-5
    assert not any("lora" in name for name, _ in again.net.named_parameters())


def test_prompts_above_a_budget_leave_the_data():
    policy = VLM(
        str(tiny_vlms.folder("qwen2_5_vl")), max_new_tokens=4, budgets=Budgets(prompt_tokens=40)
    )
    source = SimpleNamespace(
        train=[{"text": "short"}, {"text": "long" * 20, "origin": "d.jsonl:2"}], held_out=[]
    )
    prompts = admitted(policy, source)
    assert prompts.train == source.train[:1] and prompts.held_out == []
    assert any("d.jsonl:2: " in note for note in policy.report.notes) and any(
        "trainable" in note for note in policy.report.notes
    )
    with pytest.raises(UserError, match="every prompt was left out: .*d.jsonl:2"):
        admitted(policy, SimpleNamespace(train=source.train[1:], held_out=[]))
    with pytest.raises(UserError, match="exclude each other"):
        VLM(str(tiny_vlms.folder("qwen2_5_vl")), lora=2, train=Parts("full", "full", "full"))
