"""Plans a flow's sampling in an iteration: times, stochastic steps, shared states, and which states
are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Copies
from mmrl.policies.base import NO_CONTEXT, RolloutContext
from mmrl.policies.capabilities import NOISELESS
from samplers.noise import Rng
from samplers.schedules import compressed

if TYPE_CHECKING:
    from mmrl.policies.diffusion.flow_passes import FlowPasses


class Plan(NamedTuple):
    """Lists what the sampler does in one iteration: times, noise levels, which states are
    stored."""

    times: Tensor  # [K + 1]
    eta: Tensor  # [K]; 0 is a deterministic step
    spans: list[int]  # K + 1: how many adjacent rows share a state
    rows: int | None = None  # most rows of a pass; None: all active ones
    stored: tuple[int, ...] = ()  # the S steps after which the state is kept for training

    def places(self) -> Tensor:
        """Index the states on the path, [K + 1] long: where the state after k steps is stored; -1:
        nowhere."""
        places = torch.full((len(self.times),), -1)
        places[list(self.stored)] = torch.arange(len(self.stored))
        return places

    def edges(self, row: Tensor) -> Tensor | None:
        """Name the edge of every decision of rows named ``row``, [B, K]; None without a tree."""
        if self.spans[0] == 1:
            return None
        return torch.stack([row - row % span for span in self.spans[1:]], 1)


def planned(
    policy: FlowPasses, copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
) -> Plan:
    """Plan what the sampler does in this iteration: times, noise levels, branching."""
    try:
        times = policy.evaluation_times if policy.plain else policy.times
        # [K] bool
        noisy = policy.noise_window(len(times) - 1, context.iteration, rng.fold("window"))
        tree = policy.tree if policy.exploring else None
        if tree is not None:
            splits = torch.tensor(tree.at(len(times) - 1))
            noisy = noisy | torch.isin(torch.arange(len(times) - 1), splits)
        if not policy.exploring:
            times = policy.evaluation_times
            noisy = torch.zeros(len(times) - 1, dtype=torch.bool)
        if policy.exploring and policy.flash_step_ratio is not None:
            after = int(noisy.nonzero().max()) + 1
            times = compressed(times, after, policy.flash_step_ratio)
            noisy = torch.cat([noisy[:after], noisy.new_zeros(len(times) - 1 - after)])
    except ValueError as error:
        raise UserError(f"policy option noise_window or flash_step_ratio: {error}") from error
    steps = len(times) - 1
    spans = [1] * (steps + 1) if tree is None else tree.spans(steps, copies)
    decisions = (noisy & policy.exploring).nonzero()[:, 0].tolist()
    stored = {
        "path": range(len(times)),
        "decisions": sorted({k + side for k in decisions for side in (0, 1)}),
        "sample": (),
    }[context.reads]
    eta = policy.noise_level * torch.linspace(1, policy.noise_anneal, steps, dtype=torch.float64)
    eta = eta * noisy * policy.exploring
    plan = Plan(times, eta, spans, stored=tuple(stored))
    if context.reads == "decisions" and policy.exploring and not decides(policy, plan):
        raise UserError(f"policy options steps and noise_level: the objective {NOISELESS}")
    return plan


def decides(policy: FlowPasses, plan: Plan) -> bool:
    """Tell whether any step draws noise: some never do, such as DDIM's last step."""
    steps = len(plan.eta)
    blank = torch.ones(steps, *[1] * len(policy.shape), dtype=torch.float64)
    times = plan.times.to(blank)
    _, std = policy.sde_type(blank, blank, times[:-1], times[1:], plan.eta)
    return bool((std > 0).any())
