"""Trains a unified model from your own code: text token by token, pictures by flow (BAGEL,
Show-o2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.contract import Pictures
from mmrl.core.distributions import Categorical, Gaussian, Truncated
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import POLICIES
from mmrl.core.sharding import in_step, sharded
from mmrl.core.types import (
    Completion,
    Copies,
    LatentPath,
    Media,
    Point,
    Prompt,
    Rollout,
    SamplerState,
    TextAndPath,
)
from mmrl.policies.base import (
    NO_CONTEXT,
    RolloutContext,
    rows_and_groups,
    rows_of,
    turn_on_checkpointing,
    without_empty,
)
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.contracts import EvaluatesGreedily, Exports, FillsIdleRows
from mmrl.policies.diffusion.first_look import check_independence
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.lora import ATTENTION
from mmrl.zoo.models import local_code
from mmrl.zoo.models.unified.contract import Passes, check_prompts, checked
from mmrl.zoo.models.unified.draw import NONE
from mmrl.zoo.models.unified.tasks import columns, drawing, in_order
from mmrl.zoo.models.unified.writing import answer_logits, read, write
from samplers.batching import at_width, chunks
from samplers.noise import Rng
from samplers.processes import Flow
from samplers.warp import Warp


@POLICIES.register("unified_flow")
class UnifiedFlow(FlowPolicy, EvaluatesGreedily, Exports, FillsIdleRows):
    """Trains your own code of a unified model: text token by token, pictures by flow (BAGEL).

    A prompt of the task ``generate`` is drawn, after a thought if ``think`` is set; one of the task
    ``understand`` is answered. A row is W places for text, then K steps of the picture's sampler.
    What the code must offer is ``mmrl.zoo.models.unified.contract.TextAndFlow``.
    """

    capabilities = Capabilities("mixed")
    # samples of a group that share steps or noise are not written for rows with texts of their own
    not_options = (
        "net",
        "tree",
        "same_initial_noise",
        "sampling_memory_gib",
        "record_entropy",
    )
    find_unused_parameters = True  # a pass of text need not go through the picture's layers
    attention = (*ATTENTION, "q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(
        self,
        code: str,
        path: str | None = None,
        remote_code: bool = False,
        think: Count | None = None,
        answer: Count | None = None,
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_k: Count | None = None,
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0,
        picture_weight: Annotated[float, Ge(0)] = 1.0,
        picture_clip: Annotated[float, Gt(0)] = 1e-3,
        **options: Any,
    ):
        """Build the model. code: ``file.py:build``, a function that returns it, called with path.
        path: folder of its weights; null: called without. remote_code: run that code. think: tokens
        at most of a text before every picture; null: none. answer: of the answers to prompts of the
        task understand; null: there are none. temperature, top_k, top_p: of texts. picture_weight:
        of the loss of a picture's steps, beside 1 of a token's. picture_clip: what the clip of the
        ratio is multiplied by at a picture's steps, whose log-probs are means over dimensions."""
        where = () if path is None else (path,)
        model: Any = checked(local_code.build(code, remote_code, *where), code)
        self.model = model
        self.shape = tuple(model.latent_shape)
        self.process = getattr(model, "process", Flow())
        self.think = think
        self.answer = answer
        self.width = max(think or 0, answer or 0)  # W
        self.texts_warp = Warp(
            temperature, top_k, top_p, tuple(getattr(self.model, "suppressed", ()))
        )
        self.picture_weight = picture_weight
        self.picture_clip = picture_clip
        self.greedy = True  # of texts in evaluation
        self.pictures = Pictures("the method images")
        super().__init__(Passes(model), **options)
        self.report.code = local_code.files_of(model)
        self.report.notes = local_code.note(self.report.code)

    def enable_gradient_checkpointing(self) -> None:
        if not turn_on_checkpointing(self.model):
            raise ValueError(f"{type(self.model).__name__} offers no gradient checkpointing")

    # Prompts, and what is written after them.

    @torch.no_grad()
    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Encode prompts to ``ids`` and ``mask`` [P, S], what the code adds, and which of them are
        drawn, ``draws`` [P]; under ``uncond`` the empty prompt."""
        draws = drawing(prompts)
        if self.answer is None and not all(draws):
            raise UserError(
                f"prompt {draws.index(False)}: a prompt to understand; say with the policy's "
                f"answer how long answers are"
            )
        cond = self._encoded(prompts)
        cond["draws"] = torch.tensor(draws, device=self.device)
        if self.guidance_scale != 1:
            cond["uncond"] = self._encoded([{"text": ""}])
        return cond

    def _encoded(self, prompts: list[Prompt]) -> dict[str, Any]:
        encoded = self.model.encode(prompts)
        check_prompts(encoded, len(prompts))
        tensors = {name: tensor.to(self.device) for name, tensor in encoded.items()}
        tensors["mask"] = tensors["mask"].bool()
        return tensors

    def drawn_after(self, cond: dict[str, Any], group: Tensor, text: Tensor) -> dict[str, Any]:
        """Return what a picture of each row sees, [b, *]: its prompt and the text [b, W] after it;
        under ``uncond`` the empty prompt, as wide."""
        rows: dict[str, Any] = rows_of(without_empty(cond), group)
        rows.pop("draws")
        rows["ids"], rows["mask"] = read(rows["ids"], rows["mask"], text)
        if "uncond" in cond:
            empty = dict(cond["uncond"])
            room = rows["ids"].shape[1] - empty["ids"].shape[1]
            if room < 0:  # the empty prompt may be longer than short ones
                wide = torch.nn.functional.pad
                rows["ids"], rows["mask"] = (
                    wide(rows[name], (-room, 0)) for name in ("ids", "mask")
                )
                room = 0
            empty |= {
                name: torch.nn.functional.pad(empty[name], (room, 0)) for name in ("ids", "mask")
            }
            rows["uncond"] = empty
        return rows

    # Sampling.

    @torch.no_grad()
    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        cond = self.encode(prompts)
        draws = cond["draws"][group]
        text, score = self._texts(cond, group, row, draws, rng.fold("text"))
        places = draws.nonzero()[:, 0]
        # without a picture here there still is a path, of nothing
        first = places if len(places) else places.new_zeros(1)
        known = self.drawn_after(cond, group[first], text[first])
        number = torch.arange(len(first), device=row.device)
        pictures = self.paths(number, row[first], known, rng, context)
        if self.unseen:
            self.unseen = False
            check_independence(self, known, len(first))
        every = _placed(pictures, places, len(row))
        steps = every.mask & draws[:, None]
        words = (text != NONE) & self.exploring
        return Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=every.sample,
            logprob=torch.cat([score, every.logprob], 1),
            mask=torch.cat([words, steps], 1),
            trajectory=TextAndPath(text=text, **every.latents.row_tensors()),
            prompts=tuple(prompts),
        )

    def _texts(
        self, cond: dict[str, Any], group: Tensor, row: Tensor, draws: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor]:
        """Write a text [B, W] for every row, with log-probs [B, W]; nothing for pictures without a
        thought."""
        text = torch.full((len(row), self.width), NONE, device=row.device)
        score = torch.zeros(len(row), self.width, dtype=self.dtype, device=row.device)
        limit = torch.where(draws, self.think or 0, self.answer or 0)
        greedy = not self.exploring and self.greedy
        warp = Warp(0.0, suppressed=self.texts_warp.suppressed) if greedy else self.texts_warp
        stops = torch.tensor(self.model.stops, dtype=torch.long, device=row.device)
        places = (limit > 0).nonzero()[:, 0]
        size = self.pass_sizes.most(len(row))
        busy = distributed.any_of if sharded(self.net) else None
        parts = (places[part] for part in chunks(len(places), size))
        for at, counts in in_step(parts, places.new_zeros(1), self.device, sharded(self.net)):
            shown = rows_of(without_empty(cond), group[at])
            shown.pop("draws")
            uniform = rng.uniform(row[at], (self.width,))
            room = limit[at] if counts else torch.zeros_like(at)
            written, logprob = write(self.net, shown, uniform, warp, stops, room, busy)
            if counts:
                text[at] = written
                score[at] = logprob.to(score)
            self.report.forwards += int((written != NONE).sum())
        return text, score

    # Scoring.

    def idle_row(self, row: Rollout) -> Rollout:
        """Let a row have a text and a picture, whichever it has: its path a place for each."""
        words = row.mask.new_ones(1, self.width)
        return row.replace(
            cond=row.cond | {"draws": torch.ones_like(row.cond["draws"])},
            mask=torch.cat([words, row.latents.noise_level > 0], 1),
        )

    def path(self, rollout: Rollout) -> Iterator[Point]:
        words = rollout.mask[:, : self.width]
        if words.any():
            yield self._words(rollout, words)
        yield from self._steps(rollout, super().path)

    def renoise(
        self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False
    ) -> Iterator[Point]:
        """Yield the texts as they were written, and fresh states that end in the pictures."""
        words = rollout.mask[:, : self.width]
        if words.any():
            yield self._words(rollout, words).replace(logprob=None)
        yield from self._steps(rollout, lambda rows: super(UnifiedFlow, self).renoise(rows, rng))

    def _words(self, rollout: Rollout, words: Tensor) -> Point:
        """Make the point of all tokens, scored by one pass."""
        text = rollout.text_and_path.text
        credit = columns(rollout.advantages(), slice(0, self.width))
        return Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            state=text,
            target=text.clamp_min(0),
            mask=words,
            logprob=rollout.logprob[:, : self.width],
            advantage=credit,
            advantage_parts=rollout.parts(lambda x: columns(x, slice(0, self.width))),
            num_decisions=rollout.mask.sum(1),
            provenance=rollout.provenance.columns(slice(0, self.width)),
            modality=torch.zeros_like(text),
        )

    def _steps(self, rollout: Rollout, points: Any) -> Iterator[Point]:
        """Yield the points of the pictures' steps, whose conditions are those of rows."""
        rows = rollout.cond["draws"][rollout.group].nonzero()[:, 0]
        if not len(rows):
            return
        length = rollout.mask.sum(1)[rows]
        behind = slice(self.width, None)
        part = rollout[rows]
        known = part.text_and_path
        pictures = part.replace(
            group=torch.arange(len(rows), device=rows.device),
            cond=self.drawn_after(rollout.cond, part.group, known.text),
            logprob=part.logprob[:, behind],
            mask=part.mask[:, behind],
            advantage=columns(part.advantages(), behind),
            advantage_parts=part.parts(lambda x: columns(x, behind)),
            provenance=part.provenance.columns(behind),
        )
        for point in points(pictures):
            ones = torch.ones_like(point.mask)
            yield point.replace(
                num_decisions=length[point.group],
                modality=ones.long(),
                weight=ones.to(self.dtype) * self.picture_weight,
                clip_scale=ones.to(self.dtype) * self.picture_clip,
            )

    def dist(self, point: Point) -> Gaussian | Categorical:  # type: ignore[override]
        """Compute the step's Gaussian, or of a text the distribution of every token."""
        if isinstance(point.step, SamplerState):
            return super().dist(point)
        self.report.forwards += len(point)
        shown = rows_of(without_empty(point.cond), point.group)
        shown.pop("draws")

        def logits(text: Tensor, known: dict[str, Tensor]) -> Tensor:
            return answer_logits(self.active(), known, text)

        raw = at_width(logits, max(self.pass_sizes.width(), len(point)), point.state, shown)
        warp = self.texts_warp
        whole = warp.untruncated(raw)
        if not warp.truncates:
            return Categorical(whole)
        return Truncated(whole, warp(raw, keep=point.target))

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        dtype = next(self.net.parameters()).dtype
        output: Tensor = self.active()("velocity", x.to(dtype), t, **cond)
        return output

    @contextmanager
    def untempered(self) -> Iterator[None]:
        before = self.texts_warp
        self.texts_warp = Warp(suppressed=before.suppressed)
        try:
            with super().untempered():
                yield
        finally:
            self.texts_warp = before

    def sample_in_evaluation(self) -> None:
        self.greedy = False

    # Results.

    @torch.no_grad()
    def decode(self, rollout: Rollout) -> Media:
        """Decode to images [B, 3, H, W]; of a policy that answers too, to a list of images [3, H,
        W] and texts."""
        draws = rollout.cond["draws"][rollout.group]
        latents = rollout.sample[draws]
        size = self.pass_sizes.rows or max(len(latents), 1)
        parts = (latents[part] for part in chunks(len(latents), size))
        # shards are gathered for a pass of the whole network only
        decoder = partial(self.net, "images")
        blank = torch.zeros_like(rollout.sample[:1])
        decoded = [
            (self.pictures(decoder, part), counts)
            for part, counts in in_step(parts, blank, self.device, sharded(self.net))
        ]
        images = [image for image, counts in decoded if counts]
        if self.answer is None:
            return torch.cat(images)
        pictures = (image for part in images for image in part)
        return in_order(draws.tolist(), pictures, partial(self._completion, rollout))

    def texts(self, rollout: Rollout) -> list[str]:
        """Return the thought or answer of every row, for people to read."""
        rows = rollout.text_and_path.text.tolist()
        return [self.model.text([token for token in row if token != NONE]) for row in rows]

    def _completion(self, rollout: Rollout, row: int) -> Completion:
        ids = [token for token in rollout.text_and_path.text[row].tolist() if token != NONE]
        ended = bool(ids) and ids[-1] in self.model.stops
        score = float(rollout.logprob[row, : self.width].sum() / max(len(ids), 1))
        return Completion(self.model.text(ids), len(ids), ended, score)

    def export(self, folder: Path) -> None:
        """Write what the code's own ``save_pretrained`` writes; without one ``model.safetensors``,
        the state dict of what ``code`` builds, adapters added to its weights."""
        local_code.save(self.model, folder)


def _placed(pictures: Rollout, places: Tensor, rows: int) -> Rollout:
    """Spread pictures to their ``places`` among ``rows`` rows; the others have empty paths, without
    decisions."""

    def spread(tensor: Tensor) -> Tensor:
        blank = tensor.new_zeros(rows, *tensor.shape[1:])
        return blank.index_copy(0, places.to(tensor.device), tensor[: len(places)])

    latents: LatentPath = pictures.latents.map(spread)
    every = pictures.map(spread).replace(trajectory=latents)
    # all rows have the times of the sampler, and its key
    names = ("time", "noise_level", "visit", "stream")
    known = {name: getattr(pictures.latents, name) for name in names}
    same = {n: value[0].expand(rows, -1) for n, value in known.items() if value is not None}
    return every.replace(trajectory=latents.replace(**same))
