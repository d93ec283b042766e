"""Lets workers of a Ray cluster sample for a trainer, at once or ahead of it.

With ``staleness: 0`` an iteration waits for samples of its own weights: the same as in one process.
With ``staleness: s`` the samples of iteration i are drawn under the weights that iteration i - s
began with, while iterations i - s to i - 1 train; the weights depend on nothing else, so that two
such runs are equal. Weights go to the object store once per iteration; a worker takes them when it
begins the next part, and never waits for them.

Samples of older weights are scored again: ``Rollout.logprob`` is that of the current weights (the
proximal policy), ``sampler_logprob`` that of the sampling weights, and the objective's
``importance_sampling`` truncates or masks the ratio of the two. Espeholt et al. 2018, IMPALA;
Hilton et al. 2022, "Batch size-invariance for policy optimization"; Fu et al. 2025, AReaL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from mmrl.apps.ray import connection
from mmrl.apps.ray.pool import Pool
from mmrl.apps.ray.rewards import here
from mmrl.apps.ray.samplers import Draw, RolloutWorker, Samples
from mmrl.config import Config, effects
from mmrl.config.options import TrainOptions
from mmrl.config.sections import RayOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Copies, Media, Prompt, Rollout
from mmrl.data.base import Curriculum
from mmrl.data.base import batch as batch_of_prompts
from mmrl.policies.base import Policy, RolloutContext
from mmrl.policies.contracts import Stateful
from mmrl.rollout import collect
from mmrl.rollout.collect import Sampled
from mmrl.scoring.worker import Worker
from samplers.noise import Rng


def misfits(configuration: Config) -> Iterator[str]:
    """List options that sampling workers do not support, before anything is loaded."""
    options = configuration.section("ray", RayOptions)
    train = configuration.section("train", TrainOptions)
    if not options.rollout_workers:
        if options.staleness:
            yield (
                "ray.staleness: the trainers sample themselves, never ahead; set "
                "ray.rollout_workers, or leave staleness out"
            )
        return
    if options.rollout_workers % options.trainers:
        yield (
            f"ray.rollout_workers: {options.rollout_workers} workers cannot be shared evenly by "
            f"{options.trainers} trainers; take a multiple of {options.trainers}"
        )
    yield from effects.unsuited_to_workers(train, ahead=options.staleness > 0)
    objective = configuration.build("objective", OBJECTIVES)
    if objective.requires.supervised or train.preferences is not None:
        yield "ray.rollout_workers: the objective learns from answers, and nothing is sampled"
    if options.staleness:
        yield from _uncorrected(objective)


def _uncorrected(objective: Any) -> Iterator[str]:
    """Say why an objective cannot learn from off-policy samples."""
    if objective.requires.differentiates:
        yield "ray.staleness: the objective follows gradients through its own samples: set it to 0"
    if objective.requires.visits and not objective.requires.corrects:
        yield (
            "ray.staleness: samples of older weights need a correction: set "
            "objective.policy_gradient.importance_sampling, such as {mode: truncate, cap: 2.0}, or "
            "staleness to 0"
        )


@dataclass(frozen=True)
class Ahead:
    """Tracks samples in progress: their prompts, and the iteration of the sampling weights."""

    prompts: list[Prompt]
    iteration: int  # whose initial weights sample
    samples: Future[list[Samples]]


class RolloutWorkers:
    """Samples for one trainer on its share of the workers; replaces ``collect.draw``."""

    def __init__(self, ray: Any, session: Any, trainer: Any, options: RayOptions):
        if options.staleness and isinstance(trainer.prompts, Curriculum):
            raise UserError(
                "ray.staleness: the data chooses prompts by how the last ones went, so nothing can "
                "be sampled ahead: set it to 0, or take data without a curriculum"
            )
        self.ray = ray
        self.trainer = trainer
        self.staleness = options.staleness
        self.size = options.rollout_workers // options.trainers
        self.thread = Worker("rollouts")
        self.jobs: dict[int, Ahead] = {}
        self.version: tuple[int, str] = (-1, "")
        self.stored: Any = None
        self.age = 0
        bundle = {
            "CPU": options.cpus_per_rollout_worker,
            "GPU": options.gpus_per_rollout_worker,
        }
        held = {key: number for key, number in bundle.items() if number} or {"CPU": 0.001}
        what = f"{self.size} rollout workers"
        self.group = connection.reserve(ray, [held] * self.size, what, "SPREAD", options.timeout)
        actors = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle["GPU"])(RolloutWorker).options(
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=connection.strategy_of(self.group),
        )
        content = ray.cloudpickle.dumps(session.config)
        surroundings = here()
        self.pool = Pool(
            ray,
            "rollout workers",
            lambda: actors.remote(surroundings, content),
            self.size,
            options.timeout,
        )
        trainer.draw = self.draw
        if self.staleness:
            trainer.monitors.append(self.measure)

    def draw(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        copies: Copies,
        rng: Rng,
        scorer: collect.Score,
        parts: int = 1,
        context: RolloutContext | None = None,
    ) -> tuple[Rollout, Media, Any]:
        """Do the same as ``collect.draw``, with sampling on workers."""
        context = context or RolloutContext()
        iteration = context.iteration
        job = self.jobs.pop(iteration, None) if self.staleness else None
        if job is None:
            job = self._begin(iteration, list(prompts), copies, rng, context)
        for later in range(iteration + 1, iteration + self.staleness + 1):
            if later not in self.jobs and later < self.trainer.options.iterations:
                self.jobs[later] = self._ahead(iteration, later)
        if job.prompts != list(prompts):
            raise RuntimeError(f"iteration {iteration} was sampled ahead for other prompts")
        rollout, media = self._joined(policy, job.samples.result())
        self.age = iteration - job.iteration
        if self.age and self.trainer.objective.requires.visits:
            rollout = corrected(policy, rollout)
        return rollout, media, lambda: collect.scored(scorer, media, rollout)

    def measure(self, sampled: Sampled) -> dict[str, float]:
        """Report by how many updates the sampling weights are behind, as a monitor."""
        return {"rollout/staleness": float(self.age)}

    def close(self) -> None:
        """End the workers and give their places back."""
        self.pool.close()
        connection.release(self.group)

    def _ahead(self, now: int, later: int) -> Ahead:
        """Start sampling a later iteration with the current weights; everything else is as that
        iteration will request it."""
        trainer = self.trainer
        options, plan = trainer.options, trainer.plan
        first = trainer.device.rank * plan.prompts_per_process
        every = batch_of_prompts(
            trainer.prompts, options.prompts_per_iteration, later, options.seed
        )
        rng = Rng(Rng.of(options.seed, later, "rollout").key).after(options.group_size, first)
        context = RolloutContext(later, trainer.objective.requires.states_read())
        prompts = every[first : first + plan.prompts_per_process]
        return self._begin(now, prompts, options.group_size, rng, context)

    def _begin(
        self, now: int, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext
    ) -> Ahead:
        """Submit the sampling of prompts to the workers, in parts of whole passes."""
        policy = self.trainer.policy
        stored, version = self._weights(policy)
        rows = policy.pass_sizes.rows
        draws = [
            Draw(
                [stored],
                version,
                prompts[first:last],
                copies if isinstance(copies, int) else copies[first:last],
                rng.after(copies, first),
                context,
                rows,
            )
            for first, last in pairwise(edges(len(prompts), copies, rows, self.size))
        ]
        return Ahead(prompts, now, self.thread.submit(self.pool.run, draws))

    def _weights(self, policy: Policy) -> tuple[Any, str]:
        """Return the current weights, in the object store, and their version; stored once per
        update."""
        key = self.trainer.update.step, policy.weights.current
        if self.version != key:
            weights = policy.weights
            state = policy.state_dict() if isinstance(policy, Stateful) else None
            self.stored = self.ray.put((weights.full(weights.current), state))
            self.version = key
        return self.stored, f"{key[0]} {key[1]}"

    def _joined(self, policy: Policy, parts: Sequence[Samples]) -> tuple[Rollout, Media]:
        policy.report.forwards += sum(part.forwards for part in parts)
        for part in parts:
            policy.report.warnings += part.warnings
        rollouts = [part.rollout.to(policy.device) for part in parts]
        whole = rollouts[0] if len(rollouts) == 1 else collect.joined(rollouts)
        if any(part.media is None for part in parts):
            return whole, policy.decode(whole)
        return whole, torch.cat([part.media for part in parts]).to(policy.device)


def edges(prompts: int, copies: Copies, rows: int | None, workers: int) -> list[int]:
    """Return where a list of prompts is split: every part but the last makes whole passes of
    ``rows`` rows, so that each pass has the same rows as in one process, and rounds equally."""
    if not isinstance(copies, int) or rows is None:
        return [0, prompts]
    unit = rows // math.gcd(rows, copies)
    size = unit * max(1, prompts // (unit * workers))
    return [*range(0, prompts, size), prompts]


@torch.no_grad()
def corrected(policy: Policy, rollout: Rollout) -> Rollout:
    """Re-score samples of older weights under the current ones, and keep the sampler's
    log-probs."""
    known = rollout.provenance.sampler_logprob
    drawn_with = rollout.logprob if known is None else known
    every = torch.ones_like(rollout.row_id, dtype=torch.bool)
    provenance = replace(rollout.provenance, sampler_logprob=drawn_with)
    now = collect.rescored(policy, rollout, every)
    return rollout.replace(logprob=now, provenance=provenance)
