"""Uses compared answers of the data instead of samples: offline preferences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl.core.broken_rows import first_of
from mmrl.core.errors import UserError
from mmrl.core.types import Copies, Media, Prompt, Rewards, Rollout
from mmrl.policies.base import NO_CONTEXT, Policy, RolloutContext
from mmrl.policies.contracts import Demonstrates, Replays
from mmrl.rollout.collect import Score
from samplers.noise import Rng

if TYPE_CHECKING:  # readers of files, which most runs do without
    from mmrl.config.preferences import Preferences
    from mmrl.data.pairs import Judged, Pairs

REWARD = "preference"  # 1 the better or a good answer, 0 the worse, -1 a bad one


class Compared:
    """Replaces ``collect.draw``: a prompt's group is its answers in the data, whose rewards say
    which is better. Log-probs are those of the current weights."""

    def __init__(self, pairs: Pairs):
        self.pairs = pairs

    @classmethod
    def of(cls, options: Preferences) -> Compared:
        """Compare the answers that these options name."""
        from mmrl.data.pairs import Pairs

        return cls(Pairs(options))

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        copies: Copies,
        rng: Rng,
        scorer: Score | None = None,
        parts: int = 1,
        context: RolloutContext = NO_CONTEXT,
    ) -> tuple[Rollout, Media, Callable[[], Rewards]]:
        """Make a rollout of the answers to ``prompts``. ``scorer``, ``parts`` and ``context``,
        which sampling needs, are ignored.

        If the policy cannot give an answer, because it is too long or has a suppressed token, the
        rewards of its group are NaN, so that it is not trained on.
        """
        policy = Demonstrates.of(policy)
        lot = Rng(rng.fold("pair").key)
        groups = [self.pairs.of(prompt, lot) for prompt in prompts]
        size = self.pairs.options.group_size
        repeated = [prompt for prompt in prompts for _ in range(size)]
        judged = [each for group in groups for each in group]
        answers = [opened(policy, p, each) for p, each in zip(repeated, judged, strict=True)]
        # there every answer is its own prompt, named as a sample would be
        rows = policy.demonstrate(repeated, answers, replace(rng, offset=rng.offset * size))
        taken = _whole_pairs(rows, size)
        cond, shown = Replays.of(policy).recall(list(prompts))
        group = torch.arange(len(rows), device=rows.group.device) // size
        provenance = rows.provenance.replace(is_ground_truth=None)
        rollout = rows.replace(
            group=group, cond=cond, prompts=tuple(shown), provenance=provenance, trainable=None
        )
        reward = torch.tensor([each.reward for each in judged], device=group.device)
        reward = torch.where(taken, reward, torch.nan)
        return (
            rollout.replace(mask=rollout.mask & taken[:, None]),
            policy.decode(rollout),
            lambda: Rewards({REWARD: reward}, {REWARD: 1.0}),
        )

    def check(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Raise UserError, with file and line, for rows without two answers, with equal ones, or
        with files that cannot be opened."""
        policy = Demonstrates.of(policy)
        problems = []
        for prompt in prompts:
            if why := next(self._problems(policy, prompt), None):
                place = prompt.get("origin") or repr(str(prompt.get("text", ""))[:60])
                problems.append(f"{place}: {why}")
        if problems:
            raise UserError(
                f"{len(problems)} of {len(prompts)} rows have no preference to learn from:\n    "
                f"{first_of(problems)}"
            )

    def _problems(self, policy: Demonstrates, prompt: Prompt) -> Iterator[str]:
        if why := self.pairs.problem(prompt):
            yield why
            return
        for each in self.pairs.of(prompt, Rng.of(0, "check")):
            if policy.medium_of(prompt) == "text":
                if not isinstance(each.content, str):
                    yield f"an answer is {type(each.content).__name__}, expected text"
            elif why := policy.unreadable(prompt, each.content):
                yield why


def opened(policy: Demonstrates, prompt: Prompt, answer: Judged) -> Any:
    """Return an answer as ``Demonstrates.demonstrate`` takes it."""
    if policy.medium_of(prompt) == "text":
        return str(answer.content)
    return policy.open_answer(prompt, answer.content)


def labelled(rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
    """Return the labels of single answers as advantages, [B, 1]: there is nothing to compare."""
    assert isinstance(rewards, Rewards)
    return rewards[REWARD].to(rollout.logprob)[:, None]


def _whole_pairs(rows: Rollout, size: int) -> Tensor:
    """Return [B] bool: rows of groups all of whose answers the policy can give."""
    taken = rows.provenance.is_ground_truth
    taken = rows.alive() if taken is None else taken
    taken = taken & (rows.logprob.isfinite() | ~rows.mask).all(1)
    return taken.view(-1, size).all(1).repeat_interleave(size)
