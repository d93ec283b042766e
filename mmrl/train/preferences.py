"""Measures on held-out pairs how well a policy tells which answer is preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mmrl.core import distributed
from mmrl.core.metrics import Meter
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.policies.base import Policy
from mmrl.rollout.preferences import REWARD, Compared
from mmrl.rollout.stages import outline
from mmrl.train.batch import Batch
from mmrl.train.passes import Passes
from samplers.noise import Rng

SHOWN = ("loss", "group/", "dpo/", "dgpo/", "kto/")  # what objectives report of pairs


@torch.no_grad()
def held_out_preferences(
    policy: Policy, passes: Passes, draw: Compared, prompts: Sequence[Prompt], seed: int
) -> dict[str, float]:
    """Measure the loss on held-out answers and the objective's metrics of them, such as
    ``group/right``, the share of pairs whose better answer has the larger log-ratio; the same noise
    each time, nothing without any. A collective call."""
    compared = draw.pairs.kept_or_none(prompts)
    if not compared:
        return {}
    rank, size = distributed.world()
    share = -(-len(compared) // size)
    local = list(compared[rank * share : (rank + 1) * share])
    filled = [*local, *[compared[0]] * (share - len(local))]
    answers = draw.pairs.options.group_size
    rng = Rng(Rng.of(seed, "held out").key, rank * share)
    rollout, _, scores = draw(policy, filled, answers, rng)
    batch = _batch(policy, rollout, scores(), len(local) * answers, share * size)
    points = passes.points(batch.rollout, rng, False)
    with Meter().listening() as meter:
        for point in passes.cut(batch, points, passes.most_rows(), rng, couple=True)[1]:
            loss = passes.objective.loss(policy, point)
            meter.add("loss", loss, point.mask)
    measured = {n: mean for n, mean in meter.means().items() if n.startswith(SHOWN)}
    if "dpo/loss" in measured:  # the objective's own is a tangent, without the loss's value
        measured["loss"] = measured.pop("dpo/loss")
    return measured


def without_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop an iteration's metrics of rewards: those of pairs are the same in every iteration.
    ``samples/left_out`` is the share of answers that the policy cannot give."""
    constant = ("reward/", "groups/")
    remaining = {name: mean for name, mean in metrics.items() if not name.startswith(constant)}
    remaining["samples/left_out"] = remaining.pop("samples/excluded") / remaining["samples/total"]
    return remaining


def _batch(policy: Policy, rollout: Rollout, rewards: Rewards, rows: int, prompts: int) -> Batch:
    """Make a batch of the first ``rows`` rows; the others only fill up the pass."""
    reward = rewards[REWARD].to(rollout.logprob)
    is_real = torch.arange(len(reward), device=reward.device) < rows
    is_whole = ~torch.stack([reward.isnan(), ~is_real]).any(0)
    rollout = rollout.replace(
        advantage=reward.nan_to_num(0.0)[:, None],
        mask=rollout.mask & is_whole[:, None],
        trainable=is_whole,
    )
    size = len(rollout) // max(1, len(rollout.prompts))
    return Batch(
        iteration=0,
        rollout=rollout,
        rewards=rewards,
        sampled=(outline(rollout), rewards),
        group_sizes=(size,) * prompts,
        idle_row=rollout[:1],
        longest=distributed.largest(rollout.mask.shape[1], rollout.group.device),
        pass_rows=policy.pass_sizes.rows,
        metrics={},
    )
