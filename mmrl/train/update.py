"""Takes the optimizer steps of an iteration, on what it collected.

The loss is a mean over the decisions of the *global* batch, so neither the micro-batch size nor the
number of processes changes the gradient. On the first step the current weights are the sampling
weights: if the re-scored log-probs are not the recorded ones, ``logprob_gate`` stops the run.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.config.options import TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.core import distributed
from mmrl.core.contract import called, returned
from mmrl.core.distributed import StopAll
from mmrl.core.metrics import Meter, Stopwatch, observe
from mmrl.core.types import Rollout
from mmrl.objectives.base import Objective
from mmrl.objectives.contracts import CountsEpochs, MovesSnapshots, TracksOld
from mmrl.policies.base import Policy
from mmrl.train import logprob_gate, minibatches
from mmrl.train.batch import Batch
from mmrl.train.device import Device
from mmrl.train.passes import Passes
from samplers.noise import Rng


class Learner(Protocol):
    """Trained along with the policy, on the rows of each of its steps."""

    def improve(self, batch: Batch, rollout: Rollout, rng: Rng, meter: Meter) -> None:
        """Take its steps."""


class Update:
    """Trains the policy on one batch after another. ``step`` counts optimizer steps."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        options: TrainOptions,
        device: Device,
        clock: Stopwatch,
    ):
        """Take an ``optimizer`` that ``device`` has prepared together with the policy."""
        self.policy = policy
        self.objective = objective
        self.optimizer = optimizer
        self.options = options
        self.device = device
        self.clock = clock
        self.plan = arithmetic(options, device.processes)
        self.passes = Passes(policy, objective, options, self.plan)
        self.lrs = [group["lr"] for group in optimizer.param_groups]
        self.step = 0
        self.learner: Learner | None = None  # trained along with the policy

    def run(self, batch: Batch) -> dict[str, float]:
        """Take all optimizer steps on a batch, then update the snapshot ``old``. Returns
        metrics."""
        meter = Meter()
        skipped = 0
        objective = self.objective
        if isinstance(objective, MovesSnapshots) and objective.restarts(batch.iteration):
            self.optimizer.state.clear()
        with meter.listening():
            batch = self.recompute_old_logprob(batch, meter)
            with self.clock.time("update"):
                for epoch in range(self.options.epochs):
                    if isinstance(objective, CountsEpochs):
                        objective.start_epoch(epoch if self.options.epochs > 1 else None)
                    rng = self._rng(batch, epoch)
                    parts = self.passes.steps(batch.rollout, batch.group_sizes, rng)
                    # free each part before the next is taken out of the rollout
                    for index in range(self.plan.steps):
                        first = epoch == index == 0 and self.objective.behavior_policy == "live"
                        skipped += self._steps(batch, next(parts), rng.fold(index), first, meter)
        if "old" in self.policy.weights.saved:
            decay = objective.old_decay(self.step) if isinstance(objective, TracksOld) else 0.0
            self.policy.weights.track("old", decay)
        return self._metrics(meter) | {"skipped_steps": skipped}

    def gradient(self, batch: Batch, rollout: Rollout) -> list[Tensor]:
        """Return the gradient of the loss of all these rows of the batch, without a step."""
        rng = self._rng(batch, 0).fold(0)
        live = self.objective.behavior_policy == "live"
        points = self.passes.points(rollout, rng, live)
        mode = self.options.loss_agg_mode
        sums = distributed.all_sum(minibatches.loss_total(points.outline, rollout, mode))
        trained, total = sums.tolist()
        with torch.enable_grad(), Meter().listening() as meter:
            for attempt in self.policy.pass_sizes.attempts(self.passes.most_rows()):
                with attempt as rows:
                    self.optimizer.zero_grad()
                    if trained > 0:
                        total = 1.0 if mode == "token_sum" else total
                        self._accumulate(batch, points, total, rng, rows, meter)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for p in self._parameters()
        ]
        self.optimizer.zero_grad()
        return gradients

    def _steps(
        self, batch: Batch, rollout: Rollout, rng: Rng, on_policy: bool, meter: Meter
    ) -> int:
        """Take the optimizer step on these rows, after ``train.slow_fast``'s fast steps and its
        step back if there are any. Returns how many steps were left out."""
        if self.learner is not None:
            self.learner.improve(batch, rollout, rng, meter)
        fast = self.options.slow_fast
        if fast is None or (fast.iterations is not None and batch.iteration >= fast.iterations):
            return not self.improve(batch, rollout, rng, on_policy, meter)
        start = [parameter.detach().clone() for parameter in self._parameters()]
        skipped = 0
        for _ in range(fast.fast_steps):
            skipped += not self.improve(batch, rollout, rng, on_policy, meter)
            on_policy = False
        with torch.no_grad():
            for parameter, origin in zip(self._parameters(), start, strict=True):
                parameter.sub_(origin).mul_(fast.reposition).add_(origin)
        return skipped + (not self.improve(batch, rollout, rng, on_policy, meter))

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.policy.net.parameters() if p.requires_grad]

    def improve(
        self, batch: Batch, rollout: Rollout, rng: Rng, on_policy: bool, meter: Meter
    ) -> bool:
        """Take one optimizer step on these rows of the batch.

        Returns False if there was nothing to train on, or the gradient was not finite.
        """
        points = self.passes.points(rollout, rng, on_policy)
        mode = self.options.loss_agg_mode
        sums = distributed.all_sum(minibatches.loss_total(points.outline, rollout, mode))
        trained, total = sums.tolist()  # one wait for both
        if not trained > 0:
            return False
        if self.options.skip_zero_advantage:
            points = self.passes.points(minibatches.mask_zero_advantage(rollout), rng, on_policy)
        total = 1.0 if mode == "token_sum" else total
        share = sums.new_full((), total / self.device.processes)
        meter.put("loss", torch.zeros_like(share), share)
        mark = meter.mark()
        for attempt in self.policy.pass_sizes.attempts(self.passes.most_rows()):
            with attempt as rows, Meter().listening() as observed:
                self.optimizer.zero_grad()
                meter.restore(mark)
                self._accumulate(batch, points, total, rng, rows, meter)
        if on_policy:
            self._check_logprobs(batch, observed)
        return self._descend(meter)

    @torch.no_grad()
    def recompute_old_logprob(self, batch: Batch, meter: Meter) -> Batch:
        """Replace recorded log-probs by those of the update's own passes, if
        ``train.recompute_old_logprob`` asks for it.

        A decoder's pass for one token rounds differently from the pass that scores a whole answer:
        in half precision ratios of later steps would be off by more than some clip ranges. Rows of
        earlier iterations keep what they have.
        """
        steps = self.plan.steps * self.options.epochs
        supervised = self.objective.requires.supervised
        if supervised or not logprob_gate.rescores(self.options, self.policy, steps):
            return batch
        rollout = batch.rollout
        places = torch.arange(rollout.logprob.numel(), device=rollout.logprob.device).double()
        # index of each point's log-probs in the rollout
        placed = rollout.replace(logprob=places.view_as(rollout.logprob))
        mark = meter.mark()
        behavior = self.policy.weights.using(self.objective.behavior_policy)
        with self.clock.time("old_log_prob"), behavior:
            for attempt in self.policy.pass_sizes.attempts(self.passes.most_rows()):
                with attempt as rows, Meter().listening() as observed:
                    meter.restore(mark)
                    scores = self._scores(batch, placed, rows)
            self._check_logprobs(batch, observed)
        return replace(batch, rollout=rollout.replace(logprob=scores.view_as(rollout.logprob)))

    def _scores(self, batch: Batch, placed: Rollout, rows: int) -> Tensor:
        """Score a whole rollout by the passes of the first epoch: [B K].

        ``placed`` has the place of every decision as its log-prob.
        """
        scores = batch.rollout.logprob.flatten().clone()
        rng = self._rng(batch, 0)
        for part in self.passes.steps(placed, batch.group_sizes, rng):
            points = minibatches.Points(partial(self.policy.path, part))
            for point in self.passes.cut(batch, points, rows, rng)[1]:
                where = point.current()
                place = torch.where(where, point.recorded, 0.0).long()
                recorded = scores[place]
                logp = self.policy.dist(point).log_prob(point.target).to(scores)
                logp = torch.where(where, logp, recorded)
                observe("log_ratio", logp - recorded, where)
                scores[place[where]] = logp[where]
        return scores

    def _accumulate(
        self,
        batch: Batch,
        points: minibatches.Points,
        total: float,
        rng: Rng,
        rows: int,
        meter: Meter,
    ) -> None:
        """Pass forward and backward over all points, ``rows`` at a time."""
        count, passes = self.passes.cut(batch, points, rows, rng, couple=True)
        mode = self.options.loss_agg_mode
        denominator = self.options.loss_denominator or batch.longest
        for i, point in enumerate(passes):
            weight = minibatches.loss_weights(point, mode, denominator)
            with nullcontext() if i == count - 1 else self.device.no_sync(self.policy.trained):
                loss = returned(
                    self.objective.loss(self.policy, point),
                    f"{called(self.objective)}.loss",
                    B_L=tuple(weight.shape),
                )
                summed = (loss * weight).sum()
                if not summed.requires_grad:
                    raise StopAll(
                        f"no gradient leads from {called(self.objective)}.loss to a trained "
                        f"weight: the network's output, or what the loss makes of it, was cut "
                        f"off (detach, torch.no_grad, NumPy), or no layer on the way is trained"
                    )
                meter.put("loss", summed, torch.zeros_like(summed))
                self.device.backward(summed / total)

    def _check_logprobs(self, batch: Batch, observed: Meter) -> None:
        """Stop the run if re-scored log-probs are not the recorded ones; but not if passes have
        just shrunk for lack of memory, and so round differently from those that sampled."""
        if self.policy.pass_sizes.rows == batch.pass_rows:
            logprob_gate.check(self.options, self.policy, self.objective, observed, batch.iteration)

    def _descend(self, meter: Meter) -> bool:
        """Clip, step, track the moving average. Returns False if the gradient was not finite and
        the step was left out."""
        options = self.options
        factor = lr_factor(
            options.lr_schedule, self.step, options.warmup_steps, self.plan.total_steps
        )
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * factor
        norm = self.device.clip(self.policy, options.max_grad_norm)
        meter.add("grad_norm", norm.reshape(1))
        finite = math.isfinite(float(norm))
        # fp16's loss scaler skips the step by itself, and adapts its scale
        if finite or self.device.scales_loss:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if options.ema and (self.step + 1) % options.ema_update_interval == 0:
            self.policy.weights.track("ema", ema_decay(self.step, options.ema))
        self.step += 1
        return finite

    def _rng(self, batch: Batch, epoch: int) -> Rng:
        return Rng.of(self.options.seed, batch.iteration, "update", epoch)

    def _metrics(self, meter: Meter) -> dict[str, float]:
        names = {"ratio": "ratio/mean"}
        metrics = {names.get(name, name): mean for name, mean in meter.means().items()}
        if metrics.pop("log_ratio", None) is not None:
            metrics["ratio/max_deviation"] = math.expm1(min(meter.top("log_ratio"), 50.0))
        return metrics | {"lr": self.optimizer.param_groups[0]["lr"], "step": self.step}


def lr_factor(schedule: str, step: int, warmup: int, total: int) -> float:
    """Return the factor of the learning rate at optimizer step ``step`` of ``total``."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = max(0.0, 1 - (step - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[
        schedule
    ]


def ema_decay(step: int, limit: float) -> float:
    """Return the decay of a moving average at optimizer step ``step``: small at first, so that the
    initial weights soon lose their influence."""
    return min(limit, (1 + step) / (10 + step))
