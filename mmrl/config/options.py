"""Defines the ``train`` and ``evaluate`` sections of a configuration, and the arithmetic that
follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from mmrl.config.preferences import Preferences
from mmrl.core.effects import FREE_AT_RESUME, REFUSED_AT_RESUME, Effects
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural, Positive
from mmrl.core.registry import STAGES

LEFT_OUT = Effects(in_dry_run=False)
SPEED = Effects(resumes="free", in_dry_run=False)
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
class TemporalContrast:
    """Gives right answers about a video a bonus where its order of frames matters: T-GRPO.

    ``reward``: the one that says whether an answer is right. ``share``: answers with shuffled
    frames, of ``train.group_size``. ``ratio``: a group gets the bonus if its mean reward is at
    least so many times that of the shuffled answers. ``bonus``: is added to the reward.
    ``threshold``: an answer whose reward is above it is right.
    """

    reward: str
    share: Annotated[float, Gt(0)] = 0.5
    ratio: Annotated[float, Ge(0)] = 0.8
    bonus: float = 0.3
    threshold: float = 0.1


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
    ``mmrl.apps.prepare.reference_rewards`` writes them, to which the model is fitted before the
    first iteration, ``epochs`` times in steps of ``batch`` prompts. ``key``: the field of a prompt
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
    iterations: Annotated[Natural, FREE_AT_RESUME]  # rollouts; 0 only writes the first checkpoint
    seed: Annotated[Natural, REFUSED_AT_RESUME] = 0  # seeds everything random
    # parts of a rollout: the rewards of one are computed while the next is sampled
    reward_overlap_chunks: Annotated[
        Count, Effects(resumes="free", in_dry_run=False, idle_without_samples=True)
    ] = 1
    epochs: Count = 1  # passes over the rows of an iteration
    # rows of a forward and backward pass on a process; null: all its rows of the optimizer step;
    # auto: the fastest of several sizes, measured in the first iteration (flows)
    micro_batch_size: Annotated[Count | Literal["auto"] | None, SPEED] = None
    warmup_steps: Natural = 0  # optimizer steps in which the learning rate rises linearly
    # shape of the learning rate after the warm-up
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    # fast steps and a step back before every optimizer step; null: none
    slow_fast: SlowFast | None = None
    # weights of several rewards that follow their gradients; null: as in the configuration
    reward_gradients: RewardGradients | None = None
    # gradients are clipped to this global norm; null: not clipped
    max_grad_norm: Positive | None = 1.0
    # mixed precision of the forward pass
    precision: Annotated[Literal["fp32", "bf16", "fp16"], LEFT_OUT] = "fp32"
    # recompute activations: less memory, about a third more time
    gradient_checkpointing: Annotated[bool, SPEED] = False
    # the sequence of a sample over several processes; null: every process has rows of its own
    context_parallel: Annotated[ContextParallel | None, FREE_AT_RESUME] = None
    # processes that hold one copy of the weights together (FSDP2); null: all processes
    shard_size: Annotated[Count | None, FREE_AT_RESUME] = None
    # decay of the moving average of the weights; null: none
    ema: Annotated[float, Ge(0), Lt(1)] | None = None
    ema_update_interval: Count = 1  # optimizer steps between its updates
    loss_agg_mode: LossAggMode = "token_mean"  # what has equal weight in the loss
    # leave rows of advantage 0 out of the update's passes: the gradient is the same
    skip_zero_advantage: bool = False
    # decisions by which a loss that sums them is divided; null: those of the longest answer
    loss_denominator: Annotated[Count | None, LEFT_OUT] = None
    # answers cut off at the limit count in advantages, but are not trained on
    mask_truncated_completions: Annotated[bool, Effects(idle_without_samples=True)] = False
    # (iteration, tokens): the limit of answers from that iteration on
    max_new_tokens_schedule: tuple[tuple[Natural, Count], ...] = ()
    # sample prompts again until their rewards are a signal; null: every prompt once
    adaptive_sampling: AdaptiveRounds | None = None
    # a bonus where the order of a video's frames matters; null: none
    temporal_contrast: TemporalContrast | None = None
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
    preferences: Annotated[Preferences | None, LEFT_OUT] = None
    # answers that the policy improves by what is asked of them; null: none
    refinement: Refinement | None = None
    # source of one answer of every group: a reward, or a field of the prompt; null: none
    ground_truth_rollout: str | None = None
    # further stages of sampling, such as your own, in the order in which they act
    stages: tuple[Annotated[Any, STAGES], ...] = ()
    # tolerated |re-scored - recorded log-prob| before the first step
    logprob_tolerance: Annotated[Positive | Literal["auto"] | None, FREE_AT_RESUME] = "auto"
    # compute a rollout's log-probs once more before training on it
    recompute_old_logprob: bool | Literal["auto"] = "auto"
    # iterations between checkpoints; 0: only at the end
    save_every: Annotated[Natural, FREE_AT_RESUME] = 50
    # minutes after which it is saved as well; null: never
    save_minutes: Annotated[Positive | None, FREE_AT_RESUME] = None
    # number of newest checkpoints to keep on disk
    save_total_limit: Annotated[Count, FREE_AT_RESUME] = 3
    # save and keep, besides, the checkpoint whose held-out score is the best so far
    save_best: Annotated[bool, FREE_AT_RESUME] = False
    # iterations between evaluations; 0: never during training
    evaluate_every: Annotated[Natural, FREE_AT_RESUME] = 0
    # iterations between sample grids; 0: never
    sample_every: Annotated[Natural, FREE_AT_RESUME] = 0
    # the run stops if a larger share of samples has no reward
    max_reward_failure_rate: Annotated[float, Ge(0), Le(1), FREE_AT_RESUME] = 0.5
    # seconds that a process waits for the others (rewards, a save) before the run fails
    timeout: Annotated[Positive, FREE_AT_RESUME] = 1800.0
    # seconds after which the run saves and ends cleanly
    time_limit: Annotated[Positive | None, FREE_AT_RESUME] = None
    # what the run may spend; null: all its iterations
    budget: Annotated[Budget | None, FREE_AT_RESUME] = None


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
