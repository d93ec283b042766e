"""Adds answers to groups: remembered ones, and demonstrations, which policy and rewards score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.policies.base import Policy
from mmrl.policies.contracts import Demonstrates
from mmrl.rollout.collect import appended, media_of, together
from mmrl.rollout.stages import Drawn, Setup, outline
from mmrl.zoo.stages.answer_memory import Remembered, beside, marked, with_marks
from mmrl.zoo.stages.answers import Answer
from samplers.noise import Rng

Wanted = list[tuple[int, Prompt, Answer]]  # groups, their prompts, and answers to add


def inserted(
    policy: Policy, drawn: Drawn, chosen: Sequence[tuple[int, Remembered]], grows: bool
) -> Drawn:
    """Add answers to groups: they replace the last rows, or those that the answers name, or are
    appended. A collective call if rows are appended, since all get new names."""
    rollout = drawn.rollout
    if rollout.provenance.is_replayed is None:
        drawn = replace(drawn, rollout=marked(rollout, False))
        rollout = drawn.rollout
    if not chosen:
        return renamed(drawn) if grows else drawn
    device = rollout.group.device
    new_rows: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for place, (group, entry) in enumerate(chosen):
        new_rows.setdefault(group, []).append(len(rollout) + place)
        if entry.row is not None:
            left.setdefault(group, []).append(entry.row)
    order, replaced = _places(rollout, new_rows, grows, left)
    last = {group: row for row, group in enumerate(rollout.group.tolist())}
    whole = appended(rollout, *(_row(entry, rollout, last[group]) for group, entry in chosen))
    media = together([drawn.media, policy.decode(whole[len(rollout) :])])
    rewards = {
        name: torch.cat([value, *(entry.rewards[name].to(value) for _, entry in chosen)])[order]
        for name, value in drawn.rewards.items()
    }
    mixed = whole[order]
    if not grows:
        mixed = mixed.replace(row_id=rollout.row_id)
    drawn = replace(
        drawn,
        rollout=mixed,
        media=media_of(media, order.to(device)),
        rewards=Rewards(rewards, drawn.rewards.weights),
        unused=(*drawn.unused, *_lost(drawn, replaced)),
    )
    return renamed(drawn) if grows else drawn


def _lost(drawn: Drawn, replaced: Tensor) -> tuple[tuple[Rollout, Rewards], ...]:
    """Outline the rows that were replaced, with their rewards."""
    plain = drawn.rewards.per_row()
    lost = Rewards({name: value[replaced] for name, value in plain.items()}, plain.weights)
    return ((outline(drawn.rollout)[replaced], lost),) if len(replaced) else ()


def _row(entry: Remembered, rollout: Rollout, place: int) -> Rollout:
    """Make a row of an answer, with the fields of the prompt from a row of its group."""
    old = rollout[place : place + 1]
    return beside(entry, rollout).replace(
        group=old.group,
        row_id=old.row_id,
        all_samples=old.all_samples,
        records=old.records and old.records.of_prompt(),
    )


def _places(
    rollout: Rollout,
    new_rows: Mapping[int, Sequence[int]],
    grows: bool,
    left: Mapping[int, Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """List the rows in their new order, and the old rows that are replaced: those named in
    ``left``, else a group's last."""
    device = rollout.group.device
    group = rollout.group.tolist()
    if not grows:
        order = list(range(len(rollout)))
        replaced: list[int] = []
        for name, rows in new_rows.items():
            last_places = [row for row, of in enumerate(group) if of == name][-len(rows) :]
            own_places = left.get(name, last_places)
            replaced += own_places
            for place, row in zip(own_places, rows, strict=True):
                order[place] = row
        return torch.tensor(order, device=device), torch.tensor(replaced, device=device)
    order = []
    by_name = rollout.row_id.argsort().tolist()
    for at, row in enumerate(by_name):
        order.append(row)
        if at + 1 == len(by_name) or group[by_name[at + 1]] != group[row]:
            order += new_rows.get(group[row], [])
    return torch.tensor(order, device=device), torch.zeros(0, dtype=torch.long, device=device)


def renamed(drawn: Drawn) -> Drawn:
    """Name the rows by their order over all processes; a collective call."""
    rollout = drawn.rollout
    device = rollout.group.device
    rank, _ = distributed.world()
    counts = distributed.all_gather_rows(torch.tensor([len(rollout)], device=device)).tolist()
    names = torch.arange(len(rollout), device=device) + sum(counts[:rank])
    return replace(drawn, rollout=rollout.replace(row_id=names))


def demonstrated(
    setup: Setup,
    drawn: Drawn,
    due: Wanted,
    logprob: str,
    grows: bool,
    iteration: int,
    rows_left: Sequence[int] = (),
) -> tuple[Drawn, float]:
    """Add demonstrations to groups, replacing their last rows or ``rows_left``; also return their
    number over all processes. A collective call."""
    rollout = drawn.rollout
    device = rollout.group.device
    drawn = replace(drawn, rollout=with_marks(rollout))
    most = distributed.largest(len(due), device)
    if not most:
        return inserted(setup.policy, drawn, [], grows), 0.0
    prompts = [prompt for _, prompt, _ in due]
    media_format = setup.policy.media
    answers = [answer.media(media_format.frames, media_format.fps) for _, _, answer in due]
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
    """Record the denominator of the ratio: the policy's log-probs, those of the file, or 0."""
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
                    f"train.stages.demonstrations: an answer to "
                    f"{str(prompt.get('text'))[:60]!r} has {len(answer.logprobs)} logprobs, but "
                    f"{length} tokens, its end included; leave logprobs out, or write those of "
                    f"this policy's tokens"
                )
            known = torch.tensor(answer.logprobs).to(logprob)
            logprob[place, rows.mask[place]] = known[:length]
            old[place] = True
    provenance = rows.provenance.replace(is_ground_truth=_taken(rows), is_replayed=old)
    return rows.replace(logprob=logprob, provenance=provenance, trainable=None)


def _scored(setup: Setup, rows: Rollout, due: Wanted, like: Rewards) -> Rewards:
    """Score the answers whose rewards are not known."""
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
    """Return rewards by name; a single number becomes rewards with that weighted sum."""
    if isinstance(reward, Mapping):
        return reward
    first = next(name for name, weight in like.weights.items() if weight)
    return dict.fromkeys(like, 0.0) | {first: reward / like.weights[first]}
