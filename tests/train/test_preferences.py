"""Training on compared answers of the data, on every family that knows their log-probs or errors:
against formulas written out, and what must not change them."""

import json
import math
from functools import partial

import pytest
import torch

from mmrl.advantages import flow_grpo
from mmrl.config.options import TrainOptions
from mmrl.config.preferences import Preferences
from mmrl.core.errors import UserError
from mmrl.data.pairs import Pairs, PreferencePairs, answer_of, pairs_of_file
from mmrl.rollout.preferences import Compared
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.objectives import DPO, KTO, DiffusionDPO, SimPO
from samplers.noise import Rng
from tests.fixtures.demonstrations import make, picture
from tests.policies.vlm.test_vlm_policy import policy_of

OTHERS = {
    "causal": lambda i: torch.tensor([1, i % 3, 0, 2, 1, 3]),
    "vlm": lambda i: ("no", "a bird", "a cat")[i % 3],
}
FLOWS = ["module", "sd"]
BETA = 0.3


def paired(family, double=True):
    """A policy, and six rows with a chosen and a rejected answer."""
    policy, rows = make(family, double=double)
    other = OTHERS.get(family, lambda i: picture(100 + i))
    if family == "masked_lm":
        other = lambda i: ("no", "two birds")[i % 2]  # noqa: E731
    pairs = [
        {**row, "chosen": row["answer"], "rejected": other(i + 1)} for i, row in enumerate(rows)
    ]
    return policy, pairs


def objective_of(family):
    return DiffusionDPO(beta=30.0, num_noise_draws=2) if family in FLOWS else DPO(beta=BETA)


def trainer_of(policy, rows, objective, optimizer=torch.optim.SGD, lr=1.0, **sizes):
    options = {
        "prompts_per_iteration": len(rows),
        "group_size": 2,
        "train_batch_size": 2 * len(rows),
        "micro_batch_size": 4,
        "iterations": 40,
        "max_grad_norm": None,
        "loss_agg_mode": "seq_mean_token_mean",
        "preferences": Preferences(),
    } | sizes
    return Trainer(
        policy,
        rows,
        Scorer.nothing(),
        flow_grpo,
        objective,
        partial(optimizer, lr=lr),
        TrainOptions(**options),
    )


def step_of(trainer):
    """The change of weights by a step of gradient descent at rate 1, and the metrics."""
    before = trainer.policy.weights.full()
    metrics = trainer.iterate()
    after = trainer.policy.weights.full()
    return {name: before[name] - after[name] for name in before}, metrics


def log_probs(policy, rows, side):
    """log p of one answer of every row, with gradient."""
    answers = [
        row[side] if policy.medium_of(row) == "text" else policy.open_answer(row, row[side])
        for row in rows
    ]
    with policy.untempered():
        rollout = policy.demonstrate(rows, answers, Rng.of("by hand"))
        total = torch.zeros(len(rows), dtype=torch.float64)
        for point in policy.path(rollout):
            dist = policy.dist(point.replace(guidance=1.0))
            logp = torch.where(point.mask, dist.log_prob(point.target), 0.0)
            total = total.index_add(0, point.row_id - rollout.row_id[0], logp.sum(1).double())
    return total


@pytest.mark.parametrize("family", ["causal", "vlm"])
def test_dpo_begins_at_log_2_with_its_known_gradient(family):
    """-beta / 2 (grad log p_w - grad log p_l), mean over pairs; one row's two answers are named
    alike here and there, so that a masked model would not reveal them in the same order."""
    policy, rows = paired(family)
    margin = log_probs(policy, rows, "chosen") - log_probs(policy, rows, "rejected")
    loss = -(BETA / 2 * margin).mean()
    policy.net.zero_grad()
    loss.backward()
    named = policy.weights.parameters().items()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
    policy.net.zero_grad()
    found, metrics = step_of(trainer_of(policy, rows, objective_of(family)))
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["group/log_ratio"] == pytest.approx(0, abs=1e-6)
    for name, change in found.items():
        torch.testing.assert_close(change, expected[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["amused", "llamagen"])
def test_guidance_of_sampling_is_left_out_of_preferences(family):
    """Scores and reference are those of the policy without guidance."""
    policy, rows = paired(family, double=False)
    policy.guidance_scale = 4.0
    if family == "amused":
        policy.sampler, policy.chooses = "emerge", False
    trainer = trainer_of(policy, rows[:2], SimPO())
    with trainer._likelihoods(), torch.no_grad():
        rollout, _, _ = trainer.draw(policy, rows[:2], 2, Rng.of("guided"))
    for point in policy.path(rollout):
        with policy.untempered(), torch.no_grad():
            own = policy.dist(point.replace(guidance=1.0)).log_prob(point.target)
            guided = policy.dist(point.replace(guidance=4.0)).log_prob(point.target)
        recorded = point.recorded[point.mask]
        torch.testing.assert_close(recorded, own[point.mask], atol=1e-4, rtol=0)
        assert not point.mask.any() or (guided[point.mask] - recorded).abs().max() > 1e-3
    assert policy.guidance_scale == 4.0


@pytest.mark.parametrize("family", ["masked_lm", "module"])
def test_the_better_answer_becomes_likelier_than_the_worse(family):
    policy, rows = paired(family, double=False)
    trainer = trainer_of(policy, rows, objective_of(family), adamw, 3e-3)
    for _ in range(8):
        metrics = trainer.iterate()
    name = "dpo/right" if family in FLOWS else "group/right"
    assert metrics[name] == 1
    measured = trainer.held_out(rows, 1)
    assert measured[name] == 1 and measured["loss"] < 0.9 * math.log(2)
    assert trainer.held_out(rows, 1) == measured


def test_answers_are_scored_by_the_models_own_distribution():
    """An option of sampling that would forbid their tokens does not count."""
    losses = []
    for options in ({}, {"top_k": 1, "temperature": 0.5}):
        policy, (_, rows) = policy_of(**options), paired("vlm")
        trainer = trainer_of(policy, rows, SimPO())
        losses.append(trainer.iterate()["loss"])
    assert len(set(losses)) == 1 and math.isfinite(losses[0])


def test_a_pair_with_an_answer_that_cannot_be_given_does_not_train():
    policy, rows = paired("vlm")
    rows[1]["rejected"] = "a bird " * 200  # longer than the policy writes
    trainer = trainer_of(policy, rows, objective_of("vlm"))
    found, metrics = step_of(trainer)
    assert metrics["samples/left_out"] == pytest.approx(2 / 12)
    assert not [name for name in metrics if name.startswith("reward/")], "they never change"
    policy, rows = paired("vlm")
    kept = [row for i, row in enumerate(rows) if i != 1]
    others, _ = step_of(trainer_of(policy, kept, objective_of("vlm")))
    for name, change in found.items():
        torch.testing.assert_close(change, others[name], atol=1e-6, rtol=1e-5, msg=name)


def test_single_answers_with_labels_train_kto():
    """At the reference: (1 - sigmoid(0)) each, and a gradient that lifts good answers alone."""
    policy, rows = paired("causal")
    labelled = [
        {**row, "good": i % 2 == 0, "answer": row[("chosen", "rejected")[i % 2]]}
        for i, row in enumerate(rows)
    ]
    sizes = {
        "group_size": 1,
        "train_batch_size": len(rows),
        "preferences": Preferences(label="good"),
    }
    before = log_probs(policy, rows[::2], "chosen"), log_probs(policy, rows[1::2], "rejected")
    trainer = trainer_of(policy, labelled, KTO(), adamw, 1e-2, **sizes)
    assert trainer.iterate()["loss"] == pytest.approx(0.5)
    for _ in range(10):
        metrics = trainer.iterate()
    after = log_probs(policy, rows[::2], "chosen"), log_probs(policy, rows[1::2], "rejected")
    assert (after[0] > before[0]).all() and (after[1] < before[1]).all()
    assert metrics["kto/right"] == 1 and trainer.held_out(labelled, 0)["kto/right"] == 1


def test_a_file_of_pairs_gives_one_by_lot_and_leaves_others_out(tmp_path):
    lines = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {"prompt": "a", "chosen": "fine", "rejected": "poor", "sources": ["x", "y"]},
        {"prompt": "b", "chosen": None, "rejected": None, "tie": True},
    ]
    path = tmp_path / "rated.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    pairs = Pairs(Preferences(path=path))
    prompts = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert pairs.kept(prompts) == prompts[:1]
    drawn = {tuple(each.content for each in pairs.of(prompts[0], Rng.of(i))) for i in range(40)}
    assert drawn == {("good", "bad"), ("fine", "poor")}
    assert [each.reward for each in pairs.of(prompts[0], Rng.of(0))] == [1.0, 0.0]
    with pytest.raises(UserError, match="has no pair for any prompt"):
        pairs.kept(prompts[1:])
    for broken, why in (
        ({}, "rated.jsonl:1: expected"),
        ({"chosen": "x", "rejected": "x"}, "rated.jsonl:1: chosen and"),
        ({"tie": True}, "holds no pairs"),
    ):
        path.write_text(json.dumps({"prompt": "a"} | broken))
        with pytest.raises(UserError, match=why):
            pairs_of_file(path)


def test_the_data_source_reads_texts_and_conversations(tmp_path):
    rows = [
        {"prompt": "say", "chosen": "yes", "rejected": "no", "score": 3},
        {
            "prompt": [{"role": "user", "content": "when?"}],
            "chosen": [{"role": "assistant", "content": "now"}],
            "rejected": [{"role": "assistant", "content": "never"}],
        },
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    source = PreferencePairs(file, held_out=0.0)
    shown = {p["text"]: (p["chosen"], p["rejected"]) for p in source.train}
    assert shown == {"say": ("yes", "no"), "when?": ("now", "never")}
    parts = [{"content": [{"type": "text", "text": "n"}, {"text": "ow"}]}]
    assert answer_of(parts) == "now" and answer_of([1, 2, 3]) == [1, 2, 3]
    file.write_text(json.dumps({"prompt": "x", "better": "a", "worse": "b"}))
    with pytest.raises(UserError, match="rows.jsonl:1: no 'chosen'"):
        PreferencePairs(file)
    columns = {"chosen": "better", "rejected": "worse"}
    assert PreferencePairs(file, held_out=0.0, columns=columns).train[0]["chosen"] == "a"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"chosen": None}, r"no 'chosen'; it has text, answer"),
        ({"rejected": "same"}, "'chosen' and 'rejected' are equal"),
        ({"rejected": 3}, "an answer is int, expected text"),
    ],
)
def test_rows_without_a_preference_are_named(change, why):
    policy, _ = paired("vlm")
    row = {"text": "t", "answer": "a", "chosen": "same", "rejected": "b", "origin": "rows.csv:7"}
    with pytest.raises(UserError, match=f"1 of 1 rows .*\n    rows.csv:7: {why}"):
        Compared(Pairs(Preferences())).check(policy, [row | change])


def test_a_missing_picture_and_a_label_that_says_nothing_are_named():
    policy, _ = paired("module")
    rows = [{"text": "t", "chosen": "gone.png", "rejected": "other.png"}]
    with pytest.raises(UserError, match="no file gone.png"):
        Compared(Pairs(Preferences())).check(policy, rows)
    pairs = Pairs(Preferences(label="good"))
    for label in (3, None, "perhaps"):
        assert "'good'" in pairs.problem({"text": "t", "answer": "a", "good": label})
    assert pairs.problem({"text": "t", "answer": "a", "good": "true"}) is None
