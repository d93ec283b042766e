"""Checks before training whether objective, policy, prompts and options fit together."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config import effects
from mmrl.config.compatibility import (
    pathless,
    renamed_rows,
    unfit_for_data,
    unsuited,
    without_average,
)
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.data.base import as_curriculum
from mmrl.data.by_size import BySize
from mmrl.objectives.base import Objective
from mmrl.objectives.contracts import undeclared
from mmrl.policies.base import Policy


def whole_questions(prompts: Sequence[Prompt], prompts_per_process: int) -> None:
    """Raise UserError if the forms of a question, which are compared, would be split over two
    processes."""
    together = as_curriculum(prompts).prompts_per_question
    if prompts_per_process % together:
        raise UserError(
            f"train.prompts_per_iteration: the data asks every question in {together} forms on one "
            f"process, and a process has {prompts_per_process} prompts of an iteration; make that "
            f"a multiple of {together}"
        )


def one_size(prompts: Sequence[Prompt], options: TrainOptions) -> None:
    """Raise UserError if answers of other iterations, whose images may have another size, would be
    mixed with those of an iteration."""
    if isinstance(prompts, BySize):
        for why in effects.unsuited_to_sizes(options, len(prompts.buckets)):
            raise UserError(why)


def suits(objective: Objective, policy: Policy, options: TrainOptions) -> None:
    """Raise UserError if the objective is for another kind of model, or needs a snapshot that the
    run does not keep."""
    if why := (
        undeclared(objective)
        or unsuited(type(objective), policy)
        or without_average(objective.snapshots, options)
    ):
        raise UserError(why)
    if renamed := list(renamed_rows(options, objective)):
        raise UserError(renamed[0])
    if why := pathless(options, policy, objective):
        raise UserError(why)
    for option, sentence in objective.unfit(policy):
        raise UserError(f"the objective's option {option}: {sentence}")
    if problems := list(unfit_for_data(options, objective, policy)):
        raise UserError("\n".join(problems))
