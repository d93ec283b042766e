"""Reports incompatible options of ``train``, objectives and policies, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mmrl.config import effects
from mmrl.config.options import TrainOptions
from mmrl.config.preferences import unfit_for_preferences
from mmrl.core.errors import called
from mmrl.core.registry import Plugin, declared
from mmrl.policies.capabilities import capabilities_of

KINDS = {  # kinds of decisions that may be required
    "gaussian": "flow and diffusion models",
    "categorical": "models that write tokens",
    "masked": "masked diffusion, whose tokens can be hidden again",
    "one pass": "models that score all tokens of an answer in one pass",
}


def unsuited(plug_in: Plugin, policy: Any, kind: str = "objective") -> str | None:
    """Say why an objective (or another ``kind`` of plug-in) cannot train a policy (an object, a
    class or a factory); None if it can, or if one of the two does not declare it."""
    from mmrl.policies.contracts import Remasks

    requires: Any = declared(plug_in, "requires")  # advantages are functions: few declare it
    can = capabilities_of(policy)
    if can is None or requires is None:
        return None
    name = called(policy)
    if kind == "objective" and can.decisions == "mixed" and not requires.mixes:
        return (
            f"the objective {plug_in.__name__} is for decisions of one kind, and the policy {name} "
            f"has tokens and steps of pictures: choose policy_gradient"
        )
    if not requires.decisions:
        return None
    has: set[str] = {can.decisions}
    if can.decisions == "categorical":
        has |= {"masked"} if Remasks.kept_by(policy) else set()
        has |= {"one pass"} if can.one_pass else set()
    if requires.decisions in has:
        return None
    models = KINDS[requires.decisions]
    return f"the {kind} {plug_in.__name__} is for {models}, which the policy {name} is not"


def unsupported_options(train: TrainOptions, policy: Any) -> Iterator[str]:
    """List sentences about options of ``train`` that a policy (an object, a class or a factory)
    does not support."""
    can = capabilities_of(policy)
    if can is None:
        return  # it does not declare its capabilities
    yield from effects.unsupported(train, policy)
    if train.micro_batch_size == "auto" and can.decisions != "gaussian":
        yield (
            f"train.micro_batch_size: auto measures passes of flow and diffusion models, which "
            f"{called(policy)} is not; give a number, or null"
        )


def unfit_for_sft(train: TrainOptions) -> Iterator[str]:
    """List sentences about options of ``train`` that have no effect if answers come from the
    data."""
    if train.group_size != 1:
        yield (
            f"train.group_size: {train.group_size}, but supervised fine-tuning has one answer to "
            f"every prompt: set it to 1"
        )
    yield from effects.idle(train, "supervised fine-tuning samples and rewards nothing")


def unfit_for_data(train: TrainOptions, objective: Any, policy: Any) -> Iterator[str]:
    """List sentences about options without effect if the objective learns from answers in the data
    or from preferences, or if answers take several iterations; ``policy``: an object or a class."""
    yield from unfit_for_parts(train, objective)
    if objective.requires.sums_kinds and train.loss_agg_mode != "token_mean":
        yield (
            f"train.loss_agg_mode: {train.loss_agg_mode}, but the objective sums two losses, each "
            f"a mean over its own points: leave it token_mean"
        )
    if objective.requires.supervised:
        yield from unfit_for_sft(train)
        if train.preferences is not None:
            yield "train.preferences: sft learns one answer by heart: choose dpo, or leave it out"
    elif train.preferences is not None:
        yield from unfit_for_preferences(train.preferences, train.group_size, objective, policy)
        yield from effects.idle(train, "nothing is sampled with train.preferences")


def pathless(train: TrainOptions, policy: Any, objective: Any) -> str | None:
    """Say why demonstrations cannot be used: the denoising path of an external image is unknown, so
    that only losses of finished samples learn from it; None if they can."""
    can = capabilities_of(policy)
    if objective.requires.imitates:
        return None  # it learns from the finished picture
    if can is None or can.decisions != "gaussian" or objective.requires.reads == "sample":
        return None
    return next(effects.pathless(train), None)


def unweighable(train: TrainOptions, trained: int, objective: Any) -> Iterator[str]:
    """Say why ``train.reward_gradients`` cannot weight this number of rewards."""
    if train.reward_gradients is None:
        return
    if trained < 2:
        yield (
            f"train.reward_gradients: it weighs several rewards against each other, and there "
            f"is {trained} with a weight; add one, or leave it out"
        )
    if objective is not None and objective.requires.differentiates:
        yield (
            "train.reward_gradients: the objective follows the gradient of the rewards itself; "
            "leave it out"
        )
    if train.precision == "fp16":
        yield "train.reward_gradients: fp16 scales the loss: use train.precision bf16"


def renamed_rows(train: TrainOptions, objective: Any) -> Iterator[str]:
    """Say what renames rows, whose names are the noise key of an objective that uses the reward's
    gradient."""
    if objective is not None and objective.requires.differentiates:
        yield from effects.renaming(train)


def not_to_be_skipped(train: TrainOptions, objective: Any) -> str | None:
    """Say why rows of advantage 0 cannot be skipped with an ``objective``; None if they can."""
    if not train.skip_zero_advantage or objective is None:
        return None
    name = type(objective).__name__
    if not objective.requires.proportional:
        return (
            f"train.skip_zero_advantage: the loss of {name} is not proportional to the advantage: "
            "leave it out, or choose policy_gradient, masked or awm"
        )
    if extra := objective.extra_terms():
        return (
            f"train.skip_zero_advantage: the objective's {extra} also moves rows of advantage 0: "
            "leave out one of the two"
        )
    return None


def unfit_for_parts(train: TrainOptions, objective: Any) -> Iterator[str]:
    """List sentences about options incompatible with answers written over several iterations."""
    parts = next(effects.writing_in_parts(train), None)
    if parts is None:
        return
    yield from effects.unsuited_to_parts(train, parts)
    if objective.requires.visits and not objective.requires.corrects:
        yield (
            f"train.{parts}: tokens of older weights need a correction: set "
            "objective.policy_gradient.importance_sampling, such as {mode: truncate, cap: 2.0}"
        )


def unmeasurable(train: TrainOptions, policy: Any, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Say which of a policy's options (``chosen``, of its class) fix its pass size, so that there
    is nothing to measure."""
    if train.micro_batch_size == "auto":
        for key, value in chosen.items():
            if value is not None and effects.of_policy(policy, key).sizes_passes:
                yield (
                    f"train.micro_batch_size: auto chooses how many rows a pass has, and so does "
                    f"policy.{key}: leave out one of them"
                )


def blocked(objective: Any, estimator: Any, options: Mapping[str, Any]) -> str | None:
    """Say why an objective (a class, with its chosen estimator) cannot train a policy with these
    options: block-causal models have one masked block per pass; None if it can."""
    if not options.get("block_causal"):
        return None
    requires = objective.requires
    remasks = requires.decisions == "masked" and not declared(estimator, "visits_only", False)
    if not (remasks or requires.supervised):
        return None
    return (
        "with the policy's option block_causal a pass sees one hidden block, and this objective or "
        "its estimator hides tokens of several; use policy_gradient, or masked with estimator: "
        "trajectory"
    )


def without_average(snapshots: Collection[str], train: TrainOptions) -> str | None:
    """Say what is wrong if an objective needs a moving average of the weights that is not kept, or
    None."""
    if "ema" in snapshots and not train.ema:
        return (
            "the objective uses the moving average of the weights: set train.ema, its "
            "decay, such as 0.3"
        )
    return None
