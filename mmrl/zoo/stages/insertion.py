"""Puts written answers in groups, scored by the policy and by the rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.policies.contracts import Demonstrates
from mmrl.rollout.stages import Drawn, Setup
from mmrl.zoo.stages.answer_memory import Remembered, inserted, with_marks
from mmrl.zoo.stages.answers import Answer
from samplers.noise import Rng

Wanted = list[tuple[int, Prompt, Answer]]  # groups, their prompts, and answers that they get


def demonstrated(
    setup: Setup,
    drawn: Drawn,
    due: Wanted,
    logprob: str,
    grows: bool,
    iteration: int,
    rows_left: Sequence[int] = (),
) -> tuple[Drawn, float]:
    """Put answers in groups, in the places of their last rows or of ``rows_left``; also returns how
    many, over all processes. A collective call."""
    rollout = drawn.rollout
    device = rollout.group.device
    drawn = replace(drawn, rollout=with_marks(rollout))
    most = distributed.largest(len(due), device)
    if not most:
        return inserted(setup.policy, drawn, [], grows), 0.0
    prompts = [prompt for _, prompt, _ in due]
    frames, rate = setup.policy.media_frames, setup.policy.media_fps
    answers = [answer.media(frames, rate) for _, _, answer in due]
    idle = most - len(due)  # every process makes equally many passes
    rng = Rng.of(setup.options.seed, iteration, "demonstrate")
    policy = Demonstrates.of(setup.policy)
    with setup.behavior():
        rows = policy.demonstrate(
            [*prompts, *[drawn.rollout.prompts[0]] * idle], [*answers, *[None] * idle], rng
        )
    taken = _taken(rows)[: len(due)].tolist()
    rows = _with_logprobs(rows, due, logprob)
    rewards = _scored(setup, rows, due, drawn.rewards)
    chosen = []
    for place, (group, _, _) in enumerate(due):
        if taken[place]:
            entry = {name: value[place : place + 1] for name, value in rewards.items()}
            row = rows[place : place + 1].replace(cond=None, prompts=())
            answer = Remembered(-1, iteration, row, Rewards(entry, rewards.weights))
            answer.row = rows_left[place] if rows_left else None
            chosen.append((group, answer))
    count = distributed.all_sum(torch.tensor(float(len(chosen)), device=device))
    return inserted(setup.policy, drawn, chosen, grows), float(count)


def _taken(rows: Rollout) -> Tensor:
    """Tell which answers the policy took, [B] bool."""
    if rows.provenance.is_ground_truth is not None:
        return rows.provenance.is_ground_truth
    return rows.alive()


def _with_logprobs(rows: Rollout, due: Wanted, how: str) -> Rollout:
    """Record what a ratio divides by: the policy's own log-probs, those of the file, or 0."""
    old = torch.zeros_like(_taken(rows))
    logprob = rows.logprob.clone()
    for place, (_, prompt, answer) in enumerate(due):
        if how == "one":
            logprob[place] = 0.0
            old[place] = True
        elif how == "recorded" and answer.logprobs is not None:
            length = int(rows.mask[place].sum())
            if length and len(answer.logprobs) != length:
                raise UserError(
                    f"train.demonstrations: an answer to {str(prompt.get('text'))[:60]!r} has "
                    f"{len(answer.logprobs)} logprobs, but {length} tokens, its end included; "
                    f"leave logprobs out, or write those of this policy's tokens"
                )
            known = torch.tensor(answer.logprobs).to(logprob)
            logprob[place, rows.mask[place]] = known[:length]
            old[place] = True
    provenance = rows.provenance.replace(is_ground_truth=_taken(rows), is_replayed=old)
    return rows.replace(logprob=logprob, provenance=provenance, trainable=None)


def _scored(setup: Setup, rows: Rollout, due: Wanted, like: Rewards) -> Rewards:
    """Score the answers, but for those whose rewards are known."""
    rewards = setup.score(rows)
    values = {name: rewards[name].to(like[name]).clone() for name in like}
    for place, (_, _, answer) in enumerate(due):
        if answer.reward is None:
            continue
        for name, value in _parts(answer.reward, like).items():
            if name in values:
                values[name][place] = float(value)
    return Rewards(values, like.weights)


def _parts(reward: float | Mapping[str, float], like: Rewards) -> Mapping[str, float]:
    """Return the rewards by name whose weighted sum is ``reward``, if that is one number."""
    if isinstance(reward, Mapping):
        return reward
    first = next(name for name, weight in like.weights.items() if weight)
    return dict.fromkeys(like, 0.0) | {first: reward / like.weights[first]}
