"""Says which options of ``train``, objectives and policies do not go together, before anything is
loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from mmrl.config.options import TrainOptions
from mmrl.config.preferences import unfit_for_preferences
from mmrl.core.registry import Plugin

KINDS = {  # what an objective may need, by its class attribute ``needs``
    "gaussian": "flow and diffusion models",
    "categorical": "models that write tokens",
    "masked": "masked diffusion, whose tokens can be hidden again",
    "one pass": "models that score all tokens of an answer in one pass",
}

NOISELESS = (  # of an objective, and of a policy whose sampler draws no noise
    "looks at steps with noise, of which this policy has none: give it a stochastic sde_type and a "
    "noise_level above 0 (sde_type: flow_sde, noise_level: 0.7), more steps where the last has no "
    "noise (of a pipeline with a strength, raise that) or another noise_window, or take an "
    "objective of finished samples: dgpo, nft, awm, fpo, crd, rwr, diffusion_dpo"
)


def capabilities_of(policy: Any) -> Any | None:
    """Look up the ``mmrl.policies.capabilities.Capabilities`` of a policy (an object or a class);
    None of a function that makes one, which cannot say."""
    return getattr(policy, "capabilities", None)


def unsuited(plug_in: Plugin, policy: Any, kind: str = "objective") -> str | None:
    """Say why an objective (or another ``kind`` of plug-in) cannot train a policy (an object, a
    class or what makes one); None if it can, or if one of the two does not say what it needs or
    is."""
    from mmrl.policies.contracts import Remasks

    needs = getattr(plug_in, "needs", "")
    can = capabilities_of(policy)
    if can is None:
        return None
    name = getattr(policy, "__name__", type(policy).__name__)
    if kind == "objective" and can.decisions == "mixed" and not getattr(plug_in, "mixes", False):
        return (
            f"the objective {plug_in.__name__} is for decisions of one kind, and the policy {name} "
            f"has tokens and steps of pictures: choose policy_gradient"
        )
    if not needs:
        return None
    has = {can.decisions}
    if can.decisions == "categorical":
        has |= {"masked"} if Remasks.kept_by(policy) else set()
        has |= {"one pass"} if can.one_pass else set()
    if needs in has:
        return None
    return f"the {kind} {plug_in.__name__} is for {KINDS[needs]}, which the policy {name} is not"


def _unfit_additions(train: TrainOptions, policy: Any, name: str) -> Iterator[str]:
    """List sentences about rewritten answers, shuffled frames and the value model."""
    from mmrl.policies.contracts import ReadsPrompts

    can: Any = capabilities_of(policy)
    if train.refinement is not None and can.makes != "text":
        yield (
            f"train.refinement: {name} reads no criticism of its answers; it is for policies that "
            f"write texts"
        )
    corrections = train.refinement and train.refinement.corrections
    if corrections and corrections.continued and not can.one_pass:
        yield (
            f"train.refinement.corrections: {name} cannot go on with an answer; set continued to "
            f"0, or take a policy that writes token by token"
        )
    if train.temporal_contrast is not None and can.makes != "text":
        yield (
            f"train.temporal_contrast: {name} sees no order of frames; it is for policies that "
            f"write texts about videos: leave it out"
        )
    value = train.prompt_value
    if value is not None and value.base == "trained" and not ReadsPrompts.kept_by(policy):
        yield (
            f"train.prompt_value: base: trained is for policies whose own network reads the prompt "
            f"(vlm); {name} sees what an encoder makes of it: set base to frozen"
        )


def unsupported_options(train: TrainOptions, policy: Any) -> Iterator[str]:
    """List sentences about options of ``train`` that a policy (an object, a class or what makes
    one) cannot take."""
    from mmrl.policies.contracts import Demonstrates, LimitsLength, Replays

    name = getattr(policy, "__name__", type(policy).__name__)
    can = capabilities_of(policy)
    if can is None:
        return  # it does not say what it is
    if train.ground_truth_rollout is not None and not can.ground_truth:
        yield f"train.ground_truth_rollout: {name} takes no answers of others; it is for vlm"
    if train.speculative is not None and not (can.drafts and can.one_pass):
        yield (
            f"train.speculative: {name} cannot begin with an earlier answer; it is for models that "
            f"draw tokens one after the other"
        )
    yield from _unfit_additions(train, policy, name)
    if train.demonstrations is not None and not Demonstrates.kept_by(policy):
        yield f"train.demonstrations: {name} takes no answers of others: it has no demonstrate"
    if train.micro_batch_size == "auto" and can.decisions != "gaussian":
        yield (
            f"train.micro_batch_size: auto measures passes of flow and diffusion models, which "
            f"{name} is not; give a number, or null"
        )
    for key in ("policy_drift", "replay_buffer", "response_reuse"):
        if getattr(train, key) is not None and not Replays.kept_by(policy):
            yield f"train.{key}: {name} cannot be shown old answers again: it has no recall"
    if train.max_new_tokens_schedule and not LimitsLength.kept_by(policy):
        yield (
            f"train.max_new_tokens_schedule: {name} writes no answers whose length could "
            f"change; it is for vlm"
        )


IDLE_IN_SFT = (
    "reward_overlap_chunks",
    "demonstrations",
    "refinement",
    "partial_rollout",
    "speculative",
    "adaptive_sampling",
    "dynamic_sampling_rounds",
    "policy_drift",
    "prompt_value",
    "replay_buffer",
    "response_reuse",
    "ground_truth_rollout",
    "mask_truncated_completions",
    "temporal_contrast",
)


def unfit_for_sft(train: TrainOptions) -> Iterator[str]:
    """List sentences about options of ``train`` that mean nothing where answers come from the
    data."""
    if train.group_size != 1:
        yield (
            f"train.group_size: {train.group_size}, but supervised fine-tuning has one answer to "
            f"every prompt: set it to 1"
        )
    yield from unfit_without_samples(train, "supervised fine-tuning samples and rewards nothing")


def unfit_for_data(train: TrainOptions, objective: Any, policy: Any) -> Iterator[str]:
    """List sentences about what means nothing where the objective learns from answers in the data,
    or from preferences, or where answers take several iterations; ``policy``: an object or a
    class."""
    yield from unfit_for_parts(train, objective)
    if getattr(objective, "sums_kinds", False) and train.loss_agg_mode != "token_mean":
        yield (
            f"train.loss_agg_mode: {train.loss_agg_mode}, but the objective sums two losses, each "
            f"a mean over its own points: leave it token_mean"
        )
    if getattr(objective, "supervised", False):
        yield from unfit_for_sft(train)
        if train.preferences is not None:
            yield "train.preferences: sft learns one answer by heart: choose dpo, or leave it out"
    elif train.preferences is not None:
        yield from unfit_for_preferences(train.preferences, train.group_size, objective, policy)
        yield from unfit_without_samples(train, "nothing is sampled with train.preferences")


def unfit_without_samples(train: TrainOptions, why: str) -> Iterator[str]:
    """List sentences about options of ``train`` that mean nothing where answers come from the
    data; ``why``: what is missing."""
    defaults = {f.name: f.default for f in fields(TrainOptions)}
    for name in IDLE_IN_SFT:
        if getattr(train, name, None) != defaults.get(name):
            yield f"train.{name}: {why}, so it would do nothing: leave it out"


def pathless(train: TrainOptions, policy: Any, objective: Any) -> str | None:
    """Say why answers of others cannot be trained on: of a picture or a video nobody knows the
    path, so that only losses of finished samples learn from one; None if they can."""
    can = capabilities_of(policy)
    if getattr(objective, "imitates", False):
        return None  # it learns from the finished picture
    reads = getattr(objective, "reads", "sample")
    if train.demonstrations is None or can is None or can.decisions != "gaussian":
        return None
    if reads == "sample":
        return None
    return (
        "train.demonstrations: the objective follows the steps of the sampler, which nobody knows "
        "of a picture that was made elsewhere; choose one of finished samples, such as "
        "diffusion_dpo, awm or rwr, or give policy_gradient its option sft"
    )


SINGLE_ANSWERS = (
    "adaptive_sampling",
    "demonstrations",
    "ground_truth_rollout",
    "partial_rollout",
    "policy_drift",
    "refinement",
    "replay_buffer",
    "response_reuse",
    "speculative",
)


def unweighable(train: TrainOptions, trained: int, objective: Any) -> Iterator[str]:
    """Say why ``train.reward_gradients`` cannot weigh so many rewards with a weight."""
    if train.reward_gradients is None:
        return
    if trained < 2:
        yield (
            f"train.reward_gradients: it weighs several rewards against each other, and there "
            f"is {trained} with a weight; add one, or leave it out"
        )
    if getattr(objective, "differentiates", False):
        yield (
            "train.reward_gradients: the objective follows the gradient of the rewards itself; "
            "leave it out"
        )
    if train.precision == "fp16":
        yield "train.reward_gradients: fp16 scales the loss: use train.precision bf16"


def renamed_rows(train: TrainOptions, objective: Any) -> Iterator[str]:
    """Say which stages give rows other names, by which an objective that follows the reward's
    gradient draws the noise of their paths again."""
    if not getattr(objective, "differentiates", False):
        return
    for key in (
        "dynamic_sampling_rounds",
        "adaptive_sampling",
        "replay_buffer",
        "response_reuse",
    ):
        if getattr(train, key):
            yield (
                f"train.{key}: this objective draws the noise of every path again, by the names "
                f"that rows have now; leave it out, or choose policy_gradient"
            )


def not_to_be_skipped(train: TrainOptions, objective: Any) -> str | None:
    """Say why rows of advantage 0 cannot be left out with an ``objective``; None if they can."""
    if not train.skip_zero_advantage or objective is None:
        return None
    name = type(objective).__name__
    if not objective.proportional:
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


def unsuited_to_trees(train: TrainOptions) -> Iterator[str]:
    """List sentences about options of ``train`` that a policy whose samples branch cannot take."""
    for key in SINGLE_ANSWERS:
        if getattr(train, key) is not None:
            yield (
                f"train.{key}: it exchanges single answers, and those of a tree share their "
                f"beginnings; leave it out, or the policy's tree"
            )


BESIDE_PARTS = (
    "adaptive_sampling",
    "demonstrations",
    "dynamic_sampling_rounds",
    "ground_truth_rollout",
    "max_new_tokens_schedule",
    "policy_drift",
    "prompt_value",
    "refinement",
    "replay_buffer",
    "response_reuse",
    "speculative",
    "temporal_contrast",
)


def unfit_for_parts(train: TrainOptions, objective: Any) -> Iterator[str]:
    """List sentences about what does not go with answers that several iterations write."""
    if train.partial_rollout is None:
        return
    for name in BESIDE_PARTS:
        if getattr(train, name):
            yield (
                f"train.{name}: it looks at the answers of an iteration, of which "
                f"train.partial_rollout leaves some to the next: leave one of them out"
            )
    visits = getattr(objective, "visits", False)
    if visits and not getattr(objective, "corrects", False):
        yield (
            "train.partial_rollout: tokens of older weights need a correction: set "
            "objective.policy_gradient.importance_sampling, such as {mode: truncate, cap: 2.0}"
        )


WIDTHS = ("fixed_batch_rows", "sampling_memory_gib")


def unmeasurable(train: TrainOptions, chosen: Collection[str]) -> Iterator[str]:
    """Say which of a policy's options (``chosen``: those that are set) settle the size of its
    passes, so that there is nothing to measure."""
    if train.micro_batch_size == "auto":
        for key in WIDTHS:
            if key in chosen:
                yield (
                    f"train.micro_batch_size: auto chooses how many rows a pass has, and so does "
                    f"policy.{key}: leave out one of them"
                )


def unsuited_to_refill(train: TrainOptions) -> Iterator[str]:
    """List sentences about options of ``train`` with which a policy's ``refill`` would do
    nothing."""
    if train.speculative is not None:
        yield (
            "train.speculative: answers that begin with an earlier one are not refilled, so that "
            "policy.refill would do nothing: set it to none, or leave speculative out"
        )


def blocked(objective: Any, estimator: Any, options: Mapping[str, Any]) -> str | None:
    """Say why an objective (a class, with the estimator that is chosen for it) cannot train a
    policy with these options: blocks that never see what is behind them have one hidden block in a
    pass; None if it can."""
    if not options.get("block_causal"):
        return None
    remasks = objective.needs == "masked" and not getattr(estimator, "visits_only", False)
    if not (remasks or objective.supervised):
        return None
    return (
        "with the policy's option block_causal a pass sees one hidden block, and this objective or "
        "its estimator hides tokens of several; use policy_gradient, or masked with estimator: "
        "trajectory"
    )


def without_average(snapshots: Collection[str], train: TrainOptions) -> str | None:
    """Say what is wrong where an objective needs a moving average of the weights that nobody keeps,
    or None."""
    if "ema" in snapshots and not train.ema:
        return (
            "the objective looks at the moving average of the weights: set train.ema, its "
            "decay, such as 0.3"
        )
    return None
