"""What only some policies can do, a class for each, from which those that can derive.

Whoever needs one asks ``isinstance(policy, Replays)``, or ``Replays.kept_by(policy)`` where it may
be a class, or takes ``Replays.of(policy)``, which refuses all others in a sentence.
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
    """Is something that only some policies can do."""

    lack: ClassVar[str]  # what is said of a policy without it, behind the policy's name

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the policy, which keeps this contract. Raises UserError if it does not."""
        if isinstance(policy, cls):
            return policy
        raise UserError(f"{type(policy).__name__} {cls.lack}")

    @classmethod
    def kept_by(cls, policy: Any) -> bool:
        """Tell whether a policy, an object or a class, keeps this contract."""
        return issubclass(policy if isinstance(policy, type) else type(policy), cls)


class Replays(Policy, Contract):
    """Is shown its answers of earlier iterations again."""

    lack = "cannot be shown old answers again"

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> Any:
        """Encode prompts to their conditions, a nest of tensors [P, *] or a list of P."""

    def recall(self, prompts: list[Prompt]) -> tuple[Any, list[Prompt]]:
        """Encode prompts again: their conditions, and the prompts as ``rollout`` returns them."""
        return self.encode(prompts), prompts

    def prompt_states(self, prompts: list[Prompt]) -> Tensor:
        """Return a state [P, H] of every prompt, under the current weights: what its encoder makes
        of it, the mean over places, each prompt by itself."""
        from mmrl.policies.prompt_states import pooled

        return torch.cat([pooled(self.recall([prompt])[0]) for prompt in prompts])


class ReadsPrompts(Replays):
    """Reads prompts by its own trained network, so that ``prompt_states`` has a gradient."""

    @abstractmethod
    def prompt_states(self, prompts: list[Prompt]) -> Tensor: ...


class Demonstrates(Policy, Contract):
    """Takes answers that somebody else wrote."""

    lack = "takes no answers of others"
    _clips_said: bool = False  # how clips of the data are read

    @abstractmethod
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        """Make a rollout of answers, one to each prompt.

        An answer is what ``decode`` returns of one row, a picture of any size; None, or one that
        does not fit, gives a row without decisions that is not trained on. Log-probs are those of
        the current weights; not ``score``: they are 0, and no pass is made. Where decisions are
        unknown, as those of the path to a picture, the mask holds none and the row is trainable.
        """

    def medium_of(self, prompt: Prompt) -> Medium | None:
        """Say what an answer to the prompt is; None: what ``decode`` returns is not known."""
        return self.capabilities.makes

    def open_answer(self, prompt: Prompt, value: Any) -> Tensor:
        """Open the picture or video, mostly a file, that answers a prompt, for ``demonstrate``. The
        first clip says once how clips are read."""
        from mmrl.policies.answers import clips_are_read, opened

        medium = self.medium_of(prompt)
        if medium == "video" and not isinstance(value, Tensor) and not self._clips_said:
            self._clips_said = True
            self.report.warnings.append(clips_are_read(self.media.frames, self.media.fps))
        return opened(value, medium, self.media.frames, prompt, self.media.fps)

    def unreadable(self, prompt: Prompt, value: Any) -> str | None:
        """Say why that picture or video cannot be opened, by the head of its file; None: it can."""
        from mmrl.policies.answers import media_problem

        medium = self.medium_of(prompt)
        return media_problem(value, medium, self.media.frames, prompt, self.media.fps)


class EncodesMedia(Demonstrates):
    """Takes pictures or videos of others, which it encodes."""

    @abstractmethod
    def encode_media(self, media: Tensor) -> Tensor:
        """Encode pictures [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, of the sizes that
        ``decode`` returns, to samples [B, *]: its inverse, as far as there is one."""


class WritesText(Policy, Contract):
    """Writes texts, of which a part can be read by itself."""

    lack = "writes no text"

    @abstractmethod
    def text_of(self, ids: list[int]) -> str:
        """Return the text of the first tokens of an answer."""


class LimitsLength(Policy, Contract):
    """Writes answers whose length can be limited, and which can go on where they were cut off."""

    lack = "writes no answers whose length could change"

    @abstractmethod
    def most_new_tokens(self) -> int:
        """Return how many new tokens an answer may have."""

    @abstractmethod
    def set_max_new_tokens(self, tokens: int) -> None:
        """Limit answers to so many new tokens from now on."""

    def cannot_go_on(self) -> str:
        """Say why an answer that was cut off could not go on; empty: it could."""
        return ""


class Remasks(Policy, Contract):
    """Hides any tokens of a finished sample again, as masked diffusion does."""

    lack = "hides no tokens"

    rates: Tensor  # [T + 1] share of tokens hidden before each pass and after the last

    @abstractmethod
    def at(self, rollout: Rollout, hide: Tensor, score: Tensor | None = None) -> Point:
        """Hide the tokens ``hide`` [B, L] again and score those at ``score`` [B, L] (None: the
        hidden ones)."""

    def corrupted(self, cond: Any, share: float, rng: Rng) -> Any:
        """Hide a random share of every prompt's tokens in the conditions, where the network reads
        tokens."""
        return cond


class FollowsProcess(Policy, Contract):
    """Follows a process between noise and data, in Gaussian steps."""

    lack = "draws no noise on its path"
    process: Process

    @abstractmethod
    def noise(self, stream: Tensor, row: Tensor, step: int) -> Tensor:
        """Draw once more the noise of step ``step`` of rows [B]."""

    @property
    @abstractmethod
    def summed_dimensions(self) -> int:
        """Count the dimensions that a decision's log-prob is summed over."""


class Branches(Policy, Contract):
    """Draws samples that may share their beginnings."""

    lack = "draws single samples"
    tree: Any = None  # how they branch; None: they are single


class MeasuresPasses(Policy, Contract):
    """Offers passes to time before it samples, for ``train.micro_batch_size: auto``."""

    lack = "cannot measure its passes before it samples"

    @abstractmethod
    def trial(self, prompts: list[Prompt], copies: Copies, reads: Reads) -> Trial:
        """Offer passes whose speed can be measured. ``copies``: of each prompt of an iteration;
        ``reads``: what the objective looks at."""


class SplitsSequences(Policy, Contract):
    """Splits the sequences of its network over processes."""

    lack = "has no sequence to split"

    @abstractmethod
    def enable_context_parallel(self, ulysses_degree: int, ring_degree: int) -> None:
        """Split them over groups of neighbouring processes; a collective call, before the network
        is wrapped."""


class KeepsWhole(Policy, Contract):
    """Has modules that every process keeps whole where the weights are sharded."""

    lack = "has no modules to keep whole"

    @property
    @abstractmethod
    def unsharded(self) -> Sequence[nn.Module]:
        """List frozen modules that are called outside the network's passes, or only for some
        rows."""


class FillsIdleRows(Policy, Contract):
    """Has decisions of several kinds, of which a row may lack one."""

    lack = "has decisions of one kind"

    @abstractmethod
    def idle_row(self, row: Rollout) -> Rollout:
        """Prepare a sampled row [1] to be passed through the network by a process without rows of
        its own: with a decision of every kind."""


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
    place: str = ""  # the folder of the model it began from, where it is one of diffusers

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the trained weights into a folder."""


class VariesSize(Policy, Contract):
    """Makes pictures of the size that a prompt asks for."""

    lack = "makes pictures of one size"

    @abstractmethod
    def size_of(self, prompt: Prompt) -> tuple[int, int]:
        """Return the size of the pictures for a prompt, [height, width]; the prompts of a rollout
        have one."""


def size_of(policy: Policy, prompt: Prompt) -> tuple[int, int] | None:
    """Return the size of the pictures for a prompt, [height, width]; None: it makes no pictures, or
    does not know theirs."""
    return policy.size_of(prompt) if isinstance(policy, VariesSize) else policy.media.size


class GroupsParameters(Policy, Contract):
    """Trains parts of its network at learning rates of their own."""

    lack = "trains all parameters at one learning rate"

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """List the trained parameters in groups that share a learning rate."""


class Stateful(Policy, Contract):
    """Learns something besides its weights."""

    lack = "learns nothing besides its weights"

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, plain data fit for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""


class Compiles(Policy, Contract):
    """May compile the passes of its network by torch.compile."""

    lack = "compiles no passes"
    compiled: bool = False


class WarpsLogits(Policy, Contract):
    """Draws tokens from logits that are warped: by a temperature, or cut off."""

    lack = "draws no tokens"
    warp: Warp | None = None


class ScoresItself(Policy, Contract):
    """May judge its own answers, by the log-prob of a token behind them."""

    lack = "judges no answers"
    self_score_id: int | None = None  # the token; None: it does not judge


class EvaluatesGreedily(Policy, Contract):
    """Takes the likeliest answer in evaluation."""

    lack = "samples in evaluation"

    @abstractmethod
    def sample_in_evaluation(self) -> None:
        """Sample in evaluation too: the best of several is chosen among different ones."""


class Measures(Policy, Contract):
    """Has curves of its own."""

    lack = "has no curves of its own"

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """Report the curves of this process since the last call: before and after every
        iteration."""


class NamesSpaces(Policy, Contract):
    """Says in which space its samples lie, which a teacher has to share."""

    lack = "names no space of its samples"

    @abstractmethod
    def spaces(self) -> dict[str, Any]:
        """Describe the ``latents`` or the ``vocabulary`` of samples in plain data."""
