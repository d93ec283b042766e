"""The training loop. Read this first.

One iteration, the same for every family of models: sample, score, compare inside groups, improve.
What differs from the papers' pseudo-code: the loss is a mean over the decisions of the *global*
batch, so neither the micro-batch size nor the number of processes changes the gradient; whole
groups live on one process; and on the first step of an iteration the re-scored log-probs must equal
the recorded ones, or the run stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from mmrl import advantages
from mmrl.config.options import TrainOptions, arithmetic, unsuited, without_average
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.metrics import Meter, observe
from mmrl.core.types import Advantage, Media, Point, Prompt, Rewards, Rollout
from mmrl.data.prompts import Curriculum, batch, pick
from mmrl.monitoring import completion_stats
from mmrl.monitoring.diversity import portrait
from mmrl.objectives.base import Objective
from mmrl.policies.base import Policy, reading
from mmrl.rollout import collect
from mmrl.rollout.dynamic_sampling import Drawn, resampled
from mmrl.rollout.ground_truth import sampled_only, writer
from mmrl.rollout.replay_buffer import Memory
from mmrl.train import logprob_gate, minibatches
from mmrl.train.device import Device
from mmrl.train.optimizers import ema_decay, lr_factor
from samplers.noise import Rng

Scorer = Callable[[Media, list[Prompt]], Rewards]
Watch = Callable[[Media, Rollout, Rewards], None]


class Trainer:
    """``optimizer`` makes one from parameters. After construction the policy lives on the device,
    wrapped for it."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        advantage: Advantage,
        objective: Objective,
        optimizer: Callable,
        options: TrainOptions,
        device: Device | None = None,
    ):
        self.policy = policy
        self.prompts = prompts
        self.scorer = scorer
        self.advantage = advantage
        self.objective = objective
        self.options = options
        self.device = device or Device(options)
        self.plan = arithmetic(options, self.device.processes)
        self.optimizer = self.device.prepare(policy, optimizer)
        policy.fixed_batch_rows = policy.fixed_batch_rows or self.plan.micro_batch
        self.lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.iteration = self.step = 0  # iterations finished; optimizer steps taken
        # of the current iteration
        self.meter = Meter()
        self.seconds = {}
        # is shown what this process sampled, with advantages, before it is trained on
        self.watch: Watch | None = None
        for name in self.snapshots():
            policy.weights.keep(name)
        suits(objective, policy, options)
        if objective.differentiates:
            objective.attach(scorer.differentiable)
        self.truth = (
            writer(options.ground_truth_rollout, scorer.rewards, policy)
            if options.ground_truth_rollout
            else None
        )
        self.memory = (
            Memory(options.replay_buffer, policy, prompts) if options.replay_buffer else None
        )
        self.coupled = objective.couples(policy)
        if self.coupled == "groups" and options.train_batch_size % options.group_size:
            raise UserError(
                f"train.train_batch_size {options.train_batch_size}: this objective compares whole "
                f"groups, so it must be a "
                f"multiple of train.group_size {options.group_size}"
            )
        self.whole_groups = self.coupled == "groups" or (
            policy.adjacent and options.train_batch_size % options.group_size == 0
        )

    def snapshots(self) -> tuple[str, ...]:
        """Names of the snapshots this run keeps."""
        return kept_snapshots(self.objective, self.options)

    def iterate(self) -> dict[str, float]:
        """Sample, score, compare, improve. Returns what is worth a curve, of answers that the
        policy gave itself."""
        self.meter = Meter()
        self.seconds = {}
        skipped = 0
        passed = self.policy.forwards
        self.policy.measures()
        rollout, rewards = self.collect()
        if logprob_gate.rescores(self.options, self.policy, self.plan.steps * self.options.epochs):
            with self.meter.listening(), self._timed("old_log_prob"):
                rollout = self._rescored(rollout)
        with self.meter.listening(), self._timed("update"):
            for epoch in range(self.options.epochs):
                self.policy.epoch = epoch if self.options.epochs > 1 else None
                rng = self._rng("update", epoch)
                parts = self._batches(rollout, rng)
                # each part is let go before the next is taken out of the rollout
                for index in range(self.plan.steps):
                    on_policy = epoch == index == 0 and self.objective.behavior_policy == "live"
                    skipped += not self.improve(next(parts), rng.fold(index), on_policy)
        if "old" in self.policy.weights.saved:
            self.policy.weights.track("old", self.objective.old_decay(self.step))
        self._learn()
        self.iteration += 1
        # of this process
        counts = {"forwards": self.policy.forwards - passed, "decisions": int(rollout.mask.sum())}
        counts |= self.policy.measures()
        metrics = self._metrics(*self.sampled) | counts | {"skipped_steps": skipped}
        self.objective.adapt(self.iteration - 1, metrics)
        return metrics

    @torch.no_grad()
    def collect(self) -> tuple[Rollout, Rewards]:
        """Sample with the behaviour weights and compare inside groups; NaN advantages leave
        training."""
        prompts = batch(
            self.prompts, self.options.prompts_per_iteration, self.iteration, self.options.seed
        )
        first = self.device.rank * self.plan.prompts_per_process
        mine = prompts[first : first + self.plan.prompts_per_process]
        self.policy.iteration = self.iteration
        self.objective.revisit(self.policy.weights, self.iteration, self._rng("checkpoints"))
        self._limit()
        drawn = self.draw(mine, self._rng("rollout", offset=first))
        found, self.noted = (
            self._resampled(drawn) if self.options.dynamic_sampling_rounds else (drawn, {})
        )
        if self.memory is not None:
            found, counts = self.memory.exchange(found, self.iteration)
            self.noted |= counts
        rollout = found.rollout
        media = found.media
        rewards = found.rewards
        texts, own, earned = sampled_only(media, rollout, rewards)
        self.noted |= completion_stats.lengths(texts, own) | portrait(texts, own.group)
        self.noted |= completion_stats.lengths_by_reward(texts, own, earned)
        rewards = self.objective.shaped(self.policy, rollout, rewards)
        # what gave way was not shaped: where something did, all is looked at as the rewards gave it
        self.sampled = (found if found.gave_way else replace(found, rewards=rewards)).sampled()
        of_rows = self.advantage(rewards, rollout).to(rollout.logprob)
        advantage = advantages.by_edge(of_rows, rollout)
        self.sampled_at = self.policy.fixed_batch_rows  # rows of the passes that sampled
        self.spare = rollout[:1]  # what a process without rows passes through the network
        self.longest = distributed.largest(rollout.mask.shape[1], rollout.group.device)
        kept = ~advantage.isnan()
        mask = rollout.mask & kept
        if self.options.mask_truncated_completions:
            mask &= completion_stats.finished(media, rollout)
        alive = rollout.replace(
            advantage=advantage.nan_to_num(0.0), mask=mask, trainable=~of_rows.isnan().all(1)
        )
        if self.watch is not None:
            self.watch(*sampled_only(media, alive, rewards))
        return alive, rewards

    def _limit(self) -> None:
        """The length of answers that this iteration allows, if the configuration changes it on the
        way."""
        due = [
            tokens
            for start, tokens in self.options.max_new_tokens_schedule
            if start <= self.iteration
        ]
        if due and not hasattr(self.policy, "limit"):
            raise UserError(
                f"train.max_new_tokens_schedule: {type(self.policy).__name__} writes no "
                f"answers whose "
                f"length could change"
            )
        if due:
            self.policy.limit(due[-1])

    def draw(self, prompts: list[Prompt], rng: Rng) -> Drawn:
        """Sample and score, with the behaviour weights."""
        reads = self.objective.reads
        options = self.options
        with (
            self._timed("rollout"),
            self.policy.weights.using(self.objective.behavior_policy),
            self._taught(),
            reading(self.policy, reads),
        ):
            rollout, media, scores = collect.draw(
                self.policy,
                prompts,
                options.group_size,
                rng,
                self.scorer,
                options.reward_overlap_chunks,
            )
        with self._timed("reward"), distributed.together():
            drawn = Drawn(rollout, media, self._on_device(scores(), rollout))
        if hasattr(self.scorer, "remember"):
            self.scorer.remember()
        if self.memory is not None:
            self.memory.told(prompts, drawn)
        return drawn

    def _resampled(self, drawn: Drawn) -> tuple[Drawn, dict[str, float]]:
        """Dynamic sampling: groups in which all rewards are equal give way to other prompts."""
        streams = [self._rng("resample", n) for n in range(self.options.dynamic_sampling_rounds)]
        spread = self.options.dynamic_sampling_min_std
        return resampled(
            drawn, lambda u: pick(self.prompts, u, self.iteration), self.draw, streams, spread
        )

    @torch.no_grad()
    def _rescored(self, rollout: Rollout) -> Rollout:
        """The rollout with the log-probs that the update's own passes give under the weights that
        sampled.

        A decoder's pass for one token rounds otherwise than the pass that scores a whole answer: in
        half precision ratios of later steps would be off by more than some clip at. Rows of earlier
        iterations keep what they have.
        """
        names = torch.arange(rollout.logprob.numel(), device=rollout.logprob.device).double()
        # leads from a point to its decisions
        named = rollout.replace(logprob=names.view_as(rollout.logprob))
        mark = self.meter.mark()

        def attempt(rows: int) -> tuple[Tensor, Meter]:
            scores = rollout.logprob.flatten().clone()
            rng = self._rng("update", 0)
            self.meter.restore(mark)
            with Meter().listening() as observed:
                for part in self._batches(named, rng):  # the passes of the first epoch
                    points = minibatches.Points(partial(self.policy.path, part))
                    _, idle = self._kept_in_step(points.rows, rows, rng)
                    for point in self._here(
                        chain(minibatches.passes(points, rows, self.policy.adjacent), idle)
                    ):
                        self._score(point, scores)
            return scores, observed

        with self.policy.weights.using(self.objective.behavior_policy):
            scores, observed = self.policy.fitted(attempt, self._most_rows())
        self._gate(observed)
        return rollout.replace(logprob=scores.view_as(rollout.logprob))

    def _score(self, point: Point, scores: Tensor) -> None:
        """Put the log-probs of a pass into ``scores`` [B K], at the places that the point has for
        its log-probs."""
        where = point.current()
        place = torch.where(where, point.logprob, 0.0).long()
        recorded = scores[place]
        found = torch.where(
            where, self.policy.dist(point).log_prob(point.target).to(scores), recorded
        )
        observe("log_ratio", found - recorded, where)
        scores[place[where]] = found[where]

    def _learn(self) -> None:
        """Tell data that draws by it how the groups of all processes were rewarded, those that gave
        way too."""
        if isinstance(self.prompts, Curriculum):
            rollout, rewards = self.sampled
            self.prompts.learn(advantages.outcomes(rewards, rollout))

    def improve(self, rollout: Rollout, rng: Rng, on_policy: bool) -> bool:
        """One optimizer step on these rows. False if there was nothing to train on, or the gradient
        was not finite."""
        points = self._points(rollout, rng, fresh=on_policy)
        reduction = self.options.loss_agg_mode
        sums = distributed.all_sum(minibatches.loss_total(points.outline, rollout, reduction))
        there, total = sums.tolist()  # one wait for both
        if not there > 0:
            return False
        total = 1.0 if reduction == "token_sum" else total
        share = sums.new_full((), total / self.device.processes)
        self.meter.put("loss", torch.zeros_like(share), share)
        observed = self._accumulated(points, total, rng)
        if on_policy:
            self._gate(observed)
        return self._descend()

    def _points(self, rollout: Rollout, rng: Rng, fresh: bool) -> minibatches.Points:
        """The objective's. States of a path are not held but made again; tokens, and what is
        coupled, are small."""

        def make() -> Iterator[Point]:
            each = self.objective.points(self.policy, rollout, rng) if len(rollout) else ()
            return (point.replace(on_policy=fresh) for point in each)

        if self.policy.adjacent or self.coupled:
            held = list(make())
            return minibatches.Points(lambda: held)
        return minibatches.Points(make)

    def _accumulated(self, points: minibatches.Points, total: float, rng: Rng) -> Meter:
        """Gradients of all passes, and what was observed in them; anew in smaller ones where memory
        does not do."""
        mark = self.meter.mark()

        def attempt(rows: int) -> Meter:
            self.optimizer.zero_grad()
            self.meter.restore(mark)
            with Meter().listening() as observed:
                self._accumulate(points, total, rng, rows)
            return observed

        return self.policy.fitted(attempt, self._most_rows())

    def _most_rows(self) -> int:
        """Of a pass of the update."""
        return min(self.plan.micro_batch, self.policy.most or self.plan.micro_batch)

    def _accumulate(self, points: minibatches.Points, total: float, rng: Rng, rows: int) -> None:
        """Forward and backward over every pass of ``rows``. All processes make equally many, as
        sharded models need."""
        parts = minibatches.passes(points, rows, self.policy.adjacent)
        most, idle = self._kept_in_step(points.rows, rows, rng)
        if self.coupled:
            parts = self._couple(list(parts), idle)
        for i, point in enumerate(self._here(chain(parts, idle))):
            weight = minibatches.loss_weights(
                point, self.options.loss_agg_mode, self.options.loss_denominator or self.longest
            )
            with nullcontext() if i == most - 1 else self.device.no_sync(self.policy.trained):
                loss = self.objective.loss(self.policy, point)
                summed = (loss * weight).sum()
                self.meter.put("loss", summed, torch.zeros_like(summed))
                self.device.backward(summed / total)

    def _kept_in_step(self, trained: int, rows: int, rng: Rng) -> tuple[int, list[Point]]:
        """How many passes of ``rows`` every process makes, and idle ones for those that this one
        has too few of."""
        own = -(-trained // rows)
        most = distributed.largest(own, self.spare.group.device)
        return most, [self._idle(rng) for _ in range(most - own)]

    @torch.no_grad()
    def _couple(self, parts: list[Point], idle: list[Point]) -> list[Point]:
        """Let an objective see all rows of the step before its elementwise loss."""
        measured = [
            self.objective.measure(self.policy, point) for point in self._here([*parts, *idle])
        ]
        # without rows of its own a process still joins what couple does with all
        here = parts or idle
        found = self.objective.couple(Point.cat(here), torch.cat(measured[: len(here)]))
        cut = list(found.split(len(parts[0]))) if parts else []
        if cut and self.policy.adjacent:
            minibatches.tell(found, cut)
        return cut

    def _here(self, points: Iterable[Point]) -> Iterator[Point]:
        """One after the other on the device, where a policy keeps its paths elsewhere."""
        return (point.map(lambda tensor: sent(tensor, self.spare.group.device)) for point in points)

    def _idle(self, rng: Rng) -> Point:
        """A pass that trains nothing."""
        advantage = torch.zeros_like(self.spare.logprob[:, :1])
        point = next(
            iter(self.objective.points(self.policy, self.spare.replace(advantage=advantage), rng))
        )[:1]
        return point.replace(mask=torch.zeros_like(point.mask))

    def _gate(self, meter: Meter) -> None:
        """Stop a run whose re-scored log-probs are not the recorded ones, beyond what
        ``train.logprob_tolerance`` tolerates."""
        if self.policy.fixed_batch_rows != self.sampled_at:
            # passes have just shrunk for want of memory, and round in another way than those that
            # sampled
            return
        average = logprob_gate.on_average(self.options, self.policy)
        allowed = logprob_gate.tolerance(self.options, self.policy, self.objective)
        gap = meter.size("log_ratio") if average else meter.top("log_ratio")
        if allowed is not None and not gap <= allowed:
            raise distributed.StopAll(
                f"iteration {self.iteration}: re-scored log-probs differ from the "
                f"recorded ones by {gap:.2e} "
                f"{'on average' if average else 'at most'}, "
                f"more than train.logprob_tolerance = {allowed:.0e} allows, although the "
                f"weights are "
                f"the same. The gradient would "
                "be biased. Usual causes: dropout or other randomness in the network, a "
                "rollout computed in "
                "another precision or attention backend than the update, latents stored "
                "more coarsely than scored. "
                "Try train.precision=fp32; set train.logprob_tolerance to a larger "
                "number to accept "
                "the gap, or to null to ignore it"
            )

    def _descend(self) -> bool:
        """Clip, step, track the moving average. False if the gradient was not finite and the step
        was left out."""
        factor = lr_factor(
            self.options.lr_schedule, self.step, self.options.warmup_steps, self.plan.total_steps
        )
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * factor
        norm = self.device.clip(self.policy, self.options.max_grad_norm)
        self.meter.add("grad_norm", norm.reshape(1))
        finite = math.isfinite(float(norm))
        # fp16's loss scaler leaves the step out by itself, and learns from it
        if finite or self.device.scales_loss:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.options.ema and (self.step + 1) % self.options.ema_update_interval == 0:
            self.policy.weights.track("ema", ema_decay(self.step, self.options.ema))
        self.step += 1
        return finite

    def _batches(self, rollout: Rollout, rng: Rng) -> Iterator[Rollout]:
        sizes = self.options.group_size, self.plan.rows, self.options.train_batch_size
        return minibatches.batches(rollout, *sizes, rng, whole_groups=self.whole_groups)

    def _rng(self, *names: int | str, offset: int = 0) -> Rng:
        stream = Rng.of(self.options.seed, self.iteration, *names)
        return Rng(stream.key, offset)

    def _on_device(self, rewards: Rewards, rollout: Rollout) -> Rewards:
        return Rewards(
            {name: value.to(rollout.logprob) for name, value in rewards.items()}, rewards.weights
        )

    def _metrics(self, rollout: Rollout, rewards: Rewards) -> dict[str, float]:
        means = self.meter.means().items()
        found = {
            "ratio/mean" if name == "ratio" else name: value
            for name, value in means
            if name != "log_ratio"
        }
        if "log_ratio" in self.meter.sums:
            found["ratio/max_deviation"] = math.expm1(min(self.meter.top("log_ratio"), 50.0))
        found |= advantages.statistics(rewards, rollout)
        found |= self.noted
        found |= {f"time/{name}": value for name, value in self.seconds.items()}
        return found | {"lr": self.optimizer.param_groups[0]["lr"], "step": self.step}

    @contextmanager
    def _taught(self) -> Iterator[None]:
        """One answer of every group is the right one, if so chosen."""
        if self.truth is None:
            yield
            return
        self.policy.truth = self.truth
        try:
            yield
        finally:
            self.policy.truth = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def kept_snapshots(objective: Objective, options: TrainOptions) -> tuple[str, ...]:
    """Names of the snapshots that a run keeps: those that something samples with, looks at or
    averages into."""
    wanted = {objective.behavior_policy, *objective.snapshots} - {"live"}
    return tuple(sorted(wanted | ({"ema"} if options.ema else set())))


def suits(objective: Objective, policy: Policy, options: TrainOptions) -> None:
    """Raises UserError if the objective is for another kind of model, or needs what is not kept."""
    if why := unsuited(type(objective), policy) or without_average(objective.snapshots, options):
        raise UserError(why)
