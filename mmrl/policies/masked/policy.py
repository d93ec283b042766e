"""Samples and scores masked discrete diffusion: all tokens start masked; every pass draws the
masked ones and keeps some of them.

Three samplers. ``emerge`` reveals each hidden position independently of the model, so that the
reveal order alone makes the likelihood of a trajectory exact. ``maskgit`` keeps the most confident
tokens; the exact likelihood needs all tokens drawn in every pass and the Plackett-Luce probability
of the choice. ``threshold`` keeps tokens drawn with a probability above a threshold: the choice
follows from the draws, so the decisions are exactly all draws of every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from mmrl.core.distributions import drawn
from mmrl.core.errors import UserError
from mmrl.core.host import indices, on_host, remember, selected
from mmrl.core.numbers import Steps
from mmrl.core.sharding import sharded
from mmrl.core.types import (
    Copies,
    MaskChoice,
    MaskPass,
    MaskTrace,
    Point,
    Prompt,
    Query,
    Rollout,
    TokenOrder,
)
from mmrl.policies.base import (
    NO_CONTEXT,
    LogprobGuidance,
    RolloutContext,
    first_of_group,
    rows_of,
    warn_of_mismatch,
    without_empty,
)
from mmrl.policies.contracts import Guided, NamesSpaces, Remasks
from mmrl.policies.diffusion.flow_passes import stacked
from mmrl.policies.masked.hidden_tokens import Hidden as Hidden
from mmrl.policies.masked.hidden_tokens import chosen
from mmrl.policies.scores import recorded
from mmrl.policies.tokens import LogitsPolicy, somewhere
from samplers import unmask
from samplers.noise import Rng
from samplers.warp import Anneal

SCHEDULES = {"cosine": unmask.cosine, "linear": unmask.linear}


class MaskedDiffusion(LogitsPolicy, Guided, Remasks, NamesSpaces):
    """Reveals tokens pass by pass, as masked diffusion models do.

    steps: passes per sample. sampler: emerge, maskgit or threshold. threshold: probability of a
    drawn token above which the sampler of that name keeps it; every pass keeps at least an even
    share of the tokens. schedule: share of masked tokens over the passes. guidance_scale: scale w
    of classifier-free guidance on the logits, z_u + w (z_c - z_u). logprob_guidance: what is
    scored, see FlowPolicy. temperature: of the tokens. choice: temperature of the Gumbel noise of
    maskgit's choice, at the first and the last pass. confidence: by which maskgit and threshold
    choose, the probability at the sampling temperature (tempered) or at temperature 1 (untempered).
    anneal: factor of the temperature, falling from pass to pass (EAD).
    """

    # the rows of a group see different tokens in a pass
    not_options: tuple[str, ...] = (*LogitsPolicy.not_options, "blocks", "record_divergence")
    capabilities = replace(LogitsPolicy.capabilities, one_pass=False)
    keep_groups_together = True

    def __init__(
        self,
        net: nn.Module,
        length: int,
        mask_id: int,
        steps: Steps = 12,
        sampler: Literal["emerge", "maskgit", "threshold"] = "emerge",
        schedule: Literal["cosine", "linear"] = "cosine",
        guidance_scale: Annotated[float, Ge(0)] = 1.0,
        logprob_guidance: LogprobGuidance = "guided",
        temperature: Annotated[float, Gt(0)] = 1.0,
        choice: tuple[float, float] = (2.0, 0.0),
        confidence: Literal["tempered", "untempered"] = "tempered",
        anneal: Anneal | None = None,
        threshold: Annotated[float, Gt(0), Le(1)] = 0.95,
        blocks: int = 1,
        **options: Any,
    ):
        """Divide the sample into ``blocks`` equal parts, completed one after the other, with
        ``steps / blocks`` passes each."""
        super().__init__(net, length, mask_id, **options)
        self.passes = steps
        self.turns = steps // blocks  # T passes a block
        self.block = length // blocks  # tokens
        self.rates = SCHEDULES[schedule](self.turns)  # [T + 1]
        self.left = unmask.left_hidden(self.block, self.rates)
        self.noises = torch.linspace(*choice, self.turns).tolist()  # [T]
        self.sampler = sampler
        self.threshold = threshold
        self.least = unmask.evenly(self.block, self.turns)  # tokens kept in a pass (threshold)
        self.chooses = sampler != "emerge"  # chooses by its draws, which are all recorded
        self.noisy = sampler == "maskgit"
        if self.noisy and self.turns > 1 and min(self.noises[:-1]) <= 0:
            raise UserError(
                f"policy option choice must be above 0 before the last pass, not {tuple(choice)}"
            )
        warn_of_mismatch(logprob_guidance, guidance_scale)
        self.guidance_scale = guidance_scale
        self.logprob_guidance = logprob_guidance
        self.temperature = temperature
        self.untempered_choice = confidence == "untempered"
        self.anneal = anneal
        self.heats: tuple[float, ...] = ()  # of every pass; (): 1

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        if self.anneal is not None:
            self.heats = self.anneal.temperatures(self.passes, context.iteration)
        return super().rollout(prompts, copies, rng, context)

    def _sample(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng) -> Rollout:
        ids = torch.full((len(row), self.length), self.mask_id, device=row.device)
        order = torch.full_like(ids, self.passes)
        turn = self.block_of(cond, group) * self.turns  # [1 or B, L] the first pass of its block
        copies = alike(group)
        steps: list[tuple[Tensor, ...]] = []
        for step in range(self.passes):
            hidden = (order == self.passes) & (turn <= step) & (step < turn + self.turns)
            if steps and self._idle(hidden):  # every row of this block is already complete
                steps.append(_nothing(steps[-1], hidden))
                continue
            point = Query(
                group=group,
                cond=cond,
                row_id=row,
                state=ids,
                mask=hidden,
                step=self._heated(step, len(row)),
            )
            uniform = rng.uniform(row, (self.length,), 2 * step)
            draw, scored, sure, choice, values = self._drawn(point, uniform, 1 if step else copies)
            rank = self._reveal(step, sure, hidden, rng.uniform(row, (self.length,), 2 * step + 1))
            new = hidden & ((rank < self.length) | ((step + 1) % self.turns == 0))
            if self.noisy:
                scored = chosen(scored, choice, self._noise(step, len(row)).to(scored), rank)
            steps.append((torch.stack([draw, rank], -1), scored, hidden, new, values))
            ids = torch.where(new, draw, ids)
            order = torch.where(new, step, order)
        return self._rollout(
            Rollout(
                group=group,
                cond=cond,
                row_id=row,
                sample=ids,
                trajectory=TokenOrder(commit_step=order),
                logprob=torch.zeros(ids.shape, device=ids.device),
                mask=torch.ones_like(ids, dtype=torch.bool),
            ),
            steps,
        )

    def _idle(self, hidden: Tensor) -> bool:
        """Tell whether a pass would draw nothing on any process, where all make the same passes."""
        if self.sampler != "threshold":
            return False
        working = bool(hidden.any())
        if sharded(self.net):
            working = self.any_process(working)
        return not working

    def _drawn(
        self, point: Query, uniform: Tensor, copies: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Draw tokens [B, L] where the point's mask is, with the log-probs recorded, the logs of
        their confidences in sampling and as recorded (the same unless ``logprob_guidance`` is
        conditional), and the ``quantities`` [B, L, R] of the distributions drawn from. ``copies``
        adjacent rows share one state, which the network sees once."""
        distinct = point if copies == 1 else point[::copies]
        remember(distinct.group, on_host(point.group)[::copies])
        each = selected(
            uniform.unflatten(0, (-1, copies)).transpose(1, 2), distinct.mask
        )  # [N, copies]
        logits = self._logits(distinct, self.guidance_scale)
        token, _ = drawn(logits, each)
        scored = _gathered(logits, token)  # computed as in scoring, bit-equal
        choice = sure = self._confidence(distinct, logits, token, scored)
        if self.logprob_guidance == "conditional" and self.guidance_scale != 1:
            plain = self._logits(distinct, 1.0)
            scored = _gathered(plain, token)
            choice = self._confidence(distinct, plain, token, scored)
        results = []
        for values in (token, scored, sure, choice):
            every = values.new_zeros(distinct.mask.numel(), copies).index_copy(
                0, indices(distinct.mask), values
            )
            results.append(
                every.view(*distinct.mask.shape, copies).transpose(1, 2).reshape(uniform.shape)
            )
        values = logits.new_zeros(len(logits), 0)
        if self.quantities:
            plain = logits * self.temperature * self._heat(distinct)
            values = recorded(self.quantities, plain, logits)
        at_places = values.new_zeros(distinct.mask.numel(), values.shape[-1]).index_copy(
            0, indices(distinct.mask), values
        )
        every = at_places.view(*distinct.mask.shape, -1).repeat_interleave(copies, 0)
        return results[0], results[1], results[2], results[3], every

    def _confidence(self, point: Query, logits: Tensor, token: Tensor, scored: Tensor) -> Tensor:
        """Return the logs of confidences [N, n] in tokens, ``scored`` under ``logits`` [N, V]."""
        heat = self._confidence_heat(point)
        if not isinstance(heat, Tensor) and heat == 1:
            return scored
        return _gathered(logits * heat, token)

    def _confidence_heat(self, point: Query) -> Tensor | float:
        """Return the factor of tempered logits for confidences, [N, 1] or 1."""
        return self.temperature * self._heat(point) if self.untempered_choice else 1.0

    def _reveal(self, step: int, confidence: Tensor, hidden: Tensor, uniform: Tensor) -> Tensor:
        """Rank the tokens kept in this pass, [B, L], numbered as in ``samplers.unmask.ranked``."""
        turn = step % self.turns
        if not self.chooses:
            new = unmask.emerge(uniform, hidden, self.rates, turn)
            return torch.where(new, 0, self.length + ~hidden)
        if not self.noisy:
            new = unmask.sure(confidence.exp(), hidden, self.threshold, self.least[turn])
            return torch.where(new, 0, self.length + ~hidden)
        # the last pass chooses nothing
        count = self.left[turn] - self.left[turn + 1] if turn < self.turns - 1 else 0
        return unmask.ranked(confidence, uniform, self.noises[turn], hidden, count)

    def block_of(self, cond: dict[str, Any], rows: Tensor) -> Tensor:
        return (torch.arange(self.length, device=rows.device) // self.block)[None]

    def _noise(self, step: int, rows: int) -> Tensor:
        """Return the noise [B, 1] of the choice in this pass; arbitrary where nothing is chosen."""
        return torch.full((rows, 1), self.noises[step % self.turns] or 1.0, device=self.device)

    def _rollout(self, rollout: Rollout, steps: list[tuple[Tensor, ...]]) -> Rollout:
        """Assemble the rollout of all passes. emerge: K = L decisions, one a token. maskgit and
        threshold: K = T L, all tokens drawn in every pass."""
        decision, logprob, hidden, new, values = (
            torch.stack(part, 1) for part in zip(*steps, strict=True)
        )
        if self.chooses:
            trace = MaskTrace(commit_step=rollout.tokens.commit_step, proposals=decision)
            drawn_twice = rollout.replace(
                logprob=logprob.flatten(1), mask=hidden.flatten(1), trajectory=trace
            )
            return self.with_recorded(drawn_twice, values.flatten(1, 2))
        once = rollout.replace(
            logprob=torch.where(new, logprob, 0.0).sum(1), mask=torch.ones_like(rollout.mask)
        )
        return self.with_recorded(once, torch.where(new[..., None], values, 0.0).sum(1))

    def path(self, rollout: Rollout) -> Iterator[Point]:
        for step in range(self.passes):
            if not self.chooses:
                yield self._pass_of(rollout, step)
                continue
            part = slice(step * self.length, (step + 1) * self.length)
            of_pass = partial(_columns, part=part)
            yield Point(
                group=rollout.group,
                cond=rollout.cond,
                row_id=rollout.row_id,
                num_decisions=rollout.mask.sum(1),
                state=torch.where(rollout.tokens.commit_step >= step, self.mask_id, rollout.sample),
                mask=rollout.mask[:, part],
                target=self._decided(rollout.passes.proposals[:, step]),
                logprob=rollout.logprob[:, part],
                entropy=None if rollout.entropy is None else rollout.entropy[:, part],
                step=self._choice(step, rollout),
                advantage=of_pass(rollout.advantages()),
                advantage_parts=rollout.parts(of_pass),
                provenance=rollout.provenance.columns(part),
            )

    def _decided(self, proposals: Tensor) -> Tensor:
        """Return a pass's decisions, of proposals [B, L, 2]: tokens; with noise also their
        ranks."""
        return proposals if self.noisy else proposals[..., 0]

    def _choice(self, step: int, rollout: Rollout) -> MaskPass:
        heated = self._heated(step, len(rollout))
        if not self.noisy:
            return heated
        noise = self._noise(step, len(rollout)).to(rollout.logprob)[:, 0]
        return MaskChoice(temperature=noise, heat=heated.heat)

    def _pass_of(self, rollout: Rollout, step: int) -> Point:
        """Make the point before pass ``step``, scored at the tokens that this pass committed."""
        (point,) = super().path(rollout)
        hide = rollout.tokens.commit_step >= step
        return point.replace(
            mask=rollout.mask & (rollout.tokens.commit_step == step),
            step=self._heated(step, len(rollout)),
            state=torch.where(hide, self.mask_id, rollout.sample),
        )

    def at(self, rollout: Rollout, hide: Tensor, score: Tensor | None = None) -> Point:
        """Mask ``hide`` [B, L] of the final tokens again, scored at ``score`` (None: the masked
        ones)."""
        mask = (hide if score is None else score) & rollout.mask.any(1)[:, None]
        if rollout.mask.shape == mask.shape:
            mask = mask & rollout.mask
        columns = rollout.advantages().shape[1]
        last = slice(0 if columns in (1, self.length) else -1, None)
        return Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            target=rollout.sample,
            mask=mask,
            state=torch.where(hide, self.mask_id, rollout.sample),
            num_decisions=mask.sum(1),
            advantage=rollout.advantages()[:, last],
            advantage_parts=rollout.parts(lambda x: x[:, last]),
            provenance=rollout.provenance.replace(sampler_logprob=None),
        )

    def order_of(self, row: Tensor, block: Tensor, rng: Rng, score: bool) -> Tensor:
        """Draw the passes in which the schedule reveals the tokens, independently of the model."""
        order = torch.full((len(row), self.length), self.passes, device=row.device)
        if self.chooses:
            if score:
                raise UserError(
                    f"policy option sampler {self.sampler}: it chooses by its own draws, of which "
                    "an answer of others has none; use emerge"
                )
            return torch.zeros_like(order)
        for step in range(self.passes):
            hidden = (order == self.passes) & (block == step // self.turns)
            rank = self._reveal(
                step, hidden, hidden, rng.uniform(row, (self.length,), 2 * step + 1)
            )
            new = hidden & ((rank < self.length) | ((step + 1) % self.turns == 0))
            order = torch.where(new, step, order)
        return order

    @contextmanager
    def untempered(self) -> Iterator[None]:
        before = self.temperature
        self.temperature = 1.0
        try:
            with super().untempered():
                yield
        finally:
            self.temperature = before

    def renoise(
        self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False
    ) -> Iterator[Point]:
        name = first_of_group(rollout) if shared else rollout.row_id
        rate = rng.uniform(name, (1,), step=0) if time is None else time[:, None]
        draw = rng.uniform(name, (self.length,), step=1)
        # mask at least one token
        yield self.at(rollout, hide=(draw < rate) | (draw == draw.amin(1, keepdim=True)))

    def spaces(self) -> dict[str, Any]:
        return {"vocabulary": {"tokens": self.length, "hidden": self.mask_id}}

    def dist(self, point: Point) -> Hidden:
        where = somewhere(point.mask)
        logits = self._logits(point.replace(mask=where), self.scored_guidance(point))
        choice = point.step
        if not isinstance(choice, MaskChoice):
            return Hidden(logits, where)
        heat = self._confidence_heat(point.replace(mask=where))
        return Hidden(logits, where, choice.temperature[:, None], heat)

    def _heated(self, step: int, rows: int) -> MaskPass:
        """Describe a pass by its temperature factor."""
        if not self.heats:
            return MaskPass()
        heat = torch.full((rows,), self.heats[step], dtype=self.dtype, device=self.device)
        return MaskPass(heat=heat)

    def _heat(self, point: Query) -> Tensor | float:
        """Return the factor of the temperature, [N, 1], where the point's mask is."""
        if not isinstance(point.step, MaskPass) or point.step.heat is None:
            return 1.0
        return selected(point.step.heat[:, None].expand_as(point.mask), point.mask)[:, None]

    def _logits(self, point: Query, scale: float) -> Tensor:
        """Compute guided logits [N, V] at all temperatures where the point's mask is."""
        logits = self._guided(point, scale)
        heat = self._heat(point)
        return logits / heat if isinstance(heat, Tensor) else logits

    def _guided(self, point: Query, scale: float) -> Tensor:
        """Compute guided logits [N, V] where the point's mask is; conditional and unconditional
        rows in one pass unless the latter need no gradient."""
        ids = point.state
        rows = point.group
        cond = without_empty(point.cond)
        if scale == 1:
            return self._warped(self._pass(ids, cond, rows, point.mask))
        empty = self.empty(point)
        empty_rows = torch.zeros_like(rows)
        empty_rows = rows if _rows(empty) == _rows(cond) else empty_rows
        if self.logprob_guidance == "guided_stopgrad_uncond":
            with torch.no_grad():
                z_empty = self._pass(ids, empty, empty_rows, point.mask)
            z = self._pass(ids, cond, rows, point.mask)
            return self._warped(z_empty + scale * (z - z_empty))
        stacked_cond = stacked(cond, empty)
        places = torch.cat([rows, empty_rows + _rows(cond)])
        known = on_host(rows)
        remember(
            places,
            torch.cat(
                [known, (known if empty_rows is rows else torch.zeros_like(known)) + _rows(cond)]
            ),
        )
        return self._warped(
            self._pass(torch.cat([ids, ids]), stacked_cond, places, point.mask, scale)
        )

    def empty(self, point: Query) -> Any:
        """Look up the unconditional condition, [1, *], or one per prompt [P, *]."""
        return point.cond["uncond"]

    def _pass(
        self, ids: Tensor, cond: Any, rows: Tensor, where: Tensor, scale: float | None = None
    ) -> Tensor:
        self.report.forwards += len(ids)
        return self.places(ids, cond, rows, where, scale).to(self.dtype)

    def places(
        self, ids: Tensor, cond: Any, rows: Tensor, where: Tensor, scale: float | None
    ) -> Tensor:
        """Compute logits [N, V] at ``where`` [B, L] of ids [B, L], whose conditions are the
        ``rows`` [B] of cond [P, *].

        With a ``scale`` ids have twice as many rows, the second half unconditional, and logits are
        guided. A family may override this by something faster than ``logits``.
        """
        z = self.logits(ids, rows_of(cond, rows)).to(self.dtype)
        if scale is None:
            return selected(z, where)
        z, z_empty = (selected(half, where) for half in z.chunk(2))
        return z_empty + scale * (z - z_empty)

    def _trial(self, ids: Tensor, cond: dict[str, Any], group: Tensor) -> None:
        self._logits(
            Query(group=group, cond=cond, row_id=group, state=ids, mask=ids == ids),
            self.guidance_scale,
        )

    def _warped(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1 else logits / self.temperature


def _nothing(step: tuple[Tensor, ...], hidden: Tensor) -> tuple[Tensor, ...]:
    """Record a pass in which nothing is masked, shaped like the record of another."""
    decision, scored, _, _, values = step
    return (
        torch.zeros_like(decision),
        torch.zeros_like(scored),
        hidden,
        hidden,
        torch.zeros_like(values),
    )


def alike(group: Tensor) -> int:
    """Count the adjacent rows per prompt, if equal for all prompts; else 1."""
    group = on_host(group)
    size = int((group == group[0]).sum())
    same = len(group) % size == 0 and torch.equal(group, group[::size].repeat_interleave(size))
    return size if same else 1


def _rows(cond: Any) -> int:
    """Count the rows of a nest of conditions."""
    return len(next(leaf for leaf in tree_iter(cond) if isinstance(leaf, Tensor)))


def _columns(x: Tensor, part: slice) -> Tensor:
    """Take these decisions of x, [B, 1 or K, *]."""
    return x if x.shape[1] == 1 else x[:, part]


def _gathered(logits: Tensor, token: Tensor) -> Tensor:
    """Gather log-probs of tokens [N, n] under logits [N, V]."""
    return logits.log_softmax(-1).gather(-1, token)
