"""Defines the records that move through a training iteration: prompts, rollouts, points and
rewards.

Shape letters used everywhere: P prompts, B rows (samples), K decisions a row took, L decisions one
forward pass scores, T tokens, C channels, F frames, H, W; ``*`` is the shape of one sample (C H W
for images, C F H W for videos, T for tokens).

Conditions (text embeddings, images, prefilled prefixes) are stored once per *prompt*: tensors under
``cond`` have P rows, every other tensor has B rows, and ``group`` [B] maps a row to its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.rows import Fields as Fields
from mmrl.core.rows import Rows as Rows
from mmrl.core.rows import tree_map as tree_map

Prompt = dict[str, Any]  # one row of a dataset: "text", images, the ground truth ...
# samples of every prompt: one number for all, or one each
Copies = int | Sequence[int]
Media = Tensor | list[Any]  # images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, or B texts
# (media, prompts) -> [B]; NaN means "could not be scored"
Reward = Callable[[Media, list[Prompt]], Tensor]
# (x, v, t, s, eta) -> (mean, std)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (logp, old, advantage, mask) -> loss [B, L]
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Part = TypeVar("Part")


def per_prompt(copies: Copies, prompts: int) -> list[int]:
    """List the number of samples of each of ``prompts`` prompts."""
    return [copies] * prompts if isinstance(copies, int) else list(copies)


class Rewards(dict[str, Tensor]):
    """Holds rewards by name, each [B], of steps [B, K]; NaN: could not be scored. ``weights``
    multiply them in the sum."""

    def __init__(self, values: Mapping[str, Tensor], weights: Mapping[str, float] | None = None):
        super().__init__(values)
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in self}

    def total(self) -> Tensor:
        """Return the weighted sum [B], with rewards of steps [B, K]; NaN if a part is NaN. Weight
        0: only monitored."""
        first = next(iter(self.values()))
        parts = [self.weights[name] * v for name, v in self.items() if self.weights[name]]
        # with step rewards, a sample's reward is added to each of its steps
        if any(part.ndim == 2 for part in parts):
            parts = [part if part.ndim == 2 else part[:, None] for part in parts]
        return sum(parts, first.new_zeros(len(first), *[1] * (parts[0].ndim - 1 if parts else 0)))

    def per_row(self) -> Rewards:
        """Return each reward as [B]: a step reward as the mean over steps that have one."""
        return Rewards(
            {name: v.nanmean(1) if v.ndim == 2 else v for name, v in self.items()}, self.weights
        )


# -> [B, 1] or [B, K]; NaN takes a row out of training
Advantage = Callable[["Rewards | Tensor", "Rollout"], Tensor]


@dataclass(frozen=True, kw_only=True)
class LatentPath(Fields):
    """Records the path of a sampler through latents, K steps from noise to data."""

    # [B, S, *] the stored states, in their storage dtype
    states: Tensor
    time: Tensor  # [B, K + 1] times; 1 is noise, 0 is data
    noise_level: Tensor  # [B, K] eta of the kernel; 0 is an ODE step, no decision
    # [B, K + 1] long: index in states of that after k steps; -1: not stored; None: k
    visit: Tensor | None = None
    # [B, 2] long: the key of its steps' noise; None: no noise after the first
    stream: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenOrder(Fields):
    """Records the order in which tokens became final."""

    commit_step: Tensor  # [B, K] long: the pass that committed each token
    # [B, K] KL(uniform || distribution), nats; None: not recorded
    self_certainty: Tensor | None = None
    # [B, K] log p(token | question) - log p(token | no question), nats; None: not recorded
    question_gain: Tensor | None = None
    # [B] log-prob of the token that judges an answer, after its last, nats; None: not recorded
    last_logprob: Tensor | None = None
    # [B, K, R] experts that each token went to, of all layers; -1: unknown; None: not recorded
    routes: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MaskTrace(TokenOrder):
    """Records what every pass of a masked model sampled, also what it remasked (MaskGIT)."""

    proposals: Tensor  # [B, T, L, 2] long: every pass's tokens and their rank in its choice


@dataclass(frozen=True, kw_only=True)
class TextAndPath(LatentPath):
    """Records a text of W tokens and the path, of K steps, of a picture generated after it; a
    rollout has W + K decisions."""

    text: Tensor  # [B, W] long: token ids; -1 where there is none


@dataclass(frozen=True, kw_only=True)
class Provenance(Fields):
    """Records where rows come from, if not all from the policy in this iteration."""

    # [B, K] log-prob of another sampling engine, if it differs from the policy's
    sampler_logprob: Tensor | None = None
    # [B] log p / p_sampler of the whole sample, or its mean per decision; None: not needed
    sample_log_ratio: Tensor | None = None
    # [B] bool: ground truths that replace samples; None: none
    is_ground_truth: Tensor | None = None
    # [B] bool: sampled in an earlier iteration, with older weights; None: none
    is_replayed: Tensor | None = None

    def columns(self, part: slice) -> Provenance:
        """Index the decisions of per-decision fields."""
        return self.map(lambda x: x[:, part] if x.ndim > 1 else x)


@dataclass(frozen=True, kw_only=True)
class PromptMoments(Fields):
    """Summarises the rewards of all samples of a row's prompt, also those not trained on."""

    mean: Tensor  # [B] float64 of the total reward
    std: Tensor  # [B] float64, population


@dataclass(frozen=True, kw_only=True)
class Records(Fields):
    """Holds stages' records of rows, by name: numbers [B, *], NaN if a row has none."""

    columns: Mapping[str, Tensor]
    of_prompts: frozenset[str] = frozenset()  # the same for every row of a prompt

    def row_fields(self) -> dict[str, Tensor | Fields]:
        return {**self.columns}

    def map(self, fn: Callable[[Tensor], Any]) -> Records:
        return self.replace(columns={name: fn(column) for name, column in self.columns.items()})

    @classmethod
    def cat(cls, parts: Sequence[Records]) -> Records:
        names = parts[0].columns
        columns = {n: torch.cat([part.columns[n] for part in parts]) for n in names}
        return parts[0].replace(columns=columns)

    def of(self, rows: Rollout) -> Records:
        """Return the same columns for other rows, NaN if they have none."""
        known = {} if rows.records is None else rows.records.columns
        return self.replace(
            columns={
                name: known[name]
                if name in known
                else column.new_full((len(rows), *column.shape[1:]), torch.nan)
                for name, column in self.columns.items()
            }
        )

    def of_prompt(self) -> Records:
        """Keep the records that hold for any answer to the prompt."""
        known = {name: self.columns[name] for name in self.columns if name in self.of_prompts}
        return self.replace(columns=known)


@dataclass(frozen=True, kw_only=True)
class Rollout(Rows):
    """Records what a policy sampled. A *decision* is a sampled value whose probability is known."""

    prompts: Sequence[Prompt] = ()  # P
    row_id: Tensor  # [B] long: id of the row in the whole iteration, the key of its randomness
    sample: Tensor  # [B, *] final latents or token ids
    logprob: Tensor  # [B, K] log-prob of each decision under the sampling weights
    # [B, K] entropy of the sampling distribution, nats; None: not recorded
    entropy: Tensor | None = None
    # [B, K] divergence of the group's distributions at this position; None: not recorded
    divergence: Tensor | None = None
    mask: Tensor  # [B, K] bool: the only gate; False is never trained on
    advantage: Tensor | None = None  # [B, 1] or [B, K]; None: not yet compared
    # [B, 1 or K, N] advantages whose losses are summed, with sum ``advantage``; None: only that
    advantage_parts: Tensor | None = None
    trajectory: LatentPath | TokenOrder | None = None  # how the sample came about
    provenance: Provenance = Provenance()
    # [B, K] long, trees: id of the edge, equal for rows that share it
    edge_id: Tensor | None = None
    # [B] bool: rows that stay in training, decisions or not; None: all
    trainable: Tensor | None = None
    # if prompts had more samples than these rows; None: they had not
    all_samples: PromptMoments | None = None
    records: Records | None = None  # of stages; None: there is none

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join rows that share their prompts, with the record names of the first part."""
        first = parts[0].records
        if first is not None:
            parts = [part.replace(records=first.of(part)) for part in parts]
        return super().cat(parts)

    def recorded(self, name: str, values: Tensor, of_prompts: bool = False) -> Self:
        """Return the rows with a record of that name, [B, *]. ``of_prompts``: it is the same for
        every row of a prompt, so that rows added to the group also get it."""
        known = self.records or Records(columns={})
        marked = known.of_prompts | {name} if of_prompts else known.of_prompts - {name}
        columns = {**known.columns, name: values}
        return self.replace(records=Records(columns=columns, of_prompts=marked))

    def record(self, name: str, without: str = "") -> Tensor:
        """Return a stage's record of that name, [B, *]; UserError if there is none, with the
        message ``without`` if given."""
        known = {} if self.records is None else self.records.columns
        if name not in known:
            raise UserError(
                without
                or f"no stage records {name!r} of rows; add the one that does to train.stages, or "
                f"take what is recorded: {', '.join(known) or 'nothing'}"
            )
        return known[name]

    def prompt_per_row(self) -> list[Prompt]:
        """Return the prompt of every row, B of them."""
        return [self.prompts[g] for g in self.group.tolist()]

    def alive(self) -> Tensor:
        """Return the rows that stay in training, [B] bool."""
        if self.trainable is None:
            return torch.ones_like(self.row_id, dtype=torch.bool)
        return self.trainable

    def advantages(self) -> Tensor:
        """Return ``advantage``, [B, 1] or [B, K]; 0 before the rewards are compared."""
        return torch.zeros_like(self.logprob[:, :1]) if self.advantage is None else self.advantage

    def parts(self, pick: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Apply ``pick``, which selects from the advantages, to ``advantage_parts``."""
        return None if self.advantage_parts is None else pick(self.advantage_parts)

    def entropies(self) -> Tensor:
        """Return ``entropy`` [B, K]; UserError if the policy does not record it."""
        if self.entropy is None:
            raise UserError(
                "the entropy of decisions is not recorded; set the policy's option record_entropy "
                "to true"
            )
        return self.entropy

    def path_mask(self) -> Tensor:
        """Return the decisions on the way to each row, [B, K] bool: on a tree also those of edges
        in another row's mask."""
        if self.edge_id is None:
            return self.mask
        columns = self.mask.shape[1]
        place = torch.arange(columns, device=self.edge_id.device)
        names, index = (self.edge_id * columns + place).flatten().unique(return_inverse=True)
        carried = torch.zeros(len(names), dtype=torch.long, device=index.device)
        carried = carried.scatter_reduce(0, index, self.mask.flatten().long(), "amax")
        return carried[index].view_as(self.mask).bool()

    @property
    def latents(self) -> LatentPath:
        """Return the path of a flow or diffusion model; TypeError for token models."""
        return _of_kind(self.trajectory, LatentPath, "rollout")

    @property
    def tokens(self) -> TokenOrder:
        """Return the order of tokens; TypeError for flow and diffusion models."""
        return _of_kind(self.trajectory, TokenOrder, "rollout")

    @property
    def text_and_path(self) -> TextAndPath:
        """Return texts and the paths of pictures; TypeError for policies that make only one of
        them."""
        return _of_kind(self.trajectory, TextAndPath, "rollout")

    @property
    def passes(self) -> MaskTrace:
        """Return the passes of a masked model that remasks tokens; TypeError for others."""
        return _of_kind(self.trajectory, MaskTrace, "rollout")


@dataclass(frozen=True, kw_only=True)
class SamplerState(Fields):
    """Holds the time of a state between noise and data."""

    time: Tensor  # [B]; 1 is noise, 0 is data


@dataclass(frozen=True, kw_only=True)
class Transition(SamplerState):
    """Describes one step of the sampler, from ``time``."""

    next_time: Tensor  # [B]
    noise_level: Tensor  # [B] eta of the kernel


@dataclass(frozen=True, kw_only=True)
class Renoised(SamplerState):
    """Describes a finished sample to which noise was added."""

    x0_per_output: Tensor  # [B] derivative of the predicted clean sample by the output
    snr: Tensor | None = None  # [B] signal-to-noise ratio


@dataclass(frozen=True, kw_only=True)
class WholePath(SamplerState):
    """Describes all K steps of a path; ``time`` is [B, K + 1]."""

    noise_level: Tensor  # [B, K] eta of the kernel
    stream: Tensor | None  # [B, 2] long: the key of its noise; None: there is none


@dataclass(frozen=True, kw_only=True)
class MaskPass(Fields):
    """Describes a pass of a masked model's sampler."""

    # [B] factor of the tokens' temperature in this pass; None: 1
    heat: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MaskChoice(MaskPass):
    """Describes a pass that chooses which of its tokens stay (MaskGIT)."""

    temperature: Tensor  # [B] of the Gumbel noise on the confidence


@dataclass(frozen=True, kw_only=True)
class Query(Rows):
    """Describes the input of one forward pass, and where its output is used."""

    row_id: Tensor  # [B] long, as in Rollout
    state: Tensor  # [B, *] the network's input
    mask: Tensor  # [B, L] bool
    step: SamplerState | MaskPass | None = None  # the state's place on the sampler's path
    # guidance scale; None: the policy's on the path, 1 on re-noised states
    guidance: float | None = None

    @property
    def time(self) -> Tensor:
        """Return the time [B] of the state; TypeError for token models."""
        return _of_kind(self.step, SamplerState, "point").time

    @property
    def transition(self) -> Transition:
        """Read the step of the sampler; TypeError for states off its path."""
        return _of_kind(self.step, Transition, "point")

    @property
    def renoised(self) -> Renoised:
        """Read how the state was re-noised; TypeError for states of the sampler's path."""
        return _of_kind(self.step, Renoised, "point")

    @property
    def whole_path(self) -> WholePath:
        """Read the steps of a point that holds a whole path; TypeError for others."""
        return _of_kind(self.step, WholePath, "point")


@dataclass(frozen=True, kw_only=True)
class Point(Query):
    """Describes one forward pass, and the decisions to be scored there."""

    target: Tensor  # [B, *] the decision: next latents, velocity, or token ids
    advantage: Tensor  # [B, 1] or [B, L]
    # [B, 1 or L, N] advantages whose losses are summed; None: only ``advantage``
    advantage_parts: Tensor | None = None
    num_decisions: Tensor  # [B] number of trained decisions of the row, over all its points
    logprob: Tensor | None = None  # [B, L] recorded at sampling; None for a re-noised state
    entropy: Tensor | None = None  # [B, L] recorded at sampling, nats; None: not recorded
    weight: Tensor | None = None  # [B, L] weight of every decision in the loss; None: all equal
    provenance: Provenance = Provenance()
    # [B, L] long: 0 text, 1 image, where a row has both; None: all are of one kind
    modality: Tensor | None = None
    # [B, L] factor of the ratio's clip range; None: 1
    clip_scale: Tensor | None = None
    # [B, L] weight of every decision by the estimator of masked diffusion; None: 1
    estimator_weight: Tensor | None = None
    # [B, L, R] experts that each token went to in sampling, -1: unknown; None: not recorded
    routes: Tensor | None = None
    # what a coupled objective computed from all points of the step (``Objective.couple``)
    coupling: Fields | None = None
    prompts: Sequence[Prompt] = ()  # P, for objectives that call a reward
    # on-policy: the weights are the sampling weights, so the ratio is 1 up to rounding
    on_policy: bool = False

    @property
    def recorded(self) -> Tensor:
        """Read the log-probs [B, L] that sampling recorded; TypeError for re-noised states."""
        return _of_kind(self.logprob, Tensor, "point")

    def coupled(self, kind: type[Part]) -> Part:
        """Read ``coupling``, which is a ``kind``; TypeError before ``Objective.couple``."""
        return _of_kind(self.coupling, kind, "point")

    def credit(self) -> Tensor:
        """Return the advantages that a surrogate is summed over: the parts, [B, 1 or L, N], or the
        advantage if it has none."""
        return self.advantage if self.advantage_parts is None else self.advantage_parts

    def sampled_mask(self) -> Tensor:
        """Return ``mask`` [B, L] of rows sampled in this iteration, for metrics."""
        mask = self.current()
        is_ground_truth = self.provenance.is_ground_truth
        return mask if is_ground_truth is None else mask & ~is_ground_truth[:, None]

    def current(self) -> Tensor:
        """Return ``mask`` without rows of earlier iterations, whose log-probs are of older weights,
        [B, L] bool."""
        is_replayed = self.provenance.is_replayed
        return self.mask if is_replayed is None else self.mask & ~is_replayed[:, None]

    def old(self, logp: Tensor, recorded: Tensor) -> Tensor:
        """Return the log-probs in the denominator of the ratio, [B, L]: on fresh points the
        detached current ones, which differ from the ``recorded`` ones only by rounding; for rows of
        earlier iterations always the recorded ones."""
        if not self.on_policy:
            return recorded
        is_replayed = self.provenance.is_replayed
        if is_replayed is None:
            return logp.detach()
        return torch.where(is_replayed[:, None], recorded, logp.detach())


def _of_kind(part: object, kind: type[Part], record: str) -> Part:
    if isinstance(part, kind):
        return part
    raise TypeError(f"this {record} has no {kind.__name__}, but {type(part).__name__}")


class Completion(str):
    """Holds a text that a model wrote, with recorded values that rewards may need; None: unknown.
    Its slices are plain strings."""

    tokens: int | None  # number of tokens, including the end token
    finished: bool | None  # ended by its end token; False: truncated at the limit
    logprob: float | None  # mean over its tokens under the sampling distribution
    # mean over its tokens of KL(uniform || the model's distribution)
    self_certainty: float | None
    # mean over its tokens of log p(token | question) - log p(token)
    question_gain: float | None = None
    # log-prob of the token that judges an answer, after its last one
    last_logprob: float | None = None
    # maximum tokens of an answer in its batch: decisions K of a row
    limit: int | None
    spell: Callable[[], list[str]] | None  # the text up to each of its tokens

    def __new__(
        cls,
        text: str,
        tokens: int | None = None,
        finished: bool | None = None,
        logprob: float | None = None,
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

    @classmethod
    def of(cls, text: str) -> Completion:
        """Return a completion unchanged, and any other text as one without recorded values."""
        return text if isinstance(text, cls) else cls(text)
