"""Answers that several iterations write: nothing is lost or trained twice, log-probs are those of
the weights that drew a token and of those that train, and it resumes."""

from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.config.sections import AlarmOptions
from mmrl.core.errors import UserError
from mmrl.monitoring.alarms import Alarms
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.terms.importance_sampling import Importance
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.stages.partial_rollout import PartialRollouts
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import toys
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.rollout.test_past import moved
from tests.rollout.test_written_answers import asked

LONGEST = 9


def trainer_of(lr=0.0, tokens=3, age=8, temperature=1.0, objective=None, policy=None, **options):
    """Two prompts of six an iteration, each answered twice with up to nine tokens."""
    return Trainer(
        policy or policy_of(max_new_tokens=LONGEST, temperature=temperature),
        asked(6),
        Scorer({"a": lambda texts, _: torch.tensor([float(t.count("a")) for t in texts])}),
        advantages.flow_grpo,
        objective or PolicyGradient(importance_sampling=Importance(cap=2.0)),
        partial(adamw, lr=lr),
        TrainOptions(2, 2, 4, 20, stages=(PartialRollouts(tokens, age),), **options),
    )


def collected(trainer, iterations):
    """The rollouts that iterations train on, with their metrics."""
    batches = []
    for _ in range(iterations):
        batches.append(trainer.collect())
        trainer.iteration += 1
    return batches


def whole_rows(trainer, batch):
    """Of every row that is trained: its text, its tokens and the prompt."""
    rollout = batch.rollout
    texts = trainer.policy.decode(rollout)
    rows = rollout.alive().nonzero()[:, 0].tolist()
    assert all(texts[row].finished or texts[row].tokens == LONGEST for row in rows)
    return [(rollout.prompts[int(rollout.group[row])]["text"], str(texts[row])) for row in rows]


def test_every_answer_is_trained_once_and_whole():
    trainer = trainer_of()
    batches = collected(trainer, 8)
    counts = [batch.metrics for batch in batches]
    assert any(each["partial/waiting"] for each in counts)
    trained = [row for batch in batches for row in whole_rows(trainer, batch)]
    asked_for = 8 * 4  # answers that were begun
    waiting = int(counts[-1]["partial/waiting"]) * 2
    assert len(trained) + waiting == asked_for and not counts[-1]["partial/dropped"]
    assert sum(each["partial/untrained"] for each in counts) * 2 == asked_for - len(trained)
    for batch in batches:  # the weights never change: nothing is to be corrected
        rows = batch.rollout
        gap = (rows.logprob - rows.provenance.sampler_logprob)[rows.mask].abs()
        assert not len(gap) or gap.max() < 1e-4
    assert trainer.policy.most_new_tokens() == LONGEST  # for evaluations


def test_answers_are_those_that_are_written_in_one_go():
    """Of the likeliest tokens, whatever the noise."""
    trainer = trainer_of(temperature=1e-4)
    trained = [row for batch in collected(trainer, 9) for row in whole_rows(trainer, batch)]
    plain = policy_of(max_new_tokens=LONGEST, temperature=1e-4)
    with torch.no_grad():
        rollout = plain.rollout(asked(6), 1, Rng.of(0))
    known = dict(zip((p["text"] for p in asked(6)), map(str, plain.decode(rollout)), strict=True))
    assert len(trained) > 8 and all(known[text] == answer for text, answer in trained)


def test_tokens_keep_the_log_probs_they_were_drawn_with():
    trainer = trainer_of()
    (first,) = collected(trainer, 1)
    (waiting, *_) = trainer.stages[0].memory.entries
    moved(trainer.policy, 0.05)
    seen = 0
    for batch in collected(trainer, 4):
        rollout = batch.rollout
        (point,) = trainer.policy.path(rollout)
        with torch.no_grad():
            now = trainer.policy.dist(point).log_prob(point.target)
        where = rollout.mask
        torch.testing.assert_close(rollout.logprob[where], now[where], atol=1e-4, rtol=0)
        for row in where.any(1).nonzero()[:, 0].tolist():
            for i, ids in enumerate(waiting.rollout.sample):
                mask = waiting.rollout.mask[i]
                count = int(mask.sum())
                if count < 3 or not torch.equal(rollout.sample[row, :count], ids[:count]):
                    continue
                seen += 1
                drawn_with = rollout.provenance.sampler_logprob[row, :count]
                assert torch.equal(drawn_with, waiting.rollout.logprob[i][:count])
                assert (drawn_with - rollout.logprob[row, :count]).abs().max() > 1e-4
    assert seen


def test_groups_that_are_too_old_are_given_up():
    trainer = trainer_of(tokens=1, age=1)
    counts = [batch.metrics for batch in collected(trainer, 6)]
    assert sum(each["partial/dropped"] for each in counts) > 0
    assert all(each["partial/waiting"] <= 4 for each in counts)


def test_it_resumes_to_the_bit_and_waiting_answers_are_no_reason_for_an_alarm(tmp_path):
    trainer = trainer_of(lr=1e-3, tokens=1)
    alarms = Alarms(AlarmOptions(patience=1), alone=True)
    metrics = trainer.iterate()
    assert metrics["partial/untrained"] == 2
    alarms.after_update(1, metrics)
    assert not alarms.stuck and not alarms.news
    resumes(lambda: trainer_of(lr=1e-2), tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"objective": PolicyGradient()}, "need a correction: set"),
        ({"tokens": 9}, "tokens: 9 is no less than the policy's max_new_tokens, 9"),
        ({"dynamic_sampling_rounds": 1}, "train.dynamic_sampling_rounds: it needs all answers"),
        ({"policy": toys.make("causal")}, "ToyCausal cannot go on with an answer"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        trainer_of(**options)
