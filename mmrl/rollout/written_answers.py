"""Puts answers that somebody else wrote in the groups of their prompts, beside the policy's own:
CHORD, LUFFY, TempSamp-R1, RLEP's pools of texts, pairs for DPO, IPO and RPO, A-LoL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.config.options import Demonstrations
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.data.answers import Answer, Known, of_field, of_file
from mmrl.rollout.past import Remembered, inserted, with_marks
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup, group_sizes
from samplers.noise import Rng

Wanted = list[tuple[int, Prompt, Answer]]  # groups, their prompts, and answers that they get


@STAGES.register("demonstrations")
class Demonstrated(KnowsPrompts):
    """Puts answers of a file, or of a field of the prompts, in their groups
    (``train.demonstrations``).

    They are scored as the policy's own are, unless the file has their rewards. Which of a prompt's
    answers an iteration takes is a function of the iteration and of the prompt.
    """

    def __init__(self, options: Demonstrations, setup: Setup, known: Known):
        self.options = options
        self.setup = setup
        self.known = known
        self.grows = options.place == "append"
        self.apart = "is_ground_truth" if options.apart else ""
        self.origins: dict[int, Prompt] = {}

    @classmethod
    def build(cls, setup: Setup) -> Demonstrated | None:
        options = setup.options.demonstrations
        if options is None:
            return None
        if not setup.policy.capabilities.demonstrations:
            raise UserError(
                f"train.demonstrations: {type(setup.policy).__name__} takes no answers of others; "
                f"it is for policies with the capability demonstrations"
            )
        known = of_field(options.field) if options.field else of_file(options.file(), options.key)
        if not any(known(prompt) for prompt in setup.prompts):
            raise UserError(
                f"train.demonstrations: {options.path or options.field} has no answer to any "
                f"prompt of the data; key names the field of a prompt by which it is found"
            )
        return cls(options, setup, known)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        active = self.options.until is None or iteration < self.options.until
        due = self._wanted(drawn, iteration) if active else []
        mixed, count = demonstrated(
            self.setup, drawn, due, self.options.logprob, self.grows, iteration
        )
        return mixed, {"demonstrations/rows": count}

    def _wanted(self, drawn: Drawn, iteration: int) -> Wanted:
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        right = (double.total() > self.options.threshold) & groups.present
        solved = set(rollout.group[right.to(rollout.group.device)].tolist())
        due: Wanted = []
        for group, size in enumerate(group_sizes(rollout)):
            prompt = self.origins.get(id(rollout.prompts[group]))
            needed = self.options.when == "always" or group not in solved
            if not size or prompt is None or not needed:
                continue
            answers = self.known(prompt)
            rng = Rng.of(self.setup.options.seed, iteration, "demonstrations", str(prompt["text"]))
            most = self.options.number if self.grows else min(self.options.number, size - 1)
            chosen = sorted(rng.permutation(len(answers)).tolist()[:most]) if answers else []
            due += [(group, prompt, answers[place]) for place in chosen]
        return due


def demonstrated(
    setup: Setup, drawn: Drawn, due: Wanted, logprob: str, grows: bool, iteration: int
) -> tuple[Drawn, float]:
    """Put answers in groups; also returns how many, over all processes. A collective call."""
    rollout = drawn.rollout
    device = rollout.group.device
    drawn = replace(drawn, rollout=with_marks(rollout))
    most = distributed.largest(len(due), device)
    if not most:
        return inserted(setup.policy, drawn, [], grows), 0.0
    prompts = [prompt for _, prompt, _ in due]
    answers = [answer.media() for _, _, answer in due]
    idle = most - len(due)  # every process makes equally many passes
    rng = Rng.of(setup.options.seed, iteration, "demonstrate")
    with setup.behavior():
        rows = setup.policy.demonstrate(
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
