"""Defines the ``train`` and ``evaluate`` sections of a configuration, and the arithmetic that
follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from mmrl.config.preferences import Preferences
from mmrl.core.effects import FREE_AT_RESUME, REFUSED_AT_RESUME, Effects
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
class SlowFast:
    """Takes several fast steps on the rows of one optimizer step, moves back part of the way, and
    takes one slow step from there: Slow-Fast Policy Optimization (SFPO).

    Wang et al. 2025, "Slow-Fast Policy Optimization: Reposition-Before-Update for LLM Reasoning":
    from weights w_0 the fast steps lead to w_K; the slow step starts at w_0 + reposition
    (w_K - w_0). (The paper stops by the entropy; this stops by the iteration.)

    ``fast_steps``: on the same rows, before the step back. ``reposition``: share of the way of the
    fast steps that is kept; 1: no step back. ``iterations``: number of first iterations with it;
    null: all.
    """

    fast_steps: Count = 3
    reposition: Annotated[float, Ge(0), Le(1)] = 0.8
    iterations: Natural | None = None


@dataclass(frozen=True)
class RewardGradients:
    """Weights several rewards by their gradients (Lu et al. 2025, "Learning to optimize
    multi-objective alignment through dynamic reward weighting").

    In every iteration the share of a reward in the sum is multiplied by e^(rate I), I the product
    of the gradient under this reward alone with the sum of all of them; equal shares keep the
    weights of the configuration. It costs a forward and backward pass over all rows for each
    reward, plus one.

    ``rate``: how fast the shares follow the gradients. ``measure``: the agreement of two gradients:
    their product (the paper), or their cosine, which does not depend on scales (our addition).
    ``least``: this part of the shares stays uniform.
    """

    rate: Positive = 1.0
    measure: Literal["product", "cosine"] = "product"
    least: Annotated[float, Ge(0), Lt(1)] = 0.0


@dataclass(frozen=True)
class Budget:
    """Ends a run after the iteration in which a limit is reached. A resumed run continues counting.

    ``cpu_seconds``: CPU time of the process in iterations: sampling, rewards, updates; not
    evaluation, previews or saving. ``samples``: drawn, also for replaced groups. ``forwards``: rows
    through the network of one process."""

    cpu_seconds: Positive | None = None
    samples: Count | None = None
    forwards: Count | None = None

    def spent(self, sums: Mapping[str, float]) -> str:
        """Return the limit that ``sums``, by field name, has reached; empty: none."""
        limits = {f.name: getattr(self, f.name) for f in fields(self)}
        reached = [
            f"{limit:g} {name}"
            for name, limit in limits.items()
            if limit is not None and sums.get(name, 0.0) >= limit
        ]
        return f"budget of {' and '.join(reached)} spent" if reached else ""


@dataclass(frozen=True)
class ContextParallel:
    """Splits the sequence of a sample over neighbouring processes, by diffusers' context
    parallelism. They hold the same rows, and count as one process in divisibility rules.

    ``ulysses_degree``: processes that exchange attention heads. ``ring_degree``: processes in a
    ring that passes keys and values, for ``policy.attention: flash``.
    """

    ulysses_degree: Count = 1
    ring_degree: Count = 1

    @property
    def size(self) -> int:
        return self.ulysses_degree * self.ring_degree


@dataclass(frozen=True)
class TrainOptions:
    """Holds the options of ``train``. Sizes are global: they mean the same training on any number
    of processes."""

    prompts_per_iteration: Count  # prompts sampled in an iteration
    group_size: Count  # samples of each prompt: the group that advantages compare
    train_batch_size: Count  # rows (samples) of an optimizer step
    iterations: Annotated[Natural, FREE_AT_RESUME]  # rollouts; 0 only writes the first checkpoint
    seed: Annotated[Natural, REFUSED_AT_RESUME] = 0  # seed of all random numbers
    # chunks of a rollout: the rewards of one are computed while the next is sampled
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
    # SFPO: fast steps and a step back before every optimizer step; null: none
    slow_fast: SlowFast | None = None
    # weights of several rewards that follow their gradients; null: fixed
    reward_gradients: RewardGradients | None = None
    # gradients are clipped to this global norm; null: not clipped
    max_grad_norm: Positive | None = 1.0
    # mixed precision of the forward pass
    precision: Annotated[Literal["fp32", "bf16", "fp16"], LEFT_OUT] = "fp32"
    # gradient checkpointing: less memory, about a third more time
    gradient_checkpointing: Annotated[bool, SPEED] = False
    # sequence of a sample over several processes; null: each process has its own rows
    context_parallel: Annotated[ContextParallel | None, FREE_AT_RESUME] = None
    # processes that share one copy of the weights (FSDP2); null: all processes
    shard_size: Annotated[Count | None, FREE_AT_RESUME] = None
    # decay of the moving average of the weights; null: none
    ema: Annotated[float, Ge(0), Lt(1)] | None = None
    ema_update_interval: Count = 1  # optimizer steps between its updates
    # what has equal weight in the loss: token_mean: decisions; seq_mean_token_mean: rows with
    # decisions; seq_mean_token_mean_all: all rows; seq_mean_token_sum_norm: rows, their decisions
    # divided by loss_denominator; token_sum: the same without the mean over rows
    loss_agg_mode: LossAggMode = "token_mean"
    # skip rows of advantage 0 in the update: the gradient is the same
    skip_zero_advantage: bool = False
    # divisor of a loss that sums decisions; null: the decisions of the longest answer
    loss_denominator: Annotated[Count | None, LEFT_OUT] = None
    # truncated answers count in advantages, but are not trained on
    mask_truncated_completions: Annotated[bool, Effects(idle_without_samples=True)] = False
    # (iteration, tokens): maximum answer length from that iteration on
    max_new_tokens_schedule: tuple[tuple[Natural, Count], ...] = ()
    # rounds in which groups of equal rewards are replaced by groups of other prompts
    dynamic_sampling_rounds: Natural = 0
    # std of a group's rewards up to which they count as equal
    dynamic_sampling_min_std: Annotated[float, Ge(0)] = 0.0
    # preference pairs of the data instead of samples; null: the policy samples
    preferences: Annotated[Preferences | None, LEFT_OUT] = None
    # source of one answer of every group: a reward, or a field of the prompt; null: none
    ground_truth_rollout: str | None = None
    # stages that select, change or add rows of an iteration: names, or {name: {options}}
    stages: tuple[Annotated[Any, STAGES], ...] = ()
    # tolerated difference of re-scored and recorded log-probs before the first step; null: any;
    # auto: of Gaussian decisions 1e-6 or a tenth of the clip; of tokens 1e-4 (fp32), or a mean of
    # 6e-2 (half precision)
    logprob_tolerance: Annotated[Positive | Literal["auto"] | None, FREE_AT_RESUME] = "auto"
    # recompute a rollout's log-probs by the passes of the update before training on it, as verl
    # does; auto: where tokens are sampled with a cache, in half precision, and an iteration has
    # several optimizer steps
    recompute_old_logprob: bool | Literal["auto"] = "auto"
    # iterations between checkpoints; 0: only at the end
    save_every: Annotated[Natural, FREE_AT_RESUME] = 50
    # minutes between further checkpoints; null: none
    save_minutes: Annotated[Positive | None, FREE_AT_RESUME] = None
    # number of newest checkpoints to keep on disk
    save_total_limit: Annotated[Count, FREE_AT_RESUME] = 3
    # also save and keep the checkpoint with the best held-out score
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
    # budget of the run; null: all its iterations
    budget: Annotated[Budget | None, FREE_AT_RESUME] = None


@dataclass(frozen=True)
class EvaluateOptions:
    """Holds the options of evaluation on held-out prompts."""

    prompts: Count = 64  # number of held-out prompts, from the first
    # half of the held-out prompts: choose settings on development, report numbers on test
    split: Literal["all", "development", "test"] = "all"
    num_samples: Annotated[int, Ge(1), Le(10**6)] = 4  # samples of each prompt
    seed: Natural = 1  # seed of the initial noise: the same before and after training
    # rewards that are only measured, as in ``reward``
    reward: dict[str, Any] = field(default_factory=dict)
    # guidance scales at which the base model is also evaluated
    guidance: list[Annotated[float, Ge(0)]] = field(default_factory=list)
