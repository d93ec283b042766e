"""Defines the ``train`` and ``evaluate`` sections of a configuration, and the arithmetic that
follows from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from mmrl.config.preferences import Preferences, unfit_for_preferences
from mmrl.core.errors import UserError
from mmrl.core.registry import Plugin

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Steps = Annotated[int, Ge(1), Le(10_000)]  # of a sampler: every one of them is laid out before
Positive = Annotated[float, Gt(0)]
Draws = Annotated[int, Ge(1), Le(10_000)]  # looks at one sample, all in memory at once
MOST_ROWS = 10**8  # samples of an iteration, whose bookkeeping alone fills a machine
LossAggMode = Literal[
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_mean_all",
    "seq_mean_token_sum_norm",
    "token_sum",
]


@dataclass(frozen=True)
class Reuse:
    """Replays answers of earlier iterations in place of groups of equal rewards. ``share``: the
    largest share of an iteration's groups that is replaced; on every process one stays. ``size``:
    groups that are remembered on a process; those whose rewards differ least leave first. ``age``:
    iterations after which an answer is forgotten. ``times``: how often a group comes again."""

    share: Annotated[float, Gt(0), Le(1)] = 0.5
    size: Count = 256
    age: Count = 8
    times: Count = 1


@dataclass(frozen=True)
class SlowFast:
    """Takes several fast steps on the rows of one optimizer step, goes back a part of the way, and
    takes one slow step from there: Slow-Fast Policy Optimization (SFPO).

    Wang et al. 2025, "Slow-Fast Policy Optimization: Reposition-Before-Update for LLM Reasoning":
    from weights w_0 ``fast_steps`` steps lead to w_K; the slow step starts at
    w_0 + ``reposition`` (w_K - w_0). ``iterations``: in which this is done, plain steps follow;
    null: in all. (The paper stops by the entropy; this stops by the iteration.)
    """

    fast_steps: Count = 3
    reposition: Annotated[float, Ge(0), Le(1)] = 0.8
    iterations: Natural | None = None


@dataclass(frozen=True)
class RewardGradients:
    """Weighs several rewards by their gradients (Lu et al. 2025, "Learning to optimize
    multi-objective alignment through dynamic reward weighting").

    In every iteration the share of a reward in the sum is multiplied by e^(rate I), I the product
    of the gradient under this reward alone with the sum of all of them; equal shares leave the
    weights of the configuration as they are. ``measure``: the product (the paper), or its cosine,
    which does not depend on scales (our addition). ``least``: this part of all shares stays
    equally divided. It costs a pass forward and backward over all rows for each reward, and one
    more.
    """

    rate: Positive = 1.0
    measure: Literal["product", "cosine"] = "product"
    least: Annotated[float, Ge(0), Lt(1)] = 0.0


@dataclass(frozen=True)
class Budget:
    """Ends a run with the iteration in which one of these is spent. ``cpu_seconds``: processor time
    of the process in iterations: sampling, rewards, updates; not evaluation, previews or saving.
    ``samples``: drawn, those of replaced groups too. ``forwards``: rows through the network of one
    process. A resumed run goes on counting."""

    cpu_seconds: Positive | None = None
    samples: Count | None = None
    forwards: Count | None = None

    def spent(self, sums: Mapping[str, float]) -> str:
        """Say which limit ``sums``, by the names of the fields, has reached; empty: none."""
        limits = {f.name: getattr(self, f.name) for f in fields(self)}
        reached = [
            f"{limit:g} {name}"
            for name, limit in limits.items()
            if limit is not None and sums.get(name, 0.0) >= limit
        ]
        return f"budget of {' and '.join(reached)} spent" if reached else ""


@dataclass(frozen=True)
class AdaptiveRounds:
    """Samples a prompt again, in rounds, until its rewards are a signal. ``rounds``: further ones,
    at most. ``round_size``: samples of a prompt in each; null: ``train.group_size``. ``until``:
    half of a group's size are positive and half negative (balanced), or one is positive.
    ``threshold``: a total reward above it is positive."""

    rounds: Count = 3
    round_size: Count | None = None
    until: Literal["balanced", "positive"] = "balanced"
    threshold: float = 0.5


@dataclass(frozen=True)
class ResponseReuse:
    """Puts answers of earlier iterations to a prompt in its group: AR3PO, RePO, RLEP, ReMix.

    ``threshold``: a total reward above it is right, and only right answers are remembered; null:
    all are. ``when``: in groups without a right answer, or always. ``number``: answers that a group
    gets, at most. ``strategy``: which of those remembered: the newest (recency), all (full_scope),
    the best (reward), those whose rewards differ most (variance), or random ones. ``place``: they
    replace the last of the group, of which one stays, or are appended to it. ``apart``: they are
    compared among themselves, as RePO does, not with the new ones. ``logprob``: a ratio is to the
    weights that sampled (recorded), or to those before the update (current), and then
    ``importance_sampling`` of the objective sees how far the two are apart. ``per_prompt``: answers
    that are remembered of a prompt, the newest; ``size``: prompts; ``age``: iterations after which
    an answer is forgotten; ``until``: the iteration from which on none is used; null: never.
    ``strata``: shares of ``size`` for easy, medium and hard prompts; a prompt is hard if its mean
    reward, a moving average with ``rate``, is among that share of the lowest of all prompts, and
    easy if among that of the highest (AVATAR: 0.25, 0.35, 0.4); of a stratum that is too full the
    oldest leave; null: of all. ``start``: a run, or a checkpoint, whose answers are remembered from
    the beginning, of any age, the prompts being the same. ``learn``: answers of this run are
    remembered too.
    """

    threshold: float | None = 0.5
    when: Literal["all_wrong", "always"] = "all_wrong"
    number: Count = 1
    strategy: Literal["recency", "full_scope", "reward", "variance", "random"] = "recency"
    place: Literal["replace", "append"] = "replace"
    apart: bool = False
    logprob: Literal["recorded", "current"] = "recorded"
    per_prompt: Count = 1
    size: Count = 4096
    age: Count = 64
    until: Natural | None = None
    strata: tuple[Positive, Positive, Positive] | None = None
    rate: Annotated[float, Gt(0), Le(1)] = 0.3
    start: Path | None = None
    learn: bool = True

    def __post_init__(self) -> None:
        if self.strata is not None and abs(sum(self.strata) - 1) > 1e-6:
            raise UserError(f"response_reuse: strata {list(self.strata)} must add up to 1")
        if self.threshold is None and self.when == "all_wrong":
            raise UserError(
                "response_reuse: when: all_wrong needs a threshold, above which a reward is right; "
                "set threshold, or when: always"
            )


@dataclass(frozen=True)
class Demonstrations:
    """Puts answers that somebody else wrote in the groups of their prompts.

    ``path``: a .jsonl file, each line {"prompt": ..., "answers": [...]}, an answer a text, the path
    of a picture, or {"text": ..., "reward": ..., "logprobs": [...]}, whose reward then counts in
    place of the run's rewards; ``field``: or a field of the prompts, one answer or a list. ``key``:
    the field of a prompt that "prompt" repeats. ``number``: answers that a group gets, at most.
    ``when``: in groups without a total reward above ``threshold``, or always. ``place``: they
    replace the last of the group, of which one stays, or are appended to it. ``apart``: they are
    compared among themselves, not with the policy's own: pairs for DPO and IPO, experts of CHORD.
    ``logprob``: what a ratio divides by: the policy's own log-probs before the update (current:
    TempSamp-R1, RLEP), those of the file (recorded, where it has them), or 0 (one: LUFFY, Yan et
    al. 2025, whose expert has probability 1). ``until``: the iteration from which on none is used.
    """

    path: Path | None = None
    field: str | None = None
    key: str = "text"
    number: Count = 1
    when: Literal["always", "all_wrong"] = "always"
    threshold: float = 0.5
    place: Literal["append", "replace"] = "append"
    apart: bool = False
    logprob: Literal["current", "recorded", "one"] = "current"
    until: Natural | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.field is None):
            raise UserError("demonstrations: set either path, a .jsonl file, or field")

    def file(self) -> Path:
        """Return the file; there is one where there is no field."""
        assert self.path is not None
        return self.path


@dataclass(frozen=True)
class Corrections:
    """Corrects every wrong answer in its place: EDGE-GRPO's guided error correction.

    Zhang et al. 2025, "EDGE-GRPO: Entropy-driven GRPO with guided error correction for advantage
    diversity"; by lot, with these shares of the wrong answers (theirs; what is left of 1 stays
    wrong): ``continued``: ``cue`` is written behind the answer and the policy goes on; ``answer``:
    ``correction``, which has the right answer as {feedback}, is written behind it; ``solution``:
    the field ``field`` of the prompt takes its place, or the answer is corrected where there is
    none. All are trained on as the policy's own answers to the plain prompt. The wording is ours;
    an answer that becomes longer than the policy writes stays as it was.
    """

    continued: Annotated[float, Ge(0), Le(1)] = 0.5
    answer: Annotated[float, Ge(0), Le(1)] = 0.25
    solution: Annotated[float, Ge(0), Le(1)] = 0.25
    cue: str = "\nBut this cannot be right. Once more:"
    correction: str = "\nBut this cannot be right. I checked it: the answer is {feedback}."
    field: str = "solution"

    def __post_init__(self) -> None:
        total = self.continued + self.answer + self.solution
        if not 0 < total <= 1 + 1e-9:
            raise UserError(
                f"corrections: continued, answer and solution are shares of the wrong answers, "
                f"they must add up to more than 0 and at most 1, not {total:g}"
            )
        _checked_template("corrections: correction", self.correction, feedback="")


@dataclass(frozen=True)
class Refinement:
    """Lets the policy improve its best answer to a prompt by what is asked of it, and puts the new
    answer in the group, as one to the prompt itself (RGR-GRPO's offline guidance).

    ``threshold``: groups whose best total reward is below it get one. ``feedback``: the field of
    the prompt that says what a good answer has: a text, a list of criteria (texts, or pairs whose
    first is one), or the right answer. ``failed_by``: the name of a reward that goes through
    criteria, such as judge_checklist: in place of ``feedback`` those are shown that the best answer
    fails, and a group whose best fails none gets no other (RGR-GRPO). ``template``: of the
    question, with {text}, {answer} and {feedback}. ``place``: it replaces the last of the group, or
    is appended to it. ``logprob``: what a ratio divides by: the policy's own log-probs of the
    answer to the plain prompt (current), those that it was sampled with, the criteria shown
    (guided), or 0 (one); with the last two set ``shaping`` of the objective. ``until``: the
    iteration from which on there is none. ``corrections``: instead, every answer with a total
    reward below ``threshold`` is corrected in its place, ``feedback`` being the right answer
    (EDGE-GRPO).
    """

    threshold: float = 1.0
    feedback: str = "rubric"
    failed_by: str | None = None
    template: str = (
        "{text}\n\nAn earlier answer:\n{answer}\n\nA good answer has:\n{feedback}\n\n"
        "Write a better answer."
    )
    place: Literal["replace", "append"] = "append"
    logprob: Literal["current", "guided", "one"] = "current"
    until: Natural | None = None
    corrections: Corrections | None = None

    def __post_init__(self) -> None:
        _checked_template("refinement: template", self.template, text="", answer="", feedback="")
        if self.corrections is not None and (self.failed_by or self.logprob != "current"):
            raise UserError(
                "refinement: corrections are answers to the plain prompt and need the right "
                "answer: leave out failed_by and logprob, or corrections"
            )


def _checked_template(where: str, template: str, **names: str) -> None:
    """Raise UserError where a template names anything else."""
    try:
        template.format(**names)
    except (KeyError, IndexError, ValueError) as error:
        listed = [f"{{{name}}}" for name in names]
        known = " and ".join([", ".join(listed[:-1]), listed[-1]] if listed[1:] else listed)
        raise UserError(
            f"{where} may hold {known} alone, and other braces twice ({error!r})"
        ) from error


@dataclass(frozen=True)
class Speculative:
    """Begins answers with what the weights of now accept of the last answers to the prompt
    (SPEC-RL).

    ``lenience``: a token is kept with probability min(1, lenience p / q), p its probability now and
    q that of then; the paper's e^0.5 keeps more than is exact. ``exact``: what replaces the first
    rejected token is drawn from max(0, p - q), so that with lenience 1 answers are those of the
    policy in distribution; all q of an answer's places are stored for it, tokens times vocabulary.
    false: from p, as published. ``size``: prompts whose last answers are remembered; ``age``:
    iterations after which they are forgotten.
    """

    lenience: Positive = 1.0
    exact: bool = True
    size: Count = 4096
    age: Count = 64


@dataclass(frozen=True)
class PartialRollout:
    """Cuts answers off after ``tokens`` tokens and goes on with them in the next iterations, under
    the weights of then (Kimi team 2025, k1.5; Zhou et al. 2025, APRIL), so that no iteration waits
    for the longest answer.

    Groups wait until all their answers have ended, and then take the places of groups that are cut
    off; where there are too few, places are not trained on. ``age``: iterations that a group may be
    old; older ones are given up.
    """

    tokens: Count
    age: Count = 8


@dataclass(frozen=True)
class PromptValue:
    """Predicts what a prompt is worth by a value model that learns beside the policy: the policy's
    network, as it was before training, with a head on its state of the prompt.

    ``base``: that network stays as it is (A-LoL) or is trained with the head (PCL: a model of the
    policy's size; of the policy only what it trains itself, such as its adapters, exists once
    more). ``width``: of the head's hidden layer; 0: it is linear. ``start``: the value of every
    prompt before the first step. ``lr``, ``base_lr``: of Adam for the head and for the network.
    ``steps``: on the squared error of an iteration's prompts. ``learn``: from the mean reward of
    every group; false: only from ``path``, rewards of a reference as
    ``mmrl.tools.reference_rewards`` writes them, to which the model is fitted before the first
    iteration, ``epochs`` times in steps of ``batch`` prompts. ``key``: the field of a prompt
    that names it there.
    """

    base: Literal["frozen", "trained"] = "frozen"
    width: Natural = 256
    start: float = 0.0
    lr: Positive = 1e-3
    base_lr: Positive = 1e-5
    steps: Count = 1
    learn: bool = True
    path: Path | None = None
    epochs: Count = 20
    batch: Count = 64
    key: str = "text"

    def __post_init__(self) -> None:
        if not self.learn and self.path is None:
            raise UserError("prompt_value: with learn: false nothing is learnt; set path")


@dataclass(frozen=True)
class ContextParallel:
    """Splits the sequence of a sample over neighbouring processes, by diffusers' context
    parallelism. They hold the same rows, and count as one process in what must divide.

    ``ulysses_degree``: processes that exchange attention heads. ``ring_degree``: processes around
    which keys and values go, for ``policy.attention: flash``.
    """

    ulysses_degree: Count = 1
    ring_degree: Count = 1

    @property
    def size(self) -> int:
        return self.ulysses_degree * self.ring_degree


@dataclass(frozen=True)
class PolicyDrift:
    """Measures how far the policy has moved since it last answered a prompt: the last answers are
    remembered and scored again at the next visit (single-stream SPO).

    ``answers``: of a prompt that are remembered, of its last visit; each costs a pass at the next.
    ``size``: prompts whose answers are remembered; those answered longest ago leave first.
    """

    answers: Count = 1
    size: Count = 65536


@dataclass(frozen=True)
class TrainOptions:
    """Holds the options of ``train``. Sizes are global: they mean the same training on any number
    of processes."""

    prompts_per_iteration: Count  # prompts sampled in an iteration
    group_size: Count  # samples of each prompt: the group that advantages compare
    train_batch_size: Count  # rows (samples) of an optimizer step
    iterations: Natural  # rollouts; 0 only writes the first checkpoint
    seed: Natural = 0  # seeds everything random
    # parts of a rollout: the rewards of one are computed while the next is sampled
    reward_overlap_chunks: Count = 1
    epochs: Count = 1  # passes over the rows of an iteration
    # rows of a forward and backward pass on a process; null: all its rows of the optimizer step
    micro_batch_size: Count | None = None
    warmup_steps: Natural = 0  # optimizer steps in which the learning rate rises linearly
    # shape of the learning rate after the warm-up
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    # fast steps and a step back before every optimizer step; null: none
    slow_fast: SlowFast | None = None
    # weights of several rewards that follow their gradients; null: as in the configuration
    reward_gradients: RewardGradients | None = None
    # gradients are clipped to this global norm; null: not clipped
    max_grad_norm: Positive | None = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # mixed precision of the forward pass
    # recompute activations: less memory, about a third more time
    gradient_checkpointing: bool = False
    # the sequence of a sample over several processes; null: every process has rows of its own
    context_parallel: ContextParallel | None = None
    # processes that hold one copy of the weights together (FSDP2); null: all processes
    shard_size: Count | None = None
    # decay of the moving average of the weights; null: none
    ema: Annotated[float, Ge(0), Lt(1)] | None = None
    ema_update_interval: Count = 1  # optimizer steps between its updates
    loss_agg_mode: LossAggMode = "token_mean"  # what has equal weight in the loss
    # leave rows of advantage 0 out of the update's passes: the gradient is the same
    skip_zero_advantage: bool = False
    # decisions by which a loss that sums them is divided; null: those of the longest answer
    loss_denominator: Count | None = None
    # answers cut off at the limit count in advantages, but are not trained on
    mask_truncated_completions: bool = False
    # (iteration, tokens): the limit of answers from that iteration on
    max_new_tokens_schedule: tuple[tuple[Natural, Count], ...] = ()
    # sample prompts again until their rewards are a signal; null: every prompt once
    adaptive_sampling: AdaptiveRounds | None = None
    # rounds in which groups of equal rewards are replaced by groups of other prompts
    dynamic_sampling_rounds: Natural = 0
    # std of a group's rewards up to which they count as equal
    dynamic_sampling_min_std: Annotated[float, Ge(0)] = 0.0
    # replace groups of equal rewards by answers of earlier iterations; null: no
    replay_buffer: Reuse | None = None
    # answers of earlier iterations to the same prompts in their groups; null: none
    response_reuse: ResponseReuse | None = None
    # begin with what is accepted of the last answers to a prompt; null: anew
    speculative: Speculative | None = None
    # long answers over several iterations; null: every answer is written at once
    partial_rollout: PartialRollout | None = None
    # what each prompt is worth, by a value model beside the policy; null: not predicted
    prompt_value: PromptValue | None = None
    # how far the policy has moved since it last answered each prompt; null: not measured
    policy_drift: PolicyDrift | None = None
    # answers of a file, or of the data, in the groups; null: none
    demonstrations: Demonstrations | None = None
    # compared answers of the data in place of samples; null: the policy samples
    preferences: Preferences | None = None
    # answers that the policy improves by what is asked of them; null: none
    refinement: Refinement | None = None
    # source of one answer of every group: a reward, or a field of the prompt; null: none
    ground_truth_rollout: str | None = None
    # tolerated |re-scored - recorded log-prob| before the first step
    logprob_tolerance: Positive | Literal["auto"] | None = "auto"
    # compute a rollout's log-probs once more before training on it
    recompute_old_logprob: bool | Literal["auto"] = "auto"
    save_every: Natural = 50  # iterations between checkpoints; 0: only at the end
    save_total_limit: Count = 3  # number of newest checkpoints to keep on disk
    evaluate_every: Natural = 0  # iterations between evaluations; 0: never during training
    sample_every: Natural = 0  # iterations between sample grids; 0: never
    # the run stops if a larger share of samples has no reward
    max_reward_failure_rate: Annotated[float, Ge(0), Le(1)] = 0.5
    # seconds that a process waits for the others (rewards, a save) before the run fails
    timeout: Positive = 1800.0
    time_limit: Positive | None = None  # seconds after which the run saves and ends cleanly
    budget: Budget | None = None  # what the run may spend; null: all its iterations


@dataclass(frozen=True)
class EvaluateOptions:
    """Holds the options of evaluation on held-out prompts."""

    prompts: Count = 64  # number of held-out prompts, from the first
    # half of the held-out prompts: settings are chosen on development, numbers reported of test
    split: Literal["all", "development", "test"] = "all"
    num_samples: Annotated[int, Ge(1), Le(10**6)] = 4  # samples of each prompt
    seed: Natural = 1  # seeds the initial noise: the same before and after training
    # rewards that are only measured, as in ``reward``
    reward: dict[str, Any] = field(default_factory=dict)
    # guidance scales at which the base model is evaluated too
    guidance: list[Annotated[float, Ge(0)]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Says what one iteration does. ``warnings`` are sentences for the user."""

    rows: int  # samples of an iteration: prompts_per_iteration * group_size
    steps: int  # optimizer steps of an epoch over them
    total_steps: int  # optimizer steps of the whole run
    processes: int
    prompts_per_process: int
    rows_per_process: int
    rows_per_step: int  # rows of an optimizer step on one process
    micro_batch: int  # rows of a forward pass on one process
    accumulation: int  # forward passes of an optimizer step; the last may be smaller
    warnings: tuple[str, ...] = ()


KINDS = {  # what an objective may need, by its class attribute ``needs``
    "gaussian": "flow and diffusion models",
    "categorical": "models that write tokens",
    "masked": "masked diffusion, whose tokens can be hidden again",
    "one pass": "models that score all tokens of an answer in one pass",
}


def capabilities_of(policy: Any) -> Any | None:
    """Look up the ``mmrl.policies.capabilities.Capabilities`` of a policy (an object or a class);
    None of a function that makes one, which cannot say."""
    return getattr(policy, "capabilities", None)


def unsuited(plug_in: Plugin, policy: Any, kind: str = "objective") -> str | None:
    """Say why an objective (or another ``kind`` of plug-in) cannot train a policy (an object, a
    class or what makes one); None if it can, or if one of the two does not say what it needs or
    is."""
    needs = getattr(plug_in, "needs", "")
    can = capabilities_of(policy)
    if not needs or can is None:
        return None
    has = {can.decisions}
    if can.decisions == "categorical":
        has |= {"masked"} if can.remaskable else set()
        has |= {"one pass"} if can.one_pass else set()
    if needs in has:
        return None
    name = getattr(policy, "__name__", type(policy).__name__)
    return f"the {kind} {plug_in.__name__} is for {KINDS[needs]}, which the policy {name} is not"


def _unfit_additions(train: TrainOptions, policy: Any, name: str) -> Iterator[str]:
    """List sentences about rewritten answers and the value model."""
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
    value = train.prompt_value
    if value is not None and value.base == "trained" and not getattr(policy, "reads_prompts", True):
        yield (
            f"train.prompt_value: base: trained is for policies whose own network reads the prompt "
            f"(vlm); {name} sees what an encoder makes of it: set base to frozen"
        )


def unsupported_options(train: TrainOptions, policy: Any) -> Iterator[str]:
    """List sentences about options of ``train`` that a policy (an object, a class or what makes
    one) cannot take."""
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
    if train.demonstrations is not None and not can.demonstrations:
        yield f"train.demonstrations: {name} takes no answers of others: it has no demonstrate"
    for key in ("policy_drift", "replay_buffer", "response_reuse"):
        if getattr(train, key) is not None and not can.replay:
            yield f"train.{key}: {name} cannot be shown old answers again: it has no recall"
    if train.max_new_tokens_schedule and not can.max_new_tokens:
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
    if getattr(objective, "supervised", False):
        yield from unfit_for_sft(train)
        if train.preferences is not None:
            yield "train.preferences: sft learns one answer by heart: choose dpo, or leave it out"
    elif train.preferences is not None:
        can = capabilities_of(policy)
        yield from unfit_for_preferences(train.preferences, train.group_size, objective, can)
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
    if getattr(objective, "sft", None) is not None:
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
    if visits and getattr(objective, "importance_sampling", None) is None:
        yield (
            "train.partial_rollout: tokens of older weights need a correction: set "
            "objective.policy_gradient.importance_sampling, such as {mode: truncate, cap: 2.0}"
        )


def unsuited_to_refill(train: TrainOptions) -> Iterator[str]:
    """List sentences about options of ``train`` with which a policy's ``refill`` would do
    nothing."""
    if train.speculative is not None:
        yield (
            "train.speculative: answers that begin with an earlier one are not refilled, so that "
            "policy.refill would do nothing: set it to none, or leave speculative out"
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


def arithmetic(train: TrainOptions, processes: int = 1, supervised: bool = False) -> Plan:
    """Compute how the sizes divide over processes, steps and micro-batches. ``supervised``: answers
    come from the data, so that groups of one are as they should be.

    Raises UserError naming every key that does not fit and the nearest values that would.
    """
    problems = list(impossible(train, processes))
    if problems:
        raise UserError("\n".join(problems))
    rows = train.prompts_per_iteration * train.group_size
    rows_per_step = train.train_batch_size // processes
    micro_batch = train.micro_batch_size or rows_per_step
    return Plan(
        rows=rows,
        steps=rows // train.train_batch_size,
        total_steps=rows // train.train_batch_size * train.epochs * _step_rounds(train),
        processes=processes,
        prompts_per_process=train.prompts_per_iteration // processes,
        rows_per_process=rows // processes,
        rows_per_step=rows_per_step,
        micro_batch=micro_batch,
        accumulation=-(-rows_per_step // micro_batch),
        warnings=tuple(_warnings(train, supervised)),
    )


def _step_rounds(train: TrainOptions) -> int:
    """Count how often a run goes through the optimizer steps of an epoch, fast ones included."""
    if train.slow_fast is None:
        return train.iterations
    several = train.slow_fast.iterations
    fast = train.iterations if several is None else min(several, train.iterations)
    return train.iterations + fast * train.slow_fast.fast_steps


def impossible(train: TrainOptions, processes: int = 1) -> Iterator[str]:
    """List sentences, each beginning with the key, about sizes that do not divide."""
    unfit = False
    for key in (
        "prompts_per_iteration",
        "group_size",
        "train_batch_size",
        "epochs",
        "micro_batch_size",
    ):
        value = vars(train)[key]
        if value is not None and value < 1:
            unfit = True
            yield f"train.{key} is {value}: at least 1"
    if unfit:
        return
    if problem := _indivisible(train, processes):
        yield problem


def _indivisible(train: TrainOptions, processes: int) -> str | None:
    """Return the first sentence about sizes that do not divide; None if all do."""
    rows = train.prompts_per_iteration * train.group_size
    if train.prompts_per_iteration % processes:
        near = _nearest(train.prompts_per_iteration, processes, lambda n: True)
        return (
            f"train.prompts_per_iteration {train.prompts_per_iteration} cannot be shared by "
            f"{processes} processes: use {near}"
        )
    if rows > MOST_ROWS or train.prompts_per_iteration > MOST_ROWS:
        return (
            f"train.group_size {train.group_size} x train.prompts_per_iteration "
            f"{train.prompts_per_iteration} is {rows:.3g} samples of an iteration: at most "
            f"{MOST_ROWS:.0e}"
        )
    batch = train.train_batch_size
    if rows % batch:
        near = _nearest(min(batch, rows), processes, lambda n: n <= rows and rows % n == 0)
        return (
            f"train.train_batch_size {batch} does not divide the {rows} samples "
            f"(train.prompts_per_iteration {train.prompts_per_iteration} x "
            f"train.group_size {train.group_size}) of an iteration: use {near}"
        )
    if batch % processes:
        near = _nearest(batch, processes, lambda n: n <= rows and rows % n == 0)
        return (
            f"train.train_batch_size {batch} cannot be shared by {processes} processes: use {near}"
        )
    share = batch // processes
    if train.micro_batch_size and train.micro_batch_size > share:
        return (
            f"train.micro_batch_size {train.micro_batch_size} is more than the {share} rows of an "
            f"optimizer step on one process (train.train_batch_size {batch} over {processes}): "
            f"at most {share}, or null"
        )
    return None


def _nearest(size: int, multiple: int, fits: Callable[[int], bool]) -> str:
    """Return the multiples of ``multiple`` nearest to ``size`` that fit, below and above."""
    first = size // multiple * multiple
    below = (
        n for n in range(first, max(0, first - 100_000 * multiple), -multiple) if n > 0 and fits(n)
    )
    above = (n for n in range(first + multiple, first + 100_000 * multiple, multiple) if fits(n))
    nearest = [n for n in (next(below, None), next(above, None)) if n]
    return " or ".join(map(str, nearest)) or f"a multiple of {multiple}"


def _warnings(train: TrainOptions, supervised: bool) -> Iterator[str]:
    are_apart = train.demonstrations is not None and train.demonstrations.apart
    are_given = supervised or train.preferences is not None
    if train.group_size < 2 and not are_given and not are_apart:
        yield (
            "train.group_size is 1: an advantage that compares the samples of a prompt is zero, "
            "nothing would be learned"
        )
    if train.dynamic_sampling_min_std and not train.dynamic_sampling_rounds:
        yield (
            "train.dynamic_sampling_min_std is set and train.dynamic_sampling_rounds is "
            "0: no group gives way; set "
            "its number of rounds"
        )
    if train.iterations == 0:
        yield "train.iterations is 0: nothing is trained"
