"""Samples and scores autoregressive image policies: tokens drawn block by block, scored together in
one teacher-forced pass.

A family defines how prompts are encoded and images decoded, and provides a network (``ImageNet``).
Guidance, temperature, top-k, top-p, chunks and randomness are here, once, and the same in sampling
and in the score.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mmrl.core.distributions import Dist, drawn
from mmrl.core.effects import FREE_AT_RESUME
from mmrl.core.errors import UserError
from mmrl.core.host import on_host, sent
from mmrl.core.numbers import Count
from mmrl.core.sharding import sharded
from mmrl.core.types import Copies, Media, Point, Prompt, Rollout, TokenOrder
from mmrl.policies.base import (
    NO_CONTEXT,
    LogprobGuidance,
    RolloutContext,
    rows_and_groups,
    warn_of_mismatch,
)
from mmrl.policies.contracts import Compiles, EncodesMedia, Exports, Guided, NamesSpaces
from mmrl.policies.demonstrations import encoded, placed_rows, sourced
from mmrl.policies.draft_verification import FREE, SHARDED
from mmrl.policies.image_tokens.attention import Kernel, available
from mmrl.policies.image_tokens.network import ImageNet, Inputs, beside, spans, stacked
from mmrl.policies.image_tokens.speculation import speculate
from mmrl.policies.scores import recorded
from mmrl.policies.tokens import AnswerTokens, TokenPolicy, somewhere
from samplers.batching import at_width, chunks
from samplers.noise import Rng
from samplers.warp import Anneal, Warp


class ImageTokenPolicy(TokenPolicy, Guided, NamesSpaces, Compiles, Exports):
    """Samples images as tokens, block by block, and scores all of them in one teacher-forced pass.

    temperature, top_k, top_p: of sampling and of scoring, applied to guided logits. anneal: factor
    of the temperature, falling from block to block (EAD). adaptive_temperature: largest relative
    increase for decisions of high entropy, and decrease for those of low entropy (HAPO).
    guidance_scale: scale s of classifier-free guidance, z = z_u + s (z_c - z_u); 1 is none.
    logprob_guidance: what is scored; "guided" is what was sampled, "guided_stopgrad_uncond" the
    same without gradient through the unconditional logits, "conditional" leaves guidance out of the
    score (a mismatch most codes publish). attention: the kernel; auto is torch's own choice.
    compile: the pass for one token as one graph (torch.compile), whose shapes never change, for
    GPUs; a text is the name of its backend.
    """

    capabilities = replace(TokenPolicy.capabilities, makes="image", drafts=True)
    keep_groups_together = True
    net: ImageNet

    def __init__(
        self,
        net: ImageNet,
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_k: Count | None = None,
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0,
        anneal: Anneal | None = None,
        adaptive_temperature: Annotated[float, Ge(0), Lt(1)] = 0.0,
        guidance_scale: float = 5.0,
        logprob_guidance: LogprobGuidance = "guided",
        attention: Kernel = "auto",
        compile: Annotated[bool | str, FREE_AT_RESUME] = False,
        **options: Any,
    ):
        super().__init__(net, **options)
        self.warp = Warp(temperature, top_k, top_p, adaptive=adaptive_temperature)
        self.anneal = anneal
        self.guidance_scale = guidance_scale
        self.logprob_guidance = logprob_guidance
        net.stopgrad = logprob_guidance == "guided_stopgrad_uncond"
        net.kernel = available(attention)
        if compile:
            net.compile_token("inductor" if compile is True else compile)
            self.compiled = True
        warn_of_mismatch(logprob_guidance, guidance_scale)

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> list[Inputs]:
        """Encode the condition of every prompt, tensors [1, *] on the device."""

    @abstractmethod
    def empty(self, inputs: Inputs) -> Inputs:
        """Make the unconditional inputs [P, *] that belong to collated ones."""

    @abstractmethod
    def pixels(self, ids: Tensor) -> Tensor:
        """Decode token ids [B, T] to [B, 3, H, W] in -1..1."""

    def collate(self, cond: list[Inputs]) -> Inputs:
        """Join conditions to one batch [P, *]."""
        return {name: torch.cat([prompt[name] for prompt in cond]) for name in cond[0]}

    def scales(self, guidance: float) -> Tensor:
        """List the guidance scale of every decision, [T]."""
        return torch.full((sum(self.net.turns),), guidance)

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        if self.compiled and sharded(self.net):
            raise UserError(
                "policy option compile: weights that processes share are gathered layer by layer, "
                "which a graph of all layers does not do; leave it out, or the sharding"
            )
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        if self.anneal is not None:
            heats = self.anneal.temperatures(len(self.net.turns), context.iteration)
            every = (heat for heat, n in zip(heats, self.net.turns, strict=True) for _ in range(n))
            self.warp = replace(self.warp, schedule=tuple(every))
        cond = self.encode(prompts)
        # single-token passes allocate the same: two show the peak of all
        few = 2 if self.net.token else None
        size = self.pass_sizes.to_sample(
            len(row), lambda n: self._draw(cond, group[:n], row[:n], Rng.of("try"), few)
        )
        drafts = context.drafts(prompts, copies) if context.drafts else None
        if drafts is None:
            parts = [
                (self._draw(cond, group[p], row[p], rng), counts)
                for p, counts in self.pass_sizes.chunks(len(row), size)
            ]
            rollout = Rollout.cat([part for part, counts in parts if counts]).replace(
                prompts=tuple(prompts)
            )
            return self.with_divergence(rollout, size)
        if sharded(self.net):
            raise UserError(SHARDED)
        rollout, counts = speculate(self, cond, group, row, rng, drafts, size)
        drafts.accepted.append(torch.stack([counts, drafts.mask.sum(1)], 1).cpu())
        return self.with_divergence(rollout.replace(prompts=tuple(prompts)), size)

    @torch.no_grad()
    def _draw(
        self,
        cond: list[Inputs],
        group: Tensor,
        row: Tensor,
        rng: Rng,
        passes: int | None = None,
    ) -> Rollout:
        """Sample the rows of ``group`` [B], in all ``passes`` or in the first alone; a prompt is
        read once for all its rows."""
        net = self.net
        hidden, state = self.read(cond, group)
        self.report.forwards += len(hidden) * len(net.turns)
        uniform = rng.uniform(row, (sum(net.turns),))
        scale = sent(self.scales(self.guidance_scale), row.device)
        ids: list[Tensor] = []
        logprob: list[Tensor] = []
        values: list[Tensor] = []
        for block in list(spans(net.turns))[:passes]:
            if ids:
                hidden = net("step", ids[-1], state)
            token, score, value = self.draw_block(hidden, scale[block], uniform[:, block], block)
            ids.append(token)
            logprob.append(score)
            values.append(value)
        tokens = torch.cat(ids, 1)
        order = self.blocks_of(tokens)
        rollout = Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=tokens,
            logprob=torch.cat(logprob, 1),
            mask=self.decided(tokens),
            trajectory=TokenOrder(commit_step=order.expand_as(tokens)),
        )
        return self.with_recorded(rollout, torch.cat(values, 1))

    def read(self, cond: list[Inputs], group: Tensor) -> tuple[Tensor, Any]:
        """Read the prompts of ``group`` [B], each once: returns the hidden states after them, with
        guidance [2B, *], the unconditional rows last, and the state to continue from."""
        unique, rows = group.unique(return_inverse=True)
        inputs = self.collate([cond[i] for i in unique.tolist()])
        if self.guidance_scale != 1:
            inputs = stacked(inputs, self.empty(inputs))
            rows = torch.cat([rows, rows + len(unique)])
        hidden, state = self.net("begin", inputs, rows)
        return hidden, state

    def draw_block(
        self,
        hidden: Tensor,
        scale: Tensor,
        uniform: Tensor,
        block: slice,
        forced: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the tokens [B, n] of a ``block`` from hidden states [B, n, H], with guidance [2B, n,
        H]; ``scale`` [n], ``uniform`` [B, n]. ``forced`` [B, n]: given tokens. Returns the same as
        ``_decide``."""
        guided = self.guidance_scale != 1
        cond, *empty = hidden.chunk(2) if guided else (hidden,)
        features = beside(cond, empty[0], scale) if empty else cond
        conditional = guided and self.logprob_guidance == "conditional"
        plain = hidden[: len(uniform)] if conditional else None
        token, score, value = self._decide(features, plain, uniform, block.start)
        if forced is None:
            return token, score, value
        known = torch.where(forced == FREE, token, forced)
        logits = self.net("logits", features if plain is None else plain)
        warped = self.warp(logits, keep=known, place=block.start)
        exact = warped.log_softmax(-1).gather(-1, known[..., None])[..., 0].to(score)
        return known, torch.where(forced == FREE, score, exact), value

    def blocks_of(self, ids: Tensor) -> Tensor:
        """Number the block of each of the tokens ids [B, T], [T]."""
        turns = torch.tensor(self.net.turns)
        order = torch.arange(len(turns)).repeat_interleave(turns)
        return order[: ids.shape[1]].to(ids.device)

    def decided(self, ids: Tensor) -> Tensor:
        """Mark which tokens of ids [B, T] are decisions; in some families a few tokens are not."""
        return torch.ones_like(ids, dtype=torch.bool)

    def _decide(
        self, features: Tensor, plain: Tensor | None, uniform: Tensor, place: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens [B, n] by inversion at ``uniform`` [B, n], with the log-probs that are
        recorded, those at the ``plain`` features where guidance is left out of the score, and the
        ``quantities`` [B, n, R] of the distributions drawn from. ``place``: of the first token."""
        logits = self.net("logits", features)
        warped = self.warp(logits, place=place)
        values = recorded(self.quantities, logits, warped)
        drawn_ids, score = drawn(warped, uniform[..., None])
        token = drawn_ids[..., 0]
        if plain is None:
            return token, score[..., 0].to(self.dtype), values
        logits = self.warp(self.net("logits", plain), keep=token, place=place)
        score = logits.gather(-1, drawn_ids)[..., 0] - logits.logsumexp(-1)
        return token, score.to(self.dtype), values

    def spaces(self) -> dict[str, Any]:
        return {"vocabulary": {"codes": self.net.vocab, "turns": list(self.net.turns)}}

    def dist(self, point: Point) -> Dist:
        where = somewhere(point.mask)
        scale = self.scored_guidance(point)
        inputs = self.collate([point.cond[i] for i in on_host(point.group).tolist()])
        empty = None if scale == 1 else self.empty(inputs)
        self.report.forwards += len(where) * (1 if empty is None else 2)
        hidden, scored = self.active()(
            "score",
            inputs,
            empty,
            point.target,
            where,
            sent(self.scales(scale), where.device),
            self.warp,
            self.entropies,
        )
        return AnswerTokens(self, point, where, hidden, scored)

    def decode(self, rollout: Rollout) -> Media:
        return torch.cat(self.images_of(rollout.sample, len(rollout)))

    @torch.no_grad()
    def images_of(self, ids: Tensor, rows: int) -> list[Tensor]:
        """Decode token ids [B, T] to images [b, 3, H, W] in 0..1, in passes of the width that
        ``rows`` rows have."""
        size = self.pass_sizes.rows or rows
        parts = [at_width(self.pixels, size, ids[part]) for part in chunks(len(ids), size)]
        return [(part.float() / 2 + 0.5).clamp(0, 1) for part in parts]


class EncodedImagePolicy(ImageTokenPolicy, EncodesMedia):
    """Samples images as tokens, and encodes external images to tokens."""

    @torch.no_grad()
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        row, group = rows_and_groups(prompts, 1, rng, self.device)
        samples, present = encoded(self, answers)
        blank = torch.zeros(len(row), sum(self.net.turns), dtype=torch.long, device=self.device)
        ids = placed_rows(samples, present, blank)
        rollout = Rollout(
            group=group,
            cond=self.encode(prompts),
            row_id=row,
            sample=ids,
            logprob=torch.zeros(ids.shape, dtype=self.dtype, device=ids.device),
            mask=self.decided(ids) & present[:, None],
            trajectory=TokenOrder(commit_step=self.blocks_of(ids).expand_as(ids)),
            prompts=tuple(prompts),
        )
        rollout = self.with_unknown(sourced(rollout, present))
        return self.scored(rollout) if score else rollout

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        return self.ids_of(2 * media - 1)

    @abstractmethod
    def ids_of(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] in -1..1 to token ids [B, T]: the inverse of ``pixels``."""
