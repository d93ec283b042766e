"""Defines stages, which change the rows that an iteration trains on.

A stage is registered in ``STAGES`` and made from its own options where ``train.stages`` names it;
some built-in ones are made from an option of ``train:``, of the data or of the policy. The trainer
calls every method of every stage: built-in ones in the order of registration, then others in that
of ``train.stages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError
from mmrl.core.host import on_host
from mmrl.core.registry import STAGES, load_built_in
from mmrl.core.types import Copies, Media, Prompt, PromptMoments, Provenance, Rewards, Rollout
from mmrl.policies.base import Policy, RolloutContext
from mmrl.rollout.collect import joined, media_of
from samplers.noise import Rng


@dataclass(frozen=True)
class Drawn:
    """Holds samples with their rewards, and the groups that were sampled but replaced.

    Of the replaced ones ``gave_way`` has groups and rewards, not their samples; ``unused`` has
    those of further samples of the same groups that are not trained on.
    """

    rollout: Rollout
    media: Media
    rewards: Rewards
    gave_way: tuple[tuple[Rollout, Rewards], ...] = ()
    unused: tuple[tuple[Rollout, Rewards], ...] = ()

    def sampled(self) -> tuple[Rollout, Rewards]:
        """Join everything the policy sampled in this iteration, also what is not trained on.

        Statistics are of these rows.
        """
        standing = [(outline(self.rollout), self.rewards.per_row()), *self.unused]
        parts = [*self.gave_way]
        parts[:0] = [
            (
                Rollout.cat([rollout for rollout, _ in standing]),
                Rewards({n: torch.cat([part[n] for _, part in standing]) for n in self.rewards}),
            )
        ]
        rewards = {name: torch.cat([part[name] for _, part in parts]) for name in self.rewards}
        whole = joined([rollout for rollout, _ in parts])
        _, rows, row_rewards = sampled_only(
            [None] * len(whole), whole, Rewards(rewards, self.rewards.weights)
        )
        return rows, row_rewards


# draws and scores samples with the sampling weights, as many of each prompt as ``Copies`` says
Sample = Callable[[list[Prompt], Rng, Copies], Drawn]


@dataclass(frozen=True)
class Setup:
    """Holds what stages are made from: the options of ``train:`` and the parts of the run.

    ``prompts`` is the whole data; ``rewards`` are those that are trained on, by name.
    """

    options: TrainOptions
    policy: Policy
    prompts: Sequence[Prompt]
    rewards: Mapping[str, Any]
    # the sampling weights are in force within it
    behavior: Callable[[], AbstractContextManager[Any]] = nullcontext
    # scores rows as samples are scored; a collective call
    score: Callable[[Rollout], Rewards] = lambda rollout: Rewards({})


class Stage:
    """Does nothing by itself; a stage overrides the methods it needs. ``saved_as`` names its part
    of a checkpoint, if it has a state."""

    effects: ClassVar[Effects] = Effects()
    # what makes the stage, instead of ``train.stages``: an option of ``train``, or anything else
    option: ClassVar[str] = ""
    asked_by: ClassVar[str] = ""
    saved_as: str = ""
    grows: bool = False  # adds rows to groups, and renumbers all rows
    # rows with this mark of provenance are compared among themselves; empty: none
    baseline_of: str = ""

    @classmethod
    def build(cls, setup: Setup) -> Stage | None:
        """Make the stage if something other than ``train.stages`` asks for it, else return None.
        May raise UserError."""
        return None

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        """Yield (key, sentence) for what ``options`` ask and a policy (object or class) cannot do;
        an empty key: the stage as a whole."""
        return iter(())

    def setup(self, setup: Setup) -> None:
        """Check the parts of the run before the first iteration, if ``train.stages`` names the
        stage. May raise UserError."""

    def begin(self, iteration: int) -> None:
        """Prepare the policy for iteration ``iteration`` (from 0), before anything is sampled."""

    def context(self, context: RolloutContext) -> RolloutContext:
        """Change the context of a training rollout before it samples."""
        return context

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        """Observe what was just sampled for ``prompts``, which are as in the data."""

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        """Replace groups before they are compared. Also returns counts over all processes, for the
        log."""
        return drawn, {}

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        """Return the state for a checkpoint: tensors, and plain data fit for JSON."""
        return {}, None

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Restore a state of ``state_dict``; both are empty if a checkpoint has none."""


class KnowsPrompts(Stage):
    """Knows the original prompts of the data for the prompts that the policy returned."""

    origins: dict[int, Prompt]  # id of the returned prompt -> prompt of the data

    def begin(self, iteration: int) -> None:
        self.origins = {}

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        for prompt, returned in zip(prompts, drawn.rollout.prompts, strict=True):
            self.origins[id(returned)] = prompt


def stages_of(setup: Setup) -> list[Stage]:
    """Make all registered stages that the options ask for, and those of ``train.stages``, new for
    each trainer. Raises UserError for what the policy cannot do."""
    from mmrl.config.effects import saved_twice, unsupported

    load_built_in()  # a program that makes its trainer itself may have imported none
    for why in unsupported(setup.options, setup.policy):
        raise UserError(why)
    kinds = [cast(type[Stage], entry) for entry in STAGES.values()]
    built = [stage for kind in kinds if (stage := kind.build(setup)) is not None]
    named: list[Stage] = deepcopy([*setup.options.stages])
    for stage in named:
        stage.setup(setup)
    place = {kind: i for i, kind in enumerate(kinds) if kind.__module__.startswith("mmrl.")}
    every = sorted([*built, *named], key=lambda stage: place.get(type(stage), len(kinds)))
    for why in saved_twice(every):
        raise UserError(why)
    return every


def outline(rollout: Rollout) -> Rollout:
    """Return which rows answer which prompts, without the samples."""
    nothing = torch.zeros_like(rollout.mask[:, :1])
    return Rollout(
        group=rollout.group,
        row_id=rollout.row_id,
        prompts=rollout.prompts,
        sample=rollout.row_id,
        mask=nothing,
        logprob=nothing.to(rollout.logprob),
        provenance=Provenance(
            is_ground_truth=_marks(rollout, rollout.provenance.is_ground_truth),
            is_replayed=_marks(rollout, rollout.provenance.is_replayed),
        ),
    )


def group_sizes(rollout: Rollout) -> list[int]:
    """Count the rows of every group of a rollout."""
    sizes: list[int] = on_host(rollout.group).bincount(minlength=len(rollout.prompts)).tolist()
    return sizes


def sizes_of_all(rollout: Rollout) -> list[int]:
    """Count the rows of every group of all processes, in the order of the row ids; a collective
    call."""
    group = rollout.group[rollout.row_id.argsort()]
    _, counts = torch.unique_consecutive(group, return_counts=True)
    sizes: list[int] = distributed.all_gather_rows(counts).tolist()
    return sizes


def set_apart(rollout: Rollout, mark: str) -> Rollout:
    """Put the rows with a mark of ``Provenance`` in separate groups, for advantages."""
    rows: Tensor | None = getattr(rollout.provenance, mark)
    if rows is None:
        return rollout
    count = len(rollout.prompts)
    return rollout.replace(
        group=rollout.group + count * rows, prompts=(*rollout.prompts, *rollout.prompts)
    )


def by_question(rollout: Rollout) -> Rollout:
    """Make one group of the answers to all forms of a question (data ``forms``, together), for
    advantages."""
    questions = [prompt.get("question") for prompt in rollout.prompts]
    if all(question is None for question in questions):
        return rollout
    first: dict[Any, int] = {}
    leads = [
        place if question is None else first.setdefault(question, place)
        for place, question in enumerate(questions)
    ]
    return rollout.replace(group=torch.tensor(leads, device=rollout.group.device)[rollout.group])


def moments(rollout: Rollout, rewards: Rewards) -> PromptMoments:
    """Compute the moments of every row's group, leaving out rows without a reward."""
    double, groups = measured(rewards.per_row(), rollout)
    total = double.total()
    return PromptMoments(
        mean=groups.mean(total)[groups.index], std=groups.variance(total, 0).sqrt()[groups.index]
    )


def shaped_moments(rollout: Rollout, plain: Rewards, shaped: Rewards) -> Rollout:
    """Return the rollout with each group's mean shifted by the average change that shaping makes,
    since samples that are not trained on were not shaped."""
    if rollout.all_samples is None or shaped is plain:
        return rollout
    before = moments(rollout, plain).mean
    moved = moments(rollout, shaped).mean - before
    everything = rollout.all_samples
    return rollout.replace(all_samples=everything.replace(mean=everything.mean + moved))


def _marks(rollout: Rollout, rows: Tensor | None) -> Tensor:
    return torch.zeros_like(rollout.group, dtype=torch.bool) if rows is None else rows


def sampled_only(
    media: Media, rollout: Rollout, rewards: Rewards
) -> tuple[Media, Rollout, Rewards]:
    """Leave out ground-truth answers and answers of earlier iterations, for metrics."""
    foreign_rows = [
        rows
        for rows in (rollout.provenance.is_ground_truth, rollout.provenance.is_replayed)
        if rows is not None and rows.any()
    ]
    if not foreign_rows:
        return media, rollout, rewards
    sampled_rows = ~torch.stack(foreign_rows).any(0)
    return (
        media_of(media, sampled_rows.nonzero()[:, 0]),
        rollout[sampled_rows],
        Rewards({name: value[sampled_rows] for name, value in rewards.items()}, rewards.weights),
    )
