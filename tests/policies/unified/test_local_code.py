"""Unified models of a user's own code: the two of docs/unified.md, as they stand there."""

import hashlib
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from mmrl.advantages import flow_grpo
from mmrl.config.compatibility import unsuited
from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Rewards
from mmrl.objectives import PolicyGradient
from mmrl.objectives.kl import KL
from mmrl.objectives.surrogates import gspo
from mmrl.policies.contracts import Demonstrates
from mmrl.rollout.stages import Drawn
from mmrl.train.minibatches import passes
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from mmrl.zoo.models.unified import tasks
from mmrl.zoo.models.unified.local_flow import UnifiedFlow
from mmrl.zoo.stages.answer_memory import packed, remembered, unpacked
from samplers.noise import Rng
from tests.fixtures import local_code
from tests.fixtures.command import mmrl, refused
from tests.fixtures.local_code import WORDS, flow, masked

PROMPTS = local_code.PROMPTS
BOTH = "flow", "masked"
MAKE = {"flow": flow, "masked": masked}


def rolled(policy, copies=3):
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, copies, Rng.of("local"))
    signs = torch.tensor([1.0, -1.0]).repeat(copies)
    return rollout.replace(advantage=signs[:, None])


def trainer(policy, **chosen):
    def scorer(media, prompts):
        sizes = [m.mean() if isinstance(m, torch.Tensor) else float(len(m)) for m in media]
        return Rewards({"size": torch.tensor(sizes)})

    options = TrainOptions(2, 4, 8, 2, micro_batch_size=3, max_grad_norm=None, **chosen)
    objective = PolicyGradient(clip_range=0.2, kl=0.1)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Trainer(policy, PROMPTS, scorer, flow_grpo, objective, optimizer, options)


def recorded(runner):
    """A list that gets every batch on which the trainer updates."""
    batches = []
    update = runner.update.run
    runner.update.run = lambda batch: batches.append(batch) or update(batch)
    return batches


@pytest.mark.parametrize("kind", BOTH)
def test_both_kinds_of_decisions_are_trained(kind):
    """First ratios are 1 in both iterations, and what only one kind of decision goes through
    moves."""
    policy = MAKE[kind]()
    before = policy.weights.full()
    runner = trainer(policy)
    for _ in range(2):
        metrics = runner.iterate()
        assert metrics["ratio/max_deviation"] < 1e-5 and metrics["clip_fraction"] == 0
    after = policy.weights.full()
    if kind == "flow":
        for name in ("model.unpatch.weight", "model.lm_head.weight"):
            assert not torch.equal(before[name], after[name])
    else:
        rows = (before["head.weight"] != after["head.weight"]).any(1)
        assert rows[:WORDS].any() and rows[WORDS:].all()


@pytest.mark.parametrize("kind", BOTH)
def test_half_precision_is_on_policy_and_near_float32(kind):
    """Adapters on weights in bfloat16, and autocast over float32 weights."""
    lora = 2 if kind == "flow" else None
    policy, exact = MAKE[kind](lora=lora), MAKE[kind](lora=lora)
    for p in policy.net.parameters():
        p.data = p.data.bfloat16() if lora and not p.requires_grad else p.data
    before = {name: value.clone() for name, value in policy.weights.full().items()}
    runner = trainer(policy, precision="bf16")
    batches = recorded(runner)
    metrics = runner.iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    rollout = batches[0].rollout
    assert rollout.logprob.dtype == rollout.advantage.dtype == torch.float32
    for name, p in exact.weights.parameters().items():
        p.data = before[name]
    worst = 0.0
    for point in exact.path(rollout):
        with torch.no_grad():
            logp = exact.dist(point).log_prob(point.target)
        worst = max(worst, float((logp - point.logprob)[point.mask].abs().max()))
    assert 1e-6 < worst < 0.05  # bfloat16 has three digits


@pytest.mark.parametrize(("kind", "number"), [("flow", 0), ("masked", 1)])
def test_old_answers_are_shown_again(kind, number):
    """From what a checkpoint stores of them, beside prompts of other lengths."""
    policy = MAKE[kind]()
    rollout = rolled(policy)
    rows = 3 * number + torch.arange(3)
    media = policy.decode(rollout)
    entry = remembered(Drawn(rollout, media, Rewards({"r": torch.zeros(6)})), rows, 0, 0)
    (again,) = unpacked(*packed([entry]))
    assert type(again.rollout.trajectory) is type(rollout.trajectory)
    shown = again.rollout.replace(cond=policy.encode(PROMPTS[number : number + 1]))
    for point in policy.path(shown):
        logp = policy.dist(point).log_prob(point.target)
        torch.testing.assert_close(logp[point.mask], point.logprob[point.mask], atol=1e-5, rtol=0)
    assert torch.equal(shown.logprob, rollout.logprob[rows]) and shown.mask.any()


def test_answers_of_others_are_learnt_where_their_order_is_a_sampler_s():
    policy = masked()
    picture = policy.decode(rolled(policy)[:1])[0]
    policy.image.codec.encode = lambda images: (images[:, 0] * 7).round().long().flatten(1)
    rollout = policy.demonstrate([*PROMPTS, PROMPTS[0]], [picture, "two", None], Rng.of("others"))
    assert rollout.mask.any(1).tolist() == [True, True, False]
    assert torch.equal(rollout.sample[0], rolled(policy).sample[0])
    for point in policy.path(rollout):
        logp = policy.dist(point).log_prob(point.target)
        torch.testing.assert_close(logp[point.mask], point.logprob[point.mask], atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="takes no demonstrations"):
        Demonstrates.of(flow())


def test_probabilities_of_all_thoughts_sum_to_one():
    """And the picture's steps are Gaussians under the very thought that was written."""
    policy = flow(think=2, answer=2)
    policy.net.double()
    rollout = rolled(policy, copies=1)[:1]
    vocabulary = 29
    first = torch.arange(vocabulary).repeat_interleave(vocabulary)
    second = torch.arange(vocabulary).repeat(vocabulary)
    # nothing follows a stop
    texts = torch.stack([first, torch.where(first == 0, -1, second)], 1).unique(dim=0)
    trace = rollout.text_and_path
    (point,) = [p for p in policy.path(rollout) if p.step is None]
    every = point.repeat(len(texts)).replace(state=texts, target=texts.clamp_min(0))
    logp = policy.dist(every).log_prob(every.target)
    total = torch.where(texts >= 0, logp, 0.0).sum(1).exp().sum()
    torch.testing.assert_close(total, torch.ones_like(total))
    steps = [p for p in policy.path(rollout) if p.step is not None]
    other = rollout.replace(trajectory=trace.replace(text=(trace.text + 1).clamp_max(28)))
    changed = [p for p in policy.path(other) if p.step is not None]
    assert len(steps) == 3
    for step, moved in zip(steps, changed, strict=True):
        same = policy.dist(step).log_prob(step.target)
        torch.testing.assert_close(same, step.logprob, atol=1e-6, rtol=0)
        assert (policy.dist(moved).log_prob(moved.target) - same).abs().max() > 1e-6


def test_a_cache_writes_what_is_written_without(monkeypatch):
    policy = flow()
    model = policy.model
    plain = rolled(policy)
    widths = []

    def next_logits(ids, mask, cache):
        widths.append(ids.shape[1])
        cache = ids if cache is None else torch.cat([cache, ids], 1)
        at = torch.full((len(ids), 1), cache.shape[1] - 1)
        return model.text_logits(cache, mask, at)[:, 0], cache

    monkeypatch.setattr(model, "next_logits", next_logits, raising=False)
    again = rolled(policy)
    assert torch.equal(again.text_and_path.text, plain.text_and_path.text)
    assert set(widths[1:]) & {1} and torch.equal(again.logprob, plain.logprob)


def test_guided_pictures_leave_the_thought_out_of_the_empty_pass():
    policy = flow(guidance_scale=3.0)
    rollout = rolled(policy)
    seen = policy.drawn_after(rollout.cond, rollout.group[:1], rollout.text_and_path.text[:1])
    assert seen["uncond"]["mask"].sum() == 1 and seen["mask"].sum() > 1
    assert seen["uncond"]["ids"].shape == seen["ids"].shape


def test_a_picture_weighs_and_is_clipped_as_its_options_say():
    policy = flow(picture_weight=0.25, picture_clip=0.5)
    for point in policy.path(rolled(policy)):
        picture = point.step is not None
        assert (point.weight == 0.25).all() if picture else point.weight is None
        objective = PolicyGradient(clip_range=0.2)
        logp = torch.full_like(point.logprob, math.log(1.15))
        point = point.replace(advantage=torch.ones_like(point.advantage))
        loss = objective.surrogate(logp, 0 * logp, point, objective.clip_scale(point))
        expected = -1.1 if picture else -1.15  # 1 + 0.2 x 0.5
        torch.testing.assert_close(loss, torch.full_like(loss, expected))


@pytest.mark.parametrize("kind", BOTH)
def test_an_export_is_loaded_again(kind, tmp_path):
    """By the same code, adapters within the weights."""
    policy = MAKE[kind](lora=2)
    with torch.no_grad():
        for p in policy.weights.parameters().values():
            p.add_(0.1)
    policy.export(tmp_path)
    again = flow(path=str(tmp_path)) if kind == "flow" else masked(tmp_path)
    one, two = rolled(policy), rolled(again)
    torch.testing.assert_close(one.logprob, two.logprob, atol=1e-4, rtol=0)
    assert one.logprob.abs().sum() > 0
    if kind == "masked":  # masked_lm answers with the same weights
        code = f"{local_code.folder()}/my_mmada.py:build"
        alone = MaskedLM(str(tmp_path), max_new_tokens=4, code=code, remote_code=True)
        assert torch.equal(alone.net.head.weight, again.net.head.weight)


@pytest.mark.parametrize("kind", BOTH)
def test_neither_uneven_groups_nor_the_size_of_passes_changes_a_row(kind):
    policy = MAKE[kind]()
    policy.net.double()
    prompts = [*PROMPTS, PROMPTS[0]]
    rows = torch.arange(6)
    with torch.no_grad():
        whole = policy.rollout(prompts, (1, 3, 2), Rng.of("local"))
        policy.pass_sizes.rows = 2
        cut = policy.rollout(prompts, (1, 3, 2), Rng.of("local"))
    assert whole.group.tolist() == [0, 1, 1, 1, 2, 2] and torch.equal(whole.row_id, rows)
    for name in ("sample", "logprob", "mask"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), atol=1e-12, rtol=0)
    gradients = []
    credit = torch.tensor([1.0, -1.0, 0.5, torch.nan, 2.0, -0.5]).double()[:, None]
    alive = credit.isfinite()[:, 0]  # the reward of a row of the second group has failed
    rollout = whole.replace(advantage=credit.nan_to_num(), mask=whole.mask & alive[:, None])
    for size in (1, 4):
        policy.net.zero_grad()
        for point in passes(policy.path(rollout), size, policy.keep_groups_together):
            loss = PolicyGradient().loss(policy, point)
            (loss * point.mask).sum().backward()
        grads = [p.grad.flatten() for p in policy.net.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    assert gradients[0].isfinite().all() and gradients[0].abs().max() > 0


def test_in_training_every_process_makes_equally_many_passes_of_each_kind(monkeypatch):
    """tests/train/test_gathers.py has two, and sampling."""
    policy = flow()
    runner = trainer(policy)
    batches = recorded(runner)
    runner.iterate()
    cut = runner.update.passes
    for task in (False, True):  # answers alone here, pictures with their thoughts alone
        rows = (batches[0].rollout.cond["draws"][batches[0].rollout.group] == task).nonzero()[:, 0]
        part = batches[0].rollout[rows]
        batch = replace(batches[0], rollout=part, idle_row=part[:1])
        points = cut.points(part, Rng.of("cut"), True)
        most = iter([3, 7])  # of texts and of pictures, on some process
        monkeypatch.setattr(distributed, "largest", lambda *_, counts=most: next(counts))
        count, made = cut.cut(batch, points, 3, Rng.of("cut"))
        made = list(made)
        assert [point.step is None for point in made] == [True] * 3 + [False] * 7
        assert count == 10 and sum(int(point.mask.sum()) for point in made) == part.mask.sum()
        for point in made:
            loss = runner.objective.loss(policy, point)
            assert loss.isfinite().all() and loss.requires_grad
    monkeypatch.setattr(tasks, "sharded", lambda net: True)
    with pytest.raises(UserError, match="needs whole weights on every process, not shards: launc"):
        tasks.check_shards(torch.nn.Identity(), True, True, torch.device("cpu"))


def test_the_code_is_checked(tmp_path):
    def made(text):
        name = tmp_path / f"code_{abs(hash(text))}.py"
        name.write_text(text)
        return UnifiedFlow(f"{name}:build", remote_code=True)

    with pytest.raises(UserError, match="must return an nn.Module, not int"):
        made("def build():\n    return 3")
    with pytest.raises(UserError, match="has no latent_shape, stops, encode"):
        made("from torch import nn\ndef build():\n    return nn.Linear(1, 1)")
    policy = flow(answer=None)
    with pytest.raises(UserError, match="prompt 1: a prompt to understand"):
        policy.encode(PROMPTS)
    right = {"ids": torch.ones(2, 2), "mask": torch.tensor([[1, 1], [1, 0]])}
    policy.model.encode = lambda prompts: right
    with pytest.raises(UserError, match="pad on the left"):
        policy.encode(PROMPTS[:1] * 2)


@pytest.mark.parametrize("name", ["bagel", "mmada"])
def test_the_page_s_configuration_runs_and_goes_on_to_the_bit(name, tmp_path):
    local_code.write(tmp_path)
    config = tmp_path / f"{name}.yaml"
    mmrl("train", config, "run=whole", cwd=tmp_path)
    if name == "bagel":
        mmrl("train", config, "run=half", "train.iterations=1", cwd=tmp_path)
        mmrl("train", "--resume", "half", "train.iterations=2", cwd=tmp_path)
        whole, half = (
            load_file(tmp_path / run / "checkpoints" / "iteration-000002" / "weights.safetensors")
            for run in ("whole", "half")
        )
        assert whole and all(torch.equal(whole[key], half[key]) for key in whole)
    machine = json.loads((tmp_path / "whole" / "machine.json").read_text())
    code = (tmp_path / f"my_{name}.py").read_bytes()
    assert machine["model_code"] == {f"my_{name}.py": hashlib.sha256(code).hexdigest()}
    option = "unified_flow" if name == "bagel" else "unified_masked"
    words = ("train", config, f"policy.{option}.remote_code=false")
    assert "remote_code to true, which runs it" in refused(*words, cwd=tmp_path)
    assert "--safe refuses" in refused("--safe", *words[:2], cwd=tmp_path)


def test_objectives_and_options_of_one_kind_of_decision_are_refused():
    for name in ("nft", "dpo", "distill", "masked", "sft", "unified"):
        assert "UnifiedFlow" in unsuited(OBJECTIVES[name], UnifiedFlow), name
    assert unsuited(PolicyGradient, UnifiedFlow) is None
    single = {"surrogate": gspo, "kl": KL(form="flow_grpo"), "entropy": 0.1}
    objective = PolicyGradient(**single, timestep_fraction=0.5)
    refused_options = {option for option, _ in objective.unfit(UnifiedFlow)}
    assert refused_options == {*single, "timestep_fraction"}
    assert not list(PolicyGradient(clip_range=0.2, kl=0.1).unfit(UnifiedFlow))
