"""Text objectives in training: the causal toy with answers of many lengths."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mmrl import advantages, config
from mmrl.config.options import TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.registry import OBJECTIVES, SURROGATES
from mmrl.core.types import Completion, Provenance, Rewards
from mmrl.experiment import state
from mmrl.objectives import PolicyGradient
from mmrl.objectives.terms.entropy import Entropy, EntropyBonus
from mmrl.objectives.terms.kl_penalty import KLPenalty
from mmrl.policies.base import NO_CONTEXT
from mmrl.rollout.stages import Drawn
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.objectives import GVPO, REAL, KLCov, RegGRPO
from mmrl.zoo.stages import dynamic_sampling
from mmrl.zoo.stages.dynamic_sampling import flat_groups
from rewards import co_reward
from samplers.noise import Rng
from tests.advantages.test_advantages import rollout as rollout_of
from tests.experiment.test_resume import resumes
from tests.fixtures import toys
from tests.fixtures.records import make_point

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


def trainer(objective=None, reward=threes, advantage=None, lr=3e-3, **options):
    sizes = {
        "prompts_per_iteration": 8,
        "group_size": 8,
        "train_batch_size": 32,
        "iterations": 60,
        "micro_batch_size": 16,
    } | options
    policy = Answers()
    policy.net.double()
    return Trainer(
        policy,
        toys.prompts(16),
        Scorer({"threes": reward}),
        advantage or advantages.grpo,
        objective or PolicyGradient(),
        partial(adamw, lr=lr),
        TrainOptions(**sizes),
    )


def text(surrogate, **options):
    return config.build({"policy_gradient": {"surrogate": surrogate, **options}}, OBJECTIVES)


def test_surrogates_raise_the_reward(subtests):
    for name in [*SURROGATES][::3]:
        with subtests.test(name=name):
            built = trainer(
                text(name),
                train_batch_size=32,
                micro_batch_size=None,
                lr=3e-2,
                loss_agg_mode="seq_mean_token_mean",
            )
            rewards = [built.iterate()["reward/mean"] for _ in range(8)]
            assert sum(rewards[-2:]) / 2 > rewards[0] + 0.15, rewards


CASES = {
    **{name: text(name, kl=0.1) for name in [*SURROGATES][::3]},
    "entropy": PolicyGradient(entropy=0.01),
    "exact": config.build(
        {"policy_gradient": {"kl": {"weight": 0.1, "form": "exact"}}}, OBJECTIVES
    ),
    "reward kl": config.build(
        {"policy_gradient": {"kl": {"weight": 0.1, "where": "reward"}}}, OBJECTIVES
    ),
    "top entropy": PolicyGradient(top_entropy=0.3),
    "clip_cov": config.build({"clip_cov": {"share": 0.1, "low": 0.0, "high": 5.0}}, OBJECTIVES),
    "kl_cov": config.build({"kl_cov": {"share": 0.1}}, OBJECTIVES),
    "gvpo": GVPO(beta=0.5),
    "reg_grpo": RegGRPO(),
    "real": REAL(),
}


def test_micro_batches_change_nothing_in_a_whole_run(subtests):
    for case in CASES:
        with subtests.test(case=case):
            runs = []
            for micro in (9, 32):
                built = trainer(
                    CASES[case], micro_batch_size=micro, loss_agg_mode="seq_mean_token_mean_all"
                )
                runs.append(
                    (
                        [built.iterate()["reward/mean"] for _ in range(2)],
                        built.policy.weights.full(),
                    )
                )
            (rewards, weights), (rewards_cut, same) = runs
            assert rewards == pytest.approx(rewards_cut, abs=1e-10)
            for name, value in weights.items():
                torch.testing.assert_close(value, same[name], atol=1e-9, rtol=0)


def test_the_first_ratio_is_one(subtests):
    for case in CASES:
        with subtests.test(case=case):
            metrics = trainer(CASES[case], train_batch_size=64).iterate()
            assert metrics["ratio/max_deviation"] < 1e-12 and metrics["grad_norm"] > 0
            assert metrics.get("clip_fraction", 0.0) == 0.0 and metrics.get(
                "kl", 0.0
            ) == pytest.approx(0.0, abs=1e-12)
            assert (
                metrics["answer/min"] >= 1
                and metrics["answer/max"] == 6
                and 0 < metrics["answer/cut"] < 1
            )
            assert 0 < metrics.get("entropy", 1.0) < math.log(5)


def test_the_reductions_by_hand(subtests):
    """REINFORCE's loss on the first step, mean by mean."""
    for reduction in [
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_mean_all",
        "seq_mean_token_sum_norm",
        "token_sum",
    ]:
        with subtests.test(reduction=reduction):
            built = trainer(
                text("reinforce"),
                train_batch_size=64,
                loss_agg_mode=reduction,
                loss_denominator=10,
                mask_truncated_completions=True,
            )
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
    built = trainer(
        reward=lambda media, prompts: torch.rand(len(media)), mask_truncated_completions=True
    )
    with torch.no_grad():
        built.policy.net.head.bias.view(6, 5)[:, 4] = -1e3  # no answer ends
    before = built.policy.weights.full()
    metrics = built.iterate()
    assert metrics["answer/cut"] == 1 and metrics["skipped_steps"] == 2 and metrics["step"] == 0
    assert all(
        torch.equal(value, before[name]) for name, value in built.policy.weights.full().items()
    )


def test_groups_without_a_reward_have_no_gradient_and_no_nan():
    def reward(media, prompts):
        return torch.where(torch.arange(len(media)) < 8, torch.nan, threes(media, prompts))

    built = trainer(reward=reward)
    metrics = built.iterate()
    assert (
        metrics["samples/excluded"] == 8
        and math.isfinite(metrics["loss"])
        and metrics["skipped_steps"] == 0
    )
    assert all(value.isfinite().all() for value in built.policy.weights.full().values())


# Dynamic sampling


def only_label_one(media, prompts):
    """Answers to label 0 all earn the same."""
    return threes(media, prompts) * torch.tensor([float(p["label"]) for p in prompts])


def test_flat_groups_give_way_to_other_prompts():
    built = trainer(reward=only_label_one, dynamic_sampling_rounds=12)
    batch = built.collect()
    rollout = batch.rollout
    rewards = batch.rewards
    assert {p["label"] for p in rollout.prompt_per_row()} == {1}
    assert sorted(rollout.row_id.tolist()) == list(range(64))
    assert batch.metrics["resample/left"] == 0
    assert batch.metrics["resample/groups"] >= 4 and batch.metrics["resample/rounds"] <= 12
    for group in rollout.group.unique():
        members = rollout.group == group
        assert members.sum() == 8 and rewards["threes"][members].unique().numel() > 1
    point = next(iter(built.policy.path(rollout)))
    scored = built.policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(scored[point.mask], rollout.logprob[point.mask], atol=1e-12, rtol=0)
    assert torch.equal(
        rewards["threes"], only_label_one(built.policy.decode(rollout), rollout.prompt_per_row())
    )


def test_rewards_in_the_log_are_those_of_everything_that_was_sampled():
    """Groups of equal rewards give way to others: the mean of those that stay says nothing about
    the policy."""
    scored = []

    def reward(media, prompts):
        scored.append(only_label_one(media, prompts))
        return scored[-1]

    built = trainer(reward=reward, dynamic_sampling_rounds=12, train_batch_size=64)
    metrics = built.iterate()
    every = torch.cat(scored)
    assert (
        metrics["samples/total"] == len(every) > 64 and metrics["groups/total"] == len(every) // 8
    )
    assert metrics["reward/mean"] == pytest.approx(float(every.mean()), abs=1e-6)
    assert metrics["reward/threes/mean"] == pytest.approx(float(every.mean()), abs=1e-6)
    assert (
        metrics["groups/flat"] == sum(len(group.unique()) == 1 for group in every.view(-1, 8)) > 0
    )


def test_rounds_end_when_nothing_helps_and_groups_that_differ_stay():
    plain = trainer(reward=only_label_one)
    resampling = trainer(reward=only_label_one, dynamic_sampling_rounds=1)
    before = plain.collect().rollout
    after = resampling.collect().rollout
    good = torch.tensor([p["label"] == 1 for p in before.prompt_per_row()])
    assert torch.equal(before.sample[good], after.sample[good]) and torch.equal(
        before.row_id, after.row_id
    )
    useless = trainer(
        reward=lambda media, prompts: torch.ones(len(media)), dynamic_sampling_rounds=3
    )
    metrics = useless.iterate()
    assert (
        metrics["resample/rounds"] == 3
        and metrics["resample/left"] == 8
        and metrics["grad_norm"] == 0
    )


def nearly_equal_but_for_label_one(media, prompts):
    """Answers to label 0 earn what differs in the third digit, as continuous rewards do."""
    label = torch.tensor([float(p["label"]) for p in prompts], dtype=torch.float64)
    return (threes(media, prompts) * label + 1e-3 * torch.arange(len(media)).sin()).float()


def test_rewards_that_are_nearly_equal_give_way_by_their_spread():
    exact = trainer(reward=nearly_equal_but_for_label_one, dynamic_sampling_rounds=12)
    batch = exact.collect()
    rollout = batch.rollout
    assert batch.metrics["resample/groups"] == 0 and {
        p["label"] for p in rollout.prompt_per_row()
    } == {0, 1}
    built = trainer(
        reward=nearly_equal_but_for_label_one,
        dynamic_sampling_rounds=12,
        dynamic_sampling_min_std=0.01,
    )
    batch = built.collect()
    rollout = batch.rollout
    rewards = batch.rewards
    assert {p["label"] for p in rollout.prompt_per_row()} == {1}
    assert batch.metrics["resample/left"] == 0
    assert batch.metrics["resample/groups"] >= 4
    for group in rollout.group.unique():
        assert rewards["threes"][rollout.group == group].std(correction=0) > 0.01
    with_none = TrainOptions(
        prompts_per_iteration=2,
        group_size=2,
        train_batch_size=4,
        iterations=1,
        dynamic_sampling_min_std=0.1,
    )
    assert any(
        "train.dynamic_sampling_rounds is 0" in sentence
        for sentence in arithmetic(with_none).warnings
    )


def test_the_spread_is_the_population_std_of_the_total():
    rows = rollout_of([0, 0, 0, 1, 1, 1])
    rewards = Rewards(
        {"a": torch.tensor([1.0, 2.0, 3.0, 0.0, 0.5, 1.0]), "b": torch.zeros(6)}, {"a": 2.0}
    )
    drawn = Drawn(rows, torch.zeros(6), rewards)
    wide = 2 * (2 / 3) ** 0.5
    narrow = (2 / 3) ** 0.5
    assert flat_groups(drawn) == [] and flat_groups(drawn, narrow - 1e-6) == []
    assert flat_groups(drawn, narrow + 1e-6) == [1] and flat_groups(drawn, wide - 1e-6) == [1]
    assert flat_groups(drawn, wide + 1e-6) == [0, 1]


class FirstWord(co_reward):
    """The vote of an answer is its first token."""

    def __call__(self, media, prompts, gather=list):
        return super().__call__([text.split()[0] for text in media], prompts, gather)


@pytest.mark.parametrize("remembers", [True, False])
def test_votes_that_rewards_remember_are_resumed_to_the_bit(remembers, tmp_path, monkeypatch):
    """Half of the questions come in an iteration; those whose twin came before are judged by its
    vote of then."""

    def fresh():
        built = trainer(lr=3e-2)
        built.prompts = [
            {**prompt, "twin": i // 2, "version": i} for i, prompt in enumerate(built.prompts)
        ]
        built.scorer = Scorer({"co": FirstWord()})
        return built

    if remembers:
        resumes(fresh, tmp_path)
        return
    monkeypatch.setattr(co_reward, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        resumes(fresh, tmp_path)


def test_replacements_are_the_same_on_any_number_of_processes(monkeypatch):
    """Processes with one and two flat groups of four draw what one process with all eight draws,
    row by row."""
    labels = [0, 1, 1, 1, 0, 0, 1, 1]
    prompts = [{"text": f"label {label}", "label": label} for label in labels]
    built = trainer(reward=only_label_one)
    flat = [1, 2]  # of each process

    def replaced(first, last):
        drawn = built.sample(
            prompts[first:last], Rng(Rng.of("rollout").key, first), built.options.group_size
        )
        stream = Rng.of("resample")
        return dynamic_sampling.resampled(
            drawn, lambda u: toys.prompts(16)[int(16 * u)], built.sample, [stream]
        )

    whole, counts = replaced(0, 8)
    assert counts["resample/groups"] == 3
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            two_processes = SimpleNamespace(
                world=lambda rank=rank: (rank, 2),
                all_gather_rows=lambda own: torch.tensor(flat),
                all_sum=int,
                largest=lambda number, device: number,
            )
            patch.setattr(dynamic_sampling, "distributed", two_processes)
            part, counts = replaced(4 * rank, 4 * rank + 4)
        rows_of_part = torch.isin(whole.rollout.row_id, part.rollout.row_id)
        assert counts["resample/groups"] == 3 and rows_of_part.sum() == 32
        assert torch.equal(part.rollout.sample, whole.rollout.sample[rows_of_part])
        assert part.rollout.prompt_per_row() == [
            p
            for p, in_part in zip(whole.rollout.prompt_per_row(), rows_of_part.tolist())
            if in_part
        ]
        assert torch.equal(part.rewards["threes"], whole.rewards["threes"][rows_of_part])


# Corrections, entropy, refusals


def test_a_sampler_that_differs_is_corrected():
    """With the weight p / q the gradient of what q sampled is that of p: exact expectation over one
    token."""
    objective = config.build(
        {"policy_gradient": {"surrogate": "reinforce", "importance_sampling": {"cap": 1e6}}},
        OBJECTIVES,
    )
    built = trainer(objective, train_batch_size=64)
    rollout = built.collect().rollout
    foreign = rollout.replace(provenance=Provenance(sampler_logprob=rollout.logprob - 0.5))
    point = next(iter(built.policy.path(foreign)))
    plain = PolicyGradient(surrogate=SURROGATES["reinforce"]).loss(built.policy, point)
    torch.testing.assert_close(
        objective.loss(built.policy, point), plain * math.exp(0.5) * point.mask
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [[2, 0.5, 1]]), ("sequence", [[1, 1, 1]]), ("geometric", [[1, 1, 1]])],
)
def test_importance_weights(level, expected):
    from mmrl.objectives.terms.importance_sampling import Importance

    zero = torch.zeros(1, 3)
    gap = torch.tensor([[math.log(2), -math.log(2), 5.0]])
    mask = torch.tensor([[True, True, False]])
    row = torch.zeros(1, dtype=torch.long)
    point = make_point(
        group=row, row_id=row, state=zero, mask=mask, logprob=gap, sampler_logprob=zero
    )

    def weight_of(point, **options):
        sampling = Importance(level=level, **options)
        return sampling.weight(sampling.of_samples(point))

    weight = weight_of(point, cap=1e3)
    torch.testing.assert_close(weight[mask], torch.tensor(expected)[mask].float())
    assert weight_of(point, cap=1.5)[mask].max() <= 1.5
    assert (weight_of(point, mode="mask", cap=1.5)[mask] <= 1.5).all()
    long = point.replace(mask=torch.ones(1, 3, dtype=torch.bool), logprob=torch.full((1, 3), 0.1))
    whole = {"token": 0.1, "sequence": 0.3, "geometric": 0.1}[level]
    assert weight_of(long).unique().item() == pytest.approx(math.exp(whole))


def test_answers_that_went_out_of_favour_leave_the_loss():
    built = trainer(train_batch_size=64)
    rollout = built.collect().rollout
    point = next(iter(built.policy.path(rollout.replace(logprob=rollout.logprob + 0.3))))
    masked, plain = (
        PolicyGradient(off_policy=limit).loss(built.policy, point) for limit in (0.2, None)
    )
    bad = (point.advantage < 0).expand_as(point.mask) & point.mask
    good = point.mask & ~bad
    assert (masked[bad] == 0).all() and torch.equal(masked[good], plain[good]) and bad.any()


def test_top_entropy_keeps_its_share_of_the_whole_step():
    objective = PolicyGradient(top_entropy=0.25)
    built = trainer(objective, train_batch_size=64, micro_batch_size=7)
    chosen = []
    loss = objective.loss
    objective.loss = lambda policy, point: (
        chosen.append(point.coupling.weight[point.mask]) or loss(policy, point)
    )
    built.iterate()
    # first tokens of one prompt have equal entropies
    assert 0.25 <= float(torch.cat(chosen).mean()) < 0.33


def test_the_entropy_controller_rises_below_its_target_and_is_saved():
    objective = PolicyGradient(entropy=Entropy(weight=0.1, target=1.0, step=0.05, high=0.2))
    entropy = objective.term(EntropyBonus)
    metrics = {"entropy": 0.5}
    objective.adapt(0, metrics)
    assert entropy.bonus == pytest.approx(0.15) and metrics["entropy_weight"] == entropy.bonus
    objective.adapt(1, {"entropy": 0.5})
    objective.adapt(2, {"entropy": 0.5})
    assert entropy.bonus == pytest.approx(0.2)  # at most high
    objective.adapt(3, {"entropy": 2.0})
    assert entropy.bonus == 0.0 and entropy.controlled == pytest.approx(0.15)
    built = trainer(objective)
    restored = trainer(PolicyGradient(entropy=Entropy(weight=0.1, target=1.0)))
    state.restore(restored, *state.capture(built))
    assert restored.objective.state_dict() == {
        "bonus": 0.0,
        "controlled": pytest.approx(0.15),
        "iteration": 4,
        "kl_factor": 1.0,
        "refreshed": 0,
    }


def test_the_kl_in_the_reward_is_taken_off_before_groups_are_compared():
    built = trainer(CASES["reward kl"], train_batch_size=64, lr=0.05)
    built.iterate()
    metrics = built.iterate()
    assert metrics["reward/kl/mean"] > 0
    rewards = built.collect().rewards
    assert rewards.weights["kl"] == -0.1 and list(rewards) == ["threes", "kl"]


def test_a_flow_policy_is_refused_when_the_trainer_is_built():
    with pytest.raises(
        UserError, match="KLCov is for models that write tokens, which the policy ToyFlow is not"
    ):
        Trainer(
            toys.make("flow"),
            toys.prompts(4),
            Scorer({"threes": threes}),
            advantages.grpo,
            KLCov(),
            partial(adamw, lr=1e-3),
            TrainOptions(prompts_per_iteration=2, group_size=2, train_batch_size=4, iterations=1),
        )


# Whole groups


def by_hand(name, ratio, advantage):
    """The loss of one group from its answers' log-ratios, as the papers write it."""
    n = len(ratio)
    if name == "gvpo":
        error = 0.5 * (ratio - ratio.mean()) - (advantage - advantage.mean())
        return error.square().sum() / 2 / (n - 1)
    if name == "reg_grpo":
        return (advantage - (ratio - ratio.mean())).square().mean()
    good = advantage > 0
    bad = advantage < 0
    score = ratio / 0.1
    return (
        (1 + score[bad].exp().sum()).log() + (1 + (-score[good]).exp().sum()).log()
        if good.any()
        else 0.0
    )


def test_losses_of_groups_and_their_gradients_by_hand(subtests):
    for name in ["gvpo", "reg_grpo", "real"]:
        for micro in [5, 32]:
            with subtests.test(name=name, micro=micro):
                from samplers.noise import Rng

                built = trainer(
                    CASES[name],
                    train_batch_size=64,
                    micro_batch_size=micro,
                    loss_agg_mode="seq_mean_token_mean",
                )
                batch = built.collect()
                rollout = batch.rollout
                built.iterate()  # away from the weights that sampled
                point = next(iter(built.policy.path(rollout)))
                gap = (
                    built.policy.dist(point).log_prob(point.target) - rollout.logprob
                ) * rollout.mask
                ratio = gap.sum(1) / (rollout.mask.sum(1) if name == "real" else 1)
                groups = [rollout.group == g for g in range(8)]
                loss = (
                    sum(
                        by_hand(name, ratio[members], rollout.advantage[members, 0])
                        for members in groups
                    )
                    / 8
                )
                slopes = torch.autograd.grad(loss, list(built.policy.net.parameters()))
                built.update._descend = lambda meter: True
                meter = Meter()
                assert built.update.improve(batch, rollout, Rng.of("step"), False, meter)
                assert meter.mean("loss") == pytest.approx(float(loss.detach()), abs=1e-6)
                for parameter, expected in zip(built.policy.net.parameters(), slopes, strict=True):
                    torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-5)


def test_the_weight_of_the_kl_goes_along_a_line():
    objective = config.build(
        {"policy_gradient": {"kl": {"weight": 0.3, "start": 0.1, "over": 4}}}, OBJECTIVES
    )
    term = objective.term(KLPenalty)
    assert [term.options.at(i) for i in (0, 1, 2, 4, 9)] == pytest.approx(
        [0.1, 0.15, 0.2, 0.3, 0.3]
    )
    objective.adapt(1, {})
    assert term.held.iteration == 2 and objective.snapshots == ("ref",)


def test_the_length_of_answers_follows_its_stages():
    with pytest.raises(
        UserError,
        match="train.max_new_tokens_schedule: Answers writes no answers whose length could change",
    ):
        trainer(max_new_tokens_schedule=((1, 3), (2, 5)))
