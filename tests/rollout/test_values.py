"""The value model of prompts: its steps by loops, what it leaves alone, resumed, and for whom."""

import json
import math
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mmrl.config.compatibility import unsupported_options
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.data.base import batch
from mmrl.policies.lora import Lora
from mmrl.policies.vlm.policy import VLM
from mmrl.zoo.advantages.baseline import PVPO
from mmrl.zoo.curricula.selection import Pcl
from mmrl.zoo.objectives.group_regression import ALoL
from mmrl.zoo.stages.value_network import SNAPSHOT, ValueNetwork
from mmrl.zoo.stages.values import PromptValues
from mmrl.zoo.stages.written_answers import Demonstrated
from tests.fixtures import tiny_vlms, toys, warm
from tests.fixtures.records import make_rollout
from tests.rollout.test_written_answers import Taught
from tests.train.test_processes import same
from tests.train.test_trainer import make_trainer

load_built_in()


def double(family="flow"):
    return toys.make(family, double=True)


@pytest.mark.parametrize("width", [0, 5])
def test_the_head_takes_the_steps_of_adam_by_loop(width):
    policy = double()
    options = PromptValues(width=width, steps=3, lr=0.02, start=0.3)
    prompts = toys.prompts(4)
    rewards = [0.1, 0.9, 0.4, 0.7]
    network = ValueNetwork(policy, options, 3)
    assert network.predict(prompts) == [0.3] * 4
    head = network.head
    weights = [p.detach().clone().requires_grad_() for p in head.parameters()]
    states = policy.prompt_states(prompts).double()
    states = [x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + 1) for x in states]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    errors = []
    for step in range(1, 4):
        errors.append(0.0)
        for row, reward in zip(states, rewards):
            x = row
            for i in range(0, len(weights), 2):
                x = weights[i] @ x + weights[i + 1]
                x = F.gelu(x) if i + 2 < len(weights) else x
            errors[-1] = errors[-1] + (x[0] - reward) ** 2 / 4
        gradients = torch.autograd.grad(errors[-1], weights)
        for w, g, (m, v) in zip(weights, gradients, moments):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            with torch.no_grad():
                w -= 0.02 * m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    before = {name: p.clone() for name, p in policy.weights.parameters().items()}
    assert network.learn(prompts, rewards) == pytest.approx(errors[0].item(), abs=1e-9)
    for mine, theirs in zip(weights, head.parameters()):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)
    assert all(torch.equal(p, before[n]) for n, p in policy.weights.parameters().items())
    again = ValueNetwork(double(), options, 3)
    again.load_state_dict(network.state_dict(), network.step)
    assert again.predict(prompts) == network.predict(prompts)
    network.learn(prompts, rewards)
    again.learn(prompts, rewards)
    assert again.predict(prompts) == network.predict(prompts)


class Toys:
    train = toys.prompts(8)
    held_out = []


@pytest.mark.parametrize("family", ["flow", "masked"])
def test_every_family_is_drawn_by_and_compared_with_its_value_model(family, monkeypatch):
    data = Pcl(Toys, value="network", candidates=2.0).train
    monkeypatch.setattr(toys, "prompts", lambda n=4: data)
    trainer = make_trainer(
        policy=double(family),
        stages=(PromptValues(lr=0.05, steps=20),),
        advantage=PVPO(learned=True),
        prompts_per_iteration=4,
        group_size=4,
        train_batch_size=16,
    )
    metrics = [trainer.iterate() for _ in range(4)]
    assert metrics[-1]["prompt_value/error"] < metrics[0]["prompt_value/error"]
    candidates = data.drawn(8, 4, 0)
    predicted = data.network(candidates)
    gaps = [abs(value - 0.5) for value in predicted]
    order = sorted(range(len(gaps)), key=lambda i: gaps[i])
    expected = [candidates[order[i % len(order)]] for i in range(4)]
    assert batch(data, 4, 4, 0) == expected
    rollout = trainer.collect().rollout
    assert torch.isfinite(rollout.record("value")).all() and len(set(predicted)) > 1


QUESTIONS = [
    {"text": "when?", "images": [tiny_vlms.image(70, 60, 0)]},
    {"text": "say so"},
    {"text": "when?", "images": [tiny_vlms.image(70, 60, 1)]},
    {"text": "what is there, and where?", "images": [tiny_vlms.image(60, 60, 2)]},
]


def test_a_vlm_reads_the_prompt_with_its_own_network_and_the_base_is_trained():
    policy = VLM(str(tiny_vlms.folder("smolvlm")), max_new_tokens=4, lora=Lora(rank=2))
    prompts = QUESTIONS
    with torch.no_grad():
        together = policy.prompt_states(prompts)
        alone = torch.cat([policy.prompt_states([prompt]) for prompt in prompts])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-3)
    assert (together[0] - together[2]).abs().max() > 1e-3, "the picture is seen"
    options = PromptValues(base="trained", steps=30, lr=1e-2, base_lr=1e-3)
    network = ValueNetwork(policy, options, 1)
    kept = {name: t.clone() for name, t in policy.weights.saved[SNAPSHOT].items()}
    own = {name: p.detach().clone() for name, p in policy.weights.parameters().items()}
    rewards = [1.0, 0.0, 1.0, 0.0]
    first = network.learn(prompts, rewards)
    values = network.predict(prompts)
    error = fmean([(value - r) ** 2 for value, r in zip(values, rewards)])
    assert error < 0.3 * first
    trained = policy.weights.saved[SNAPSHOT]
    assert any(not torch.equal(trained[name], kept[name]) for name in kept)
    assert all(torch.equal(p, own[n]) for n, p in policy.weights.parameters().items())
    assert all(p.grad is None for p in policy.net.parameters())


def test_a_reference_is_fitted_before_the_first_iteration(tmp_path, monkeypatch):
    """A-LoL: the value of the reference from a file, answers of a file, nothing else trained."""
    path = tmp_path / "reference.jsonl"
    known = [{"text": "label 0", "reward": [1.0, 0.5]}, {"text": "label 1", "reward": 0.25}]
    path.write_text("\n".join(map(json.dumps, known)))
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"prompt": "label 1", "answers": ["333333"]}))
    options = PromptValues(path=path, learn=False, epochs=200, lr=0.02)
    trainer = make_trainer(
        policy=Taught(),
        stages=(options, Demonstrated(path=answers)),
        advantage=PVPO(learned=True, offline=True),
        objective=ALoL(),
        prompts_per_iteration=4,
        group_size=4,
        train_batch_size=16,
        micro_batch_size=None,
    )
    collected = trainer.collect()
    rollout = collected.rollout
    texts = [prompt["text"] for prompt in rollout.prompt_per_row()]
    expected = [{"label 0": 0.75, "label 1": 0.25}[text] for text in texts]
    assert rollout.record("value").tolist() == pytest.approx(expected, abs=0.02)
    written = rollout.provenance.is_ground_truth
    assert written.any() and not rollout.mask[~written].any()
    advantage = collected.rewards.total() - rollout.record("value")
    torch.testing.assert_close(
        rollout.advantage[written][:, 0], advantage[written].to(rollout.advantage)
    )
    assert "prompt_value/error" not in trainer.iterate()


def test_what_cannot_be_compared_or_learnt_is_refused():
    rollout = make_rollout(
        group=torch.tensor([0, 1, 1]),
        row_id=torch.arange(3),
        sample=torch.zeros(3, 1),
        mask=torch.ones(3, 1).bool(),
        logprob=torch.zeros(3, 1, dtype=torch.float64),
    )
    known = rollout.recorded("value", torch.tensor([0.25, 0.5, 0.5], dtype=torch.float64))
    rewards = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    lead = [0.75, -0.5, 1.5]
    std = (sum((x - fmean(lead)) ** 2 for x in lead) / 3) ** 0.5
    scaled = PVPO(learned=True, scale="batch")(rewards, known)[:, 0].tolist()
    assert scaled == pytest.approx([x / (std + 1e-4) for x in lead], abs=1e-9)
    options = TrainOptions(1, 2, 2, 1, stages=(PromptValues(base="trained"),))
    assert not [*unsupported_options(options, VLM)]
    assert any("set base to frozen" in line for line in unsupported_options(options, toys.ToyFlow))
    for make, sentence in (
        (lambda: PVPO(learned=True)(rewards, rollout), "add prompt_value to train.stages"),
        (lambda: PVPO(learned=True, offline=True)(rewards, known), "add demonstrations to"),
        (lambda: PVPO(learned=True, field="reward"), "leave file and field out"),
        (lambda: PromptValues(learn=False), "nothing is learnt"),
        (
            lambda: batch(Pcl(Toys, value="network").train, 2, 0, 0),
            "value: network is that of the stage prompt_value",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            make()


@pytest.mark.slow
def test_two_processes_and_two_halves_learn_what_one_does(tmp_path):
    cases = {"one": warm.run, "two": warm.ranks, "halves": warm.ranks}
    arrays = {}
    for name, start in cases.items():
        (tmp_path / name).mkdir()
        sharded = ["--sharded"] if name == "halves" else []
        done = start(["-m", "tests.fixtures.value_worker", tmp_path / name, *sharded])
        assert done.returncode == 0, done.stderr[-4000:]
        arrays[name] = load_file(tmp_path / name / "arrays.safetensors")
    halves = arrays["halves"]
    resumed = {n: halves.pop(n) for n in list(halves) if n.startswith("again/")}
    same({n.replace("one/", "again/"): t for n, t in halves.items()}, resumed, "resumed", 0.0)
    for name in ("two", "halves"):
        same(arrays["one"], arrays[name], name, 1e-9)
