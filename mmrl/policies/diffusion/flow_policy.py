"""Samples and scores diffusion and flow models: a decision is a Gaussian transition between two
latents.

A family is a subclass with ``encode``, ``velocity`` and ``decode``; sampling, scoring, guidance,
noise and chunks are here, once. Sampling and scoring go through the same ``_transition``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core.distributions import Gaussian, Score
from mmrl.core.effects import FREE_AT_RESUME, Effects
from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.libraries import torch_dtype
from mmrl.core.numbers import Steps
from mmrl.core.registry import GRIDS, KERNELS, SOLVERS, WINDOWS
from mmrl.core.types import (
    Copies,
    Kernel,
    LatentPath,
    Media,
    Point,
    Prompt,
    Query,
    Renoised,
    Rollout,
    SamplerState,
    Transition,
    per_prompt,
)
from mmrl.policies.base import (
    NO_CONTEXT,
    LogprobGuidance,
    Reads,
    RolloutContext,
    at_guidance,
    first_of_group,
    rows_and_groups,
    rows_of,
    warn_of_mismatch,
    without_empty,
)
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.contracts import (
    Branches,
    EncodesMedia,
    FollowsProcess,
    MeasuresPasses,
    NamesSpaces,
    Replays,
    Trial,
)
from mmrl.policies.demonstrations import encoded, placed_rows, sourced
from mmrl.policies.diffusion import trials
from mmrl.policies.diffusion.first_look import check_conditions, check_independence
from mmrl.policies.diffusion.flow_passes import FlowPasses, Window
from mmrl.policies.diffusion.flow_plan import Plan, planned
from mmrl.policies.diffusion.path_points import decision
from mmrl.policies.diffusion.trees import Tree
from samplers.kernels import flow_sde
from samplers.noise import Rng
from samplers.processes import Flow, Process, TrigFlow, noised
from samplers.schedules import linear
from samplers.solvers import Step
from samplers.windows import FIXED, all_steps

Grid = Callable[[int], Tensor]  # steps -> times [K + 1], from 1 to 0
Solver = Callable[[Process], Step]
Storage = Literal["float32", "bfloat16", "float16"]


class FlowPolicy(FlowPasses, FollowsProcess, Branches, Replays, MeasuresPasses, NamesSpaces):
    """Samples and scores paths of a flow or diffusion model, whose decisions are Gaussian steps.

    steps: forward passes per sample. evaluation_steps: those of a sample in evaluation, which has
    no noise, and of ``mmrl sample``; null: as in training. noise_level: noise level of the
    stochastic steps. noise_anneal: fraction of it left at the last step, decaying linearly from the
    first (EAD, Yang et al. 2025, applied here to sampler steps). sde_type: the stochastic step.
    timestep_schedule: the times. noise_window: which steps are stochastic, and so are trained.
    guidance_scale: classifier-free guidance scale w, v = v_u + w (v_c - v_u); 1: one pass without
    the empty prompt. logprob_guidance: what is scored; "guided" is what was sampled,
    "guided_stopgrad_uncond" the same without gradient through the unconditional branch,
    "conditional" leaves guidance out of the score (a mismatch some codes publish).
    same_initial_noise: the samples of a group share their initial noise. trajectory_dtype: dtype
    that latents are rounded to before they are scored, and stored in. logprob_reduction: log-prob
    as mean or sum over dimensions; published clip ranges belong to the mean. solver: of the
    deterministic steps; None is the kernel without noise. tree: samples that share their first
    steps. flash_step_ratio: share of the steps after the last stochastic one that is kept
    (MixGRPO-Flash). logprob_type: "square" leaves the variance out of the log-prob, as Flow-CPS
    publishes it; that is a score, not a density. offload_trajectory: stored latents stay in CPU
    memory and are moved back for each pass.
    """

    # its sampler adds fresh noise between steps, in evaluation too (consistency models)
    renews = False
    unseen = True  # until conditions and rows are checked, before it first samples
    capabilities = Capabilities("gaussian")

    def __init__(
        self,
        net: nn.Module,
        steps: Steps = 10,
        evaluation_steps: Steps | None = None,
        noise_level: float = 0.7,
        noise_anneal: Annotated[float, Ge(0)] = 1.0,
        sde_type: Annotated[Kernel, KERNELS] = flow_sde,
        timestep_schedule: Annotated[Grid, GRIDS] = linear,
        noise_window: Annotated[Window, WINDOWS] = all_steps,
        guidance_scale: float = 1.0,
        logprob_guidance: LogprobGuidance = "guided",
        same_initial_noise: bool = False,
        trajectory_dtype: Storage = "float32",
        logprob_reduction: Literal["mean", "sum"] = "mean",
        solver: Annotated[Solver, SOLVERS] | None = None,
        tree: Annotated[Tree | None, Effects(branches=True)] = None,
        flash_step_ratio: float | None = None,
        logprob_type: Literal["density", "square"] = "density",
        offload_trajectory: Annotated[bool, FREE_AT_RESUME] = False,
        **options: Any,
    ):
        super().__init__(net, **options)
        if (
            min(steps, steps if evaluation_steps is None else evaluation_steps) < 1
            or noise_level < 0
        ):
            raise UserError(
                f"steps and evaluation_steps must be at least 1 and noise_level at least 0, not "
                f"{steps}, {evaluation_steps} and {noise_level}"
            )
        self.timestep_schedule = timestep_schedule
        self.step_counts = steps, evaluation_steps
        self.kernel = self._for_process(sde_type)
        self.take_times()
        self.noise_level = noise_level
        self.noise_anneal = noise_anneal
        self.noise_window = noise_window
        self.solver = solver
        self.tree = tree
        self.flash_step_ratio = flash_step_ratio
        self.offload_trajectory = offload_trajectory
        self.dist_type = Score if logprob_type == "square" else Gaussian
        warn_of_mismatch(logprob_guidance, guidance_scale)
        self.guidance_scale = guidance_scale
        self.logprob_guidance = logprob_guidance
        self.same_initial_noise = same_initial_noise
        self.trajectory_dtype = torch_dtype(trajectory_dtype)
        self.logprob_reduction = logprob_reduction
        # raises for impossible schedules and windows
        planned(self, copies=tree.factor ** len(tree.at(self.steps)) if tree else 1, rng=FIXED)

    def take_times(self) -> None:
        """Set the times of the schedule, which may depend on the shape of a sample."""
        steps, evaluation_steps = self.step_counts
        try:
            self.times = self.timestep_schedule(steps)
        except (TypeError, ValueError) as error:
            raise UserError(f"policy option timestep_schedule: {error}") from error
        self.steps = len(self.times) - 1
        self.evaluation_times = (
            self.times if evaluation_steps is None else self.timestep_schedule(evaluation_steps)
        )
        self.sde_type = self._on_grid(self.kernel, self.times)

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Encode prompts to a nest of tensors [P, *]; under ``uncond`` those of the empty prompt,
        [1, *], if there is guidance."""

    @abstractmethod
    def decode(self, rollout: Rollout) -> Media: ...

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample deterministically (ODE), or with the noise that belongs to the model's sampler, at
        another guidance scale if given."""
        before = self.exploring, self.plain
        self.exploring = self.plain = self.renews
        try:
            with at_guidance(self, guidance):
                yield
        finally:
            self.exploring, self.plain = before

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        cond = self.encode(prompts)
        if self.unseen:
            check_conditions(self, cond, len(prompts))
        paths = self.paths(group, row, cond, rng, context, copies)
        if self.unseen:  # after the first sampling, which has found what fits into a pass
            self.unseen = False
            check_independence(self, cond, len(prompts))
        return paths.replace(prompts=tuple(prompts))

    def paths(
        self,
        group: Tensor,
        row: Tensor,
        cond: dict[str, Any],
        rng: Rng,
        context: RolloutContext,
        copies: Copies = 1,
    ) -> Rollout:
        """Sample the rows named ``row`` [B] under the conditions ``cond`` [P, *], indexed by
        ``group`` [B]; also return their paths."""
        plan = planned(self, copies, rng, context)
        size = self.pass_sizes.to_sample(len(row), lambda n: self._trial(group[:n], row[:n], cond))
        path = self._room(plan, len(row))

        # all trees grow together, in passes that hold the leaves of one at least
        leaves = plan.spans[0]
        for attempt in self.pass_sizes.attempts(max(size, leaves), least=leaves):
            with attempt as rows:
                blocks = self._blocks(group, row, cond, rng, plan, path, rows)
        visit = (
            None if context.reads == "path" else plan.places().to(self.device).expand(len(row), -1)
        )
        stream = torch.tensor([rng.key], device=self.device).expand(len(row), -1)
        time, noise_level = (self._on_rows(steps, len(row)) for steps in (plan.times, plan.eta))
        latents = LatentPath(
            states=path,
            visit=visit,
            time=time,
            noise_level=noise_level,
            stream=stream if bool((plan.eta > 0).any()) else None,
        )
        rollout = Rollout.cat(blocks).replace(trajectory=latents)
        return rollout.replace(mask=torch.zeros_like(rollout.mask)) if self.plain else rollout

    def _blocks(
        self,
        group: Tensor,
        row: Tensor,
        cond: dict[str, Any],
        rng: Rng,
        plan: Plan,
        path: Tensor,
        rows: int,
    ) -> list[Rollout]:
        """Sample in passes of ``rows`` rows; a tree as a whole."""
        if plan.spans[0] > 1:
            return [self._sample(group, row, cond, rng, plan._replace(rows=rows), path)]
        blocks = []
        for p, counts in self.pass_sizes.chunks(len(row), rows):
            room = path[p] if counts else torch.empty_like(path[p])
            block = self._sample(group[p], row[p], cond, rng, plan, room)
            blocks += [block] if counts else []
        return blocks

    def spaces(self) -> dict[str, Any]:
        kinds = {Flow: "flow", TrigFlow: "trigflow"}
        kind = kinds.get(type(self.process), "diffusion")
        return {"latents": {"shape": list(self.shape), "process": kind}}

    def noise(self, stream: Tensor, row: Tensor, step: int) -> Tensor:
        """Draw again the noise [B, *] of step ``step`` (from 0) for rows [B] of streams [B, 2].

        Not for trees, whose samples share noise. The key's words are tensors, so rows may belong to
        several streams.
        """
        return Rng((stream[:, :1], stream[:, 1:])).normal(row, self.shape, step + 1, self.dtype)

    def trial(self, prompts: list[Prompt], copies: Copies, reads: Reads) -> Trial:
        plan = planned(self, copies, FIXED)
        rows = sum(per_prompt(copies, len(prompts)))
        noisy = (plan.eta > 0).nonzero()[:, 0].tolist()
        decisions = sum(rows // plan.spans[k + 1] for k in noisy)
        outputs = partial(trials.outputs, self, len(prompts), self.encode(prompts))
        return Trial(
            sample=outputs,
            train=partial(outputs, renoised=reads == "sample"),
            sampled=tuple(rows // span for span in plan.spans[:-1]),
            trained=rows if reads == "sample" else decisions,
        )

    def _room(self, plan: Plan, rows: int) -> Tensor:
        """Allocate [B, S, *] for the states of paths that are stored, which sampling fills in."""
        place = "cpu" if self.offload_trajectory else self.device
        stored = self.dtype if self.trajectory_dtype == torch.float32 else self.trajectory_dtype
        return torch.empty(rows, len(plan.stored), *self.shape, dtype=stored, device=place)

    def _trial(self, group: Tensor, row: Tensor, cond: dict[str, Any]) -> None:
        """Make one pass of the largest kind, to measure what it allocates."""
        x = torch.zeros(len(row), *self.shape, dtype=self.dtype, device=self.device)
        none = torch.zeros(len(row), 1, dtype=torch.bool)
        t = self._on_rows(self.times[:1], len(row))[:, 0]
        self._velocities(
            Query(
                group=group, cond=cond, row_id=row, state=x, mask=none, step=SamplerState(time=t)
            ),
            guided=self.guidance_scale != 1 or self.guided_by in cond,
        )

    def _sample(
        self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng, plan: Plan, path: Tensor
    ) -> Rollout:
        """Sample the leaves of trees, one row a span in a pass; fill in ``path`` [B, S, *]."""
        time, eta = (self._on_rows(schedule, len(row)) for schedule in (plan.times, plan.eta))
        state = self._start(group[:: plan.spans[0]], row[:: plan.spans[0]], cond, rng)
        self._keep(path, plan, 0, state)
        records = []
        solver = None
        for k in range(eta.shape[1]):
            if self.solver and (k == 0 or plan.eta[k - 1] > 0):
                # multistep history belongs to the states before the noise
                solver = self.solver(self.process)
            leads = slice(None, None, plan.spans[k])
            point = Query(
                group=group[leads],
                cond=cond,
                row_id=row[leads],
                state=state,
                step=Transition(
                    time=time[leads, k], next_time=time[leads, k + 1], noise_level=eta[leads, k]
                ),
                mask=eta[leads, k : k + 1] > 0,
            )
            state, *record = self._advance(point, rng, plan, k, row, solver)
            self._keep(path, plan, k + 1, state)
            records.append(record)
        logprobs, entropies, noisy = zip(*records, strict=True)
        # the first row of an edge carries its decision
        decides = torch.stack([row % span == 0 for span in plan.spans[1:]], 1)
        return Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=state,
            logprob=_at_leaves(logprobs, plan),
            entropy=_at_leaves(entropies, plan) if self.record_entropy else None,
            mask=torch.stack([*noisy]).expand(len(row), -1) & decides,
            edge_id=plan.edges(row),
        )

    def _start(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng) -> Tensor:
        # without noise along the path all samples of a group would be equal
        shared = self.same_initial_noise and self.exploring
        first = group + rng.offset if shared else row
        noise = rng.normal(first, self.shape, 0, self.dtype)
        return self._store(self.begin(noise, rows_of(without_empty(cond), group)))

    def _advance(
        self, point: Query, rng: Rng, plan: Plan, k: int, row: Tensor, solver: Step | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take step k of the active states: return their children, the children's log-probs [B, 1]
        and entropies [B, 1], and whether the step is a decision.

        The last is a bool [] on the device, so that the host need not wait for it.
        """
        sampled, scored, output = self._both(point, plan.rows)
        if not plan.eta[k] > 0:
            state = (
                sampled.mean
                if solver is None
                else solver(point.state, output, point.time, point.transition.next_time)
            )
            none = torch.zeros((), dtype=torch.bool, device=state.device)
            zero = state.new_zeros(len(state), 1)
            return self._store(state.to(self.dtype)), zero, zero, none
        factor = plan.spans[k] // plan.spans[k + 1]
        child = row[:: plan.spans[k + 1]]
        if self.tree is None or factor == 1:
            noise = rng.normal(child, self.shape, k + 1, self.dtype)
        else:
            sampled = sampled.repeat(factor)
            scored = scored.repeat(factor)
            noise = self.tree.draw(
                rng, child, child - child % plan.spans[k], self.shape, k + 1, self.dtype
            )
        state = self._store(sampled.sample(noise))  # rounded first, then scored
        return state, scored.log_prob(state), sampled.entropy(), (sampled.std > 0).all()

    def path(self, rollout: Rollout) -> Iterator[Point]:
        length = rollout.mask.sum(1)
        for k, decides in enumerate(rollout.mask.cpu().unbind(1)):  # one wait, not one a decision
            rows = decides.nonzero()[:, 0]
            if len(rows):
                yield decision(rollout, length, sent(rows, length.device), k)

    def renoise(
        self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False
    ) -> Iterator[Point]:
        name = first_of_group(rollout) if shared else rollout.row_id
        t = rng.uniform(name, step=0) if time is None else time
        t = self.process.snap(t.to(rollout.sample))
        noise = rng.normal(name, self.shape, 1, rollout.sample.dtype)
        alive = rollout.alive()
        alpha, sigma = self.process.scales(t, rollout.sample)
        yield Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            step=Renoised(
                time=t,
                x0_per_output=self.process.gain(t, rollout.sample).flatten(),
                snr=(alpha / sigma).square().flatten(),
            ),
            mask=alive[:, None],
            num_decisions=alive.long(),
            state=noised(self.process, rollout.sample, noise, t),
            target=self.process.target(rollout.sample, noise, t),
            advantage=rollout.advantages()[:, -1:],
            advantage_parts=rollout.parts(lambda x: x[:, -1:]),
            provenance=rollout.provenance.replace(sampler_logprob=None),
        )

    def _store(self, x: Tensor) -> Tensor:
        return (
            x
            if self.trajectory_dtype == torch.float32
            else x.to(self.trajectory_dtype).to(self.dtype)
        )

    def _keep(self, path: Tensor, plan: Plan, k: int, state: Tensor) -> None:
        """Store the state after ``k`` steps on the path, once for every row of its span."""
        if k in plan.stored:
            span = plan.spans[k]
            path[:, plan.stored.index(k)].unflatten(0, (-1, span)).copy_(state.detach()[:, None])

    def _on_rows(self, schedule: Tensor, rows: int) -> Tensor:
        return sent(schedule.to(self.dtype), self.device).expand(rows, -1)


@torch.no_grad()
def demonstrated(
    policy: FlowPolicy, prompts: list[Prompt], answers: Sequence[Any], rng: Rng
) -> Rollout:
    """Make a rollout of external images, one per prompt. Their denoising paths are unknown: only
    objectives that re-noise samples can train on them."""
    row, group = rows_and_groups(prompts, 1, rng, policy.device)
    cond = policy.encode(prompts)  # sets the image size, to which answers are cropped
    samples, present = encoded(cast(EncodesMedia, policy), answers)
    blank = torch.zeros(len(row), *policy.shape, dtype=policy.dtype, device=policy.device)
    sample = placed_rows(samples, present, blank)
    plan = planned(policy, 1, rng)
    time, noise_level = (policy._on_rows(steps, len(row)) for steps in (plan.times, plan.eta))
    unknown = torch.zeros_like(noise_level)
    stream = torch.tensor([rng.key], device=policy.device).expand(len(row), -1)
    latents = LatentPath(
        states=blank.new_zeros(len(row), 0, *policy.shape),
        visit=torch.full_like(time, -1, dtype=torch.long),
        time=time,
        noise_level=noise_level,
        # as sampled rows have one; none of their steps is ever redrawn
        stream=stream if bool((plan.eta > 0).any()) else None,
    )
    rollout = Rollout(
        group=group,
        cond=cond,
        row_id=row,
        sample=sample,
        logprob=unknown,
        mask=unknown.bool(),
        trajectory=latents,
        prompts=tuple(prompts),
    )
    return sourced(rollout, present)


def _at_leaves(parts: Sequence[Tensor], plan: Plan) -> Tensor:
    """Join the values of edges, one row a span, as [B, K] of the rows."""
    spans = plan.spans[1:]
    return torch.cat([x.repeat_interleave(span, 0) for x, span in zip(parts, spans)], 1)
