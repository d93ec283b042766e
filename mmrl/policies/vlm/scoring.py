"""Makes the passes of a vision-language policy: chooses the prompts that share one, samples and
scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.host import on_host, sent
from mmrl.core.metrics import Stopwatch
from mmrl.core.sharding import in_step, sharded
from mmrl.core.types import Point, Prompt, Rollout, tree_map
from mmrl.policies.base import Drafts
from mmrl.policies.contracts import Branches, Compiles, ReadsPrompts
from mmrl.policies.scores import Scored
from mmrl.policies.tokens import AnswerTokens, TokenPolicy, somewhere
from mmrl.policies.vlm import features, media
from mmrl.policies.vlm.collation import blank_clip, blank_image, images_in, is_pixels
from mmrl.policies.vlm.cross_attention_caches import PICTURES
from mmrl.policies.vlm.engines.transformers import generate_plainly
from mmrl.policies.vlm.families import OWN_DTYPE
from mmrl.policies.vlm.generate import Answers, Ending, Task, generate
from mmrl.policies.vlm.lengths import Limits
from mmrl.policies.vlm.positions import positions
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from mmrl.policies.vlm.prefixes import Prefix
from mmrl.policies.vlm.processor import Inputs
from mmrl.policies.vlm.recent import Recent
from mmrl.policies.vlm.refill import Lengths, Refill, Slots
from mmrl.policies.vlm.routing import of_prompts, padded
from mmrl.policies.vlm.speculation import speculate
from mmrl.policies.vlm.trees import Growth, TextTree
from samplers.batching import chunks
from samplers.noise import Rng
from samplers.warp import Anneal, Warp

Encoded = dict[str, Tensor]
Blank = Callable[[], Prompt]
KEPT = 2**28  # bytes of encoded prompts that are kept from one iteration to the next


class Passes(TokenPolicy, ReadsPrompts, Branches, Compiles):
    """Turns prompts into passes of the network, a ``SharedPrefix``, to sample and to score."""

    net: SharedPrefix
    inputs: Inputs
    warp: Warp
    ending: Ending
    engine: str
    sharing: str  # the option
    tree: TextTree | None  # how answers of a group branch
    growing: bool = True  # whether they branch now: not in evaluation
    sees: bool  # gradients reach the vision tower or its projector
    anneal: Anneal | None  # of the warp's temperature
    outside: Any  # the engine that samples elsewhere; None: here
    record_question_gain: bool
    self_score_id: int | None  # the token whose log-prob after an answer is recorded
    refill: Refill = "none"  # which row replaces one that has ended

    def __init__(self, net: nn.Module, **options: Any):
        super().__init__(net, **options)
        self.recent = Recent(KEPT)
        self.features = Recent(KEPT)
        # images used, and images passed through the tower, since the last measures()
        self.images = 0
        self.towered = 0
        self.lengths = Lengths()  # predicted lengths of answers, for refill plans
        self.witnesses: dict[Blank, Encoded] = {}  # prompts with an image or a clip
        self.limits = Limits.of(self.net.text_config)
        self.checked = False  # whether passes were checked against the model's own
        self.compared: list[Prompt] = []  # the run's prompts for that, the same on all processes
        # experts of the prompt tokens in this rollout
        self.prompt_routes: dict[int, Tensor] = {}
        self.gaps: list[float] = []  # mean gaps to the engine's log-probs
        self.clock = Stopwatch()  # time spent sending weights to that engine

    def dist(self, point: Point) -> AnswerTokens:
        self._check(point.cond)
        where = somewhere(point.mask)
        self.report.forwards += len(where)
        hidden, scored = self._score(
            self.active(), point.cond, point.group, point.target, where, point.routes
        )
        return AnswerTokens(self, point, where, hidden, scored)

    def encode(self, prompts: list[Prompt]) -> list[Encoded]:
        return [self._encoded(prompt)[0] for prompt in prompts]

    def prompt_states(self, prompts: list[Prompt]) -> Tensor:
        """Return the network's own hidden state [P, H] at the last token of every prompt, images
        included."""
        cond = self.encode(prompts)
        group = torch.arange(len(prompts), device=self.device)
        kinds = self._kinds(cond, group)
        parts = []
        nothing: Tensor | float = 0.0
        for at, counts in self._calls(kinds):
            inputs, rows = self.collated(cond, group[at], False)
            state = self.active()("state", inputs)[rows]
            if counts:
                parts.append(state)
            else:
                nothing = nothing + 0 * state.sum()
        return torch.cat(parts)[torch.cat(kinds).argsort()] + nothing

    def _calls(self, kinds: list[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Yield the rows of each network call of a pass, one per kind of prompts, and whether it
        counts: wrappers wait for the calls of other processes, which may have more kinds. A
        collective call then."""
        splits = self.inputs.family.splits or self.limits.some
        waits = splits or sharded(self.net)
        return in_step(kinds, kinds[0][:1], self.device, waits)

    def _placed(self, encoded: Encoded) -> Encoded:
        """Move a prompt to the device, with its positions as ``places`` [1, S, axes]: computed
        once, since they never change."""
        places = positions(self.net.hf, encoded)
        places = places[..., None] if places.ndim == 2 else places.permute(1, 2, 0)
        placed: Encoded = tree_map(
            lambda tensor: tensor.to(self.device), encoded | {"places": places}
        )
        if self.inputs.family.name not in OWN_DTYPE:
            return placed
        dtype = self.net.hf.dtype
        return {name: x.to(dtype) if is_pixels(name) else x for name, x in placed.items()}

    def _batch(self, encoded: list[Encoded]) -> Encoded:
        """Join prompts to one left-padded batch, with ``position_ids`` [P, S] or [3, P, S]."""
        encoded, unseen = self._with_pictures(encoded)
        image_features = self._image_features(encoded)
        if not image_features:
            self.towered += sum(images_in(prompt) for prompt in encoded)
        left_out = ("places", "routes", *(features.PIXELS if image_features else ()))
        batch = (
            self.inputs.collate(
                [{k: v for k, v in prompt.items() if k not in left_out} for prompt in encoded]
            )
            | image_features
        )
        length = batch["input_ids"].shape[1]
        places = [
            F.pad(prompt["places"], (0, 0, length - prompt["places"].shape[1], 0))
            for prompt in encoded
        ]
        position_ids = torch.cat(places).permute(2, 0, 1)
        known = padded([prompt.get("routes") for prompt in encoded], length, position_ids)
        if known is not None:
            batch = batch | {"routes": known}
        one_axis = len(position_ids) == 1
        return batch | unseen | {"position_ids": position_ids[0] if one_axis else position_ids}

    def _with_pictures(self, encoded: list[Encoded]) -> tuple[list[Encoded], dict[str, Any]]:
        """Add extra prompts and inputs so that the vision tower takes part.

        With several processes each must use the vision tower in every pass, or the others wait for
        its gradients: where no prompt has an image, an extra prompt without answers brings one. On
        one process too, where the tower is trained: its gradient is then zero rather than missing,
        which Adam treats differently.
        """
        many = distributed.world()[1] > 1
        heard = any("audio_input_features" in prompt for prompt in encoded)
        if many and heard:  # an extra image would change how Phi-4 encodes audio
            raise UserError(f"{self.inputs.family.name}: prompts with audio need a single process")
        trains = torch.is_grad_enabled() and self.sees and not self.inputs.family.alone
        needed = (many or trains) and not heard
        unseen: dict[str, Any] = {}
        for blank in self._lacking(encoded) if needed else ():
            if blank not in self.witnesses:
                self.witnesses[blank] = self._placed(self.inputs.encode(blank()))
            witness = self.witnesses[blank]
            if self.inputs.family.by_row:  # an image cannot share a batch with texts
                picture = {name: x for name, x in witness.items() if name in PICTURES}
                unseen = {"witness": picture}
            else:
                encoded = [*encoded, witness]
        return encoded, unseen

    def _lacking(self, encoded: list[Encoded]) -> list[Blank]:
        """Return the media that these prompts lack for the tower to make the same passes as on
        other processes: one for images and one for clips where weights are sharded; else at least
        one. A collective call then."""
        names = {name for prompt in encoded for name in prompt if is_pixels(name)}
        clips = any("videos" in name for name in names)
        brought = torch.tensor([len(names) > clips, clips], dtype=torch.float32)
        family = self.inputs.family
        needed = brought
        if family.video and not family.apart and sharded(self.net):
            needed = distributed.all_max(brought)
        pictures, films = (needed > brought).tolist()
        if not needed.any():
            pictures = True
        return [blank_image] * pictures + [blank_clip] * films

    def _image_features(self, encoded: list[Encoded]) -> dict[str, Any]:
        """Return features that replace the images of these prompts, where tower and projector are
        frozen; {}: compute them again.

        Only on one process, since sharded ones must make the same passes, and for families whose
        projector is known by name.
        """
        known = self.inputs.family.known and features.can_keep(self.net.hf)
        frozen = known and not self.sees and self.net.share and distributed.world()[1] == 1
        with_images = [prompt for prompt in encoded if "pixel_values" in prompt]
        if (
            not frozen
            or not with_images
            or any("pixel_values_videos" in prompt for prompt in encoded)
        ):
            return {}
        looked_at = []
        for prompt in with_images:
            looked = self.features.get(prompt)
            if looked is None:
                looked = self.net("look", prompt)
                self.towered += images_in(prompt)
                self.features.put(prompt, looked, features.size_of(looked))
            looked_at.append(looked)
        return features.joined(looked_at)

    def _encoded(self, prompt: Prompt) -> tuple[Encoded, dict[str, Any]]:
        """Encode a prompt, on the device, with its view; recent encodings are cached."""
        entry: tuple[Encoded, dict[str, Any]] | None = self.recent.get(prompt)
        if entry is None:
            encoded, view = self.inputs.take(prompt)
            entry = self._placed(encoded), view
            name, answer = media.where(prompt), self.ending.tokens
            self.limits.check(entry[0], answer, name, self.net.config.model_type)
            if self.refill != "none" and self.limits.pads(entry[0], answer):
                raise UserError(
                    f"{name}: with an answer it is longer than {self.limits.columns} tokens, from "
                    f"which padding counts in {self.net.config.model_type}, and refilled rows are "
                    "padded; set policy.vlm.refill: none"
                )
            self.recent.put(prompt, entry, sum(tensor.nbytes for tensor in entry[0].values()))
        return entry

    def collated(self, cond: list[Encoded], group: Tensor, each: bool) -> tuple[Encoded, Tensor]:
        """Collate the prompts of ``group`` [B], each once or (``each``) once per row, and return
        the index of every row's prompt."""
        unique, rows = on_host(group).unique(return_inverse=True)
        if each:
            unique = on_host(group)
            rows = torch.arange(len(group))
        return self._batch([cond[i] for i in unique.tolist()]), sent(rows, group.device)

    def _kinds(self, cond: list[Encoded], group: Tensor) -> list[Tensor]:
        """List positions in ``group`` [B] of the rows whose prompts can be one batch; nearly always
        all rows."""
        known = on_host(group)
        unique = known.unique()
        prompts = [cond[i] for i in unique.tolist()]
        kinds = self.inputs.groups(prompts)
        if self.limits.some:
            kinds = [part for kind in kinds for part in self._by_length(prompts, kind)]
        if len(kinds) == 1:
            return [torch.arange(len(group), device=group.device)]
        return [
            sent(torch.isin(known, unique[kind]).nonzero()[:, 0], group.device) for kind in kinds
        ]

    def _by_length(self, prompts: list[Encoded], kind: list[int]) -> list[list[int]]:
        """Split prompts that can be one batch by the network's length thresholds."""
        parts: dict[Hashable, list[int]] = {}
        for i in kind:
            parts.setdefault(self.limits.kind(prompts[i], self.ending.tokens), []).append(i)
        return list(parts.values())

    def _score(
        self,
        net: nn.Module,
        cond: list[Encoded],
        group: Tensor,
        ids: Tensor,
        where: Tensor,
        routes: Tensor | None = None,
    ) -> tuple[Tensor, Scored]:
        """Compute hidden states [N, H] and log-probs [N] of the tokens ``where`` [B, T] holds;
        ``routes`` [B, T, R]: experts that they go to."""
        each = not self.net.share

        def of_rows(at: Tensor, where: Tensor) -> tuple[Tensor, Scored]:
            inputs, rows = self.collated(cond, group[at], each)
            if routes is not None:
                inputs = inputs | {"answer_routes": routes[at]}
            scored_rows: tuple[Tensor, Scored] = net(
                "score", inputs, rows, ids[at], where, self.warp, self.entropies
            )
            return scored_rows

        kinds = self._kinds(cond, group)
        if len(kinds) > 1:
            kinds = [at for at in kinds if where[at].any()]
        scored: list[tuple[Tensor, Scored]] = []
        for at, counts in self._calls(kinds):
            if counts:
                scored.append(of_rows(at, where[at]))
            else:
                first = torch.zeros_like(where[at])
                first[:, 0] = True
                scored[0] = _beside(scored[0], of_rows(at, first))
        return scored[0] if len(scored) == 1 else _joined(scored, kinds, where)

    @abstractmethod
    def _check(self, cond: list[Encoded]) -> None:
        """Compare, once, the passes with the model's own forward pass, on the run's prompts where
        known."""

    @abstractmethod
    def _scored(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the log-probs of all its tokens."""

    def _answers(
        self,
        cond: list[Encoded],
        group: Tensor,
        row: Tensor,
        rng: Rng,
        size: int,
        drafts: Drafts | None = None,
    ) -> Answers:
        """Answer the prompts of ``group`` [B], ``size`` rows at a time, in the order of the rows.

        Prompts of similar length are read together, which leaves little padding."""
        answers_by_part: list[Answers] = []
        places: list[Tensor] = []
        blocks = self._blocks(cond, group, size)
        for rows_at, counts in in_step(blocks, blocks[0], self.device, sharded(self.net)):
            for part, answers in self._block(cond, group, row, rng, rows_at, size, drafts):
                if counts:
                    places.append(part)
                    answers_by_part.append(answers)
        order = torch.cat(places).argsort()
        columns = {}
        for name in ("ids", "mask", "logprob", "values", "routes", "num_accepted", "edge_id"):
            parts = [getattr(part_answers, name) for part_answers in answers_by_part]
            if parts[0] is not None:
                columns[name] = torch.cat(parts)[order]
        return Answers(**columns)

    def _blocks(self, cond: list[Encoded], group: Tensor, size: int) -> list[Tensor]:
        """List the positions in ``group`` [B] of the rows whose prompts are read together."""
        blocks = []
        for at in self._kinds(cond, group):
            prompt_numbers = on_host(group)[at.cpu()]
            unique, counts = prompt_numbers.unique(return_counts=True)
            lengths = torch.tensor([cond[i]["input_ids"].shape[1] for i in unique.tolist()])
            ordered = unique[lengths.argsort(descending=True, stable=True)]
            # rows that are refilled come from as many prompts as one pass reads
            together = size if self.refills else max(1, size // int(counts.max()))
            for prompts in chunks(len(ordered), together):
                known = torch.isin(prompt_numbers, ordered[prompts])
                blocks.append(at[sent(known.nonzero()[:, 0], at.device)])
        return blocks

    def _block(
        self,
        cond: list[Encoded],
        group: Tensor,
        row: Tensor,
        rng: Rng,
        rows_at: Tensor,
        size: int,
        drafts: Drafts | None,
    ) -> Iterator[tuple[Tensor, Answers]]:
        """Answer the prompts of the rows ``rows_at``, each prompt read once; yields rows and
        answers."""
        busy = self.any_process if sharded(self.net) else None
        if self.plainly:
            for rows_of_pass, counts in self.pass_sizes.chunks(len(rows_at), size):
                part = rows_at[rows_of_pass]
                inputs, _ = self.collated(cond, group[part], each=True)
                written = generate_plainly(
                    self.net, inputs, row[part], rng, self.warp, self.ending, busy
                )
                if counts:
                    yield part, written
            return
        prefix, rows = self.read(cond, group[rows_at])
        tree = self.tree if self.growing else None
        if tree is not None:  # whole trees
            size = max(tree.leaves, size // tree.leaves * tree.leaves)
        task = Task(self.net, prefix, rows, row[rows_at], rng, self.warp, self.ending, busy)
        if self.refills and drafts is None and tree is None:
            yield rows_at, generate(task, Slots(size, self.refill, self.lengths))
            return
        yield from self._in_parts(task, rows_at, size, drafts, tree)

    def _in_parts(
        self,
        task: Task,
        rows_at: Tensor,
        size: int,
        drafts: Drafts | None,
        tree: TextTree | None,
    ) -> Iterator[tuple[Tensor, Answers]]:
        """Answer the rows of a task, which are ``rows_at`` of the rollout, ``size`` at a time."""
        first = slice(0, 1 if tree is None else tree.leaves)
        parts = chunks(len(rows_at), size)
        for rows, counts in in_step(parts, first, self.device, sharded(self.net)):
            few = task.of(rows)
            part = rows_at[rows]
            if drafts is not None:
                answers = speculate(few, _rows_of(drafts, part))
            else:
                answers = generate(few) if tree is None else Growth(tree, few).grow()
            if counts:
                yield part, answers

    def read(self, cond: list[Encoded], group: Tensor) -> tuple[Prefix, Tensor]:
        """Read the prompts of ``group`` [B], and return the index of every row's prompt."""
        inputs, rows = self.collated(cond, group, each=False)
        prefix: Prefix = self.net("read", inputs)
        if self.net.routing is not None:
            taken = of_prompts(self.net.routing.last(), inputs["attention_mask"])
            numbers = on_host(group).unique().tolist()
            self.prompt_routes |= dict(zip(numbers, taken, strict=False))
        return prefix, rows

    @property
    def refills(self) -> bool:
        """Tell whether rows that end make room for others."""
        return self.refill != "none" and not self.plainly

    @property
    def plainly(self) -> bool:
        """Tell whether transformers' own ``generate`` samples."""
        return not self.net.share or self.engine == "hf"

    def _try(self, cond: list[Encoded], group: Tensor) -> None:
        """Sample these rows at the maximum cost: no answer ends early."""
        group = group[self._kinds(cond, group)[0]]
        inputs, rows = self.collated(cond, group, each=self.plainly)
        endless = replace(self.ending, stops=(), strings=())
        if self.plainly:
            generate_plainly(self.net, inputs, rows, Rng.of("try"), self.warp, endless)
        else:
            prefix = self.net("read", inputs)
            generate(Task(self.net, prefix, rows, rows, Rng.of("try"), self.warp, endless))


def _joined(
    scored: list[tuple[Tensor, Scored]], kinds: list[Tensor], where: Tensor
) -> tuple[Tensor, Scored]:
    """Reorder scores computed per kind, of the rows ``kinds``, to the order of ``where`` [B, T]."""
    number = where.flatten().cumsum(0).view_as(where) - 1
    order = torch.cat([number[at][where[at]] for at in kinds]).argsort()
    hidden, logprob = (
        torch.cat(x)[order] for x in ([h for h, _ in scored], [s.logprob for _, s in scored])
    )
    entropies = [s.entropy for _, s in scored if s.entropy is not None]
    return hidden, Scored(logprob, torch.cat(entropies)[order] if entropies else None)


def _beside(scored: tuple[Tensor, Scored], filler: tuple[Tensor, Scored]) -> tuple[Tensor, Scored]:
    """Join a dummy pass to one that counts, so that both have a backward pass."""
    hidden, scores = scored
    nothing = 0 * (filler[0].sum() + filler[1].logprob.sum())
    return hidden + nothing, scores._replace(logprob=scores.logprob + nothing)


def _rows_of(drafts: Drafts, rows: Tensor) -> Drafts:
    return drafts.map(lambda x: x[rows])
