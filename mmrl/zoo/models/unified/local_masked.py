"""Trains one masked transformer over text and picture tokens from your own code (MMaDA,
Lumina-DiMOO): answers and pictures in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.core.broken_rows import BrokenRows
from mmrl.core.host import on_host, sent
from mmrl.core.libraries import torch_dtype
from mmrl.core.numbers import Count, Steps
from mmrl.core.registry import POLICIES, locate
from mmrl.core.sharding import in_step, sharded
from mmrl.core.types import Copies, Media, Point, Prompt, Rollout, TokenOrder
from mmrl.policies.base import NO_CONTEXT, Precision, RolloutContext, rows_and_groups
from mmrl.policies.capabilities import Capabilities, Medium
from mmrl.policies.contracts import Demonstrates, Exports, Guided
from mmrl.policies.demonstrations import sourced
from mmrl.policies.masked.policy import Hidden
from mmrl.policies.tokens import TokenPolicy, somewhere
from mmrl.zoo.models import local_code
from mmrl.zoo.models.masked.masked_image_lm import MaskedImageLM
from mmrl.zoo.models.masked.masked_lm import MaskedLM, load
from mmrl.zoo.models.unified.draw import NONE
from mmrl.zoo.models.unified.prompts import task_of
from mmrl.zoo.models.unified.tasks import columns, drawing, in_places
from samplers.batching import chunks
from samplers.noise import Rng


@dataclass(frozen=True)
class Picture:
    """Describes pictures: the options of ``masked_image_lm``, and how much a code counts.

    decoder, first, codes, side, prompt, after, special_tokens, steps, schedule, guidance_scale,
    temperature: as of ``masked_image_lm``. weight: of the loss of a picture's codes, beside 1 of a
    word's."""

    decoder: str
    first: Annotated[int, Ge(0)]
    codes: Count
    side: Count = 32
    prompt: str = "{text}"
    after: str | None = None
    special_tokens: Mapping[str, int] | None = None
    steps: Steps = 12
    schedule: Literal["cosine", "linear"] = "cosine"
    guidance_scale: Annotated[float, Ge(0)] = 1.0
    temperature: Annotated[float, Gt(0)] = 1.0
    weight: Annotated[float, Ge(0)] = 1.0


class _Text(MaskedLM):
    """Samples and scores words with the network of another policy."""

    owner: UnifiedMasked

    def active(self) -> nn.Module:
        return self.owner.active()


class _Image(MaskedImageLM):
    """Samples and scores codes with the network of another policy."""

    owner: UnifiedMasked

    def active(self) -> nn.Module:
        return self.owner.active()


View: TypeAlias = _Text | _Image


@POLICIES.register("unified_masked")
class UnifiedMasked(TokenPolicy, Demonstrates, Guided, Exports):
    """Trains one masked transformer that answers in text and draws in codes (MMaDA, Lumina-DiMOO).

    A row is W places for words and N for codes, of which it has one kind: a prompt of the task
    ``generate`` is drawn as ``masked_image_lm`` does, one of the task ``understand`` answered as
    ``masked_lm`` does. Likelihoods are exact: a pass reveals places independently of the model.
    """

    capabilities = Capabilities("categorical", one_pass=False)
    keep_groups_together = True
    find_unused_parameters = True
    not_options = (
        "net",
        "record_divergence",
        "record_self_certainty",
        "record_entropy",
        "sampling_memory_gib",
    )
    attention = MaskedLM.attention

    def __init__(
        self,
        path: str,
        picture: Picture,
        max_new_tokens: Count = 256,
        block: Count | None = None,
        steps: Steps = 128,
        schedule: Literal["cosine", "linear"] = "cosine",
        temperature: Annotated[float, Gt(0)] = 1.0,
        mask: int | None = None,
        dtype: Precision = "float32",
        remote_code: bool = False,
        code: str | None = None,
        **options: Any,
    ):
        """Load the model. path: its folder. picture: how it draws. max_new_tokens, block, steps,
        schedule, temperature: of answers, as of ``masked_lm``. dtype: of the frozen weights. mask:
        id of the mask token; None: the tokenizer's. remote_code: run the Python code in that
        folder, or ``code``. code: ``file.py:build``, a function of path that returns tokenizer and
        model; None: transformers' auto classes."""
        self.place = locate(path)
        loaded = load(self.place, torch_dtype(dtype), remote_code, code)
        chosen = asdict(picture)
        self.picture_weight = chosen.pop("weight")
        self.image = _Image(path, mask=mask, loaded=loaded, **chosen)
        self.text = _Text(
            path,
            max_new_tokens,
            block,
            steps,
            mask,
            schedule=schedule,
            temperature=temperature,
            loaded=loaded,
        )
        # whether it draws, and what samples and scores such rows
        self.kinds: tuple[tuple[bool, View], ...] = ((False, self.text), (True, self.image))
        for _, view in self.kinds:
            view.owner = self
        self.width = max_new_tokens  # W
        self.media = self.image.media
        super().__init__(loaded[1], **options)
        self.guidance_scale = picture.guidance_scale
        self.report.code = local_code.files_of(self.net) if remote_code else {}
        self.report.notes = local_code.note(self.report.code)

    # Prompts.

    def medium_of(self, prompt: Prompt) -> Medium:
        return "image" if task_of(prompt) == "generate" else "text"

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        problems = {}
        for place, (prompt, drawn) in enumerate(zip(prompts, drawing(prompts), strict=True)):
            try:
                (self.image if drawn else self.text).admit([prompt])
            except BrokenRows as error:
                problems[place] = error.problems[0]
        if problems:
            raise BrokenRows(problems, len(prompts))
        return super().admit(prompts)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Encode every prompt for both tasks, and say which it is, ``draws`` [P]."""
        return {
            "text": self.text.encode(prompts),
            "image": self.image.encode(prompts),
            "draws": torch.tensor(drawing(prompts), device=self.device),
        }

    # Sampling.

    @torch.no_grad()
    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        cond = self.encode(prompts)
        draws = cond["draws"][group]
        size = self.pass_sizes.most(len(row))
        samples = []
        places = []
        for draws_it, view in self.kinds:
            of_kind = (draws == draws_it).nonzero()[:, 0]
            parts = (of_kind[part] for part in chunks(len(of_kind), size))
            waits = sharded(self.net)
            for at, counts in in_step(parts, of_kind.new_zeros(1), self.device, waits):
                with self._counted(view):
                    rows = view._sample(group[at], row[at], self._known(cond, view), rng)
                if counts:
                    samples.append(self._widened(rows, draws_it).replace(cond=cond))
                    places.append(at)
        rows = in_places(samples, places)
        return rows.replace(prompts=tuple(prompts))

    def _known(self, cond: dict[str, Any], view: View) -> dict[str, Any]:
        known: dict[str, Any] = cond["image" if view is self.image else "text"]
        return known

    @contextmanager
    def _counted(self, view: View) -> Iterator[None]:
        """Keep the view's passes as this policy's are, and count them."""
        view.pass_sizes.rows = self.pass_sizes.rows
        before = view.report.forwards
        try:
            yield
        finally:
            self.report.forwards += view.report.forwards - before

    def _room(self, draws: bool) -> tuple[int, int]:
        """Return the places before and behind those of a row's kind."""
        return (self.width, 0) if draws else (0, self.image.length)

    def _widened(self, rows: Rollout, draws: bool) -> Rollout:
        """Put the L places of a kind among all W + N."""
        room = self._room(draws)
        return rows.replace(
            sample=pad(rows.sample, room, value=NONE),
            logprob=pad(rows.logprob, room),
            mask=pad(rows.mask, room),
            trajectory=TokenOrder(commit_step=pad(rows.tokens.commit_step, room)),
        )

    @torch.no_grad()
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        """Make a rollout of demonstrations, texts and pictures, in an order in which the sampler
        could have revealed them."""
        row, group = rows_and_groups(prompts, 1, rng, self.device)
        cond = self.encode(prompts)
        present = torch.zeros_like(cond["draws"])
        samples = []
        places = []
        for draws_it, view in self.kinds:
            at = (cond["draws"] == draws_it).nonzero()[:, 0]
            if not len(at):
                continue
            ids, usable = view.answer_ids([answers[i] for i in at.tolist()])
            block = view.block_of(self._known(cond, view), at)
            rows = Rollout(
                group=group[at],
                cond=cond,
                row_id=row[at],
                sample=ids,
                logprob=torch.zeros(ids.shape, dtype=self.dtype, device=ids.device),
                mask=view.read(ids, block) & usable[:, None],
                trajectory=TokenOrder(commit_step=view.order_of(row[at], block, rng, score)),
            )
            samples.append(self._widened(rows, draws_it))
            places.append(at)
            present[at] = usable
        rollout = in_places(samples, places)
        rollout = sourced(rollout.replace(prompts=tuple(prompts)), present)
        return self.scored(rollout) if score else rollout

    # Scoring.

    @torch.no_grad()
    def scored(self, rollout: Rollout) -> Rollout:
        logprob = torch.zeros_like(rollout.logprob)
        size = self.pass_sizes.rows or len(rollout)
        # of the rows of one kind
        points = [p for part in chunks(len(rollout), size) for p in self.path(rollout[part])]
        for point, counts in in_step(points, points[0][:1], self.device, sharded(self.net)):
            at = (point.row_id[:, None] == rollout.row_id).long().argmax(1)
            scores = self.dist(point).log_prob(point.target).to(logprob)
            logprob.index_add_(0, at, torch.where(point.mask & counts, scores, 0.0))
        return rollout.replace(logprob=logprob)

    def path(self, rollout: Rollout) -> Iterator[Point]:
        draws = rollout.cond["draws"][rollout.group]
        for draws_it, view in self.kinds:
            rows = rollout[(draws == draws_it).nonzero()[:, 0]]
            if not len(rows):
                continue
            narrow = self._columns(draws_it)
            part = rows.replace(
                cond=self._known(rollout.cond, view),
                sample=rows.sample[:, narrow],
                logprob=rows.logprob[:, narrow],
                mask=rows.mask[:, narrow],
                advantage=columns(rows.advantages(), narrow),
                advantage_parts=rows.parts(partial(columns, part=narrow)),
                trajectory=TokenOrder(commit_step=rows.tokens.commit_step[:, narrow]),
                provenance=rows.provenance.columns(narrow),
            )
            for point in view.path(part):
                yield self._point(point, rollout, draws_it)

    def _columns(self, draws: bool) -> slice:
        return slice(self.width, None) if draws else slice(0, self.width)

    def _point(self, point: Point, rollout: Rollout, draws: bool) -> Point:
        """Make the point of a kind as wide as those of the other."""
        room = self._room(draws)
        assert point.logprob is not None  # of a path

        def wide(x: Tensor) -> Tensor:
            return x if x.shape[1] == 1 else pad(x, room)

        mask = pad(point.mask, room)
        weight = self.picture_weight if draws else 1.0
        provenance = point.provenance
        if provenance.sampler_logprob is not None:
            provenance = provenance.replace(sampler_logprob=wide(provenance.sampler_logprob))
        return point.replace(
            cond=rollout.cond,
            state=pad(point.state, room, value=NONE),
            target=pad(point.target, room),
            mask=mask,
            logprob=pad(point.logprob, room),
            advantage=wide(point.advantage),
            provenance=provenance,
            modality=torch.full(mask.shape, int(draws), device=mask.device),
            weight=torch.full(mask.shape, weight, dtype=self.dtype, device=mask.device),
        )

    def dist(self, point: Point) -> Words:
        """Compute the distributions of rows of both kinds. Shards are gathered for a pass of each
        kind on every process: one without such rows makes a dummy pass of its first."""
        where = somewhere(point.mask)
        draws = on_host(point.cond["draws"][point.group])
        parts = []
        for draws_it, view in self.kinds:
            rows = sent((draws == draws_it).nonzero()[:, 0], where.device)
            counts = bool(len(rows))
            if not counts and not sharded(self.net):
                continue
            narrow = self._columns(draws_it)
            part = point[rows] if counts else self._hidden(point[:1], view)
            part = part.replace(
                cond=self._known(point.cond, view),
                state=part.state[:, narrow],
                target=part.target[:, narrow],
                mask=where[rows][:, narrow] if counts else part.mask[:, narrow],
            )
            with self._counted(view):
                parts.append(Part(view.dist(part), rows, narrow))
        return Words(parts, where.shape)

    def _hidden(self, point: Point, view: View) -> Point:
        """Hide all that a row has, so that a view can read it as one of its kind."""
        return point.replace(
            state=torch.full_like(point.state, view.mask_id),
            target=torch.zeros_like(point.target),
            mask=torch.ones_like(point.mask),
        )

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample as in training, pictures at another guidance scale if given."""
        with self.image.evaluating(guidance):
            yield

    @contextmanager
    def untempered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for _, view in self.kinds:
                stack.enter_context(view.untempered())
            yield

    # Results.

    @torch.no_grad()
    def decode(self, rollout: Rollout) -> Media:
        """Decode to a list of images [3, H, W] and texts."""
        draws = rollout.cond["draws"][rollout.group]
        answers: list[Any] = [None] * len(rollout)
        for draws_it, view in self.kinds:
            at = (draws == draws_it).nonzero()[:, 0]
            if len(at):
                rows = rollout[at]
                narrow = self._columns(draws_it)
                part = rows.replace(
                    sample=rows.sample[:, narrow],
                    logprob=rows.logprob[:, narrow],
                    mask=rows.mask[:, narrow],
                )
                for place, media in zip(at.tolist(), view.decode(part), strict=True):
                    answers[place] = media
        return answers

    def export(self, folder: Path) -> None:
        """Save the model and its tokenizer, as ``masked_lm`` does."""
        self.text.export(folder)


@dataclass(frozen=True)
class Part:
    """Holds the distributions of the rows of one kind; of no rows those of one that is idle."""

    dist: Hidden
    rows: Tensor  # [b] long
    columns: slice

    def ids(self, ids: Tensor) -> Tensor:
        """Take the tokens of these rows."""
        return ids[self.rows] if len(self.rows) else torch.zeros_like(ids[:1])


@dataclass(frozen=True)
class Words:
    """Joins the distributions of words and of codes. All results are [B, W + N], 0 where a row has
    no decision."""

    parts: list[Part]
    shape: torch.Size

    def log_prob(self, ids: Tensor) -> Tensor:
        return self._joined([p.dist.log_prob(p.ids(ids)[:, p.columns]) for p in self.parts])

    def entropy(self) -> Tensor:
        return self._joined([part.dist.entropy() for part in self.parts])

    def kl(self, reference: Words, *by: Any) -> Tensor:
        pairs = zip(self.parts, reference.parts, strict=True)
        return self._joined([part.dist.kl(of.dist, *by) for part, of in pairs])

    def _joined(self, values: list[Tensor]) -> Tensor:
        every = values[0].new_zeros(self.shape)
        for part, value in zip(self.parts, values, strict=True):
            start, stop, _ = part.columns.indices(self.shape[1])
            wide = pad(value, (start, self.shape[1] - stop))
            if len(part.rows):
                every = every.index_add(0, part.rows, wide.to(every))
            else:  # gradients are reduced where a pass leads to the loss
                every = every + 0.0 * value.sum()
        return every
