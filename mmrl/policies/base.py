"""What the rest of the library knows about a generative model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from annotated_types import Gt
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.distributions import Dist
from mmrl.core.errors import UserError
from mmrl.core.types import Media, Point, Prompt, Rollout, tree_map
from mmrl.core.weights import Weights
from mmrl.policies.lora import ATTENTION, Lora, add_lora
from samplers.batching import Attempt, attempts, rows_that_fit
from samplers.noise import Rng

Medium = Literal["image", "video", "text"]
Precision = Literal["float32", "bfloat16", "float16", "float64"]


class Policy(Protocol):
    """The contract between a generative model and everything else."""

    weights: Weights

    def rollout(self, prompts: list[Prompt], copies: int, rng: Rng) -> Rollout:
        """Answer every prompt ``copies`` times (copies adjacent) and record every decision."""

    def path(self, rollout: Rollout) -> Iterable[Point]:
        """The recorded decisions, one Point for each kind of forward pass needed to score them."""

    def renoise(
        self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False
    ) -> Iterable[Point]:
        """Fresh states of the forward process that end in the finished samples.

        ``time`` [B] in (0, 1) is how much is noise (None: uniform); ``shared``: the rows of a group
        share the noise.
        """

    def dist(self, point: Point) -> Dist:
        """The policy's distribution over the decisions at a point. The only differentiable
        method."""

    def decode(self, rollout: Rollout) -> Media:
        """B images [B, 3, H, W], videos [B, F, 3, H, W] (both in 0..1) or texts, for the rewards to
        look at."""


@runtime_checkable
class Remaskable(Protocol):
    """A policy of masked diffusion: any of a finished sample's tokens may be hidden again."""

    rates: Tensor  # [T + 1] share of tokens hidden before each pass, and after the last

    def path(self, rollout: Rollout) -> Iterable[Point]: ...

    def at(self, rollout: Rollout, hide: Tensor, score: Tensor | None = None) -> Point:
        """The state with the tokens ``hide`` [B, L] hidden, to be scored at ``score`` [B, L] (None:
        at those)."""

    def corrupted(self, cond: Any, share: float, rng: Rng) -> Any:
        """The conditions with a random share of every prompt's tokens hidden, where the network
        reads tokens."""

    def dist(self, point: Point) -> Dist: ...


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate: their own ``lr``, or the optimizer's times
    ``factor``."""

    parameters: list[nn.Parameter]
    factor: float = 1.0
    lr: float | None = None
    name: str = "all"


class NetPolicy:
    """A policy around one trained network: adapters, snapshots, and which module a pass goes
    through.

    ``net`` is the plain module: rollouts and frozen passes use it. ``trained`` is what the trainer
    got back from accelerate (DDP's wrapper, say): passes with gradients use it. The network stays
    in eval mode throughout, since dropout would make a score differ from the sample it scores.
    """

    not_options: tuple[str, ...] = ("net",)
    # module-name suffixes of the projections that LoRA adapts
    attention: tuple[str, ...] = ATTENTION
    # what ``decode`` returns; None: unknown, then no reward is refused for it
    makes: Medium | None = None
    iteration: int = 0  # set by the trainer before a rollout
    # set by the trainer: the pass over the iteration's rows; None: there is only one
    epoch: int | None = None
    forwards: int = 0  # rows that went through the network so far
    # "gaussian" or "categorical": objectives that need the one refuse the other
    decisions: str = ""
    notes: tuple[str, ...] = ()  # what a person should know before training, sentences for the log
    # rows of one prompt share work, so they should share optimizer steps and passes
    adjacent: bool = False
    # a pass with gradients recorded that will not be used: not for the trainer's wrapper
    sampling: bool = False
    # a pass may leave trained weights out, such as those of a second expert
    find_unused_parameters: bool = False
    # rows of a pass that turned out to fit the device's memory; None: no pass was too large
    most: int | None = None

    def __init__(
        self,
        net: nn.Module,
        lora: Lora | int | None = None,
        fixed_batch_rows: int | None = None,
        sampling_memory_gib: Annotated[float, Gt(0)] | None = None,
    ):
        """``lora``: rank or Lora; None trains all weights. ``fixed_batch_rows``: rows of every
        forward pass; the trainer sets it to its micro-batch. ``sampling_memory_gib``: GiB that a
        pass of sampling may allocate, which then chooses its own chunks."""
        net.requires_grad_(lora is None)
        if lora is not None:
            add_lora(net, Lora(lora) if isinstance(lora, int) else lora, self.attention)
        # a parameter without a gradient stops DDP, and has no optimizer state
        for parameter in self.unused(net):
            parameter.requires_grad_(False)
        self.net = net.eval()
        self.trained = net
        # rows of every pass, so that log-probs repeat (architecture.md); None: as many as there are
        self.fixed_batch_rows = fixed_batch_rows
        # rows that fit the budget, measured once
        self.sampling_memory_gib = sampling_memory_gib
        self.fitting = 0
        self.news: list[str] = []  # sentences for the log that came up on the way
        self.weights = Weights(net)

    def unused(self, net: nn.Module) -> Iterable[nn.Parameter]:
        """Parameters that nothing of a pass depends on."""
        return ()

    def active(self) -> nn.Module:
        """The module for this pass."""
        return self.trained if torch.is_grad_enabled() and not self.sampling else self.net

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of latents and log-probs: at least float32, whatever the network computes in."""
        return torch.promote_types(next(self.net.parameters()).dtype, torch.float32)

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample as a user would: a family turns off exploration noise here, and may set its
        guidance scale."""
        yield

    def chunk(self, rows: int, forward: Callable[[int], Any]) -> int:
        """Rows to sample at once, of ``rows``; ``forward(n)`` is one pass of n rows, tried to see
        what it allocates."""
        if self.sampling_memory_gib is None:
            return min(self.fixed_batch_rows or rows, self.most or rows)
        if not self.fitting:
            try:
                found = rows_that_fit(
                    forward, int(self.sampling_memory_gib * 2**30), rows, self.device
                )
            except ValueError as error:
                raise UserError(
                    f"policy option sampling_memory_gib = {self.sampling_memory_gib:g} GiB: {error}"
                ) from error
            # one number of passes on all processes
            self.fitting = -int(distributed.all_max(torch.tensor(-found)))
        return min(self.fitting, rows, self.most or rows)

    def attempts(self, size: int, least: int = 1) -> Iterator[Attempt]:
        """Yield attempts at work in passes of at most ``size`` rows; where the device's memory does
        not do, again with half of them. From then on no pass is larger, and all are as wide as
        that, which keeps log-probs equal. UserError where ``least`` rows are too many."""
        # several processes would no longer make equally many passes
        alone = distributed.world()[1] == 1
        width = self.fixed_batch_rows
        rows = size
        try:
            for attempt in attempts(size, least if alone else size):
                rows = attempt.rows
                # or passes would be filled up to what did not fit
                if rows < size and width:
                    self.fixed_batch_rows = min(width, rows)
                yield attempt
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory: {error}. Try train.gradient_checkpointing=true, "
                f"policy.lora, a smaller "
                "train.micro_batch_size, or a smaller size; `mmrl train CONFIG --dry-run` "
                "estimates what is needed"
            ) from error
        if rows < size:
            self.shrink(rows)

    def shrink(self, rows: int) -> None:
        """From now on no pass has more than ``rows`` rows."""
        self.most = rows
        self.news.append(
            f"out of memory: passes now have at most {rows} rows; "
            f"train.micro_batch_size={rows} begins so"
        )

    def padded(self) -> int:
        """Rows every pass is filled up to; with a memory budget none is."""
        return 0 if self.sampling_memory_gib is not None else self.fixed_batch_rows or 0

    def parameter_groups(self) -> list[ParameterGroup]:
        """What is trained, by learning rate."""
        return [ParameterGroup([p for p in self.net.parameters() if p.requires_grad])]

    def measures(self) -> dict[str, float]:
        """A family's own curves, of this process and since this was last asked: before and after
        every iteration."""
        return {}

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Those of a dataset's prompts that this policy can take; one with limits notes what it
        left out."""
        return prompts

    def prepare(self, prompts: list[Prompt]) -> None:
        """Told once, on the device, which prompts will come: a family may encode them and let its
        encoders go."""

    def enable_gradient_checkpointing(self) -> None:
        for name in ("enable_gradient_checkpointing", "gradient_checkpointing_enable"):
            if hasattr(self.net, name):
                return getattr(self.net, name)()
        raise ValueError(f"{type(self.net).__name__} offers no gradient checkpointing")


def rows_of(cond: Any, group: Tensor) -> Any:
    """The condition of every row [B, *] out of the condition of every prompt [P, *]."""
    return tree_map(lambda tensor: tensor[group], cond)


def first_of_group(rollout: Rollout) -> Tensor:
    """[B] long: the name of the first row of each row's group that is here, by which a group shares
    noise."""
    # without prompts the device must be asked
    count = len(rollout.prompts) or int(rollout.group.max()) + 1
    first = torch.full((count,), torch.iinfo(torch.long).max, device=rollout.row_id.device)
    return first.scatter_reduce(0, rollout.group, rollout.row_id, "amin")[rollout.group]


@contextmanager
def reading(policy: Any, what: str) -> Iterator[None]:
    """Only these states of a rollout's path will be read: "path" (all), "decisions" or "sample".
    Policies without paths do not mind."""
    if not hasattr(policy, "reads"):
        yield
        return
    before = policy.reads
    policy.reads = what
    try:
        yield
    finally:
        policy.reads = before


@contextmanager
def at_guidance(policy: Any, guidance: float | None) -> Iterator[None]:
    """The policy at another classifier-free guidance scale; None: at its own."""
    kept = policy.guidance_scale
    policy.guidance_scale = kept if guidance is None else guidance
    try:
        yield
    finally:
        policy.guidance_scale = kept


def warn_of_mismatch(logp_dist: str, guidance: float) -> None:
    """Scores without the guidance that sampled are not those of the sampled distribution."""
    if logp_dist == "conditional" and guidance != 1:
        warnings.warn(
            f"logprob_guidance conditional: samples are drawn with guidance {guidance:g} and "
            f"scored without it, so the "
            "gradient is not that of the sampled distribution; guided matches",
            stacklevel=3,
        )
