"""Supervised fine-tuning: the loss against formulas written out, on every family of models."""

from functools import partial

import pytest
import torch

from mmrl.advantages import flow_grpo
from mmrl.core.errors import UserError
from mmrl.objectives import SFT
from mmrl.objectives.supervised import thought_tokens, without_thought
from mmrl.objectives.timestep_samplers import logit_normal
from mmrl.policies.contracts import Demonstrates
from mmrl.train.optimizers import adamw
from mmrl.train.supervised import demonstrated
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from mmrl.zoo.models.unified.policy import JanusUnified
from mmrl.zoo.models.unified.prompts import Answer, Plan
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_vlms, toys
from tests.fixtures.demonstrations import FAMILIES, make, pictured, sd
from tests.fixtures.image_tokens import tiny_janus
from tests.objectives.test_masked_objectives import Hides, finished
from tests.policies.vlm.test_vlm_policy import native, policy_of

RNG = Rng.of("supervised")


def trainer_of(policy, rows, objective=None, lr=1e-2, optimizer=adamw, **sizes):
    options = {
        "prompts_per_iteration": len(rows),
        "group_size": 1,
        "train_batch_size": len(rows),
        "micro_batch_size": 2,
        "max_grad_norm": None,
    }
    learns = objective or SFT()
    return toys.trainer(policy, learns, None, flow_grpo, lr, optimizer, rows, **options | sizes)


def gradient(policy, rows, objective=None, **sizes):
    """The change of weights by a step of gradient descent at rate 1."""
    before = policy.weights.full()
    trainer = trainer_of(policy, rows, objective, 1.0, torch.optim.SGD, **sizes)
    metrics = trainer.iterate()
    after = policy.weights.full()
    policy.weights.load(before)
    return {name: before[name] - after[name] for name in before}, metrics


def by_hand(policy, loss):
    """The gradient of a loss that was written out."""
    policy.net.zero_grad()
    loss.backward()
    named = policy.weights.parameters().items()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
    policy.net.zero_grad()
    return found


def assert_equal(one, two, apart=1e-9):
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=apart, rtol=0, msg=name)


# oracles


def test_image_tokens_have_the_gradient_of_cross_entropy():
    policy, rows = make("llamagen", double=True)
    total, count = 0.0, 0
    for row in rows:  # the published pass: class, then every token but the last
        from mmrl.policies.demonstrations import framed

        pixels = 2 * framed(row["answer"], (4, 4)) - 1
        ids = policy.vq.encode(pixels[None])
        inputs = {"label": torch.tensor([row["label"]])}
        hidden = policy.net.teach(inputs, ids)
        logits = policy.net.vocabulary(hidden)[0]
        for place in range(ids.shape[1]):
            total = total - logits[place].log_softmax(0)[ids[0, place]]
            count += 1
    expected = by_hand(policy, total / count)
    found, metrics = gradient(policy, rows)
    assert abs(metrics["loss"] - total.item() / count) < 1e-9
    assert_equal(found, expected)


def test_answers_have_the_log_probs_of_the_models_own_pass():
    policy = policy_of(max_new_tokens=12, temperature=0.5, top_k=3)
    rows = make("vlm")[1]
    rollout = demonstrated(policy, SFT(), rows, RNG)
    assert policy.decode(rollout) == [row["answer"] for row in rows]
    with policy.untempered():
        total = -float(native(policy, rollout)[rollout.mask].sum())
    _, metrics = gradient(policy, rows)
    assert abs(metrics["loss"] - total / int(rollout.mask.sum())) < 1e-5
    scored = policy.demonstrate(rows, [row["answer"] for row in rows], RNG)
    apart = (scored.logprob - native(policy, rollout))[rollout.mask]
    assert apart.abs().max() < 1e-5  # as it samples: tempered and cut


def test_the_masked_loss_is_the_bound_of_llada():
    policy, rows = make("masked_lm", double=True)
    trainer = trainer_of(policy, rows)
    batch = trainer.collect()
    rollout = batch.rollout
    rng = trainer.update._rng(batch, 0).fold(0)
    total, count = 0.0, 0
    for b in range(len(rows)):
        name = rollout.row_id[b : b + 1]
        share = 1e-3 + (1 - 1e-3) * float(rng.uniform(name, (1,), 0))
        draw = rng.uniform(name, (policy.length,), 1)[0].tolist()
        read = [i for i in range(policy.length) if bool(rollout.mask[b, i])]
        hide = [i for i in read if draw[i] < share]
        state = rollout.sample[b].clone()
        for i in hide:
            state[i] = policy.mask_id
        cond = {key: value[b : b + 1] for key, value in rollout.cond.items()}
        logits = policy.logits(state[None], cond)[0]
        logits[:, policy.mask_id] = -torch.inf  # never an answer
        for i in hide:
            total = total - logits[i].log_softmax(0)[rollout.sample[b, i]] / share
        count += len(read)
    expected = by_hand(policy, total / count)
    found, metrics = gradient(policy, rows)
    assert abs(metrics["loss"] - total.item() / count) < 1e-8
    assert_equal(found, expected, 1e-8)


@pytest.mark.parametrize("length", [4, 64, 256])
def test_a_token_of_the_bound_weighs_1_on_average(length):
    policy = Hides()
    policy.capabilities = MaskedLM.capabilities
    point = SFT()._hidden(policy, finished(20_000, length), RNG)
    weight = point.estimator_weight.mean(1)
    error = weight.std() / len(weight) ** 0.5
    assert abs(weight.mean() - 1) < 3 * error
    assert point.mask.all() and point.estimator_weight.max() <= 1000
    nothing = ~point.state.any(1)  # nothing is hidden by force: these count, as 0
    rates = torch.linspace(1e-3, 1, 100_001, dtype=torch.float64)
    expected = torch.trapezoid((1 - rates) ** length, rates) / (1 - 1e-3)
    assert abs(nothing.double().mean() - expected) < 4 * (expected / 20_000) ** 0.5


def test_masked_images_have_cross_entropy_at_hidden_tokens_alone():
    policy, rows = make("amused", double=True)
    rollout = demonstrated(policy, SFT(), rows, RNG)
    (point,) = SFT().points(policy, rollout, RNG)
    hidden = point.state == policy.mask_id
    assert torch.equal(point.mask, hidden) and bool(hidden.any(1).all())
    loss = SFT().loss(policy, point)
    logp = policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(loss, torch.where(hidden, -logp, 0.0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("weighting", ["plain", "min_snr"])
@pytest.mark.parametrize("family", ["module", "sd"])
def test_the_flow_loss_is_the_closed_form(family, weighting):
    policy, rows = make(family, double=True)
    objective = SFT(timestep_sampler=partial(logit_normal, std=1.3), weighting=weighting)
    trainer = trainer_of(policy, rows, objective)
    batch = trainer.collect()
    rollout = batch.rollout
    rng = trainer.update._rng(batch, 0).fold(0)
    total = 0.0
    for b in range(len(rows)):
        name = rollout.row_id[b : b + 1]
        t = logit_normal(rng.fold("time"), name, 1, None, std=1.3)[:, 0]
        t = policy.process.snap(t.to(rollout.sample))
        noise = rng.fold("noise", 0).normal(name, policy.shape, 1, torch.float64)
        clean = rollout.sample[b : b + 1]
        if family == "module":
            alpha, sigma, target, gain = 1 - t, t, noise - clean, t
        else:  # epsilon on Stable Diffusion's table
            bar = policy.process.alphas[int((t * 1000).round()) - 1].double()
            alpha, sigma = bar.sqrt(), (1 - bar).sqrt()
            target, gain = noise, sigma / alpha
        cond = {k: v[b : b + 1] for k, v in rollout.cond.items() if k != "uncond"}
        output = policy.velocity(alpha * clean + sigma * noise, t, cond)
        snr = (alpha / sigma) ** 2
        weight = 1.0 if weighting == "plain" else torch.clamp(snr, max=5.0) * gain**2
        total = total + weight * (output - target).square().mean()
    total = total.sum() / len(rows)
    expected = by_hand(policy, total)
    found, metrics = gradient(policy, rows, objective)
    # sd computes in float32
    apart = 1e-9 if family == "module" else 1e-5
    assert abs(metrics["loss"] - total.item()) < apart
    assert_equal(found, expected, apart)


# every family


@pytest.mark.parametrize("family", ["amused", "emu3", "masked_lm", "sd", "var", "vlm"])
def test_micro_batches_and_the_order_of_rows_change_nothing(family):
    policy, rows = make(family, double=family != "sd")
    whole, _ = gradient(policy, rows, micro_batch_size=6)
    parts, _ = gradient(policy, rows, micro_batch_size=1)
    exact = family not in ("sd", "vlm", "emu3")  # parts of these compute in float32
    assert_equal(whole, parts, 1e-9 if exact else 2e-5)
    rollout = demonstrated(policy, SFT(), rows, RNG)
    turned = torch.arange(len(rows)).flip(0)
    losses = []
    for rows_of in (rollout, rollout[turned]):
        with torch.no_grad():
            points = list(SFT().points(policy, rows_of, RNG))
            losses.append(sum(SFT().loss(policy, p).double().sum(1) for p in points))
    torch.testing.assert_close(losses[0][turned], losses[1], atol=1e-4, rtol=1e-5)


def test_what_was_learnt_is_what_is_sampled():
    """No answer before, all of them afterwards."""
    policy, rows = make("vlm")
    trainer = trainer_of(policy, rows)

    def right():
        with policy.evaluating(), torch.no_grad():
            said = policy.decode(policy.rollout(rows, 1, Rng.of("figure")))
        return sum(text == row["answer"] for text, row in zip(said, rows)) / len(rows)

    before = right()
    for _ in range(14):
        trainer.iterate()
    assert before < 0.3 and right() == 1.0


@pytest.mark.parametrize("family", ["causal", "module"])
def test_it_resumes_to_the_bit(family, tmp_path):
    def fresh():
        policy, rows = make(family)
        return trainer_of(policy, rows, SFT(thought_dropout=0.0), ema=0.9, train_batch_size=3)

    resumes(fresh, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_missing_is_not_trained_on(family):
    policy, rows = make(family)
    answers = SFT().answers(policy, rows, RNG)
    whole = policy.demonstrate(rows, answers, RNG, score=False)
    some = policy.demonstrate(rows, [None, *answers[1:]], RNG, score=False)
    assert some.alive().tolist() == [False] + [True] * 5
    assert not some.mask[0].any() and torch.equal(some.mask[1:], whole.mask[1:])
    assert torch.equal(some.sample[1:], whole.sample[1:])
    assert some.row_id.tolist() == some.group.tolist() == list(range(6))
    none = policy.demonstrate(rows, [None] * 6, RNG, score=False)
    assert not none.mask.any() and none.sample.shape == whole.sample.shape
    assert policy.capabilities.decisions != "gaussian" or not whole.mask.any()


@pytest.mark.parametrize("family", ["causal", "llamagen", "masked_lm", "var", "vlm"])
def test_recorded_log_probs_are_those_of_a_score(family):
    policy, rows = make(family)
    rollout = policy.demonstrate(rows, SFT().answers(policy, rows, RNG), RNG)
    again = torch.zeros_like(rollout.logprob)
    with torch.no_grad():
        for point in policy.path(rollout):
            again += torch.where(point.mask, policy.dist(point).log_prob(point.target), 0.0)
    torch.testing.assert_close(again, rollout.logprob, atol=1e-5, rtol=0)
    assert (rollout.logprob[rollout.mask] < 0).all() and rollout.provenance.is_ground_truth.all()


def test_maskgit_has_no_log_probs_of_answers_of_others():
    policy, rows = make("amused")
    policy.chooses = True
    answers = SFT().answers(policy, rows, RNG)
    policy.demonstrate(rows, answers, RNG, score=False)
    with pytest.raises(UserError, match="use emerge"):
        policy.demonstrate(rows, answers, RNG)


def test_packed_answers_have_the_same_gradient():
    rows = make("vlm")[1]
    plain, _ = gradient(policy_of(), rows)
    packed, _ = gradient(policy_of(remove_padding=True), rows, micro_batch_size=6)
    assert_equal(plain, packed, 2e-5)


# thoughts

THOUGHT = "<think>{thought}</think>\n<answer>{answer}</answer>"


def thoughtful(count=2):
    return [
        {
            "text": "when?",
            "images": [],
            "thought": f"it is {i}",
            "answer": "noon",
            "origin": f"f:{i}",
        }
        for i in range(count)
    ]


def test_a_dropped_thought_is_empty_and_drawn_anew_at_every_visit():
    policy = policy_of(max_new_tokens=80)
    rows = thoughtful(400)
    objective = SFT(template=THOUGHT, thought_dropout=0.3)
    objective.check(policy, rows)
    first = objective.answers(policy, rows, RNG)
    assert set(first) <= {objective.text(row) for row in rows} | {
        "<think>\n\n</think>\n<answer>noon</answer>"
    }
    dropped = [text.startswith("<think>\n\n</think>") for text in first]
    assert 0.22 < sum(dropped) / 400 < 0.38
    assert dropped == [t.startswith("<think>\n\n") for t in objective.answers(policy, rows, RNG)]
    other = objective.answers(policy, rows, RNG.fold(1))
    assert dropped != [text.startswith("<think>\n\n") for text in other]
    # a process's share is that of the whole
    assert objective.answers(policy, rows[100:], RNG.after(1, 100)) == first[100:]
    assert without_thought("no thought") == "no thought"


def test_parts_of_an_answer_are_trained_alone():
    policy = policy_of(max_new_tokens=80)
    rows = thoughtful()
    spelled = {}
    for part in ("all", "thought", "answer"):
        objective = SFT(template=THOUGHT, train_on=part)
        rollout = demonstrated(policy, objective, rows, RNG)
        spelled[part] = [
            policy.text_of(ids[mask].tolist())
            for ids, mask in zip(rollout.sample, rollout.mask, strict=True)
        ]
    assert spelled["thought"] == [f"<think>it is {i}</think>" for i in range(2)]
    assert spelled["answer"] == ["\n<answer>noon</answer>"] * 2
    assert spelled["all"] == [
        "".join(pair) for pair in zip(spelled["thought"], spelled["answer"], strict=True)
    ]
    assert thought_tokens(policy, [], None) == 0


# plans and images in one sequence (ReasonGen-R1)


@pytest.fixture(scope="module")
def janus_folder(tmp_path_factory):
    return tiny_janus(tmp_path_factory.mktemp("sft-janus"), 2, embeddings=0.2)


def test_a_plan_and_its_image_are_learnt_as_one_sequence(janus_folder):
    plan = Plan(max_new_tokens=12, instruction="{prompt}")
    policy = JanusUnified(janus_folder, plan=plan, answer=Answer(max_new_tokens=12))
    rows = [{**row, "plan": "red one"} for row in pictured(3)]
    rows.append({"text": "which?", "image": tiny_vlms.image(28, 28), "answer": "7"})
    SFT().check(policy, rows)
    rollout = policy.demonstrate(rows, SFT().answers(policy, rows, RNG), RNG)
    assert policy.texts(rollout) == ["red one"] * 3 + ["7"]
    assert (rollout.mask[:3, policy.tokens :]).all() and not rollout.mask[3, policy.tokens :].any()
    assert (rollout.logprob[rollout.mask] < 0).all()
    trainer = trainer_of(policy, rows)
    before = trainer.held_out(rows, 1)["loss"]
    for _ in range(4):
        trainer.iterate()
    assert trainer.held_out(rows, 1)["loss"] < before
    missing = [{key: value for key, value in row.items() if key != "plan"} for row in rows]
    unread = policy.demonstrate(missing, SFT().answers(policy, missing, RNG), RNG, score=False)
    assert unread.alive().tolist() == [False] * 3 + [True]


# bad input


WRONG_ROWS = [  # changes of a row, options, what is said
    ({"answer": None}, {}, r"f:1: no 'answer'.*objective.sft.field"),
    ({"answer": ["a"]}, {}, "f:1: 'answer' is list, expected text"),
    ({"answer": "plain"}, {"thought_dropout": 0.5}, "f:1: its answer has no <think>"),
    ({}, {"template": "{reason}"}, "f:[01]: no 'reason'"),
]


@pytest.mark.parametrize(("change", "options", "message"), WRONG_ROWS)
def test_rows_that_cannot_be_learnt_are_named_before_training(change, options, message):
    rows = [{**row, "answer": "<think>so</think>noon"} for row in thoughtful()]
    rows[1] |= change
    with pytest.raises(UserError, match=message):
        SFT(**options).check(policy_of(), rows)


def test_files_that_are_missing_or_no_pictures_are_named(tmp_path):
    policy = sd()
    broken = tmp_path / "broken.png"
    broken.write_text("not a picture")
    for answer, message in (
        (str(tmp_path / "none.png"), "f:0: no file"),
        (str(broken), r"f:0: .*broken.png is no picture"),
    ):
        with pytest.raises(UserError, match=message):
            SFT().check(policy, [{"text": "a", "answer": answer, "origin": "f:0"}])


def test_options_for_other_models_are_refused():
    flow, text = sd(), policy_of()
    assert dict(SFT(template="{a}").unfit(flow)).keys() == {"template"}
    assert dict(SFT(train_on="answer").unfit(flow)).keys() == {"train_on"}
    assert dict(SFT(weighting="min_snr").unfit(text)).keys() == {"weighting"}
    assert not dict(SFT(train_on="answer", thought_dropout=0.5).unfit(text))
    nobody = toys.make("flow")
    assert "takes no demonstrations" in dict(SFT().unfit(nobody))["field"]
    with pytest.raises(UserError, match="^ToyFlow takes no demonstrations"):
        Demonstrates.of(nobody)


def test_options_of_training_that_would_do_nothing_are_refused():
    policy, rows = make("causal")
    for options, message in (
        ({"group_size": 2, "train_batch_size": 12}, "train.group_size: 2"),
        ({"dynamic_sampling_rounds": 1}, "train.dynamic_sampling_rounds: supervised"),
    ):
        with pytest.raises(UserError, match=message):
            trainer_of(policy, rows, **options)
