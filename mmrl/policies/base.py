"""Defines the contract of policies: all that the rest of the library uses of a generative model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import Tensor, nn

from mmrl.core.distributions import Dist
from mmrl.core.effects import CHOOSES_WEIGHTS, Effects
from mmrl.core.host import sent
from mmrl.core.media import USUAL_RATE
from mmrl.core.types import Copies, Media, Point, Prompt, Rollout, tree_map
from mmrl.core.weights import Weights
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.guidance import LogprobGuidance as LogprobGuidance
from mmrl.policies.guidance import at_guidance as at_guidance
from mmrl.policies.guidance import warn_of_mismatch as warn_of_mismatch
from mmrl.policies.guidance import without_empty as without_empty
from mmrl.policies.lora import ATTENTION, Lora, add_lora
from mmrl.policies.pass_sizes import PassSizes
from mmrl.policies.rollout_context import NO_CONTEXT as NO_CONTEXT
from mmrl.policies.rollout_context import Drafts as Drafts
from mmrl.policies.rollout_context import Reads as Reads
from mmrl.policies.rollout_context import RolloutContext as RolloutContext
from samplers.noise import Rng

SIZES_PASSES = Effects(resumes="free", sizes_passes=True)
Precision = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class MediaFormat:
    """Describes the images or videos that a policy makes."""

    size: tuple[int, int] | None = None  # [height, width], pixels
    frames: int | None = None  # of a video
    fps: float = USUAL_RATE  # for writing videos and reading clips


@dataclass
class Report:
    """Holds what a policy reports: sentences for the log, its foreign code and its work."""

    notes: tuple[str, ...] = ()  # sentences for the log, before training
    warnings: list[str] = field(default_factory=list)  # sentences for the log, during training
    # the files of code outside mmrl that make the model, with their SHA-256
    code: Mapping[str, str] = field(default_factory=dict)
    forwards: int = 0  # rows that went through the network so far


class Policy(ABC):
    """The contract of a generative model: everything that the rest of the library uses of it.

    The model is one trained network. ``net`` is the plain module: rollouts and frozen passes use
    it. ``trained`` is the module as prepared by accelerate (wrapped in DDP, say): passes with
    gradients use it. The network stays in eval mode throughout, since dropout would make a score
    differ from the sample it scores.
    """

    capabilities: Capabilities
    not_options: tuple[str, ...] = ("net",)  # constructor arguments that no configuration sets
    attention: tuple[str, ...] = ATTENTION  # name suffixes of the modules that LoRA adapts
    media: MediaFormat = MediaFormat()

    def __init__(
        self,
        net: nn.Module,
        lora: Annotated[Lora | int | None, CHOOSES_WEIGHTS] = None,
        fixed_batch_rows: Annotated[int | None, SIZES_PASSES] = None,
        sampling_memory_gib: Annotated[Annotated[float, Gt(0)] | None, SIZES_PASSES] = None,
        record_entropy: bool = False,
    ):
        """Take the network and add adapters to it. lora: rank or Lora; None trains all weights.
        fixed_batch_rows: rows of every forward pass; the trainer sets it to its micro-batch.
        sampling_memory_gib: GiB that a pass of sampling may allocate, which then chooses its own
        chunks. record_entropy: record the entropy (nats) of the distribution of each decision, for
        advantages that use it."""
        frozen = [p for p in net.parameters() if not p.requires_grad]  # frozen by the caller
        net.requires_grad_(lora is None)
        if lora is not None:
            add_lora(net, Lora(lora) if isinstance(lora, int) else lora, self.attention)
        # a parameter without a gradient makes DDP fail, and has no optimizer state
        for parameter in (*frozen, *self.unused(net)):
            parameter.requires_grad_(False)
        self.net = net.eval()
        self.trained = net
        self.record_entropy = record_entropy
        self.pass_sizes = PassSizes(
            net, self.report.warnings, fixed_batch_rows, sampling_memory_gib
        )
        self.weights = Weights(net)

    # ----------------------------------------------------------------------------------------------
    # act: sampling, and scoring what was sampled

    @abstractmethod
    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        """Answer every prompt ``copies`` times (a list: a number per prompt), copies adjacent, and
        record every decision."""

    @abstractmethod
    def path(self, rollout: Rollout) -> Iterable[Point]:
        """Yield the recorded decisions, one Point for each forward pass needed to score them."""

    def renoise(
        self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False
    ) -> Iterator[Point]:
        """Draw fresh states of the forward process that ends in the finished samples; without such
        a process, as in autoregressive models, those of the path.

        ``time`` [B] in (0, 1) is how much is noise (None: uniform); ``shared``: the rows of a group
        share the noise.
        """
        for point in self.path(rollout):
            yield point.replace(logprob=None)

    @abstractmethod
    def dist(self, point: Point) -> Dist:
        """Compute the distribution over the decisions at a point; the only differentiable
        method."""

    @abstractmethod
    def decode(self, rollout: Rollout) -> Media:
        """Decode samples to the media that rewards score: B images [B, 3, H, W], videos [B, F, 3,
        H, W] (both in 0..1) or texts."""

    @contextmanager
    def untempered(self) -> Iterator[None]:
        """Score under the model's own distribution: temperature 1, no truncation, no guidance."""
        yield

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample as a user would: a family turns off exploration noise here, and may set its
        guidance scale."""
        yield

    # ----------------------------------------------------------------------------------------------
    # train: parameters, passes and their memory

    # rows of one prompt share computation, so they should share optimizer steps and passes
    keep_groups_together: bool = False
    # a pass may skip trained weights, such as those of a second expert
    find_unused_parameters: bool = False

    def active(self) -> nn.Module:
        """Choose the module for this pass: ``trained`` where gradients are recorded, else
        ``net``."""
        return self.trained if torch.is_grad_enabled() else self.net

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of latents and log-probs: at least float32, whatever the network's
        dtype."""
        return torch.promote_types(next(self.net.parameters()).dtype, torch.float32)

    def unused(self, net: nn.Module) -> Iterable[nn.Parameter]:
        """Name the parameters that no output of a pass depends on."""
        return ()

    def enable_gradient_checkpointing(self) -> None:
        if not turn_on_checkpointing(self.net):
            raise ValueError(f"{type(self.net).__name__} offers no gradient checkpointing")

    # ----------------------------------------------------------------------------------------------
    # data: prompts, their metadata, and lengths

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Select the prompts of a dataset that this policy can take; a policy with limits reports
        those it dropped."""
        return prompts

    def prepare(self, prompts: list[Prompt]) -> None:
        """Receive the prompts of the run once, on the device: a family may encode them and free its
        encoders."""
        return None

    # ----------------------------------------------------------------------------------------------
    # report: what is logged

    @cached_property
    def report(self) -> Report:
        """Return the policy's report; it may be used before the network is loaded."""
        return Report()


@contextmanager
def unwrapped(policy: Policy) -> Iterator[None]:
    """Let passes with gradients use the unwrapped network: its distributed wrapper would wait for a
    backward pass to the weights."""
    trained = policy.trained
    policy.trained = policy.net
    try:
        yield
    finally:
        policy.trained = trained


def rows_and_groups(
    prompts: list[Prompt], copies: Copies, rng: Rng, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the ids of rows [B] that answer prompts, copies adjacent, and the prompt index of each
    [B]."""
    row = rng.rows(len(prompts), copies).to(device)
    if isinstance(copies, int):
        return row, torch.arange(len(prompts), device=device).repeat_interleave(copies)
    group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(copies))
    return row, sent(group, device)


def rows_of(cond: Any, group: Tensor) -> Any:
    """Gather the condition of every row [B, *] out of the condition of every prompt [P, *]."""
    return tree_map(lambda tensor: tensor[group], cond)


def turn_on_checkpointing(net: Any) -> bool:
    """Turn on gradient checkpointing by whichever method the network has: that of diffusers' and
    mmrl's models, of transformers from 5.23 on, or of older transformers; False: it has none."""
    for name in (
        "enable_gradient_checkpointing",
        "activation_checkpointing_enable",
        "gradient_checkpointing_enable",
    ):
        if hasattr(net, name):
            getattr(net, name)()
            return True
    return False


def first_of_group(rollout: Rollout) -> Tensor:
    """Return the lowest row id of each row's group, [B] long: its key draws the noise that a group
    shares."""
    # without prompts only the device knows the number of groups
    count = len(rollout.prompts) or int(rollout.group.max()) + 1
    first = torch.full((count,), torch.iinfo(torch.long).max, device=rollout.row_id.device)
    return first.scatter_reduce(0, rollout.group, rollout.row_id, "amin")[rollout.group]
