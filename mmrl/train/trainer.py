"""Runs the training loop. Read this first.

One iteration, the same for every family of models: collect (``mmrl.train.collector``: sample,
score, compare inside groups), then update. Groups are never split over processes, so that only
global statistics are communicated. What one kind of run needs is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import mmrl.advantages as advantages
from mmrl.config.options import TrainOptions
from mmrl.core.types import Advantage, Prompt
from mmrl.data.base import Curriculum
from mmrl.objectives.base import Objective
from mmrl.objectives.contracts import (
    FollowsReward,
    HasCritic,
    HasTeacher,
    Stateful,
)
from mmrl.policies.base import Policy
from mmrl.policies.contracts import Measures, MeasuresPasses
from mmrl.train.collector import Collector, Scorer
from mmrl.train.device import Device, MakeOptimizer
from mmrl.train.divergence import Divergence
from mmrl.train.update import Update

if TYPE_CHECKING:
    from mmrl.train.critic import SnapshotUpdate


class Trainer(Collector):
    """Trains a policy, one iteration per call of ``iterate``.

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

        super().__init__(
            policy, prompts, scorer, advantage, objective, options, device or Device(options)
        )
        self.divergence = Divergence(policy.weights)
        prepared = self.device.prepare(policy, optimizer)
        self.pass_rows: int | None = None  # of every pass, where that was measured
        policy.pass_sizes.rows = policy.pass_sizes.rows or self.plan.micro_batch
        for name in self.snapshots():
            policy.weights.keep(name)
        checks.suits(objective, policy, options)
        if isinstance(objective, HasTeacher):
            objective.setup(policy)
        checks.whole_questions(prompts, self.plan.prompts_per_process)
        checks.one_size(prompts, options)
        differentiable = getattr(scorer, "differentiable", None)
        follows = objective.requires.differentiates
        if follows and differentiable and isinstance(objective, FollowsReward):
            objective.attach(differentiable)
        self.attach()
        self.update = Update(policy, objective, prepared, options, self.device, self.clock)
        self.critic: SnapshotUpdate | None = None  # trained along with the policy
        if isinstance(objective, HasCritic):
            self.critic = self._critic(objective, optimizer)
            self.update.learner = self.critic

    def _critic(self, objective: HasCritic, optimizer: MakeOptimizer) -> SnapshotUpdate:
        from mmrl.train.critic import SnapshotUpdate

        return SnapshotUpdate(objective.critic(), self.policy, optimizer, self.options, self.device)

    def snapshots(self) -> tuple[str, ...]:
        """Name the snapshots this run keeps."""
        return kept_snapshots(self.objective, self.options)

    def iterate(self) -> dict[str, float]:
        """Run one iteration. Returns its metrics, over what the policy itself sampled."""
        if self.options.micro_batch_size == "auto" and self.pass_rows is None:
            self.measure_passes()
        forwards = self.policy.report.forwards
        self._measured()  # forget what was counted outside iterations
        self.divergence.look(self.iteration)
        with self._likelihoods(), self.divergence.explained():
            batch = self.collect()
            metrics = self.update.run(batch)
        if isinstance(self.prompts, Curriculum) and not self.objective.requires.supervised:
            rollout, rewards = batch.sampled
            self.prompts.see_update(metrics)
            self.prompts.learn(advantages.outcomes(rewards, rollout))
        self.iteration += 1
        metrics |= batch.metrics | self.clock.lap()
        # of this process
        metrics["forwards"] = self.policy.report.forwards - forwards
        metrics["decisions"] = int(batch.rollout.mask.sum())
        metrics |= self._measured()
        if isinstance(self.objective, Stateful):
            self.objective.adapt(batch.iteration, metrics)
        return metrics

    def _measured(self) -> dict[str, float]:
        return self.policy.measures() if isinstance(self.policy, Measures) else {}

    def measure_passes(self) -> None:
        """Choose the size of all further passes by timing a few; a collective call."""
        from mmrl.train.pass_size import fastest

        prompts = self.next_prompts()[0][: self.plan.prompts_per_process]
        policy = MeasuresPasses.of(self.policy)
        requires = self.objective.requires
        trial = policy.trial(prompts, self.options.group_size, requires.states_read())
        if requires.supervised or self.options.preferences is not None:
            trial = replace(trial, sampled=())
        with self.clock.time("measure_passes"):
            rows, sentence = fastest(self.policy, trial, self.plan, self.options.epochs)
        self.limit_passes(rows)
        self.policy.report.warnings.append(sentence)

    def limit_passes(self, rows: int) -> None:
        """Set the size of all passes to the one chosen, now or before a resume."""
        self.pass_rows = min(rows, self.plan.micro_batch)
        self.policy.pass_sizes.fix(self.pass_rows)

    def held_out(self, prompts: Sequence[Prompt], seed: int) -> dict[str, float]:
        """Measure the loss on held-out answers under the current weights, if the objective learns
        from answers or preferences; a collective call."""
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
        if not self.objective.requires.supervised:
            return {}
        from mmrl.train import supervised

        loss = supervised.held_out_loss(self.policy, self.objective, passes, prompts, seed)
        return {"loss": loss}


def kept_snapshots(objective: Objective, options: TrainOptions) -> tuple[str, ...]:
    """Name the snapshots that a run keeps: those that something samples with, reads or averages
    into."""
    names = {objective.behavior_policy, *objective.snapshots} - {"live"}
    return tuple(sorted(names | ({"ema"} if options.ema else set())))
