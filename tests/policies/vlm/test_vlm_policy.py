"""A vision-language policy: prompts read once a group give the log-probs, gradients and samples of
separate passes."""

import copy
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from mmrl.advantages import flow_grpo, grpo
from mmrl.config.options import TrainOptions
from mmrl.core.distributions import Categorical
from mmrl.core.types import Point, Rewards
from mmrl.objectives import PolicyGradient
from mmrl.policies import scores
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.recent import Recent
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from rewards import self_certainty
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures import tiny_vlms
from tests.policies.vlm.conftest import quiet  # noqa: F401

COPIES = 3


def prompts():
    """One image; two images and more text; none."""
    image = tiny_vlms.image
    pair = [image(120, 50, 1), image(56, 56, 2)]
    return [
        {"text": "what is this?", "images": [image(70, 60, 0)]},
        {"text": "which of these two is the larger one?", "images": pair},
        {"text": "hello"},
    ]


def policy_of(family="qwen2_5_vl", **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VLM(
            str(tiny_vlms.folder(family)),
            **{"max_new_tokens": 8, "coordinate_space": "original"} | options,
        )


@pytest.fixture(scope="module")
def policy():
    return policy_of()


def rolled(policy, given=None, copies=COPIES, rng=None):
    with torch.no_grad():
        return policy.rollout(given or prompts(), copies, rng or Rng.of("vlm"))


def point_of(policy, rollout) -> Point:
    return next(iter(policy.path(rollout)))


def logprobs(policy, rollout):
    return policy.dist(point_of(policy, rollout)).log_prob(rollout.sample)


def gradient_of(net, objective):
    net.zero_grad()
    objective.backward()
    found = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


def weighted(logp):
    return (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum()


def gradient(policy, rollout, share=True):
    kept = policy.net.share
    policy.net.share = share
    found = gradient_of(policy.net, weighted(logprobs(policy, rollout)))
    policy.net.share = kept
    return found


def assert_near(one, two, tolerance=1e-5):
    assert one.keys() == two.keys()
    scale = max(float(g.abs().max()) for g in two.values())
    assert max(float((one[n] - two[n]).abs().max()) for n in two) < tolerance * max(scale, 1.0)


def native(policy, rollout, grad=False):
    """Log-probs by the model's own forward pass, one row at a time, prompt and answer unpadded."""
    rows = [_alone(policy, rollout, i, grad) for i in range(len(rollout))]
    return torch.nn.utils.rnn.pad_sequence([*rows, rollout.logprob[0]], batch_first=True)[:-1]


def _alone(policy, rollout, i, grad):
    prompt = {k: v for k, v in rollout.cond[int(rollout.group[i])].items() if k != "places"}
    n = int(rollout.mask[i].sum())
    answer = rollout.sample[i : i + 1, :n]
    fill = {"input_ids": answer, "attention_mask": 1, "mm_token_type_ids": 0}
    fill["token_type_ids"] = int(policy.net.config.model_type == "paligemma")
    longer = {
        k: torch.cat([prompt[k], torch.zeros_like(answer) + fill[k]], 1)
        for k in fill.keys() & prompt
    }
    if (crossed := prompt.get("cross_attention_mask")) is not None:  # as the last of the prompt
        last = crossed[:, -1:].expand(-1, n, -1, -1)
        longer["cross_attention_mask"] = torch.cat([crossed, last], 1)
    with torch.set_grad_enabled(grad):
        logits = policy.net.hf(**prompt | longer, use_cache=False).logits[:, -n - 1 : -1]
        return Categorical(policy.warp(logits, keep=answer)).log_prob(answer)[0]


def test_greedy_answers_are_those_of_generate():
    policy = policy_of("gemma3")
    with policy.evaluating():
        rollout = rolled(policy, copies=1)
    for encoded, ids, mask in zip(rollout.cond, rollout.sample, rollout.mask, strict=True):
        wanted = policy.net.hf.generate(
            **{k: v for k, v in encoded.items() if k != "places"},
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=list(policy.inputs.suppressed),
            eos_token_id=list(policy.inputs.stops),
            pad_token_id=policy.inputs.pad,
        )[0, encoded["input_ids"].shape[1] :]
        assert ids[mask].tolist() == wanted.tolist()


def test_pictures_past_the_cache_are_read_once_for_all_answers(monkeypatch):
    """Samples, log-probs and gradients of uneven groups, with pictures and without, are those of a
    pass for every answer; also where rows make room for others."""
    from transformers.models.mllama.modeling_mllama import MllamaTextRMSNorm

    monkeypatch.setattr(MllamaTextRMSNorm, "forward", tiny_vlms.exact_norm)
    image = tiny_vlms.image
    given = [
        {"text": "what?", "images": [image(60, 50, 0)]},
        {"text": "hello"},
        {"text": "these?", "images": [image(120, 50, 1), image(56, 56, 2)]},
        {"text": "and this, say?", "images": [image(56, 180, 3)]},
        {"text": "no picture here"},
    ]
    shared = policy_of("mllama")
    apart = policy_of("mllama", prefix_sharing="none")
    for policy in (shared, apart):
        policy.net.double()
        policy.ending = replace(policy.ending, stops=tuple(range(0, 256, 8)))
    rollout = rolled(shared, given, copies=[3, 2, 4, 2, 1])
    assert len(set(rollout.mask.sum(1).tolist())) > 2
    assert torch.equal(rolled(apart, given, copies=[3, 2, 4, 2, 1]).sample, rollout.sample)
    scores, alone = (logprobs(policy, rollout).detach() for policy in (shared, apart))
    for other in (alone, rollout.logprob):
        torch.testing.assert_close(scores[rollout.mask], other[rollout.mask], atol=1e-12, rtol=0)
    # answers to texts have a gradient of zero in the tower, on which other processes wait
    for rows in (slice(None), slice(3, 5)):
        expected = gradient(apart, rollout[rows], share=False)
        assert_near(gradient(shared, rollout[rows]), expected, 1e-12)
        assert len(expected) == len(list(shared.net.parameters()))
    shared.refill = "longest"
    shared.pass_sizes.rows = 3
    again = rolled(shared, given, copies=[3, 2, 4, 2, 1])
    assert torch.equal(again.sample, rollout.sample)
    torch.testing.assert_close(again.logprob, rollout.logprob, atol=1e-12, rtol=0)


def test_another_engine_is_measured_against_the_policys_own_passes():
    other = policy_of(engine="hf", temperature=0.8, top_k=20)
    own = rolled(policy_of(temperature=0.8, top_k=20))
    rollout = rolled(other)
    assert torch.equal(rollout.sample, own.sample) and own.provenance.sampler_logprob is None
    theirs = rollout.provenance.sampler_logprob
    torch.testing.assert_close(theirs, own.logprob, atol=2e-5, rtol=1e-5)
    scored = logprobs(other, rollout).detach()
    torch.testing.assert_close(rollout.logprob, scored, atol=1e-6, rtol=1e-6)
    gap = (theirs - rollout.logprob)[rollout.mask].abs().mean()
    assert other.measures()["engine/gap"] == pytest.approx(float(gap)) and gap < 1e-5


def test_a_prompt_is_encoded_once_and_forgotten_when_there_is_no_room():
    given = prompts()
    calls = []
    one = policy_of()
    take = one.inputs.take
    one.inputs.take = lambda prompt: calls.append(prompt["text"]) or take(prompt)
    first = rolled(one, given)
    again = rolled(one, given)
    assert len(calls) == 3 and torch.equal(first.sample, again.sample)
    rolled(one, prompts())
    assert len(calls) == 6, "other objects, which might differ"
    one.recent = Recent(one.recent.entries.currsize // 2 - 1)
    rolled(one, prompts())
    assert 0 < len(one.recent.entries) < 3


def test_answers_end_and_finished_rows_leave(policy, monkeypatch):
    policy = copy.copy(policy)
    policy.checked = True  # the comparison with the class would be counted too
    policy.ending = replace(policy.ending, tokens=20, stops=tuple(range(0, 300, 9)))
    sizes = []
    step = type(policy.net).step
    counted = lambda net, ids, *given: sizes.append(len(ids)) or step(net, ids, *given)  # noqa: E731
    monkeypatch.setattr(type(policy.net), "step", counted)
    before = policy.report.forwards
    rollout = rolled(policy, copies=6)
    assert policy.report.forwards - before == int(rollout.mask.sum())
    stopped = torch.isin(rollout.sample, torch.tensor(policy.ending.stops)) & rollout.mask
    assert (stopped.sum(1) <= 1).all() and stopped.any()
    for i, n in enumerate((rollout.mask.sum(1) - 1).tolist()):
        assert stopped[i, n] or n == 19
        assert rollout.mask[i, : n + 1].all()
        assert (rollout.sample[i, n + 1 :] == policy.ending.pad).all()
    assert sizes[0] == 18 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 18
    scored = logprobs(policy, rollout).detach()
    torch.testing.assert_close(scored, rollout.logprob, atol=1e-5, rtol=1e-5)
    texts = policy.decode(rollout)
    assert [text.tokens for text in texts] == rollout.mask.sum(1).tolist()
    assert [text.finished for text in texts] == stopped.any(1).tolist()
    mean = float(rollout.logprob[0][rollout.mask[0]].mean())
    # a mean in another order: 3 units of float32 seen
    assert texts[0].logprob == pytest.approx(mean, rel=2e-6)


def test_a_stop_string_ends_an_answer():
    plain = policy_of(max_new_tokens=24)
    policy = policy_of(max_new_tokens=24, stop=["e", "B"])
    free, rollout = (rolled(p, copies=8) for p in (plain, policy))
    texts = policy.decode(rollout)
    assert any(text.finished and any(s in text for s in "eB") for text in texts)
    for before, after in zip(plain.decode(free), texts, strict=True):
        at = min((i for i in (before.find("e"), before.find("B")) if i >= 0), default=None)
        assert after == (before if at is None else before[: at + 1])


# --------------------------------------------------------------------------------------------------
# the distribution


def test_log_prob_entropy_and_kl_are_those_of_the_whole_distribution(monkeypatch):
    policy = policy_of()
    rollout = rolled(policy)
    point = point_of(policy, rollout)
    policy.weights.keep("before")
    inputs, rows = policy.collated(rollout.cond, rollout.group, each=False)
    plain = copy.deepcopy(policy.net)
    with torch.no_grad():
        for p in policy.net.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))

    def whole(net):
        hidden = net._shared(inputs, rows, rollout.sample)
        return Categorical(Warp(suppressed=policy.warp.suppressed)(net.logits(hidden)))

    # five positions a chunk
    monkeypatch.setattr(scores, "BYTES", 4 * policy.net.text_config.vocab_size * 5)
    live = policy.dist(point)
    with policy.weights.using("before"), torch.no_grad():
        before = policy.dist(point)
    wanted, old, mask = whole(policy.net), whole(plain), point.mask
    other = torch.where(mask, (point.target + 1) % 200, point.target)
    for found, expected in (
        (live.log_prob(point.target), wanted.log_prob(point.target)),
        (live.log_prob(other), wanted.log_prob(other)),
        (live.entropy(), wanted.entropy()),
        (live.kl(before), wanted.kl(old)),
        (policy.dist(point).entropy(), wanted.entropy()),  # with the pass now
    ):
        torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=1e-4)
    assert not live.entropy()[~mask].any() and not live.kl(before)[~mask].any()
    parameters = list(policy.net.parameters())
    for totals in (
        (live.entropy()[mask].sum(), wanted.entropy()[mask].sum()),
        (live.kl(before)[mask].sum(), wanted.kl(old)[mask].sum()),
    ):
        grads = [torch.autograd.grad(total, parameters, retain_graph=True) for total in totals]
        for one, two in zip(*grads, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)


def test_checkpointed_layers_give_the_same_gradient():
    policy = policy_of()
    rollout = rolled(policy)
    plain = gradient(policy, rollout)
    calls = []
    layer = policy.net.hf.base_model.language_model.layers[0].self_attn.q_proj
    hook = layer.register_forward_hook(lambda *_: calls.append(1))
    policy.enable_gradient_checkpointing()
    assert_near(gradient(policy, rollout), plain, 1e-7)
    hook.remove()
    assert len(calls) == 4, "prompt and answers, once forward and once more for the gradient"
    assert torch.equal(rolled(policy).sample, rollout.sample)
    assert not policy.net.training
    # older versions of transformers call this while answers are sampled too
    again = policy.net.hf.base_model.language_model.layers[0]._gradient_checkpointing_func
    with torch.no_grad(), patch.object(caches, "checkpoint", side_effect=AssertionError):
        assert again(len, [1, 2]) == 2


# --------------------------------------------------------------------------------------------------
# training


def trainer_of(policy, objective=None, lr=1.0, **sizes):
    def scorer(media, asked):
        lengths = [float(len(text) + text.count("a")) for text in media]
        return Rewards({"length": torch.tensor(lengths)})

    sizes = {"prompts_per_iteration": 3, "group_size": 4, "train_batch_size": 12} | sizes
    return Trainer(
        policy,
        prompts(),
        scorer,
        flow_grpo,
        objective or PolicyGradient(clip_range=0.2, kl=0.1),
        lambda p: torch.optim.SGD(p, lr=lr),
        TrainOptions(max_grad_norm=None, **{"iterations": 2, "micro_batch_size": 5} | sizes),
    )


def test_images_pass_the_tower_once_to_sample_once_to_score_once_for_the_reference():
    found = trainer_of(policy_of(), micro_batch_size=None).iterate()
    assert found["vlm/vision_passes"] == 3


def test_no_micro_batch_changes_the_gradient():
    found = []
    for micro_batch in (12, 5):
        policy = policy_of()
        before = policy.weights.full()
        trainer_of(policy, micro_batch_size=micro_batch).iterate()
        after = policy.weights.full()
        found.append({name: before[name] - after[name] for name in before})  # the gradient
    assert_near(*found)


def test_certainty_is_the_divergence_of_the_uniform_distribution_from_the_models():
    """Whatever the sampling: temperature and top-k change what is drawn and not what is
    recorded."""
    policy = policy_of(temperature=0.7, top_k=5, record_self_certainty=True)
    rollout = rolled(policy, prompts()[1:], copies=2)
    # [N, V], of all tokens
    full = policy.dist(point_of(policy, rollout))._head("full", Warp()).double()
    uniform = torch.full_like(full, 1 / full.shape[-1])
    where = rollout.mask
    recorded = rollout.tokens.self_certainty
    wanted = torch.zeros_like(recorded, dtype=torch.float64)
    wanted[where] = (uniform * (uniform.log() - full)).sum(-1).detach()
    torch.testing.assert_close(recorded[where].double(), wanted[where], atol=1e-5, rtol=1e-5)
    assert (recorded[where] > 0).all() and (recorded[~where] == 0).all()
    means = [float(row[mask].mean()) for row, mask in zip(wanted, where, strict=True)]
    found = self_certainty(policy.decode(rollout), [{}] * 4)
    assert found.tolist() == pytest.approx(means, abs=1e-5)


def letters(texts, prompts):
    """Share of small letters among eight tokens of a byte each."""
    return [sum("a" <= c <= "z" for c in text) / 8 for text in texts]


def test_a_few_iterations_raise_the_reward():
    asked = [{"text": "what is this?", "images": [tiny_vlms.image(56, 56, i)]} for i in range(2)]
    trainer = Trainer(
        policy_of(remove_padding=True),
        asked,
        Scorer({"letters": letters}),
        grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(prompts_per_iteration=2, group_size=16, train_batch_size=32, iterations=8),
    )
    found = [trainer.iterate()["reward/mean"] for _ in range(8)]
    assert found[0] < 0.3 and sum(found[-2:]) / 2 > found[0] + 0.3


def test_prompts_of_like_length_are_read_together():
    lengths = [40, 3, 38, 5, 36, 4]
    given = [{"text": "x" * n} for n in lengths]
    one = policy_of(fixed_batch_rows=4)
    whole = policy_of()
    sizes = []
    read = one.net.read
    one.checked = True  # the comparison with the class reads them too
    one.net.read = lambda inputs: sizes.append(tuple(inputs["input_ids"].shape)) or read(inputs)
    found = rolled(one, given, copies=2)
    wanted = rolled(whole, given, copies=2)
    assert torch.equal(found.sample, wanted.sample) and torch.equal(found.mask, wanted.mask)
    own = sorted((cond["input_ids"].shape[1] for cond in wanted.cond), reverse=True)
    assert sizes == [(2, own[0]), (2, own[2]), (2, own[4])]
