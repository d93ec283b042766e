"""Collects an iteration: draws the prompts, samples, scores, lets the stages replace groups,
compares inside groups, and calls the monitors."""

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
    MovesSnapshots,
    ShapesRewards,
)
from mmrl.policies.base import Policy, RolloutContext
from mmrl.rollout import collect
from mmrl.rollout.collect import Monitor, Sampled
from mmrl.rollout.stages import (
    Drawn,
    Setup,
    Stage,
    by_question,
    sampled_only,
    set_apart,
    shaped_moments,
    sizes_of_all,
    stages_of,
)
from mmrl.train.batch import Batch
from mmrl.train.device import Device
from samplers.noise import Rng

if TYPE_CHECKING:
    from mmrl.train.reward_weights import RewardWeights
    from mmrl.train.update import Update

Scorer = Callable[[Media, list[Prompt]], Rewards]


class Collector:
    """Collects iterations; ``mmrl.train.trainer.Trainer`` updates the policy on what it collects.

    Functions appended to ``monitors`` see every iteration too.
    """

    update: Update
    stages: list[Stage]
    monitors: list[Monitor]
    reward_weights: RewardWeights | None = None

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        advantage: Advantage,
        objective: Objective,
        options: TrainOptions,
        device: Device,
    ):
        self.policy = policy
        self.prompts = prompts
        self.scorer = scorer
        self.advantage = advantage if objective.requires.compares else _equal
        self.objective = objective
        self.options = options
        self.device = device
        group_size_may_be_one = objective.requires.supervised or not objective.requires.compares
        self.plan = arithmetic(options, device.processes, group_size_may_be_one)
        self.draw: Any = collect.draw  # workers of a cluster may sample instead
        if options.preferences is not None:
            from mmrl.rollout.preferences import Compared, labelled

            self.draw = Compared.of(options.preferences)
            if options.preferences.label is not None:
                self.advantage = labelled
        self.clock = Stopwatch()
        self.iteration = 0  # iterations finished

    def attach(self) -> None:
        """Make the stages, monitors and weights of rewards that the options ask for."""
        rewards = getattr(self.scorer, "rewards", {})
        setup = Setup(self.options, self.policy, self.prompts, rewards, self._behavior, self._score)
        self.stages = stages_of(setup)
        self.monitors = list(MONITORS.values())
        if self.options.reward_gradients is not None:
            from mmrl.train.reward_weights import RewardWeights

            self.reward_weights = RewardWeights(self.options.reward_gradients)
            self.reward_weights.suits(self.objective, self.policy, self.device.scales_loss)

    @torch.no_grad()
    def collect(self) -> Batch:
        """Sample, score and compare inside groups, without training. Answers of the data are taken
        as they are."""
        first = self.device.rank * self.plan.prompts_per_process
        prompts, sizes = self.next_prompts()
        local = slice(first, first + self.plan.prompts_per_process)
        if isinstance(self.objective, MovesSnapshots):
            self.objective.begin_iteration(
                self.policy.weights, self.iteration, self._rng("checkpoints")
            )
        for stage in self.stages:
            stage.begin(self.iteration)
        rng = Rng(self._rng("rollout").key).after(sizes, first)
        if self.objective.requires.supervised:
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
        batch = self._batch(drawn.rollout, rewards, group_sizes, metrics)
        comparable = shaped_moments(drawn.rollout, drawn.rewards, rewards)
        drawn_shaped = replace(drawn, rollout=comparable)
        weighted = self._weighted(batch, drawn_shaped, rewards)
        trained = self._compare(drawn_shaped, weighted)
        sampled, metrics = self._monitored(drawn, trained, rewards, metrics)
        return replace(batch, rollout=trained, rewards=weighted, sampled=sampled, metrics=metrics)

    def _batch(
        self, rows: Rollout, rewards: Rewards, sizes: Sequence[int], metrics: dict[str, float]
    ) -> Batch:
        return Batch(
            iteration=self.iteration,
            rollout=rows,
            rewards=rewards,
            sampled=(rows, rewards),
            group_sizes=tuple(sizes),
            idle_row=rows[:1],
            longest=distributed.largest(rows.mask.shape[1], rows.group.device),
            pass_rows=self.policy.pass_sizes.rows,
            metrics=metrics,
        )

    def _monitored(
        self, drawn: Drawn, trained: Rollout, rewards: Rewards, metrics: dict[str, float]
    ) -> tuple[tuple[Rollout, Rewards], dict[str, float]]:
        """Return everything that was sampled, and the metrics with those of the monitors."""
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
        return sampled, metrics

    def next_prompts(self) -> tuple[list[Prompt], Copies]:
        """Draw the prompts of the iteration, of all processes, and how often each is answered."""
        options = self.options
        count = options.prompts_per_iteration
        prompts = batch_of_prompts(self.prompts, count, self.iteration, options.seed)
        if not isinstance(self.prompts, Curriculum) or self.objective.requires.supervised:
            return prompts, options.group_size
        return prompts, self.prompts.copies(prompts, options.group_size, self.iteration)

    def sample(self, prompts: list[Prompt], rng: Rng, copies: Copies) -> Drawn:
        """Sample answers to the prompts with the sampling weights, and score them."""
        context = RolloutContext(self.iteration, self.objective.requires.states_read())
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
        """Return the rewards, with weights that follow their gradients if that is chosen."""
        if self.reward_weights is None:
            return rewards
        from mmrl.train.reward_weights import forgetting

        compare = forgetting(self.advantage, partial(self._compare, drawn))
        gradient = partial(self.update.gradient, batch)
        weighted = self.reward_weights.weighted(rewards, [*drawn.rewards], compare, gradient)
        batch.metrics.update(self.reward_weights.metrics())
        return weighted

    def _compare(self, drawn: Drawn, rewards: Rewards) -> Rollout:
        """Add advantages to the rollout. Rows whose advantage is NaN are not trained on."""
        rollout = drawn.rollout
        compared = by_question(rollout)
        for stage in self.stages:
            compared = set_apart(compared, stage.baseline_of) if stage.baseline_of else compared
        parts = advantages.parts_of(self.advantage, rewards, compared).to(rollout.logprob)
        if any(stage.baseline_of == "is_ground_truth" for stage in self.stages):
            expert = rollout.provenance.is_ground_truth
            if expert is not None:  # imitated, whatever their advantage
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
        """Score demonstrations under the model's own distribution, as ``sft`` does."""
        if self.options.preferences is None:
            return nullcontext()
        return self.policy.untempered()

    def _behavior(self) -> AbstractContextManager[Any]:
        """Use the sampling weights."""
        return self.policy.weights.using(self.objective.behavior_policy)

    def _rng(self, name: str) -> Rng:
        return Rng.of(self.options.seed, self.iteration, name)


def _equal(rewards: Rewards | torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Return advantages of 0 [B, 1], for an objective that compares nothing."""
    return torch.zeros_like(rollout.logprob[:, :1])
