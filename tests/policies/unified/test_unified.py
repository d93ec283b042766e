"""Plans, images and answers in one Janus: exact by enumeration on a tiny instance of transformers'
own class."""

import itertools
import json
import warnings
from functools import partial

import pytest
import torch

from mmrl.advantages import dr_grpo, flow_grpo, grpo
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.data.vision.paired import Paired
from mmrl.policies.vlm.policy import VLM
from mmrl.train.minibatches import loss_weights
from mmrl.train.trainer import Trainer
from mmrl.zoo.advantages import pairs, tree_mean
from mmrl.zoo.models.image_tokens.janus import Janus
from mmrl.zoo.models.unified.policy import JanusUnified
from mmrl.zoo.models.unified.prompts import Answer, Plan
from mmrl.zoo.objectives import Unified
from mmrl.zoo.objectives.unified import Steered, SteeredEntropy
from rewards import ByTask
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures import tiny_vlms
from tests.fixtures.image_tokens import every, flat_grad, tiny_janus
from tests.fixtures.records import make_point, make_rollout

TEXT = {"text": "a red seven"}
TEXTS = [TEXT, {"text": "a blue two left of a green nine"}]
ASKED = {"text": "which digit?", "image": tiny_vlms.image(28, 28), "answer": "7"}
# image tokens to choose from, and words of a plan
VOCAB = 2
WORDS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A complete folder of the real class: two image tokens to choose from, four to an image."""
    # the text head is scaled too: not sure of anything
    return tiny_janus(tmp_path_factory.mktemp("unified"), VOCAB, embeddings=0.2)


@pytest.fixture
def make(folder):
    def make(double=True, words=None, **options):
        """``words``: the plan is of these letters and what ends it."""
        plan = options.pop("plan", {})
        if plan is not None:
            plan = {"instruction": "{prompt}!", "max_new_tokens": WORDS} | plan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = JanusUnified(folder, plan=plan and Plan(**plan), **options)
        policy.net.to(torch.float64 if double else torch.float32)
        if words:
            head = policy.heads["plan"]
            stop = policy.stops["plan"][-1]
            allowed = {*policy.processor.tokenizer.convert_tokens_to_ids(list(words)), stop}
            banned = tuple(set(range(policy.net.config.text_config.vocab_size)) - allowed)
            head.warp = Warp(head.warp.temperature, head.warp.top_k, head.warp.top_p, banned)
        return policy

    return make


def sequences(policy, words="ab"):
    """[S, W + 4] every plan of two words with every image."""
    a, b, stop = (
        *policy.processor.tokenizer.convert_tokens_to_ids(list(words)),
        policy.stops["plan"][-1],
    )
    plans = [[stop, -1], [a, stop], [b, stop], *map(list, itertools.product((a, b), repeat=2))]
    images = every(VOCAB, 4)
    text = torch.tensor(plans).repeat_interleave(len(images), 0)
    return torch.cat([text, images.repeat(len(plans), 1)], 1)


def at(policy, ids, prompt):
    group = torch.zeros(len(ids), dtype=torch.long)
    mask = ids >= 0
    return make_point(
        group=group, cond=policy.encode([prompt]), row_id=group, state=ids, target=ids, mask=mask
    )


def logp(policy, ids, prompt=TEXT):
    return policy.dist(at(policy, ids, prompt)).log_prob(ids).sum(1)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.0},
        {"guidance_scale": 3.0, "temperature": 0.7, "plan": {"turn": "new", "temperature": 1.4}},
        {"guidance_scale": 2.0, "top_p": 0.8, "plan": {"top_k": 2}},
    ],
    ids=str,
)
def test_what_can_be_sampled_sums_to_1_and_comes_at_the_rate_of_its_score(make, options):
    policy = make(words="ab", **options)
    ids = sequences(policy)
    copies = 1000
    with torch.no_grad():
        p = logp(policy, ids).exp()
        possible = torch.ones(len(ids), dtype=torch.bool)
        for part in policy.dist(at(policy, ids, TEXT)).parts:
            whole = policy.net(part.policy.prefix + "full", part.hidden, part.warp)
            there = whole.gather(1, ids[part.where][:, None])[:, 0].isfinite()
            every_token = torch.ones_like(ids, dtype=torch.bool)
            possible &= every_token.masked_scatter(part.where, there).all(1)
        rollout = policy.rollout([TEXT], copies, Rng.of("frequencies"))
    truncated = {"top_k", "top_p"} & set(options)
    assert 1 < possible.sum() < len(ids) if truncated else possible.all()
    p = p * possible
    assert abs(p.sum() - 1) < 1e-12
    index = (rollout.sample[:, None] == ids).all(2).long().argmax(1)
    torch.testing.assert_close(rollout.logprob.sum(1).exp(), p[index], atol=1e-10, rtol=1e-8)
    counts = torch.bincount(index, minlength=len(ids))
    common = p * copies > 5
    chi = ((counts - p * copies) ** 2 / (p * copies))[common].sum()
    assert chi < common.sum() + 4 * (2 * common.sum()) ** 0.5


@pytest.mark.parametrize("kind", ["guided", "guided_stopgrad_uncond"])
def test_without_a_plan_it_is_janus(make, folder, kind):
    """Samples, scores, pictures and gradients."""
    options = {"guidance_scale": 3.0, "logprob_guidance": kind}
    policy, plain = make(plan=None, **options), Janus(folder, **options)
    plain.net.to(torch.float64)
    found, wanted = (one.rollout(TEXTS, 3, Rng.of("same")) for one in (policy, plain))
    assert torch.equal(found.sample, wanted.sample) and policy.tokens == 0
    torch.testing.assert_close(found.logprob, wanted.logprob, atol=1e-12, rtol=0)
    assert torch.equal(policy.decode(found), plain.decode(wanted))
    ids = every(VOCAB, 4)
    weight = torch.linspace(-1, 2, len(ids), dtype=torch.float64).sin()
    grads = [flat_grad(one, (weight * logp(one, ids)).sum()) for one in (policy, plain)]
    torch.testing.assert_close(*grads, atol=1e-10, rtol=1e-9)


MIXED = [*TEXTS, ASKED, {"text": "and what is 3 and 4?", "task": "understand", "answer": "7"}]


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 2.0, "plan": None},
        {"guidance_scale": 3.0, "plan": {"max_new_tokens": 6, "turn": "new", "images": 2}},
        {"guidance_scale": 2.0, "logprob_guidance": "conditional"},
    ],
    ids=str,
)
def test_token_by_token_is_all_at_once_with_ragged_prompts_of_both_tasks(make, options):
    policy = make(answer=Answer(max_new_tokens=4), **options)
    rollout = policy.rollout(MIXED, 4, Rng.of("ragged"))
    (point,) = policy.path(rollout)
    with torch.no_grad():
        whole = policy.dist(point).log_prob(point.target)
        torch.testing.assert_close(
            whole, torch.where(point.mask, rollout.logprob, 0.0), atol=1e-12, rtol=0
        )
        some = point[torch.tensor([13, 2, 9, 7, 0])]  # answers and images, twins apart
        alone = torch.cat(
            [policy.dist(some[i : i + 1]).log_prob(some.target[i : i + 1]) for i in range(5)]
        )
    torch.testing.assert_close(alone, torch.where(some.mask, some.logprob, 0.0), atol=1e-12, rtol=0)
    assert len({one["ids"].shape for one in rollout.cond}) == 4
    assert rollout.mask[:8, policy.tokens :].all() and not rollout.mask[8:, policy.tokens :].any()


def test_answers_are_those_of_the_vlm_policy(make, folder):
    policy = make(plan=None, answer=Answer(max_new_tokens=5))
    vlm = VLM(folder, max_new_tokens=5)
    vlm.net.to(torch.float64)
    rollout = policy.rollout([ASKED, MIXED[3]], 2, Rng.of("answers"))
    ids = rollout.sample[:, :5]
    point = make_point(
        group=rollout.group,
        cond=[vlm._encoded(p)[0] for p in (ASKED, MIXED[3])],
        row_id=rollout.row_id,
        state=ids.clamp_min(0),
        target=ids.clamp_min(0),
        mask=rollout.mask[:, :5],
    )
    with torch.no_grad():
        torch.testing.assert_close(
            vlm.dist(point).log_prob(point.target), rollout.logprob[:, :5], atol=1e-10, rtol=0
        )
    (first, *_) = policy.decode(rollout)
    assert first.tokens == int(rollout.mask[0].sum()) and rollout.prompts[0]["view"]["sizes"] == [
        [28, 28]
    ]


def test_the_head_is_that_of_the_next_token(make):
    """By hand: every word and the image's start come from lm_head, image tokens from the generation
    head."""
    policy = make(words="ab", guidance_scale=1.0)
    a = policy.processor.tokenizer.convert_tokens_to_ids("a")
    stop = policy.start
    ids = torch.tensor([[a, stop, 0, 1, 1, 0]])
    hf = policy.net.hf
    prompt = policy.encode([TEXT])[0]["ids"]
    assert stop == policy.stops["plan"][-1]
    with torch.no_grad():
        text = hf.get_input_embeddings()(torch.cat([prompt, ids[:, :2]], 1))
        image = hf.prepare_embeddings_for_image_generation(ids[:, 2:5])
        hidden = hf.model.language_model(
            inputs_embeds=torch.cat([text, image], 1)
        ).last_hidden_state[:, -6:]
        words = policy.heads["plan"].warp(hf.lm_head(hidden[:, :2])).log_softmax(-1)
        pictures = hf.model.generation_head(hidden[:, 2:]).log_softmax(-1)
        wanted = torch.cat(
            [words.gather(2, ids[:, :2, None]), pictures.gather(2, ids[:, 2:, None])], 1
        )[..., 0]
        found = policy.dist(at(policy, ids, TEXT)).log_prob(ids)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_a_new_turn_holds_the_plans_ids_between_its_words(make):
    policy = make(plan={"max_new_tokens": 4, "turn": "new"}, guidance_scale=1.0)
    text = torch.tensor([[7, 8, policy.stops["plan"][0], -1], [5, 6, 7, 8]])
    cond = policy.encode([TEXT])
    found = policy._leading(cond, torch.tensor([0, 0]), text)
    before = cond[0]["before"][0].tolist()
    after = cond[0]["after"][0].tolist()
    for row, kept in zip(found["ids"], ([7, 8], [5, 6, 7, 8])):
        expected = [*before, *kept, *after, policy.start]
        assert row.tolist()[-len(expected) :] == expected
    assert policy.processor.tokenizer.decode(before).endswith("a red seven. ")
    assert found["mask"].sum(1).diff() == 2


# ------------------------------------------------------------------------------------------------
# segments and trees


def gradient(policy, rollout, advantage, loss_agg_mode):
    """That of the trainer's weighted sum of REINFORCE losses."""
    (point,) = policy.path(rollout.replace(advantage=advantage.double()))
    terms = -point.advantage * policy.dist(point).log_prob(point.target)
    total = (terms * loss_weights(point, loss_agg_mode, 1)).sum() / len(rollout)
    return flat_grad(policy, total)


def test_a_segment_counts_by_its_mean(make):
    share = 0.2
    policy = make(
        guidance_scale=1.0,
        weigh="segment",
        text_share=share,
        plan={"max_new_tokens": 7},
        answer=Answer(max_new_tokens=3),
        words="abcdef",
    )
    rollout = policy.rollout([TEXT, ASKED], 3, Rng.of("segments"))
    terms = torch.arange(6 * 11, dtype=torch.float64).view(6, 11).sin()
    (point,) = policy.path(rollout)
    found = (terms * loss_weights(point, "seq_mean_token_mean", 1)).sum(1)
    length = rollout.mask[:, :7].sum(1)
    assert len(length[:3].unique()) > 1
    for row in range(6):
        text = terms[row, : length[row]].mean()
        wanted = share * text + (1 - share) * terms[row, 7:].mean() if row < 3 else text
        assert float(found[row]) == pytest.approx(float(wanted))


@pytest.mark.parametrize(("weigh", "turn"), [("token", "new"), ("segment", "same")])
def test_the_gradient_of_a_tree_is_the_average_of_its_samples(make, weigh, turn):
    """Shared decisions scored once, with the mean advantage of their images, against every sample
    in full."""
    plan = {"max_new_tokens": 5, "turn": turn}
    reward = torch.tensor([0.3, 1.0, -0.4, 0.0, 0.7, 0.1, 0.0, 0.9])
    tree = make(weigh=weigh, guidance_scale=2.0, plan=plan | {"images": 2})
    rollout = tree.rollout(TEXTS, 4, Rng.of("tree"))
    flat = make(weigh=weigh, guidance_scale=2.0, plan=plan)
    samples = rollout.replace(mask=rollout.sample >= 0, edge_id=None)
    rows = torch.arange(8)
    assert torch.equal(rollout.sample[::2, :5], rollout.sample[1::2, :5])
    assert not rollout.mask[1::2, :5].any() and rollout.mask[::2, 0].all()
    assert torch.equal(rollout.edge_id[:, 0], rows - rows % 2)
    loss_agg_mode = "token_sum" if weigh == "token" else "seq_mean_token_mean"
    found = gradient(tree, rollout, tree_mean(reward, rollout, base=dr_grpo), loss_agg_mode)
    wanted = gradient(flat, samples, dr_grpo(reward, samples), loss_agg_mode)
    # Llama's norms are in float32 throughout
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert wanted.abs().max() > 0.01


def test_a_plan_is_judged_by_those_of_its_images_that_have_a_reward(make):
    reward = torch.tensor([0.0, 1.0, 3.0, 3.0])
    rollout = make(plan={"images": 2}).rollout([TEXT], 4, Rng.of("advantage"))
    found = tree_mean(reward, rollout, base=dr_grpo, siblings=True)
    torch.testing.assert_close(found[:, 0], torch.tensor([-1.25, -1.25, 1.25, 1.25]))
    torch.testing.assert_close(found[:, -1], torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    whole = tree_mean(reward.index_fill(0, torch.tensor([0]), torch.nan), rollout, base=dr_grpo)
    assert whole[0, -1].isnan() and whole[0, 0].isfinite()


# -------------------------------------------------------------------------------------------------
# training both tasks


def score(media, prompts):
    bright = [
        m.mean() if isinstance(m, torch.Tensor) else torch.tensor(m.count("e") + len(m) / 7.0)
        for m in media
    ]
    return Rewards({"bright": torch.stack([b.double() for b in bright])})


@pytest.mark.parametrize(
    "options", [{"plan": {"max_new_tokens": 5, "images": 2}, "weigh": "segment"}, {"lora": 2}]
)
def test_both_tasks_train_in_one_batch(make, options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = make(double=False, guidance_scale=3.0, answer=Answer(max_new_tokens=4), **options)
    before = policy.weights.full()
    objective = Unified(kl=0.1, steer_text=Steered(target=2.0), steer_image=Steered(target=0.5))
    sizes = TrainOptions(2, 4, 8, 2, micro_batch_size=3, max_grad_norm=None)
    trainer = Trainer(
        policy, MIXED[1:3], score, tree_mean, objective, lambda p: torch.optim.SGD(p, lr=0.5), sizes
    )
    first = trainer.iterate()
    assert first["clip_fraction"] == 0 and first["ratio/max_deviation"] < 1e-4
    assert first["entropy/text"] > 1 and 0 < first["entropy/image"] < 0.7
    after = policy.weights.full()
    moved = sum(not torch.equal(before[n], after[n]) for n in before) / len(before)
    assert moved >= (0.5 if "lora" in options else 0.9)
    second = trainer.iterate()
    assert second["ratio/max_deviation"] < 1e-4 and second["kl"] > 0
    assert second["entropy_weight/image"] != 0


def test_steered_entropies_follow_their_targets(make):
    """alpha rises while the entropy is above its target, within bounds, and its gradient is that of
    alpha H."""
    objective = Unified(
        steer_text=Steered(target=2.0, rate=1e-3, rule="plain"),
        steer_image=Steered(target=1.0, rate=1.0, most=0.01),
    )
    alpha = objective.term(SteeredEntropy).alpha
    objective.adapt(0, metrics := {"entropy/text": 3.0, "entropy/image": 0.5})
    assert metrics["entropy_weight/text"] == pytest.approx(torch.tensor(1e-3).sinh().item())
    assert metrics["entropy_weight/image"] == pytest.approx(-0.01)
    again = Unified(steer_text=Steered(target=2.0), steer_image=Steered(target=1.0, most=0.01))
    again.load_state_dict(objective.state_dict())
    assert again.term(SteeredEntropy).alpha("text") == alpha("text")
    policy = make(guidance_scale=2.0, words="ab")
    rollout = policy.rollout([TEXT], 3, Rng.of("entropy")).replace(advantage=torch.zeros(3, 1))
    (point,) = policy.path(rollout)
    found = flat_grad(policy, (objective.loss(policy, point) * point.mask).sum())
    entropy = policy.dist(point).entropy()
    weight = torch.where(point.modality == 0, alpha("text"), alpha("image")) * point.mask
    torch.testing.assert_close(
        found, flat_grad(policy, (entropy * weight).sum()), atol=1e-8, rtol=0
    )


def test_the_published_rule_is_adam_also_after_a_resume():
    entropies = [3.0, 2.5, 1.0, 1.9, 4.0]
    psi = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([psi], lr=1e-3)
    objective = Unified(steer_text=Steered(target=2.0, rate=1e-3, most=1.0))
    for i, entropy in enumerate(entropies):
        adam.zero_grad()
        (-psi * (entropy - 2.0)).sum().backward()
        adam.step()
        objective.adapt(i, {"entropy/text": entropy})
        again = Unified(steer_text=Steered(target=2.0, rate=1e-3, most=1.0))
        again.load_state_dict(json.loads(json.dumps(objective.state_dict())))
        objective = again
        assert objective.term(SteeredEntropy).psi["text"] == pytest.approx(float(psi), abs=1e-9)


def test_what_does_not_fit_is_refused(make):
    with pytest.raises(UserError, match="with the policy's answer"):
        make().encode([ASKED])
    with pytest.raises(UserError, match="task 'paint' is unknown"):
        make().encode([TEXT | {"task": "paint"}])
    with pytest.raises(ValueError, match="no {prompt}"):
        Plan(instruction="plan it")
    with pytest.raises(UserError, match="multiple of 2"):
        make(plan={"images": 2}).rollout([TEXT], 3, Rng.of("odd"))


# --------------------------------------------------------------------------------------------------
# pairs


def test_pairs_are_drawn_whole_and_rewarded_by_task(tmp_path):
    rows = [
        {"understand": {"text": "a?", "answer": "A"}, "generate": {"text": f"g{i}"}}
        for i in range(6)
    ]
    rows[0]["similarity"] = 0.25
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Paired(tmp_path / "pairs.jsonl", held_out=0.0)
    seen = [p for k in range(3) for p in data.train.batch(4, k, seed=0)]
    assert all(
        one["pair"] == two["pair"] and one["task"] != two["task"]
        for one, two in zip(seen[::2], seen[1::2])
    )
    assert sorted(p["text"] for p in seen if p["task"] == "generate") == [f"g{i}" for i in range(6)]
    assert len(data.train.restricted(list(data.train)[1:])) == 10
    with pytest.raises(UserError, match="must be even"):
        data.train.batch(3, 0, 0)
    reward = ByTask(
        {
            "generate": lambda m, p: m.mean((1, 2, 3)),
            "understand": lambda m, p: [float(t == "A") for t in m],
        }
    )
    pictures = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    prompts = [{"task": t} for t in ("understand", "generate", "understand", "generate", "paint")]
    found = reward(["A", pictures[0], "B", pictures[1], "C"], prompts)
    torch.testing.assert_close(
        found[:4], torch.tensor([1, pictures[0].mean(), 0, pictures[1].mean()])
    )
    assert found[4].isnan()


def test_no_statistic_mixes_tasks():
    """Weights come after normalisation, so that the scale of a task's rewards changes nothing, not
    even globally."""
    prompts = [{"task": t, "similarity": s} for t, s in (("understand", 0.25), ("generate", 1.0))]
    group = torch.arange(2).repeat_interleave(4)
    zero = torch.zeros(8, 1)
    shape = {"sample": zero, "logprob": zero, "mask": zero == 0}
    rows = make_rollout(group=group, row_id=torch.arange(8), prompts=prompts, **shape)
    reward = torch.tensor([0.0, 1, 1, 0, 0.3, 0.1, 0.2, 0.4])
    base = partial(flow_grpo, std="global")
    chosen = {"base": base, "power": 0.5, "tasks": ("understand", "generate")}
    found = pairs(reward, rows, **chosen)
    alone = [base(reward[group == g], rows[group == g].replace(prompts=prompts)) for g in (0, 1)]
    torch.testing.assert_close(found, torch.cat([0.5 * alone[0], alone[1]]))
    scaled = pairs(torch.cat([1000 * reward[:4], reward[4:]]), rows, **chosen)
    torch.testing.assert_close(scaled[4:], found[4:])
    assert not torch.allclose(pairs(reward, rows, base=base)[4:], found[4:])
    plain = [p | {"similarity": 1.0} for p in prompts]
    assert torch.equal(pairs(reward, rows.replace(prompts=plain), power=0.5), grpo(reward, rows))
    with pytest.raises(UserError, match="prompts of task 'generate'"):
        pairs(reward, rows, tasks=("understand",))


def test_pairs_that_share_a_prompt_are_all_learned_or_all_held_out(tmp_path):
    """Chains of four pairs: neighbours share a question or a caption, ends share nothing."""
    rows = []
    for chain in range(30):
        for question, caption in ((0, 0), (1, 0), (1, 1), (2, 1)):
            asked = f"question {chain}.{question}?"
            made = f"picture {chain}.{caption}"
            rows.append({"understand": {"text": asked, "answer": "A"}, "generate": {"text": made}})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Paired(tmp_path / "pairs.jsonl", held_out=0.3)
    chains = [
        {prompt["text"].split()[1].split(".")[0] for prompt in part}
        for part in (data.train, data.held_out)
    ]
    assert not chains[0] & chains[1] and len(chains[0] | chains[1]) == 30 and len(chains[1]) > 2
    assert len(data.train) + len(data.held_out) == 240
