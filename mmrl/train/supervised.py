"""Collects an iteration of supervised fine-tuning: answers come from the data, so nothing is
sampled, rewarded or compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.core import distributed
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.objectives.base import Objective
from mmrl.objectives.supervised import Supervised
from mmrl.policies.base import Policy
from mmrl.policies.contracts import Demonstrates
from mmrl.rollout.stages import outline
from mmrl.train.batch import Batch
from mmrl.train.passes import Passes
from samplers.noise import Rng


def demonstrated(
    policy: Policy, objective: Objective, prompts: Sequence[Prompt], rng: Rng
) -> Rollout:
    """Make a rollout of the data's answers to these prompts, without log-probs."""
    assert isinstance(objective, Supervised)
    policy = Demonstrates.of(policy)
    answers = objective.answers(policy, prompts, rng)
    rollout = policy.demonstrate(list(prompts), answers, rng, score=False)
    return objective.trimmed(policy, rollout, answers)


def collect(
    policy: Policy,
    objective: Objective,
    prompts: Sequence[Prompt],
    rng: Rng,
    iteration: int,
    rows: int,
) -> Batch:
    """Collect an iteration of ``rows`` rows on all processes; ``prompts`` are this process's.

    Its metric ``samples/left_out`` is the share of rows whose answer is too long for the policy.
    """
    rollout = demonstrated(policy, objective, prompts, rng)
    rollout = rollout.replace(advantage=torch.zeros_like(rollout.logprob[:, :1]))
    unused = distributed.all_sum((~rollout.alive()).sum().double())
    nothing = Rewards({})
    return Batch(
        iteration=iteration,
        rollout=rollout,
        rewards=nothing,
        sampled=(outline(rollout), nothing),
        group_sizes=(1,) * rows,
        idle_row=rollout[:1],
        longest=distributed.largest(rollout.mask.shape[1], rollout.group.device),
        pass_rows=policy.pass_sizes.rows,
        metrics={"samples/left_out": float(unused) / rows, "samples/total": rows},
    )


@torch.no_grad()
def held_out_loss(
    policy: Policy, objective: Objective, passes: Passes, prompts: Sequence[Prompt], seed: int
) -> float:
    """Measure the mean loss of a decision on held-out answers, with the same noise each time; NaN
    without any. A collective call."""
    rank, size = distributed.world()
    share = -(-len(prompts) // size)
    local = list(prompts[rank * share : (rank + 1) * share])
    filled = [*local, *[prompts[0]] * (share - len(local))]
    rng = Rng(Rng.of(seed, "held out").key, rank * share)
    batch = collect(policy, objective, filled, rng, 0, share * size)
    rollout = batch.rollout
    real = torch.arange(share, device=rollout.mask.device) < len(local)
    rollout = rollout.replace(mask=rollout.mask & real[:, None], trainable=rollout.alive() & real)
    points = passes.points(rollout, rng, False)
    sums = torch.zeros(2, dtype=torch.float64, device=real.device)
    for point in passes.cut(batch, points, passes.most_rows(), rng)[1]:
        loss = objective.loss(policy, point)
        sums += torch.stack([(loss * point.mask).sum(), point.mask.sum()]).to(sums)
    total, count = distributed.all_sum(sums).tolist()
    return total / count if count else float("nan")
