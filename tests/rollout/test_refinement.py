"""Answers that the policy improves by what is asked of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.compatibility import unsupported_options
from mmrl.core.errors import UserError
from mmrl.core.types import Provenance, Rewards
from mmrl.objectives import PolicyGradient
from mmrl.objectives.surrogates import gspo
from mmrl.rollout.stages import Drawn, Setup, stages_of
from mmrl.zoo.stages.refinement import Corrections, Refined, listed
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.stages import assert_recorded
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.rollout.test_written_answers import Taught, asked
from tests.train.test_trainer import make_trainer


@pytest.fixture(scope="module")
def policy():
    return policy_of(max_new_tokens=6)


def setup_of(policy, prompts, **options):
    """Its rewards are the lengths of texts."""
    plain = make_trainer("causal").options

    def score(rows):
        return Rewards({"r": torch.tensor([len(t) for t in policy.decode(rows)]).float()})

    chosen = replace(plain, stages=(Refined(**options),))
    return Setup(chosen, policy, prompts, {}, score=score)


def drawing(policy, sampled):
    """A sampler of the policy, which keeps what was asked and what was answered."""

    def draw(prompts, rng, copies=1):
        with torch.no_grad():
            rollout = policy.rollout(prompts, copies, rng)
        media = policy.decode(rollout)
        drawn = Drawn(rollout, media, Rewards({"r": torch.zeros(len(media))}))
        sampled.append(([prompt["text"] for prompt in prompts], drawn))
        return drawn

    return draw


@pytest.mark.parametrize("place", ["append", "replace"])
def test_a_group_with_room_gets_an_answer_to_the_plain_question(policy, place):
    prompts = [prompt | {"rubric": ["is short", ["is right", 2.0]]} for prompt in asked(2)]
    (stage,) = stages_of(setup_of(policy, prompts, place=place))
    sampled = []
    draw = drawing(policy, sampled)
    fresh = draw(prompts, Rng.of("own"), 3)
    fresh = replace(fresh, rewards=Rewards({"r": torch.tensor([0, 0.5, 0, 0, 1, 0])}))
    stage.begin(0)
    stage.observe(prompts, fresh)
    mixed, counts = stage.groups(fresh, 0, draw)
    assert counts == {"refinement/groups": 1.0}, "the other group has reached the threshold"
    ((question,), _) = sampled[1]
    assert question.startswith(prompts[0]["text"]) and str(fresh.media[1]) in question
    assert "- is short\n- is right" in question
    rollout = mixed.rollout
    (new,) = rollout.provenance.is_ground_truth.nonzero()[:, 0].tolist()
    assert new == {"append": 3, "replace": 2}[place]
    assert rollout.prompt_per_row()[new]["text"] == prompts[0]["text"]
    assert_recorded(policy, rollout[new : new + 1])
    assert mixed.rewards["r"][new] == len(mixed.media[new])
    assert len(mixed.sampled()[0]) == 6


class Judge:
    """Says which criteria an answer fails: those whose letter it has not."""

    def unmet(self, media, prompts):
        return [[c for c in p["rubric"] if c not in m] for m, p in zip(media, prompts)]


@pytest.mark.parametrize("logprob", ["current", "guided", "one"])
def test_only_what_fails_is_shown(policy, logprob):
    """RGR-GRPO."""
    prompts = [prompt | {"rubric": ["a", "b", "c"]} for prompt in asked(2)]
    setup = setup_of(policy, prompts, failed_by="judge", logprob=logprob)
    (stage,) = stages_of(replace(setup, rewards={"judge": Judge()}))
    sampled = []
    draw = drawing(policy, sampled)
    fresh = draw(prompts, Rng.of("own"), 3)
    fresh = replace(fresh, media=["a b", "xc", "", "", "abc", ""])
    fresh = replace(fresh, rewards=Rewards({"r": torch.tensor([0, 0.5, 0, 0, 0.9, 0])}))
    stage.begin(0)
    stage.observe(prompts, fresh)
    mixed, counts = stage.groups(fresh, 0, draw)
    assert counts == {"refinement/groups": 1}, "the other group's best answer fails nothing"
    ((question,), answer) = sampled[1]
    assert "- a\n- b\n" in question and "- c" not in question
    (new,) = mixed.rollout.provenance.is_ground_truth.nonzero()[:, 0].tolist()
    row = mixed.rollout[new : new + 1]
    (point,) = policy.path(row)
    with torch.no_grad():
        plain = policy.dist(point).log_prob(point.target)
    guided = answer.rollout.logprob
    expected = {"current": plain, "guided": guided, "one": torch.zeros_like(plain)}[logprob]
    torch.testing.assert_close(
        row.logprob[point.mask], expected[point.mask], atol=1e-5, rtol=0, check_dtype=False
    )
    replayed = bool(row.provenance.is_replayed)
    assert replayed == (logprob != "current"), "the ratio is to what is recorded, on every step"


def test_the_loss_of_guided_answers_is_shaped_by_loop():
    """-A rho / (rho + gamma) on demonstrations, the surrogate on the policy's own answers."""
    policy = toys.ToyCausal()
    policy.net.double()
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 3, Rng.of(5))
    foreign = torch.tensor([False, False, True] * 2)
    advantage = torch.linspace(-1, 1, 6).double()[:, None]
    old = rollout.logprob.double() + torch.linspace(-0.5, 0.5, 6).double()[:, None]
    rollout = rollout.replace(
        advantage=advantage,
        logprob=torch.where(foreign[:, None], old, rollout.logprob.double()),
        provenance=Provenance(is_ground_truth=foreign, is_replayed=foreign),
    )
    objective = PolicyGradient(shaping=0.1)
    assert not list(objective.unfit(policy))
    (point,) = policy.path(rollout)
    loss = objective.loss(policy, point).detach()
    logp = policy.dist(point).log_prob(point.target).detach()
    for row in range(6):
        for place in range(loss.shape[1]):
            rho = math.exp(float(logp[row, place] - rollout.logprob[row, place]))
            weight = rho / (rho + 0.1) if foreign[row] else rho
            expected = -float(advantage[row]) * weight
            assert float(loss[row, place]) == pytest.approx(expected, abs=1e-9)
    parts = [objective.loss(policy, part).detach() for part in point.split(4)]
    torch.testing.assert_close(torch.cat(parts), loss, atol=1e-9, rtol=0)
    sequences = PolicyGradient(surrogate=gspo, shaping=0.1)
    assert dict(sequences.unfit(policy))["shaping"].startswith("it is of single decisions")
    assert "shaping" in dict(PolicyGradient(shaping=0.1).unfit(toys.make("flow")))


def test_wrong_answers_are_corrected_by_loop(policy):
    """EDGE-GRPO: a share continues after a cue, a share is given the answer, a share is replaced by
    the solution; each keeps its row id, and has the policy's log-probs of the plain prompt."""
    prompts = [prompt | {"answer": str(i)} for i, prompt in enumerate(asked(3))]
    prompts[0]["solution"] = prompts[1]["solution"] = "so 1"
    wide = policy_of(max_new_tokens=60)
    chosen = Corrections(
        continued=0.4, answer=0.2, solution=0.3, cue=" no", correction=" {feedback}"
    )
    setup = setup_of(wide, prompts, feedback="answer", corrections=chosen)
    (stage,) = stages_of(setup)
    asked_for = []

    def go_on(questions, rng, copies=1):
        asked_for.extend(question["prefill"] for question in questions)
        media = [question["prefill"] + " yes" for question in questions]
        return Drawn(fresh.rollout, media, fresh.rewards)

    with torch.no_grad():
        rollout = wide.rollout(prompts, 6, Rng.of("own"))
    right = torch.arange(18) % 4 == 0
    fresh = Drawn(rollout, [f"t{i}" for i in range(18)], Rewards({"r": right.float()}))
    stage.begin(3)
    stage.observe(prompts, fresh)
    mixed, counts = stage.groups(fresh, 3, go_on)
    draws = Rng.of(setup.options.seed, 3, "correct").uniform(rollout.row_id, (1,))[:, 0].tolist()
    expected = []
    for row in range(18):
        group = row // 6
        if right[row] or draws[row] >= 0.9:
            expected.append(None)
        elif draws[row] < 0.4:
            expected.append(f"t{row} no yes")
        elif draws[row] < 0.6 or group == 2:
            expected.append(f"t{row} {group}")
        else:
            expected.append("so 1")
    assert {len(e or "") > 0 for e in expected} == {True, False} and "so 1" in expected
    new = mixed.rollout.provenance.is_ground_truth
    assert new.tolist() == [e is not None for e in expected]
    assert counts == {"refinement/corrected": float(new.sum())}
    assert mixed.rollout.row_id.tolist() == rollout.row_id.tolist()
    assert mixed.rollout.group.tolist() == rollout.group.tolist()
    assert sorted(asked_for) == sorted(
        f"t{r} no" for r, e in enumerate(expected) if e is not None and e.endswith("no yes")
    )
    for row, text in enumerate(expected):
        media = mixed.media[row]
        assert media == (f"t{row}" if text is None else media) and len(media) <= 60
        if text is not None:
            assert media.removesuffix(wide.inputs.tokenizer.eos_token or "") == text
    assert_recorded(wide, mixed.rollout[new])
    assert len(mixed.sampled()[0]) == 18, "statistics are of what the policy wrote"


def test_what_cannot_be_refined_or_corrected_is_refused(policy):
    for make, sentence in (
        (lambda: stages_of(setup_of(policy, asked(1))), "no prompt has the field 'rubric'"),
        (lambda: stages_of(setup_of(toys.ToyCausal(), [])), "ToyCausal reads no criticism"),
        (lambda: stages_of(setup_of(policy, asked(1), failed_by="r")), "'r' is no reward of this"),
        (lambda: Refined(template="{question}"), "template may hold"),
        (lambda: Corrections(continued=1.0), "more than 0 and at most 1, not 1.5"),
        (lambda: Corrections(correction="{text}"), "correction may hold {feedback} alone"),
        (lambda: Refined(failed_by="j", corrections=Corrections()), "leave out failed_by and"),
    ):
        with pytest.raises(UserError, match=sentence):
            make()
    assert listed("7") == "7" and listed(["a", ("b", 1)]) == "- a\n- b"
    options = make_trainer("causal").options
    plain = replace(options, stages=(Refined(corrections=Corrections()),))
    masked = replace(Taught.capabilities, makes="text", one_pass=False)
    (problem,) = unsupported_options(plain, SimpleNamespace(capabilities=masked))
    assert "cannot go on with an answer; set continued to 0" in problem
