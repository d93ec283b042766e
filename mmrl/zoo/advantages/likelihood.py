"""Advantages that use an answer's probability, or the tokens it shares with other answers."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from mmrl.advantages.groups import Groups, finished, measured, replaced, reward_called
from mmrl.advantages.presets import grpo
from mmrl.advantages.select import ranks
from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import entropy as entropy_of
from mmrl.zoo.advantages.quantities import path_mask, sequence_logprob
from mmrl.zoo.advantages.shaping import Underneath


@ADVANTAGES.register("unlikeliness")
def unlikeliness(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    strength: Annotated[float, Ge(0), Le(1)] = 0.25,
    reward: str | None = None,
    right: float = 0.5,
) -> Tensor:
    """Reward right answers more the less likely they are, then compare (unlikeliness).

    He et al. 2025, "Rewarding the unlikely". r (1 - strength (n - rank) / n) for a right answer,
    rank 0 being the most likely of the n of the group by the sum of its log-probs; wrong ones stay
    as they are; answers of equal probability get the mean of their ranks. reward: the one to
    modify, before it is weighted; null: the weighted sum. right: an answer is right from this
    reward on. base: the advantage of these rewards.

    strength: share by which the likeliest right answer loses.
    """
    double, groups = measured(rewards, rollout)
    value = reward_called(double, reward, "unlikeliness")
    rank = _mean_ranks(-sequence_logprob(rollout).to(value.device), groups, rollout.row_id)
    size = groups.size()[groups.index].clamp(min=1)
    weight = torch.where(value >= right, 1 - strength * (size - rank) / size, 1.0)
    advantage = base(replaced(double, reward, value * weight, groups), rollout)
    return finished(advantage, rewards, groups.present[:, None])


def _mean_ranks(score: Tensor, groups: Groups, row: Tensor) -> Tensor:
    """Return the rank [B] of each present row in its group, 0 for the lowest score, float64; equal
    scores get their mean rank."""
    rank = ranks(score, groups, row.to(score.device)).double()
    keys = torch.stack([groups.index.to(score), score], 1)
    kinds, index = keys.unique(dim=0, return_inverse=True)
    return Groups(index, groups.present, len(kinds)).mean(rank)[index]


@ADVANTAGES.register("gtpo")
def gtpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    base: Underneath = grpo,
    amplify: Annotated[float, Ge(1)] = 2.0,
    at_most: float | None = 0.7,
    penalty: Annotated[float, Ge(0)] = 0.1,
    share_conflicts: bool = True,
) -> Tensor:
    """Protect tokens shared by good and bad answers, and drop answers of high entropy (GTPO).

    Simoni et al. 2025, "GTPO: Trajectory-based policy optimization". A conflict token occurs at the
    same position, counted from the first or the last token, in answers of the group with A > 0 and
    with A < 0, within an unbroken run from that end. Its weight is 0 in bad answers and ``amplify``
    in good ones (squared where both runs overlap). Then A - penalty H, and 0 for answers with H >
    at_most (null: none), H the mean entropy of an answer's token distributions, nats, which the
    policy records. share_conflicts: a row is divided by its number of conflict tokens, as in the
    published code. Returns [B, K]; for models of tokens.

    base: the advantage that is changed. amplify: weight of conflict tokens in good answers.
    at_most: largest mean entropy, nats; null: any. penalty: weight of the entropy.
    """
    tokens = rollout.sample
    if tokens.shape != rollout.mask.shape or tokens.is_floating_point():
        raise UserError(
            "advantage gtpo compares tokens one by one, and this policy does not decide on them "
            "once each; it is for policies that write tokens, others take filtered or grpo"
        )
    advantage = base(rewards, rollout)
    weight = _conflict_weight(rollout, advantage, amplify, share_conflicts)
    entropy = entropy_of(rollout)[:, None].to(advantage)
    shaped = advantage - penalty * entropy
    if at_most is not None:
        shaped = torch.where(advantage.isnan(), advantage, shaped.masked_fill(entropy > at_most, 0))
    return shaped * weight


def _conflict_weight(
    rollout: Rollout, advantage: Tensor, amplify: float, share_conflicts: bool
) -> Tensor:
    """Return GTPO's weight of every token, [B, K]."""
    mask = path_mask(rollout)
    good = (advantage > 0).any(1)
    bad = (advantage < 0).any(1)
    conflict = ConflictTokens(rollout.group, rollout.sample, mask, good, bad)
    place = mask.long().cumsum(1) - 1
    forward = _run(conflict.at(place), mask)
    behind = mask.sum(1, keepdim=True) - 1 - place
    backward = _run(conflict.at(behind).flip(1), mask.flip(1)).flip(1)
    weight = torch.ones_like(mask, dtype=advantage.dtype)
    weight = weight * torch.where(forward, amplify, 1.0) * torch.where(backward, amplify, 1.0)
    weight = torch.where((forward | backward) & bad[:, None], 0.0, weight)
    weight = torch.where((good | bad)[:, None], weight, 1.0)
    if share_conflicts:
        conflicts = (forward | backward).sum(1, keepdim=True).clamp(min=1)
        weight = weight / torch.where((good | bad)[:, None], conflicts, 1)
    return weight


vars(gtpo)["requires"] = Requires("categorical")  # the configuration refuses it for others
vars(gtpo)["records"] = lambda options: ("record_entropy",)


class ConflictTokens:
    """Finds tokens that good and bad answers of a group have at the same position."""

    def __init__(self, group: Tensor, tokens: Tensor, mask: Tensor, good: Tensor, bad: Tensor):
        self.group = group.unique(return_inverse=True)[1]
        self.tokens = tokens.unique(return_inverse=True)[1].view_as(tokens)
        self.mask = mask
        self.good = good
        self.bad = bad

    def at(self, place: Tensor) -> Tensor:
        """Mark [B, K] the conflict tokens, given their positions ``place`` [B, K]."""
        width = self.tokens.shape[1] + 1
        kinds = self.tokens.max() + 1
        key = (self.group[:, None] * width + place.clamp(min=0)) * kinds + self.tokens
        _, index = key.flatten().unique(return_inverse=True)
        count = int(index.max()) + 1
        sides = []
        for rows in (self.good, self.bad):
            written = (self.mask & rows[:, None]).flatten().long()
            sides.append(written.new_zeros(count).scatter_reduce(0, index, written, "amax"))
        return (sides[0] * sides[1]).bool()[index].view_as(self.mask) & self.mask


def _run(conflict: Tensor, mask: Tensor) -> Tensor:
    """Keep [B, K] the conflict tokens of the run that begins at the first token."""
    return (conflict | ~mask).long().cumprod(1).bool() & conflict


@ADVANTAGES.register("gcpo")
class GCPO:
    """Reward a behaviour where it helps the group, punish it where it hurts (GCPO, GeometryZero).

    Wang et al. 2025, "GeometryZero". behaviour: the reward that is at least 0.5 for answers that
    show it, such as the use of a tool; it is multiplied by m, 1 where the group's answers with it
    have the higher mean outcome, by more than ``margin``, -1 where the lower, 0 where neither or
    where all answers show it, or none. outcome: the reward to compare; null: the weighted sum of
    all others. base: the advantage of the sum. The data ``forms`` with ``together`` asks for
    answers with the behaviour and without, so that a group holds both (the paper). The paper's
    length reward is a separate reward.

    margin: difference of mean outcomes that counts as none.
    """

    def __init__(
        self,
        behaviour: str,
        base: Underneath = grpo,
        outcome: str | None = None,
        margin: Annotated[float, Ge(0)] = 0.0,
    ):
        self.behaviour = behaviour
        self.base = base
        self.outcome = outcome
        self.margin = margin

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the advantages of the base, NaN for samples without a reward."""
        double, groups = measured(rewards, rollout)
        shown = reward_called(double, self.behaviour, "gcpo", "behaviour")
        if self.outcome is None:
            rest = {
                name: double.weights[name] * x
                for name, x in double.items()
                if name != self.behaviour
            }
            if not rest:
                raise UserError(
                    f"advantage gcpo: {self.behaviour!r} is the only reward, and nothing tells "
                    "whether the behaviour helps; add a reward of the answer"
                )
            earned = torch.stack([*rest.values()]).sum(0)
        else:
            earned = reward_called(double, self.outcome, "gcpo", "outcome")
        shows = shown >= 0.5
        having = Groups(groups.index, groups.present & shows, groups.count)
        lacking = Groups(groups.index, groups.present & ~shows, groups.count)
        lead = having.mean(earned) - lacking.mean(earned)
        sign = torch.where(lead.abs() > self.margin, lead.sign(), 0.0)
        sign = sign.masked_fill((having.size() == 0) | (lacking.size() == 0), 0.0)
        useful = replaced(double, self.behaviour, sign[groups.index] * shown, groups)
        return finished(self.base(useful, rollout), rewards, groups.present[:, None])
