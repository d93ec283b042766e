"""A vision-language policy: prompts read once a group give the log-probs, gradients and samples of
separate passes."""

import copy
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from mmrl.advantages import flow_grpo
from mmrl.config.options import TrainOptions
from mmrl.core.distributions import Categorical
from mmrl.core.errors import UserError
from mmrl.core.registry import SURROGATES
from mmrl.core.types import Completion, Point, Rewards
from mmrl.objectives import PolicyGradient
from mmrl.objectives.terms.importance_sampling import Importance
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.recent import Recent
from mmrl.train.trainer import Trainer
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures import tiny_vlms

COPIES = 3
# three axes, windows; of all families this is tested in test_vlm_families.py
SHARED = ("qwen2_5_vl", "gemma3")


def prompts(family="qwen2_5_vl"):
    """One image; two images and more text; none."""
    image = tiny_vlms.image
    found = [
        {"text": "what is this?", "images": [image(70, 60, 0)]},
        {
            "text": "which of these two is the larger one?",
            "images": [image(120, 50, 1), image(56, 56, 2)],
        },
        {"text": "hello"},
    ]
    return (
        found[:1] + [{"text": "say so", "images": [image(56, 80, 3)]}]
        if family in SINGLE
        else found
    )


SINGLE = ("paligemma", "mllama")


@pytest.fixture(autouse=True, scope="module")
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


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


def test_the_best_of_several_is_chosen_among_different_answers():
    policy = policy_of(temperature=0.7)
    with policy.evaluating():
        assert policy.warp.temperature == 0
    policy.sample_in_evaluation()
    with policy.evaluating():
        assert policy.warp.temperature == 0.7


def rolled(policy, given=None, copies=COPIES, rng=None):
    with torch.no_grad():
        return policy.rollout(given or prompts(), copies, rng or Rng.of("vlm"))


def point_of(policy, rollout) -> Point:
    return next(iter(policy.path(rollout)))


def logprobs(policy, rollout):
    return policy.dist(point_of(policy, rollout)).log_prob(rollout.sample)


def gradient(policy, rollout, share=True):
    policy.net.zero_grad()
    kept = policy.net.share
    policy.net.share = share
    weights = torch.linspace(-1, 1, rollout.mask.numel()).view_as(rollout.logprob)
    (logprobs(policy, rollout) * weights).sum().backward()
    policy.net.share = kept
    found = {n: p.grad.clone() for n, p in policy.net.named_parameters() if p.grad is not None}
    policy.net.zero_grad()
    return found


def assert_near(one, two, tolerance=1e-5):
    assert one.keys() == two.keys()
    scale = max(float(g.abs().max()) for g in two.values())
    assert max(float((one[n] - two[n]).abs().max()) for n in two) < tolerance * max(scale, 1.0)


def native(policy, rollout):
    """Log-probs by the model's own forward pass, one row at a time, prompt and answer unpadded."""
    found = torch.zeros_like(rollout.logprob)
    for i in range(len(rollout)):
        prompt = dict(rollout.cond[int(rollout.group[i])])
        n = int(rollout.mask[i].sum())
        prompt.pop("places")
        answer = rollout.sample[i : i + 1, :n]
        fill = {"attention_mask": 1, "mm_token_type_ids": 0, "token_type_ids": 0}
        more = {
            k: torch.cat([prompt[k], torch.full_like(answer, v)], 1)
            for k, v in fill.items()
            if k in prompt
        }
        if (crossed := prompt.get("cross_attention_mask")) is not None:
            more["cross_attention_mask"] = torch.cat(
                [crossed, crossed[:, -1:].expand(-1, n, -1, -1)], 1
            )
        ids = torch.cat([prompt["input_ids"], answer], 1)
        with torch.no_grad():
            logits = policy.net.hf(**prompt | more | {"input_ids": ids}, use_cache=False).logits[
                :, -n - 1 : -1
            ]
        found[i, :n] = Categorical(policy.warp(logits, keep=answer)).log_prob(answer)[0]
    return found


# --------------------------------------------------------------------------------------------------
# every family


@pytest.mark.parametrize("family", SHARED)
def test_shared_prompts_give_the_log_probs_and_gradients_of_separate_passes(family):
    policy = policy_of(family, temperature=0.8)
    rollout = rolled(policy, prompts(family))
    shared = logprobs(policy, rollout)
    torch.testing.assert_close(shared.detach(), native(policy, rollout), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared.detach(), rollout.logprob, atol=1e-5, rtol=1e-5)
    for i in (0, COPIES + 1):  # one row alone
        torch.testing.assert_close(
            logprobs(policy, rollout[i : i + 1]), shared[i : i + 1], atol=1e-5, rtol=1e-5
        )
    assert_near(gradient(policy, rollout), gradient(policy, rollout, share=False))


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3", "mllama"])
def test_greedy_answers_are_those_of_generate(family):
    policy = policy_of(family)
    with policy.evaluating(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the family that is not shared
        rollout = rolled(policy, prompts(family), copies=1)
    for encoded, ids, mask in zip(rollout.cond, rollout.sample, rollout.mask, strict=True):
        given = {k: v for k, v in encoded.items() if k != "places"}
        wanted = policy.net.hf.generate(
            **given,
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=list(policy.inputs.suppressed),
            eos_token_id=list(policy.inputs.stops),
            pad_token_id=policy.inputs.pad,
        )[0, encoded["input_ids"].shape[1] :]
        assert ids[mask].tolist() == wanted.tolist()


def test_a_family_that_cannot_share_says_so_and_samples_the_same_way(monkeypatch):
    from mmrl.policies.vlm import self_check

    monkeypatch.setattr(self_check, "shareable", lambda hf: False)
    policy = policy_of("mllama")
    with pytest.warns(UserWarning, match="read once for every answer"):
        rollout = rolled(policy, prompts("mllama"), copies=2)
    torch.testing.assert_close(
        logprobs(policy, rollout).detach(), rollout.logprob, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(rollout.logprob, native(policy, rollout), atol=1e-5, rtol=1e-5)


def test_a_family_is_compared_before_it_shares(monkeypatch):
    one = policy_of()
    rolled(one, copies=1)
    assert one.net.share
    two = policy_of()
    shared = two.net._shared  # of a family that shares wrongly
    monkeypatch.setattr(two.net, "_shared", lambda *given: shared(*given).roll(1, 1))
    with pytest.warns(UserWarning, match="not exact"):
        rolled(two, copies=1)
    assert not two.net.share


def test_own_sampling_is_that_of_transformers(policy):
    other = policy_of(prefix_sharing="none")
    own = rolled(policy)
    plain = rolled(other)
    assert torch.equal(own.sample, plain.sample) and torch.equal(own.mask, plain.mask)
    torch.testing.assert_close(own.logprob, plain.logprob, atol=1e-5, rtol=1e-5)


def test_prompts_of_unlike_numbers_of_images_are_read_apart_where_the_family_needs_it():
    """Mllama; and what is scored before anything was sampled is read the right way too."""
    image = tiny_vlms.image
    pair = {"text": "which?", "images": [image(56, 56, 4), image(56, 80, 5)]}
    given = [*prompts("mllama")[:1], pair, *prompts("mllama")[1:]]
    policy = policy_of("mllama")
    fresh = policy_of("mllama")
    rollout = rolled(policy, given, copies=2)
    torch.testing.assert_close(rollout.logprob, native(policy, rollout), atol=1e-5, rtol=1e-5)
    scored = logprobs(fresh, rollout)
    torch.testing.assert_close(scored.detach(), rollout.logprob, atol=1e-5, rtol=1e-5)
    policy.pass_sizes.rows = 3
    assert torch.equal(rolled(policy, given, copies=2).sample, rollout.sample)


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


def test_another_engine_is_measured_against_the_policys_own_passes(policy):
    other = policy_of(engine="hf", temperature=0.8, top_k=20)
    own = rolled(policy_of(temperature=0.8, top_k=20))
    other.measures()
    rollout = rolled(other)
    assert torch.equal(rollout.sample, own.sample) and own.provenance.sampler_logprob is None
    torch.testing.assert_close(
        rollout.provenance.sampler_logprob, own.logprob, atol=2e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        rollout.logprob, logprobs(other, rollout).detach(), atol=1e-6, rtol=1e-6
    )
    gap = (rollout.provenance.sampler_logprob - rollout.logprob)[rollout.mask].abs().mean()
    assert other.measures()["engine/gap"] == pytest.approx(float(gap)) and gap < 1e-5
    weight = Importance(cap=5.0).weight(point_of(other, rollout))
    torch.testing.assert_close(
        weight[rollout.mask], torch.ones(int(rollout.mask.sum())), atol=1e-4, rtol=0
    )


# -----------------------------------------------------------------------------------------------
# prompts and answers


def test_a_prompt_is_encoded_once_and_forgotten_when_there_is_no_room(policy):
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
    one.recent.entries.clear()
    rolled(one, prompts())
    one.recent = Recent(one.recent.entries.currsize - 1)
    rolled(one, prompts())
    assert 0 < len(one.recent.entries) < 3


def test_an_image_changes_its_own_rows_only(policy):
    rollout = rolled(policy)
    other = prompts()
    other[1]["images"][1] = tiny_vlms.image(56, 56, 99)
    seen = rolled(policy, other, copies=1)
    changed = logprobs(policy, rollout.replace(cond=seen.cond)) - logprobs(policy, rollout)
    moved = changed.abs().amax(1) > 1e-3
    assert moved.tolist() == (rollout.group == 1).tolist()


def test_a_text_among_images_is_itself(policy):
    rollout = rolled(policy)
    mine = rollout.group == 2
    alone = rolled(policy, prompts()[2:], rng=Rng(Rng.of("vlm").key, offset=2))
    assert torch.equal(alone.sample, rollout.sample[mine])
    torch.testing.assert_close(alone.logprob, rollout.logprob[mine], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 4])
def test_no_width_changes_a_sample(policy, width):
    whole = rolled(policy)
    policy.pass_sizes.rows = width
    parts = rolled(policy)
    policy.pass_sizes.rows = None
    assert torch.equal(whole.sample, parts.sample) and torch.equal(whole.mask, parts.mask)
    torch.testing.assert_close(whole.logprob, parts.logprob, atol=1e-5, rtol=1e-5)


def test_every_image_is_seen_once_a_group(policy):
    seen = []
    hook = policy.net.hf.base_model.visual.register_forward_pre_hook(
        lambda m, a, k: seen.append(k), with_kwargs=True
    )
    rollout = rolled(policy)
    logprobs(policy, rollout)
    hook.remove()
    assert [len(one["grid_thw"]) for one in seen] == [3, 3], (
        "three images, once to sample and once to score"
    )


def test_a_video_is_sampled_from_and_scored(policy):
    given = [
        {"text": "when?", "video": tiny_vlms.video(4, seed=i), "fps": 2.0} for i in range(2)
    ] + prompts()[:1]
    rollout = rolled(policy, given)
    torch.testing.assert_close(
        logprobs(policy, rollout).detach(), native(policy, rollout), atol=1e-5, rtol=1e-5
    )
    with torch.no_grad():
        moved = (
            logprobs(policy, rollout.replace(cond=[rollout.cond[1], *rollout.cond[1:]]))
            - rollout.logprob
        )
    assert (moved.abs().amax(1) > 1e-3).tolist() == (rollout.group == 0).tolist()


def test_answers_end_and_finished_rows_leave(policy, monkeypatch):
    policy = copy.copy(policy)
    policy.ending = replace(policy.ending, tokens=20, stops=tuple(range(0, 300, 9)))
    sizes = []
    step = type(policy.net).step
    monkeypatch.setattr(
        type(policy.net),
        "step",
        lambda net, ids, *given: sizes.append(len(ids)) or step(net, ids, *given),
    )
    rollout = rolled(policy, copies=6)
    stopped = torch.isin(rollout.sample, torch.tensor(policy.ending.stops)) & rollout.mask
    assert (stopped.sum(1) <= 1).all() and stopped.any()
    last = rollout.mask.sum(1) - 1
    for i, n in enumerate(last.tolist()):
        assert stopped[i, n] or n == 19
        assert (
            rollout.mask[i, : n + 1].all()
            and (rollout.sample[i, n + 1 :] == policy.ending.pad).all()
        )
    assert sizes[0] == 18 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 18
    torch.testing.assert_close(
        logprobs(policy, rollout).detach(), rollout.logprob, atol=1e-5, rtol=1e-5
    )
    texts = policy.decode(rollout)
    assert all(isinstance(text, Completion) for text in texts)
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


def test_truncated_sampling_is_scored_as_it_sampled():
    policy = policy_of(temperature=0.3, top_k=20, top_p=0.9)
    rollout = rolled(policy)
    scored = logprobs(policy, rollout)
    assert scored[rollout.mask].isfinite().all()
    torch.testing.assert_close(scored.detach(), rollout.logprob, atol=2e-5, rtol=1e-5)
    suppressed = torch.tensor(policy.inputs.suppressed)
    assert not torch.isin(rollout.sample[rollout.mask], suppressed).any()


# -------------------------------------------------------------------------------------------------
# the distribution


def test_log_prob_entropy_and_kl_are_those_of_the_whole_distribution(policy, monkeypatch):
    from mmrl.policies import scores

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
    wanted = whole(policy.net)
    old = whole(plain)
    mask = point.mask
    near = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(
        live.log_prob(point.target)[mask], wanted.log_prob(point.target)[mask], **near
    )
    torch.testing.assert_close(live.entropy()[mask], wanted.entropy()[mask], **near)
    torch.testing.assert_close(live.kl(before)[mask], wanted.kl(old)[mask], **near)
    # with the pass now
    torch.testing.assert_close(policy.dist(point).entropy()[mask], wanted.entropy()[mask], **near)
    assert not live.entropy()[~mask].any() and not live.kl(before)[~mask].any()
    other = torch.where(mask, (point.target + 1) % 200, point.target)
    shifted = live.log_prob(other)[mask]
    torch.testing.assert_close(shifted, wanted.log_prob(other)[mask], **near)
    for name in ("entropy", "kl"):
        totals = [
            getattr(d, name)(*([o] if name == "kl" else []))[mask].sum()
            for d, o in ((live, before), (wanted, old))
        ]
        parameters = list(policy.net.parameters())
        for one, two in zip(
            *(torch.autograd.grad(t, parameters, retain_graph=True) for t in totals), strict=True
        ):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)
    policy.weights.load(policy.weights.full("before"))
    policy.entropies = False


def test_only_decisions_go_through_the_head(policy):
    rollout = rolled(policy)
    mask = rollout.mask & (torch.arange(8) == 2)
    counts = []
    head = policy.net.hf.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, given: counts.append(given[0].shape[0]))
    found = policy.dist(point_of(policy, rollout.replace(mask=mask))).log_prob(rollout.sample)
    hook.remove()
    assert sum(counts) == int(mask.sum())
    torch.testing.assert_close(found[mask], rollout.logprob[mask], atol=1e-5, rtol=1e-5)


def test_scoring_and_sampling_leave_the_global_generator_alone(policy):
    before = torch.get_rng_state()
    gradient(policy, rolled(policy))
    assert torch.equal(before, torch.get_rng_state())


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


def trainer_of(policy, seen=None, objective=None, lr=1.0, **sizes):
    def scorer(media, asked):
        return Rewards(
            {"length": torch.tensor([float(len(text) + text.count("a")) for text in media])}
        )

    options = {
        "prompts_per_iteration": 3,
        "group_size": 4,
        "train_batch_size": 12,
        "iterations": 2,
        "micro_batch_size": 5,
    } | sizes
    return Trainer(
        policy,
        prompts(),
        scorer,
        flow_grpo,
        objective or PolicyGradient(clip_range=0.2, kl=0.1),
        lambda p: torch.optim.SGD(p, lr=lr),
        TrainOptions(max_grad_norm=None, **options),
    )


def test_the_first_ratio_is_one_and_training_changes_the_weights():
    policy = policy_of()
    before = policy.weights.full()
    found = trainer_of(policy).iterate()
    assert found["clip_fraction"] == 0 and found["ratio/max_deviation"] < 1e-4
    after = policy.weights.full()
    assert sum(not torch.equal(before[n], after[n]) for n in before) > 0.9 * len(before)


def test_gspo_at_its_published_clip_cuts_nothing_while_the_weights_stay():
    """At learning rate 0 no ratio has moved. Against the cached decoder's log-probs in half
    precision it would have: within some ten tokens one is rounded in another way."""
    found = {}
    for again in (False, "auto"):
        policy = policy_of(dtype="bfloat16", lora=2, max_new_tokens=20)
        objective = PolicyGradient(surrogate=SURROGATES["gspo"])
        sizes = {
            "prompts_per_iteration": 2,
            "group_size": 6,
            "train_batch_size": 4,
            "micro_batch_size": 4,
            "epochs": 2,
        }
        trainer = trainer_of(
            policy, objective=objective, lr=0.0, recompute_old_logprob=again, **sizes
        )
        found[again] = trainer.iterate()["clip_fraction"]
    assert found["auto"] == 0 < found[False]


def test_the_gate_in_half_precision_looks_at_the_mean():
    """Weights in bfloat16 pass; samples of other weights do not, and neither does their rounding in
    float32."""
    policy = policy_of(dtype="bfloat16", lora=2, max_new_tokens=16)
    found = trainer_of(policy).iterate()
    assert found["ratio/max_deviation"] > 1e-4 and found["skipped_steps"] == 0
    assert trainer_of(policy_of(), precision="bf16").iterate()["skipped_steps"] == 0
    for one in (policy, policy_of()):
        rollout = one.rollout
        gap = 0.05 if one is policy else 1e-3
        one.rollout = lambda *given, own=rollout, gap=gap: (r := own(*given)).replace(
            logprob=r.logprob - gap
        )
        with pytest.raises(UserError, match="on average" if one is policy else "at most"):
            trainer_of(one).iterate()


def test_images_pass_the_tower_once_to_sample_once_to_score_once_for_the_reference():
    found = trainer_of(policy_of(), micro_batch_size=None).iterate()
    assert found["vlm/vision_passes"] == 3


def test_no_micro_batch_changes_the_gradient():
    found = []
    for micro_batch in (12, 5, 1):
        policy = policy_of()
        before = policy.weights.full()
        trainer_of(policy, micro_batch_size=micro_batch).iterate()
        after = policy.weights.full()
        found.append({name: before[name] - after[name] for name in before})  # the gradient
    for other in found[1:]:
        assert_near(other, found[0])


def test_adapters_are_trained_and_exported(tmp_path):
    policy = policy_of(lora=2)
    assert all("lora_" in name for name in policy.weights.parameters())
    trainer = trainer_of(policy)
    trainer.iterate()
    policy.export(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file() and (
        tmp_path / "tokenizer.json"
    ).is_file()


def test_an_exported_model_is_the_same(tmp_path):
    policy = policy_of("gemma3")
    with torch.no_grad():
        for p in policy.net.parameters():
            p.mul_(1.1)
    rollout = rolled(policy)
    policy.export(tmp_path)
    again = VLM(str(tmp_path), max_new_tokens=8, coordinate_space="original")
    seen = rolled(again)
    assert torch.equal(seen.sample, rollout.sample) and torch.equal(seen.logprob, rollout.logprob)
    assert [c["input_ids"].tolist() for c in seen.cond] == [
        c["input_ids"].tolist() for c in rollout.cond
    ]


def test_half_precision_weights_sample_and_score():
    policy = policy_of(dtype="bfloat16")
    rollout = rolled(policy)
    gap = (logprobs(policy, rollout).detach() - rollout.logprob)[rollout.mask].abs()
    assert rollout.logprob.dtype == torch.float32 and gap.mean() < 0.02


@pytest.mark.parametrize("share", ["auto", "none"])
def test_certainty_is_the_divergence_of_the_uniform_distribution_from_the_models(share):
    """Whatever the sampling: here temperature and top-k change what is drawn and not what is
    recorded."""
    policy = policy_of(temperature=0.7, top_k=5, record_self_certainty=True, prefix_sharing=share)
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
    for answer, row, mask in zip(policy.decode(rollout), wanted, where, strict=True):
        assert answer.self_certainty == pytest.approx(float(row[mask].mean()), abs=1e-5)
    from rewards import self_certainty

    assert self_certainty(policy.decode(rollout), [{}] * 4).tolist() == [
        a.self_certainty for a in policy.decode(rollout)
    ]
    silent = rollout.replace(trajectory=rollout.tokens.replace(self_certainty=None))
    assert policy_of().decode(silent)[0].self_certainty is None


def test_forwards_are_rows_of_the_network_one_for_every_token_drawn():
    """A budget of forwards ends a run only if they are counted."""
    policy = policy_of()
    with torch.no_grad():
        rollout = policy.rollout([{"text": "how many?"}, {"text": "what is it?"}], 2, Rng.of(1))
        assert policy.report.forwards == int(rollout.mask.sum()) > 4
        policy.dist(next(iter(policy.path(rollout))))
    assert policy.report.forwards == int(rollout.mask.sum()) + 4
