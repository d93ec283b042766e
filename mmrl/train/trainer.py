"""Runs the training loop. Read this first.

One iteration, the same for every family of models: take the prompts, sample, score, let the stages
exchange groups, compare inside groups, let the monitors look, update. Whole groups live on one
process, so that only global statistics travel. What one kind of run needs is imported where it is
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import mmrl.advantages as advantages
from mmrl.config.options import TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.core import distributed
from mmrl.core.metrics import Stopwatch
from mmrl.core.registry import MONITORS
from mmrl.core.types import Advantage, Copies, Media, Prompt, Rewards, Rollout, per_prompt
from mmrl.data.base import Curriculum
from mmrl.data.base import batch as batch_of_prompts
from mmrl.objectives.base import Objective
from mmrl.objectives.contracts import (
    FollowsReward,
    HasCritic,
    HasTeacher,
    MovesSnapshots,
    ShapesRewards,
    Stateful,
)
from mmrl.policies.base import Policy, RolloutContext
from mmrl.policies.contracts import Measures, MeasuresPasses
from mmrl.rollout import collect
from mmrl.rollout.sampled import Monitor, Sampled
from mmrl.rollout.stages import (
    Drawn,
    Setup,
    by_question,
    sampled_only,
    set_apart,
    shaped_moments,
    sizes_of_all,
    stages_of,
)
from mmrl.train.batch import Batch
from mmrl.train.device import Device, MakeOptimizer
from mmrl.train.divergence import Divergence
from mmrl.train.update import Update
from samplers.noise import Rng

if TYPE_CHECKING:
    from mmrl.train.critic import SnapshotUpdate
    from mmrl.train.reward_weights import RewardWeights

Scorer = Callable[[Media, list[Prompt]], Rewards]


class Trainer:
    """Trains a policy, one iteration a call of ``iterate``.

    ``optimizer`` makes one from parameters. After construction the policy lives on the device,
    wrapped for it. Functions appended to ``monitors`` see every iteration too.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        advantage: Advantage,
        objective: Objective,
        optimizer: MakeOptimizer,
        options: TrainOptions,
        device: Device | None = None,
    ):
        from mmrl.train import checks

        self.policy = policy
        self.prompts = prompts
        self.scorer = scorer
        self.advantage = advantage if objective.compares else _equal
        self.objective = objective
        self.options = options
        self.device = device or Device(options)
        group_size_may_be_one = objective.supervised or not objective.compares
        self.plan = arithmetic(options, self.device.processes, group_size_may_be_one)
        self.draw: Any = collect.draw  # workers of a cluster may sample in its place
        if options.preferences is not None:
            from mmrl.rollout.preferences import Compared, labelled

            self.draw = Compared.of(options.preferences)
            if options.preferences.label is not None:
                self.advantage = labelled
        self.clock = Stopwatch()
        self.iteration = 0  # iterations finished
        self.divergence = Divergence(policy.weights)
        prepared = self.device.prepare(policy, optimizer)
        self.pass_rows: int | None = None  # of every pass, where that was measured
        policy.fixed_batch_rows = policy.fixed_batch_rows or self.plan.micro_batch
        for name in self.snapshots():
            policy.weights.keep(name)
        checks.suits(objective, policy, options)
        if isinstance(objective, HasTeacher):
            objective.meet(policy)
        checks.whole_questions(prompts, self.plan.prompts_per_process)
        checks.one_size(prompts, options)
        differentiable = getattr(scorer, "differentiable", None)
        if isinstance(objective, FollowsReward) and objective.differentiates and differentiable:
            objective.attach(differentiable)
        rewards = getattr(scorer, "rewards", {})
        self.stages = stages_of(
            Setup(options, policy, prompts, rewards, self._behavior, self._score)
        )
        self.monitors: list[Monitor] = list(MONITORS.values())
        self.reward_weights: RewardWeights | None = None
        if options.reward_gradients is not None:
            from mmrl.train.reward_weights import RewardWeights

            self.reward_weights = RewardWeights(options.reward_gradients)
            self.reward_weights.suits(objective, policy, self.device.scales_loss)
        self.update = Update(policy, objective, prepared, options, self.device, self.clock)
        self.critic: SnapshotUpdate | None = None  # what learns beside the policy
        if isinstance(objective, HasCritic):
            from mmrl.train.critic import SnapshotUpdate

            self.critic = SnapshotUpdate(
                objective.critic(), policy, optimizer, options, self.device
            )
            self.update.learner = self.critic

    def snapshots(self) -> tuple[str, ...]:
        """Name the snapshots this run keeps."""
        return kept_snapshots(self.objective, self.options)

    def iterate(self) -> dict[str, float]:
        """Run one iteration. Returns its metrics, of what the policy sampled itself."""
        if self.options.micro_batch_size == "auto" and self.pass_rows is None:
            self.measure_passes()
        forwards = self.policy.forwards
        self._measured()  # forget what was counted outside iterations
        self.divergence.look(self.iteration)
        with self._likelihoods(), self.divergence.explained():
            batch = self.collect()
            metrics = self.update.run(batch)
        if isinstance(self.prompts, Curriculum) and not self.objective.supervised:
            rollout, rewards = batch.sampled
            self.prompts.see_update(metrics)
            self.prompts.learn(advantages.outcomes(rewards, rollout))
        self.iteration += 1
        metrics |= batch.metrics | self.clock.lap()
        # of this process
        metrics["forwards"] = self.policy.forwards - forwards
        metrics["decisions"] = int(batch.rollout.mask.sum())
        metrics |= self._measured()
        if isinstance(self.objective, Stateful):
            self.objective.adapt(batch.iteration, metrics)
        return metrics

    def _measured(self) -> dict[str, float]:
        return self.policy.measures() if isinstance(self.policy, Measures) else {}

    def measure_passes(self) -> None:
        """Choose the size of all passes from now on by how fast a few sizes are; a collective
        call."""
        from mmrl.train.pass_size import fastest

        prompts = self.next_prompts()[0][: self.plan.prompts_per_process]
        policy = MeasuresPasses.of(self.policy)
        trial = policy.trial(prompts, self.options.group_size, self.objective.states_read())
        if self.objective.supervised or self.options.preferences is not None:
            trial = replace(trial, sampled=())
        with self.clock.time("measure_passes"):
            rows, sentence = fastest(self.policy, trial, self.plan, self.options.epochs)
        self.limit_passes(rows)
        self.policy.news.append(sentence)

    def limit_passes(self, rows: int) -> None:
        """Give all passes the size that was chosen, now or before a resume."""
        self.pass_rows = min(rows, self.plan.micro_batch)
        self.policy.limit_passes(self.pass_rows)

    @torch.no_grad()
    def collect(self) -> Batch:
        """Sample, score and compare inside groups; nothing is trained yet. Answers of the data are
        taken as they are."""
        first = self.device.rank * self.plan.prompts_per_process
        prompts, sizes = self.next_prompts()
        local = slice(first, first + self.plan.prompts_per_process)
        if isinstance(self.objective, MovesSnapshots):
            self.objective.revisit(self.policy.weights, self.iteration, self._rng("checkpoints"))
        for stage in self.stages:
            stage.begin(self.iteration)
        rng = Rng(self._rng("rollout").key).after(sizes, first)
        if self.objective.supervised:
            from mmrl.train import supervised

            with self.clock.time("demonstrate"):
                return supervised.collect(
                    self.policy, self.objective, prompts[local], rng, self.iteration, len(prompts)
                )
        local_sizes = sizes if isinstance(sizes, int) else sizes[local]
        drawn = self.sample(prompts[local], rng, local_sizes)
        metrics: dict[str, float] = {}
        for stage in self.stages:
            drawn, counts = stage.groups(drawn, self.iteration, self.sample)
            metrics |= counts
        grows = any(stage.grows for stage in self.stages)
        group_sizes = sizes_of_all(drawn.rollout) if grows else per_prompt(sizes, len(prompts))
        rewards = drawn.rewards
        if isinstance(self.objective, ShapesRewards):
            rewards = self.objective.shaped(self.policy, drawn.rollout, rewards)
        comparable = shaped_moments(drawn.rollout, drawn.rewards, rewards)
        drawn_shaped = replace(drawn, rollout=comparable)
        batch = Batch(
            iteration=self.iteration,
            rollout=drawn.rollout,
            rewards=rewards,
            sampled=(drawn.rollout, rewards),
            group_sizes=tuple(group_sizes),
            idle_row=drawn.rollout[:1],
            longest=distributed.largest(drawn.rollout.mask.shape[1], drawn.rollout.group.device),
            pass_rows=self.policy.fixed_batch_rows,
            metrics=metrics,
        )
        weighted = self._weighted(batch, drawn_shaped, rewards)
        trained = self._compare(drawn_shaped, weighted)
        # rows replaced by a stage have no shaped rewards, so ``sampled`` then keeps the plain ones
        plain_only = drawn.gave_way or drawn.unused
        whole = drawn if plain_only else replace(drawn, rewards=rewards)
        sampled = whole.sampled()
        media, rollout, plain = sampled_only(drawn.media, trained, drawn.rewards)
        _, _, shaped = sampled_only(drawn.media, trained, rewards)
        for monitor in self.monitors:
            metrics |= monitor(
                Sampled(self.iteration, media, rollout, plain, shaped, sampled, metrics)
            )
        if self.options.preferences is not None:
            from mmrl.train.preferences import without_rewards

            metrics = without_rewards(metrics)
        return replace(batch, rollout=trained, rewards=weighted, sampled=sampled, metrics=metrics)

    def held_out(self, prompts: Sequence[Prompt], seed: int) -> dict[str, float]:
        """Measure the loss on held-out answers under the present weights, where the objective
        learns from answers or preferences; a collective call."""
        from mmrl.rollout.sizes import by_size

        parts = by_size(self.policy, prompts, partial(self._held_out, seed=seed))
        return {  # rows of one size are as many decisions
            name: sum(len(part.places) / len(prompts) * part.outcome[name] for part in parts)
            for name in parts[0].outcome
        }

    def _held_out(self, prompts: Sequence[Prompt], seed: int) -> dict[str, float]:
        passes = self.update.passes
        if self.options.preferences is not None:
            from mmrl.train.preferences import held_out_preferences

            with self._likelihoods():
                return held_out_preferences(self.policy, passes, self.draw, prompts, seed)
        if not self.objective.supervised:
            return {}
        from mmrl.train import supervised

        loss = supervised.held_out_loss(self.policy, self.objective, passes, prompts, seed)
        return {"loss": loss}

    def next_prompts(self) -> tuple[list[Prompt], Copies]:
        """Take the prompts of the iteration, of all processes, and how often each is answered."""
        options = self.options
        count = options.prompts_per_iteration
        prompts = batch_of_prompts(self.prompts, count, self.iteration, options.seed)
        if not isinstance(self.prompts, Curriculum) or self.objective.supervised:
            return prompts, options.group_size
        return prompts, self.prompts.copies(prompts, options.group_size, self.iteration)

    def sample(self, prompts: list[Prompt], rng: Rng, copies: Copies) -> Drawn:
        """Sample answers to the prompts with the behaviour weights, and score them."""
        context = RolloutContext(self.iteration, self.objective.states_read())
        for stage in self.stages:
            context = stage.context(context)
        with self.clock.time("rollout"), self._behavior():
            rollout, media, scores = self.draw(
                self.policy,
                prompts,
                copies,
                rng,
                collect.once(self.scorer),
                self.options.reward_overlap_chunks,
                context,
            )
        with self.clock.time("reward"), distributed.together():
            rewards = scores()
        with self.clock.time("reward"):
            rewards = collect.shared(rewards, getattr(self.scorer, "weights", None))
            placed = {name: value.to(rollout.logprob) for name, value in rewards.items()}
            drawn = Drawn(rollout, media, Rewards(placed, rewards.weights))
        if hasattr(self.scorer, "remember"):
            self.scorer.remember()
        for stage in self.stages:
            stage.observe(prompts, drawn)
        return drawn

    def _weighted(self, batch: Batch, drawn: Drawn, rewards: Rewards) -> Rewards:
        """Return the rewards with the weights that follow their gradients, if they do."""
        if self.reward_weights is None:
            return rewards
        from mmrl.train.reward_weights import forgetting

        compare = forgetting(self.advantage, partial(self._compare, drawn))
        gradient = partial(self.update.gradient, batch)
        weighted = self.reward_weights.weighted(rewards, [*drawn.rewards], compare, gradient)
        batch.metrics.update(self.reward_weights.metrics())
        return weighted

    def _compare(self, drawn: Drawn, rewards: Rewards) -> Rollout:
        """Give the rollout its advantages. Rows whose advantage is NaN leave training."""
        rollout = drawn.rollout
        compared = by_question(rollout)
        for stage in self.stages:
            compared = set_apart(compared, stage.apart) if stage.apart else compared
        parts = advantages.parts_of(self.advantage, rewards, compared).to(rollout.logprob)
        if any(stage.apart == "is_ground_truth" for stage in self.stages):
            expert = rollout.provenance.is_ground_truth
            if expert is not None:  # imitated, however they compare
                parts = torch.where(expert[:, None, None], parts.nan_to_num(0.0), parts)
        trained = parts
        if self.options.mask_truncated_completions:
            from mmrl.monitoring.completion_stats import finished

            # of a tree, what an unfinished answer shares with others is still trained
            unfinished = ~finished(drawn.media, rollout)
            trained = parts.masked_fill(unfinished[..., None], torch.nan)
        trained = torch.stack([advantages.by_edge(x, rollout) for x in trained.unbind(-1)], -1)
        mask = rollout.mask & ~trained.isnan().any(-1)
        trained = trained.nan_to_num(0.0)
        return rollout.replace(
            advantage=trained.sum(-1),
            advantage_parts=trained if trained.shape[-1] > 1 else None,
            mask=mask,
            trainable=~parts.isnan().any(-1).all(1),
        )

    def _score(self, rollout: Rollout) -> Rewards:
        """Score rows that were not sampled; a collective call."""
        with self.clock.time("reward"), distributed.together():
            media = self.policy.decode(rollout)
            rewards = collect.scored(collect.once(self.scorer), media, rollout)
        return collect.shared(rewards, getattr(self.scorer, "weights", None))

    def _likelihoods(self) -> AbstractContextManager[Any]:
        """Score answers of others by the model's own distribution, as ``sft`` does."""
        given = self.options.preferences is not None
        return self.policy.untempered() if given else nullcontext()

    def _behavior(self) -> AbstractContextManager[Any]:
        """Put the weights in force that sample."""
        return self.policy.weights.using(self.objective.behavior_policy)

    def _rng(self, name: str) -> Rng:
        return Rng.of(self.options.seed, self.iteration, name)


def kept_snapshots(objective: Objective, options: TrainOptions) -> tuple[str, ...]:
    """Name the snapshots that a run keeps: those that something samples with, reads or averages
    into."""
    names = {objective.behavior_policy, *objective.snapshots} - {"live"}
    return tuple(sorted(names | ({"ema"} if options.ema else set())))


def _equal(rewards: Rewards | torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Return advantages of 0 [B, 1], for an objective that compares nothing."""
    return torch.zeros_like(rollout.logprob[:, :1])
