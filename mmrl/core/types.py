"""Defines the records that move through a training iteration: prompts, rollouts, points and
rewards.

Shape letters used everywhere: P prompts, B rows (samples), K decisions a row took, L decisions one
forward pass scores, T tokens, C channels, F frames, H, W; ``*`` is the shape of one sample (C H W
for images, C F H W for videos, T for tokens).

Conditions (text embeddings, images, prefilled prefixes) are stored once per *prompt*: tensors under
``cond`` have P rows, every other tensor has B rows, and ``group`` [B] leads from a row to its
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmrl.core.host import sent

Prompt = dict[str, Any]  # one line of a dataset: "text", images, the ground truth ...
Media = Tensor | list  # images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, or B texts
# (media, prompts) -> [B]; NaN means "could not be scored"
Reward = Callable[[Media, list[Prompt]], Tensor]
# (x, v, t, s, eta) -> (mean, std)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (logp, old, advantage, mask) -> loss [B, L]
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Self = TypeVar("Self", bound="Fields")


def tree_map(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``fn`` to every tensor in a nest of dicts, lists and tuples; leave everything else
    alone."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: tree_map(fn, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(tree_map(fn, item) for item in value)
    return value


class Rewards(dict[str, Tensor]):
    """Holds rewards by name, each [B], of steps [B, K]; NaN: could not be scored. ``weights``
    multiply them in the sum."""

    def __init__(self, values: Mapping[str, Tensor], weights: Mapping[str, float] | None = None):
        super().__init__(values)
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in self}

    def total(self) -> Tensor:
        """Return the weighted sum [B], with rewards of steps [B, K]; NaN where a part is NaN.
        Weight 0: only monitored."""
        first = next(iter(self.values()))
        parts = [self.weights[name] * v for name, v in self.items() if self.weights[name]]
        # rewards of steps: that of a sample belongs to each of its steps
        if any(part.ndim == 2 for part in parts):
            parts = [part if part.ndim == 2 else part[:, None] for part in parts]
        return sum(parts, first.new_zeros(len(first), *[1] * (parts[0].ndim - 1 if parts else 0)))

    def per_row(self) -> Rewards:
        """Return each reward as [B]: of a reward of steps the mean over those that have one."""
        return Rewards(
            {name: v.nanmean(1) if v.ndim == 2 else v for name, v in self.items()}, self.weights
        )


# -> [B, 1] or [B, K]; NaN takes a row out of training
Advantage = Callable[["Rewards | Tensor", "Rollout"], Tensor]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Holds a struct of arrays of equally many rows; a field may be such a struct itself."""

    def row_fields(self) -> dict[str, Tensor | Fields]:
        """Return the fields that have rows, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cond"}
        return {name: v for name, v in values.items() if isinstance(v, (Tensor, Fields))}

    def map(self: Self, fn: Callable[[Tensor], Any]) -> Self:
        """Apply ``fn`` to every row tensor, not to ``cond``."""
        changed = {
            n: v.map(fn) if isinstance(v, Fields) else fn(v) for n, v in self.row_fields().items()
        }
        return replace(self, **changed)

    @classmethod
    def cat(cls: type[Self], parts: Sequence[Self]) -> Self:
        """Join rows that share their prompts (one ``cond`` for all)."""
        joined = {}
        for name, value in parts[0].row_fields().items():
            columns = [getattr(part, name) for part in parts]
            joined[name] = (
                type(value).cat(columns) if isinstance(value, Fields) else torch.cat(columns)
            )
        return replace(parts[0], **joined)

    def replace(self: Self, **changes: Any) -> Self:
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Rows(Fields):
    """Holds a struct of arrays. Indexing takes rows; ``cond`` stays whole, since ``group`` still
    leads into it."""

    group: Tensor  # [B] long: which prompt the row answers, an index into cond and prompts
    cond: Any = None  # nest of tensors [P, *], whatever the policy needs to see of a prompt

    def __len__(self) -> int:
        return len(self.group)

    def to(self: Self, device: torch.device | str) -> Self:
        moved = self.map(lambda tensor: tensor.to(device))
        return replace(moved, cond=tree_map(lambda tensor: tensor.to(device), self.cond))

    def __getitem__(self: Self, index: Tensor | slice) -> Self:
        if isinstance(index, slice):
            return self.map(lambda tensor: tensor[index])
        # one wait, not one for every tensor
        rows = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        places = {rows.device: rows}

        def taken(tensor: Tensor) -> Tensor:
            if tensor.device not in places:  # paths may be kept off the device
                places[tensor.device] = sent(rows, tensor.device)
            return tensor[places[tensor.device]]

        return self.map(taken)

    def split(self: Self, size: int) -> Iterator[Self]:
        return (self[i : i + size] for i in range(0, len(self), size))

    def repeat(self: Self, n: int) -> Self:
        return self.map(lambda tensor: tensor.repeat_interleave(n, dim=0))


@dataclass(frozen=True, kw_only=True)
class Rollout(Rows):
    """Records what a policy sampled. A *decision* is a sampled value whose probability is known."""

    prompts: Sequence[Prompt] = ()  # P
    row_id: Tensor  # [B] long: name of the row in the whole iteration, the key of its randomness
    sample: Tensor  # [B, *] final latents or token ids
    logprob: Tensor  # [B, K] of each decision under the weights that sampled it
    mask: Tensor  # [B, K] bool: the only gate; False is never trained on
    # [B, K] tokens: KL(uniform || distribution), nats; None: not recorded
    self_certainty: Tensor | None = None
    # [B, K] log-prob another engine sampled with, where it is not the policy's own
    sampler_logprob: Tensor | None = None
    # [B] bool: ground truths that were put in the place of samples; None: none
    is_ground_truth: Tensor | None = None
    # [B] bool: sampled in an earlier iteration, by other weights; None: none
    is_replayed: Tensor | None = None
    commit_step: Tensor | None = None  # [B, K] long, tokens: the pass that committed each token
    # [B, T, L, 2] long, maskgit: every pass's tokens and their rank in its choice
    drawn: Tensor | None = None
    # [B, S, *] latents visited, in the type they are stored in; None: none are read again
    path: Tensor | None = None
    # [B, K + 1] long: where in path the state after k steps is; -1: not kept; None: at k
    visit: Tensor | None = None
    time: Tensor | None = None  # [B, K + 1] when; 1 is noise, 0 is data
    eta: Tensor | None = None  # [B, K] noise level; 0 is an ODE step, no decision
    # [B, 2] long, with a path: the key of its noise; None: there is none after the first
    stream: Tensor | None = None
    # [B, K] long, trees: name of the edge, shared by the rows that share it
    edge_id: Tensor | None = None
    advantage: Tensor | None = None  # [B, 1] or [B, K]
    trainable: Tensor | None = (
        None  # [B] bool: rows that stay in training, decisions or not; None: all
    )

    def prompt_per_row(self) -> list[Prompt]:
        """Return the prompt of every row, B of them."""
        return [self.prompts[g] for g in self.group.tolist()]


@dataclass(frozen=True, kw_only=True)
class Point(Rows):
    """Describes one forward pass: a state, and the decisions to be scored there."""

    row_id: Tensor  # [B] long, as in Rollout
    state: Tensor  # [B, *] what the network sees
    mask: Tensor  # [B, L] bool
    time: Tensor | None = None  # [B]
    next_time: Tensor | None = None  # [B]; None for a re-noised state
    eta: Tensor | None = None  # [B]
    target: Tensor | None = None  # [B, *] the decision: next latents, velocity, or token ids
    logprob: Tensor | None = None  # [B, L] recorded at sampling; None for a re-noised state
    advantage: Tensor | None = None  # [B, 1] or [B, L]
    # [B] decisions of the row that are trained on, over all its points
    num_decisions: Tensor | None = None
    weight: Tensor | None = None  # [B, L] of every decision in the loss; None: all alike
    sampler_logprob: Tensor | None = None  # [B, L] as in Rollout
    is_ground_truth: Tensor | None = None  # [B] as in Rollout
    is_replayed: Tensor | None = None  # [B] as in Rollout
    # [B] re-noised states: how far the predicted clean sample moves with the output
    x0_per_output: Tensor | None = None
    # [B, L] long: 0 text, 1 image, where a row has both; None: all are of one kind
    modality: Tensor | None = None
    # [B, L] weight of every decision by the estimator of masked diffusion; None: 1
    estimator_weight: Tensor | None = None
    # [B, 2] long, whole paths: the key of their noise (``Rollout.stream``); None: there is none
    noise_stream: Tensor | None = None
    # what a coupled objective computed from all points of the step (``Objective.couple``)
    coupling: Fields | None = None
    prompts: Sequence[Prompt] = ()  # P, for objectives that call a reward
    # the weights are those that sampled: the ratio is 1, what differs from it is rounding
    on_policy: bool = False
    # guidance scale; None is the policy's own on the path, 1 on re-noised states
    guidance: float | None = None

    def sampled_mask(self) -> Tensor:
        """Return ``mask`` [B, L] of rows the policy sampled just now, for metrics."""
        mask = self.current()
        return mask if self.is_ground_truth is None else mask & ~self.is_ground_truth[:, None]

    def current(self) -> Tensor:
        """Return ``mask`` without rows of earlier iterations, whose log-probs are those of other
        weights, [B, L] bool."""
        return self.mask if self.is_replayed is None else self.mask & ~self.is_replayed[:, None]

    def old(self, logp: Tensor, recorded: Tensor) -> Tensor:
        """Return the log-probs that a ratio divides by, [B, L]: on fresh points the row's own
        without their gradient, since what differs from the ``recorded`` ones is rounding; and
        always the recorded ones of rows of earlier iterations."""
        if not self.on_policy:
            return recorded
        return (
            logp.detach()
            if self.is_replayed is None
            else torch.where(self.is_replayed[:, None], recorded, logp.detach())
        )


class Completion(str):
    """Holds a text that a model wrote, with what a reward may need to know of it. Its slices are
    plain strings."""

    tokens: int  # how many, the one that ended it included
    finished: bool  # ended by its end token; False: it was cut at the limit
    logprob: float  # mean over its tokens under the sampling distribution
    # mean over its tokens of KL(uniform || the model's distribution); None: not recorded
    self_certainty: float | None
    # tokens that any answer of its batch may have: decisions K of a row; None: not known
    limit: int | None
    spell: Callable[[], list[str]] | None  # the texts up to each of its tokens; None: not known

    def __new__(
        cls,
        text: str,
        tokens: int,
        finished: bool,
        logprob: float,
        self_certainty: float | None = None,
        limit: int | None = None,
        spell: Callable[[], list[str]] | None = None,
    ) -> Completion:
        completion = super().__new__(cls, text)
        completion.tokens = tokens
        completion.finished = finished
        completion.logprob = logprob
        completion.self_certainty = self_certainty
        completion.limit = limit
        completion.spell = spell
        return completion
