"""Text objectives in training: the causal toy with answers of many lengths."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl import config
from mmrl.advantages import grpo
from mmrl.config.options import TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, SURROGATES
from mmrl.core.types import Completion, Provenance, Rewards
from mmrl.experiment import state
from mmrl.objectives import PolicyGradient
from mmrl.objectives.terms.entropy import Entropy, EntropyBonus
from mmrl.policies.base import NO_CONTEXT
from mmrl.rollout.stages import Drawn
from mmrl.zoo.objectives import KLCov
from mmrl.zoo.stages import dynamic_sampling
from mmrl.zoo.stages.dynamic_sampling import flat_groups
from samplers.noise import Rng
from tests.advantages.test_advantages import rollout as rollout_of
from tests.fixtures import toys

registry.load_built_in()


class Answers(toys.ToyCausal):
    """Answers end at the first token 4, or are cut off after six."""

    def rollout(self, prompts, copies, rng, context=NO_CONTEXT):
        rollout = super().rollout(prompts, copies, rng, context)
        ended = (rollout.sample == 4).cumsum(1)
        return rollout.replace(mask=(ended == 0) | ((ended == 1) & (rollout.sample == 4)))

    def decode(self, rollout):
        return [
            Completion(" ".join(map(str, ids[:n])), n, 4 in ids[:n], 0.0)
            for ids, n in zip(rollout.sample.tolist(), rollout.mask.sum(1).tolist(), strict=True)
        ]


def threes(media, prompts):
    """How many of an answer's tokens are the third."""
    return torch.tensor([text.split().count("3") / text.tokens for text in media])


def trainer(objective=None, reward=threes, lr=3e-3, **options):
    sizes = {"prompts_per_iteration": 8, "group_size": 8, "train_batch_size": 64} | options
    policy = Answers()
    policy.net.double()
    return toys.trainer(policy, objective or PolicyGradient(), reward, grpo, lr, **sizes)


def build(name="policy_gradient", **options):
    return config.build({name: options}, OBJECTIVES)


CASES = {
    **{name: build(surrogate=name, kl=0.1) for name in [*SURROGATES][::3]},
    "entropy": build(entropy=0.01),
    "exact": build(kl={"weight": 0.1, "form": "exact"}),
    "reward kl": build(kl={"weight": 0.1, "where": "reward"}),
    "top entropy": build(top_entropy=0.3),
    "clip_cov": build("clip_cov", share=0.1, low=0.0, high=5.0),
    "kl_cov": build("kl_cov", share=0.1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_ratio_is_one_and_micro_batches_change_nothing(case):
    runs = []
    for micro in (27, 64):
        sizes = {"micro_batch_size": micro, "loss_agg_mode": "seq_mean_token_mean_all"}
        built = trainer(CASES[case], **sizes)
        metrics = built.iterate()
        runs.append(built.policy.weights.full())
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], atol=1e-9, rtol=0)
    assert metrics["ratio/max_deviation"] < 1e-12 and metrics["grad_norm"] > 0
    assert metrics.get("clip_fraction", 0.0) == 0.0
    assert metrics.get("kl", 0.0) == pytest.approx(0.0, abs=1e-12)
    assert metrics["answer/min"] >= 1 and metrics["answer/max"] == 6
    assert 0 < metrics["answer/cut"] < 1 and 0 < metrics.get("entropy", 1.0) < math.log(5)


@pytest.mark.parametrize(
    "reduction",
    [
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_mean_all",
        "seq_mean_token_sum_norm",
        "token_sum",
    ],
)
def test_the_reductions_by_hand(reduction):
    """REINFORCE's loss on the first step, mean by mean."""
    sizes = {"loss_agg_mode": reduction, "loss_denominator": 10, "mask_truncated_completions": True}
    built = trainer(build(surrogate="reinforce"), **sizes)
    rollout = built.collect().rollout
    loss = (-rollout.advantage * rollout.logprob * rollout.mask).sum(1)
    count = rollout.mask.sum(1)
    rows = len(rollout)
    assert 0 < (count == 0).sum() < rows, "some answers were cut off"
    expected = {
        "token_mean": loss.sum() / count.sum(),
        "seq_mean_token_mean": (loss / count.clamp_min(1)).sum() / (count > 0).sum(),
        "seq_mean_token_mean_all": (loss / count.clamp_min(1)).sum() / rows,
        "seq_mean_token_sum_norm": loss.sum() / 10 / rows,
        "token_sum": loss.sum() / 10,
    }
    assert built.iterate()["loss"] == pytest.approx(float(expected[reduction]), abs=1e-7)


def test_nothing_but_cut_off_answers_is_a_step_left_out():
    built = trainer(mask_truncated_completions=True)
    with torch.no_grad():
        built.policy.net.head.bias.view(6, 5)[:, 4] = -1e3  # no answer ends
    before = built.policy.weights.full()
    metrics = built.iterate()
    assert metrics["answer/cut"] == 1 and metrics["skipped_steps"] == 1 and metrics["step"] == 0
    after = built.policy.weights.full()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


# Dynamic sampling


def only_label_one(media, prompts):
    """Answers to label 0 all earn the same."""
    return threes(media, prompts) * torch.tensor([float(p["label"]) for p in prompts])


def test_flat_groups_give_way_to_other_prompts():
    """Rewards in the log are those of everything that was sampled: the mean of the groups that stay
    says nothing about the policy."""
    asked = []

    def reward(media, prompts):
        asked.append(only_label_one(media, prompts))
        return asked[-1]

    built = trainer(reward=reward, dynamic_sampling_rounds=12)
    batch = built.collect()
    rollout, rewards = batch.rollout, batch.rewards
    assert {p["label"] for p in rollout.prompt_per_row()} == {1}
    assert sorted(rollout.row_id.tolist()) == list(range(64))
    assert batch.metrics["resample/left"] == 0
    assert batch.metrics["resample/groups"] >= 4 and batch.metrics["resample/rounds"] <= 12
    for group in rollout.group.unique():
        members = rollout.group == group
        assert members.sum() == 8 and rewards["toy"][members].unique().numel() > 1
    point = next(iter(built.policy.path(rollout)))
    gap = built.policy.dist(point).log_prob(point.target) - rollout.logprob
    assert gap[point.mask].abs().max() < 1e-12
    again = only_label_one(built.policy.decode(rollout), rollout.prompt_per_row())
    assert torch.equal(rewards["toy"], again)
    asked.clear()
    metrics = built.iterate()
    every = torch.cat(asked)
    flat = sum(len(group.unique()) == 1 for group in every.view(-1, 8))
    assert metrics["samples/total"] == len(every) > 64 and metrics["groups/flat"] == flat > 0
    assert metrics["groups/total"] == len(every) // 8
    for name in ("reward/mean", "reward/toy/mean"):
        assert metrics[name] == pytest.approx(float(every.mean()), abs=1e-6)


def test_rounds_end_when_nothing_helps_and_groups_that_differ_stay():
    before = trainer(reward=only_label_one).collect().rollout
    after = trainer(reward=only_label_one, dynamic_sampling_rounds=1).collect().rollout
    good = torch.tensor([p["label"] == 1 for p in before.prompt_per_row()])
    assert torch.equal(before.sample[good], after.sample[good])
    assert torch.equal(before.row_id, after.row_id)
    metrics = trainer(reward=toys.equal_reward, dynamic_sampling_rounds=3).iterate()
    counts = {"resample/rounds": 3, "resample/left": 8, "grad_norm": 0}
    assert {name: metrics[name] for name in counts} == counts


def nearly_equal_but_for_label_one(media, prompts):
    """Answers to label 0 earn what differs in the third digit, as continuous rewards do."""
    noise = 1e-3 * torch.arange(len(media)).sin()
    return (only_label_one(media, prompts) + noise).float()


def test_rewards_that_are_nearly_equal_give_way_by_their_spread():
    """By the population std of the weighted sum."""
    for spread, labels in ((0.0, {0, 1}), (0.01, {1})):
        sizes = {"dynamic_sampling_rounds": 12, "dynamic_sampling_min_std": spread}
        batch = trainer(reward=nearly_equal_but_for_label_one, **sizes).collect()
        assert {p["label"] for p in batch.rollout.prompt_per_row()} == labels
        assert batch.metrics["resample/left"] == 0
        assert (batch.metrics["resample/groups"] >= 4) == (spread > 0)
    sizes = {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 1}
    with_none = TrainOptions(**sizes, dynamic_sampling_min_std=0.1)
    warnings = arithmetic(with_none).warnings
    assert any("train.dynamic_sampling_rounds is 0" in sentence for sentence in warnings)
    parts = {"a": torch.tensor([1.0, 2.0, 3.0, 0.0, 0.5, 1.0]), "b": torch.zeros(6)}
    rows = rollout_of([0, 0, 0, 1, 1, 1])
    drawn = Drawn(rows, torch.zeros(6), Rewards(parts, {"a": 2.0}))
    narrow = (2 / 3) ** 0.5
    wide = 2 * narrow
    for bound, groups in ((narrow - 1e-6, []), (narrow + 1e-6, [1]), (wide - 1e-6, [1])):
        assert flat_groups(drawn, bound) == groups
    assert flat_groups(drawn) == [] and flat_groups(drawn, wide + 1e-6) == [0, 1]


def test_replacements_are_the_same_on_any_number_of_processes(monkeypatch):
    """Processes with one and two flat groups of four draw what one process with all eight draws,
    row by row."""
    labels = [0, 1, 1, 1, 0, 0, 1, 1]
    prompts = [{"text": f"label {label}", "label": label} for label in labels]
    built = trainer(reward=only_label_one)

    def replaced(first, last):
        rng = Rng(Rng.of("rollout").key, first)
        drawn = built.sample(prompts[first:last], rng, built.options.group_size)
        streams = [Rng.of("resample")]
        pick = toys.prompts(16)
        return dynamic_sampling.resampled(drawn, lambda u: pick[int(16 * u)], built.sample, streams)

    whole, counts = replaced(0, 8)
    assert counts["resample/groups"] == 3
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            two_processes = SimpleNamespace(
                world=lambda rank=rank: (rank, 2),
                all_gather_rows=lambda own: torch.tensor([1, 2]),  # flat groups of each
                all_sum=int,
                largest=lambda number, device: number,
            )
            patch.setattr(dynamic_sampling, "distributed", two_processes)
            part, counts = replaced(4 * rank, 4 * rank + 4)
        own = torch.isin(whole.rollout.row_id, part.rollout.row_id)
        assert counts["resample/groups"] == 3 and own.sum() == 32
        assert torch.equal(part.rollout.sample, whole.rollout.sample[own])
        asked = zip(whole.rollout.prompt_per_row(), own.tolist())
        assert part.rollout.prompt_per_row() == [p for p, in_part in asked if in_part]
        assert torch.equal(part.rewards["toy"], whole.rewards["toy"][own])


# Corrections, entropy, refusals


def test_a_sampler_that_differs_is_corrected():
    """With the weight p / q the gradient of what q sampled is that of p: exact expectation over one
    token."""
    objective = build(surrogate="reinforce", importance_sampling={"cap": 1e6})
    built = trainer(objective)
    rollout = built.collect().rollout
    foreign = rollout.replace(provenance=Provenance(sampler_logprob=rollout.logprob - 0.5))
    point = next(iter(built.policy.path(foreign)))
    plain = PolicyGradient(surrogate=SURROGATES["reinforce"]).loss(built.policy, point)
    found = objective.loss(built.policy, point)
    torch.testing.assert_close(found, plain * math.exp(0.5) * point.mask)


def test_top_entropy_keeps_its_share_of_the_whole_step():
    objective = PolicyGradient(top_entropy=0.25)
    chosen = []
    loss = objective.loss

    def noted(policy, point):
        chosen.append(point.coupling.weight[point.mask])
        return loss(policy, point)

    objective.loss = noted
    trainer(objective, micro_batch_size=7).iterate()
    # first tokens of one prompt have equal entropies
    assert 0.25 <= float(torch.cat(chosen).mean()) < 0.33


def test_the_entropy_controller_rises_below_its_target_and_is_saved():
    """By ``step`` an iteration, at most to ``high``; above the target there is no bonus."""
    objective = PolicyGradient(entropy=Entropy(weight=0.1, target=1.0, step=0.05, high=0.2))
    small = PolicyGradient(entropy=Entropy(target=2.0))
    bonuses = {objective: [], small: []}
    for n in range(4):
        for each, entropies in ((objective, [0.5, 0.5, 0.5, 2.0]), (small, [1.0, 1.0, 3.0, 2.0])):
            metrics = {"entropy": entropies[n]}
            each.adapt(n, metrics)
            bonuses[each].append(each.term(EntropyBonus).bonus)
            assert metrics["entropy_weight"] == bonuses[each][-1]
    assert bonuses[objective] == pytest.approx([0.15, 0.2, 0.2, 0.0])
    assert bonuses[small] == pytest.approx([0.005, 0.01, 0.0, 0.0]) and Entropy().high == 1.0
    restored = trainer(PolicyGradient(entropy=Entropy(weight=0.1, target=1.0)))
    state.restore(restored, *state.capture(trainer(objective)))
    saved = restored.objective.state_dict()
    expected = {"bonus": 0.0, "controlled": pytest.approx(0.15), "iteration": 4}
    assert saved == expected | {"kl_factor": 1.0, "refreshed": 0}


def test_the_kl_in_the_reward_is_taken_off_before_groups_are_compared():
    built = trainer(CASES["reward kl"], lr=0.05)
    built.iterate()
    assert built.iterate()["reward/kl/mean"] > 0
    rewards = built.collect().rewards
    assert rewards.weights["kl"] == -0.1 and list(rewards) == ["toy", "kl"]


def test_what_the_policy_is_not_for_is_refused_when_the_trainer_is_built():
    with pytest.raises(UserError, match="KLCov is for models that write tokens, which .* ToyFlow"):
        toys.trainer("flow", KLCov())
