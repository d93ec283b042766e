"""Optional capabilities of policies: one class each, which policies that have it derive from.

Callers test ``isinstance(policy, Replays)``, or ``Replays.kept_by(policy)`` where it may be a
class, or use ``Replays.of(policy)``, which raises UserError for all others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.types import Copies, Point, Prompt, Rollout
from mmrl.policies.base import Policy, Reads
from mmrl.policies.capabilities import Medium
from mmrl.policies.guidance import LogprobGuidance, at_guidance
from samplers.noise import Rng


@dataclass(frozen=True)
class ParameterGroup:
    """Groups parameters that share a learning rate: their own ``lr``, or the optimizer's times
    ``factor``."""

    parameters: list[nn.Parameter]
    factor: float = 1.0
    lr: float | None = None
    name: str = "all"


@dataclass(frozen=True)
class Trial:
    """Forward and backward passes to time for ``train.micro_batch_size: auto``."""

    # a pass of n rows as in sampling, and as in training: [n, D] outputs, with their gradient
    sample: Callable[[int], Tensor]
    train: Callable[[int], Tensor]
    sampled: tuple[int, ...]  # rows that each step of sampling passes through the network
    trained: int  # rows of an epoch of training


if TYPE_CHECKING:
    from samplers.processes import Process
    from samplers.warp import Warp


class Contract:
    """An optional capability of policies."""

    lack: ClassVar[str]  # the error for a policy without it, after the policy's name

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the policy if it keeps this contract. Raises UserError if it does not."""
        if isinstance(policy, cls):
            return policy
        raise UserError(f"{type(policy).__name__} {cls.lack}")

    @classmethod
    def kept_by(cls, policy: Any) -> bool:
        """Tell whether a policy, an object or a class, keeps this contract."""
        return issubclass(policy if isinstance(policy, type) else type(policy), cls)


class Replays(Policy, Contract):
    """Supports experience replay: answers of earlier iterations are used again."""

    lack = "cannot be shown old answers again"

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> Any:
        """Encode prompts to their conditions, a nest of tensors [P, *] or a list of P."""

    def recall(self, prompts: list[Prompt]) -> tuple[Any, list[Prompt]]:
        """Encode prompts again: their conditions, and the prompts as ``rollout`` returns them."""
        return self.encode(prompts), prompts

    def prompt_states(self, prompts: list[Prompt]) -> Tensor:
        """Return a state [P, H] of every prompt, under the current weights: its encoding averaged
        over positions, each prompt by itself."""
        from mmrl.policies.prompt_states import pooled

        return torch.cat([pooled(self.recall([prompt])[0]) for prompt in prompts])


class ReadsPrompts(Replays):
    """Encodes prompts by its own trained network, so that ``prompt_states`` has a gradient."""

    @abstractmethod
    def prompt_states(self, prompts: list[Prompt]) -> Tensor: ...


class Demonstrates(Policy, Contract):
    """Takes external answers, such as demonstrations."""

    lack = "takes no demonstrations"
    _clips_said: bool = False  # it was logged how clips are read

    @abstractmethod
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        """Make a rollout of answers, one per prompt.

        An answer is what ``decode`` returns for one row, an image of any size; None, or one that
        does not fit, gives a row without decisions that is not trained on. Log-probs are those of
        the current weights; not ``score``: they are 0, and no pass is made. Where decisions are
        unknown, such as the denoising path of an image, the mask is empty and the row is trainable.
        """

    def medium_of(self, prompt: Prompt) -> Medium | None:
        """Return the medium of an answer to the prompt; None: what ``decode`` returns is not
        known."""
        return self.capabilities.makes

    def open_answer(self, prompt: Prompt, value: Any) -> Tensor:
        """Open the image or video (usually a file) that answers a prompt, for ``demonstrate``. The
        first clip logs how clips are read."""
        from mmrl.policies.answers import clips_are_read, opened

        medium = self.medium_of(prompt)
        if medium == "video" and not isinstance(value, Tensor) and not self._clips_said:
            self._clips_said = True
            self.report.warnings.append(clips_are_read(self.media.frames, self.media.fps))
        return opened(value, medium, self.media.frames, prompt, self.media.fps)

    def unreadable(self, prompt: Prompt, value: Any) -> str | None:
        """Return why that image or video cannot be opened, from the file's header; None: it can."""
        from mmrl.policies.answers import media_problem

        medium = self.medium_of(prompt)
        return media_problem(value, medium, self.media.frames, prompt, self.media.fps)


class EncodesMedia(Demonstrates):
    """Encodes external images or videos."""

    @abstractmethod
    def encode_media(self, media: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, of the sizes that
        ``decode`` returns, to samples [B, *]: the inverse, as far as one exists."""


class WritesText(Policy, Contract):
    """Writes texts whose prefixes can be decoded."""

    lack = "writes no text"

    @abstractmethod
    def text_of(self, ids: list[int]) -> str:
        """Return the text of the first tokens of an answer."""


class LimitsLength(Policy, Contract):
    """Writes answers of limited length, which can be continued where they were cut off."""

    lack = "writes no answers whose length could change"

    @abstractmethod
    def most_new_tokens(self) -> int:
        """Return how many new tokens an answer may have."""

    @abstractmethod
    def set_max_new_tokens(self, tokens: int) -> None:
        """Limit answers to that many new tokens from now on."""

    def cannot_go_on(self) -> str:
        """Say why a truncated answer cannot be continued; empty: it can."""
        return ""


class Remasks(Policy, Contract):
    """Masks any tokens of a finished sample again, as masked diffusion does."""

    lack = "hides no tokens"

    rates: Tensor  # [T + 1] share of masked tokens before each pass and after the last

    @abstractmethod
    def at(self, rollout: Rollout, hide: Tensor, score: Tensor | None = None) -> Point:
        """Mask the tokens ``hide`` [B, L] again and score those at ``score`` [B, L] (None: the
        masked ones)."""

    def corrupted(self, cond: Any, share: float, rng: Rng) -> Any:
        """Mask a random share of every prompt's tokens in the conditions, where the network reads
        tokens."""
        return cond


class FollowsProcess(Policy, Contract):
    """Follows a process between noise and data, in Gaussian steps."""

    lack = "draws no noise on its path"
    process: Process

    @abstractmethod
    def noise(self, stream: Tensor, row: Tensor, step: int) -> Tensor:
        """Draw again the noise of step ``step`` of rows [B]."""

    @property
    @abstractmethod
    def summed_dimensions(self) -> int:
        """Count the dimensions that a decision's log-prob is summed over."""


class Branches(Policy, Contract):
    """Draws samples that may share prefixes."""

    lack = "draws single samples"
    tree: Any = None  # how they branch; None: they are single


class MeasuresPasses(Policy, Contract):
    """Offers passes to time before it samples, for ``train.micro_batch_size: auto``."""

    lack = "cannot measure its passes before it samples"

    @abstractmethod
    def trial(self, prompts: list[Prompt], copies: Copies, reads: Reads) -> Trial:
        """Offer passes whose speed can be measured. ``copies``: of each prompt of an iteration;
        ``reads``: what the objective reads."""


class SplitsSequences(Policy, Contract):
    """Splits the sequences of its network over processes."""

    lack = "has no sequence to split"

    @abstractmethod
    def enable_context_parallel(self, ulysses_degree: int, ring_degree: int) -> None:
        """Split them over groups of neighbouring processes; a collective call, before the network
        is wrapped."""


class KeepsWhole(Policy, Contract):
    """Has modules that stay unsharded on every process where the weights are sharded."""

    lack = "has no modules to keep whole"

    @property
    @abstractmethod
    def unsharded(self) -> Sequence[nn.Module]:
        """List frozen modules that are called outside the network's passes, or only for some
        rows."""


class FillsIdleRows(Policy, Contract):
    """Has decisions of several kinds; a row may lack some of them."""

    lack = "has decisions of one kind"

    @abstractmethod
    def idle_row(self, row: Rollout) -> Rollout:
        """Prepare a sampled row [1], with a decision of every kind, for a process that has no rows
        but must make a pass."""


class Guided(Policy, Contract):
    """Samples with classifier-free guidance."""

    lack = "has no classifier-free guidance"
    guidance_scale: float
    # whether log-probs are those of guided samples; "conditional" leaves guidance out
    logprob_guidance: LogprobGuidance = "guided"

    @contextmanager
    def untempered(self) -> Iterator[None]:
        with at_guidance(self, 1.0), super().untempered():
            yield

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample as in training, at another guidance scale if given: the likeliest image is not a
        good one."""
        with at_guidance(self, guidance):
            yield

    def scored_guidance(self, point: Point) -> float:
        """Choose the guidance scale of a point's log-probs; 1 leaves guidance out."""
        if point.guidance is not None:
            return point.guidance
        return 1.0 if self.logprob_guidance == "conditional" else self.guidance_scale


def guidance_of(policy: Policy) -> float | None:
    """Return the scale of classifier-free guidance; None: the policy has none."""
    return policy.guidance_scale if isinstance(policy, Guided) else None


class Exports(Policy, Contract):
    """Writes its trained weights in the format of the model's own library."""

    lack = "cannot be exported"
    # the classes in diffusers and in transformers that load what ``export`` writes; "": none
    pipeline: str = ""
    auto_class: str = ""
    place: str = ""  # folder of the base model, if in diffusers' format

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the trained weights into a folder."""


class VariesSize(Policy, Contract):
    """Makes images of the size that a prompt asks for."""

    lack = "makes pictures of one size"

    @abstractmethod
    def size_of(self, prompt: Prompt) -> tuple[int, int]:
        """Return the image size for a prompt, [height, width]; all prompts of a rollout share
        it."""


def size_of(policy: Policy, prompt: Prompt) -> tuple[int, int] | None:
    """Return the image size for a prompt, [height, width]; None: no images, or unknown."""
    return policy.size_of(prompt) if isinstance(policy, VariesSize) else policy.media.size


class GroupsParameters(Policy, Contract):
    """Trains parts of its network at separate learning rates."""

    lack = "trains all parameters at one learning rate"

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """List the trained parameters in groups that share a learning rate."""


class Stateful(Policy, Contract):
    """Has learned state besides its weights."""

    lack = "learns nothing besides its weights"

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the learned state, plain data fit for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class Compiles(Policy, Contract):
    """May compile the passes of its network by torch.compile."""

    lack = "compiles no passes"
    compiled: bool = False


class WarpsLogits(Policy, Contract):
    """Draws tokens from warped logits: temperature, top-k, top-p."""

    lack = "draws no tokens"
    warp: Warp | None = None


class ScoresItself(Policy, Contract):
    """May judge its own answers, by the log-prob of a token after them."""

    lack = "judges no answers"
    self_score_id: int | None = None  # the token; None: no self-judgement


class EvaluatesGreedily(Policy, Contract):
    """Decodes greedily in evaluation."""

    lack = "samples in evaluation"

    @abstractmethod
    def sample_in_evaluation(self) -> None:
        """Sample in evaluation too, so that best-of-n has different answers to choose from."""


class Measures(Policy, Contract):
    """Reports its own metrics."""

    lack = "has no curves of its own"

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """Report the metrics of this process since the last call: before and after every
        iteration."""


class NamesSpaces(Policy, Contract):
    """Describes its sample space, which a teacher has to share."""

    lack = "names no space of its samples"

    @abstractmethod
    def spaces(self) -> dict[str, Any]:
        """Describe the ``latents`` or the ``vocabulary`` of samples in plain data."""
