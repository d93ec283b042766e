"""Samples for a unified policy: plans and their images, answers, each kind of prompt in separate
passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.sharding import in_step, sharded
from mmrl.core.types import Copies, Prompt, Rollout, TokenOrder, per_prompt
from mmrl.policies.base import NO_CONTEXT, RolloutContext, rows_and_groups
from mmrl.policies.demonstrations import encoded, placed_rows, sourced
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.vlm.media import where
from mmrl.policies.vlm.processor import Inputs as Reader
from mmrl.zoo.models.image_tokens.janus import Janus
from mmrl.zoo.models.unified import sequences
from mmrl.zoo.models.unified.draw import NONE, paint, write
from mmrl.zoo.models.unified.net import State, UnifiedNet, together
from mmrl.zoo.models.unified.prompts import Answer, Plan, drawn, task_of
from mmrl.zoo.models.unified.sequences import Cond
from mmrl.zoo.models.unified.tasks import check_shards, drawing, in_places
from mmrl.zoo.models.unified.tokens import Head
from samplers.batching import chunks
from samplers.noise import Rng

Sample = Callable[[Tensor, Tensor, Rng], Rollout]
Parts = tuple[Tensor, Tensor]  # of the text [B, W] and of the image [B, N]


class Passes(Janus):
    """Turns prompts of both tasks into rollouts. A row is W text ids and N image ids, ``NONE``
    where there is none."""

    wrapper = UnifiedNet
    net: UnifiedNet
    plan: Plan | None
    answer: Answer | None
    reader: Reader  # of prompts to understand
    heads: dict[str, Head]  # image, and plan and answer if configured
    stops: dict[str, tuple[int, ...]]
    tokens: int  # W
    images: int  # N
    lengths: list[float]  # of texts, since this was last measured

    @property
    def branches(self) -> int:
        """Return the number of images of a plan."""
        return self.plan.images if self.plan else 1

    def encode(self, prompts: list[Prompt]) -> Cond:
        return [self._encoded(prompt)[0] for prompt in prompts]

    def recall(self, prompts: list[Prompt]) -> tuple[Cond, list[Prompt]]:
        encoded = [self._encoded(prompt) for prompt in prompts]
        return [cond for cond, _ in encoded], [prompt for _, prompt in encoded]

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        encoded_prompts = [self._encoded(prompt) for prompt in prompts]
        cond = [encoded for encoded, _ in encoded_prompts]
        least = self.branches
        for size in per_prompt(copies, 1):
            if size % least:
                raise UserError(
                    f"train.group_size {size}: with {least} images of a plan it must be a "
                    f"multiple of {least}"
                )
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        answers = torch.tensor(["answers" in prompt for prompt in cond], device=self.device)[group]
        check_shards(self.net, bool(answers.any()), not bool(answers.all()), self.device)
        samples = []
        places = []
        for rows_of_task, sample, unit in (
            (~answers, self._paint, least),
            (answers, self._answer, 1),
        ):
            rows = rows_of_task.nonzero()[:, 0]
            parts = self._chunks(rows, unit, partial(sample, cond), group, row)
            # of one kind alone, see ``check_shards``
            waits = sharded(self.net) and bool(rows_of_task.any())
            for part, counts in in_step(parts, torch.arange(unit), self.device, waits):
                rows_of_part = sample(cond, group[part], row[part], rng)
                if counts:
                    samples.append(rows_of_part)
                    places.append(part)
        rollout = in_places(samples, places)
        return rollout.replace(prompts=tuple(prompt for _, prompt in encoded_prompts))

    def _chunks(
        self,
        rows: Tensor,
        unit: int,
        sample: Callable[[Tensor, Tensor, Rng], Rollout],
        group: Tensor,
        row: Tensor,
    ) -> list[Tensor]:
        """Cut ``rows`` into parts that are sampled at once, of whole trees of ``unit`` rows."""
        if not len(rows):
            return []
        size = self.pass_sizes.to_sample(
            len(rows), lambda n: sample(group[rows[:n]], row[rows[:n]], Rng.of("try"))
        )
        return [rows[part] for part in chunks(len(rows), max(unit, size // unit * unit))]

    def _encoded(self, prompt: Prompt) -> tuple[dict[str, Any], Prompt]:
        """Encode a prompt to tensors [1, *] on the device, and to what rewards see of it."""
        if task_of(prompt) == "generate":
            tensors = drawn(self.processor, texts_of([prompt])[0], self.plan)
            shown = prompt
        elif self.answer is None:
            raise UserError(
                f"{where(prompt)}: a prompt to understand; say with the policy's answer "
                f"how long answers are"
            )
        else:
            read, view = self.reader.take(prompt)
            tensors = {"ids": read["input_ids"], "answers": torch.ones(1)}
            shown = {**prompt, "view": view}
            if "pixel_values" in read:
                tensors["pixels"] = read["pixel_values"].flatten(0, -4)
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}, shown

    @torch.no_grad()
    def _answer(self, cond: Cond, group: Tensor, row: Tensor, rng: Rng) -> Rollout:
        """Write text for prompts to understand."""
        ids, logprob, values, _, _ = self._written("answer", cond, group, row, rng)
        blank = torch.full((len(row), self.images), NONE, device=row.device)
        nothing = torch.zeros_like(blank).to(logprob)
        rollout = self._as_rollout(cond, group, row, (ids, blank), (logprob, nothing))
        nothing = nothing[..., None].expand(-1, -1, values.shape[-1])
        return self.with_recorded(rollout, torch.cat([values, nothing], 1))

    @torch.no_grad()
    def _paint(self, cond: Cond, group: Tensor, row: Tensor, rng: Rng) -> Rollout:
        """Write a plan for every ``branches`` rows, and draw an image for each row."""
        first = torch.arange(0, len(row), self.branches, device=row.device)
        of = torch.arange(len(first), device=row.device).repeat_interleave(self.branches)[
            : len(row)
        ]
        text, logprob, values, state, hidden = self._written(
            "plan", cond, group[first], row[first], rng
        )
        if self.plan and self.plan.turn == "new":
            hidden, state = self.net("read", self._leading(cond, group[first], text), of)
        else:
            state.select(of)
            ones = torch.ones_like(row, dtype=torch.bool)
            hidden = self.net("add_text", torch.full_like(row, self.start), state, ones)
        scale = (
            None if self.guidance_scale == 1 else sent(self.scales(self.guidance_scale), row.device)
        )
        if scale is not None:
            without, empty = self._unconditional(self._leading(cond, group, text[of]))
            hidden = torch.cat([hidden, without])
            state = together(state, empty)
        state.whole = bool(state.mask.all())
        ids, score, drawn_values = paint(
            self.net, hidden, state, rng.uniform(row, (self.images,)), scale, self._decided
        )
        self.report.forwards += len(hidden) * self.images
        rollout = self._as_rollout(cond, group, row, (text[of], ids), (logprob[of], score))
        return self.with_recorded(rollout, torch.cat([values[of], drawn_values.to(values)], 1))

    def _decided(
        self, features: Tensor, plain: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        conditional = self.guidance_scale != 1 and self.logprob_guidance == "conditional"
        return self._decide(features, plain if conditional else None, uniform)

    def _written(
        self, kind: str, cond: Cond, group: Tensor, row: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Tensor, State, Tensor]:
        """Write text ids with log-probs [B, W] and quantities [B, W, R]; the state after them and
        the last hidden states [B, H] go with them."""
        unique, rows = group.unique(return_inverse=True)
        hidden, state = self.net("read", sequences.prompt_inputs(cond, unique, self.pad), rows)
        chosen = getattr(self, kind)
        ids = torch.full((len(row), self.tokens), NONE, device=row.device)
        logprob = torch.zeros(ids.shape, device=row.device, dtype=self.dtype)
        values = logprob.new_zeros(*ids.shape, len(self.quantities))
        if chosen is None:
            return ids, logprob, values, state, hidden
        uniform = rng.fold("text").uniform(row, (chosen.max_new_tokens,))
        stops = torch.tensor(self.stops[kind], device=row.device)
        busy = self.any_process if sharded(self.net) else None
        warp = self.heads[kind].warp
        tokens, score, value = write(
            self.net, hidden, state, uniform, warp, stops, self.quantities, busy
        )
        ids[:, : chosen.max_new_tokens] = tokens
        logprob[:, : chosen.max_new_tokens] = score.to(logprob)
        values[:, : chosen.max_new_tokens] = value.to(values)
        self.lengths += (tokens >= 0).sum(1).tolist()
        self.report.forwards += int((tokens >= 0).sum())
        return ids, logprob, values, state, hidden

    @torch.no_grad()
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        """Make a rollout of pictures, behind the plans that prompts hold under ``plan``, and of
        texts for prompts to understand."""
        pairs = [self._encoded(prompt) for prompt in prompts]
        row, group = rows_and_groups(prompts, 1, rng, self.device)
        draws = drawing(prompts)
        texts = [
            self._answer_tokens("plan", prompt.get("plan"))
            if is_drawn
            else self._answer_tokens("answer", answer)
            for prompt, answer, is_drawn in zip(prompts, answers, draws, strict=True)
        ]
        samples, painted = encoded(
            self, [answer if is_drawn else None for answer, is_drawn in zip(answers, draws)]
        )
        blank = torch.full((len(row), self.images), NONE, device=self.device)
        ids = torch.full((len(row), self.tokens), NONE)
        for text, tokens in zip(ids, texts, strict=True):
            text[: len(tokens or ())] = torch.tensor(tokens or (), dtype=torch.long)
        usable = torch.tensor([tokens is not None for tokens in texts])
        answered = ~torch.tensor(draws)
        present = sent(usable, self.device) & (painted | sent(answered, self.device))
        parts = (sent(ids, self.device), placed_rows(samples, painted, blank))
        zeros = [torch.zeros(part.shape, dtype=self.dtype, device=self.device) for part in parts]
        rollout = self._as_rollout(
            [cond for cond, _ in pairs], group, row, parts, (zeros[0], zeros[1])
        )
        rollout = rollout.replace(
            prompts=tuple(shown for _, shown in pairs), mask=rollout.mask & present[:, None]
        )
        rollout = self.with_unknown(sourced(rollout, present))
        return self.scored(rollout) if score else rollout

    def _answer_tokens(self, kind: str, text: str | None) -> list[int] | None:
        """Return the tokens of a plan or an answer, the end behind them; None where it is missing
        or too long. Without plans there is nothing to write."""
        chosen = getattr(self, kind)
        if chosen is None:
            return [] if kind == "plan" else None
        tokens = None if text is None else self.reader.tokens(text)
        return None if tokens is None or len(tokens) > chosen.max_new_tokens else tokens

    def _leading(self, cond: Cond, group: Tensor, text: Tensor) -> Inputs:
        return sequences.leading(cond, group, text, self.stops["plan"], self.start, self.pad)

    def _unconditional(self, inputs: Inputs) -> tuple[Tensor, State]:
        """Read texts in which all but the first token and the image's start is padding; equal ones
        are read once."""
        empty = self.empty(inputs)
        width = inputs["ids"].shape[1]
        unique, rows = torch.cat([empty["ids"], empty["mask"]], 1).unique(
            dim=0, return_inverse=True
        )
        hidden, state = self.net(
            "read", {"ids": unique[:, :width], "mask": unique[:, width:]}, rows
        )
        return hidden, state

    def _as_rollout(
        self, cond: Cond, group: Tensor, row: Tensor, ids: Parts, logprob: Parts
    ) -> Rollout:
        """Assemble a rollout; a plan that rows share is in the mask of the first one."""
        sample = torch.cat(ids, 1)
        mask = sample >= 0
        branch = None
        order = torch.arange(sample.shape[1], device=row.device).expand_as(sample)
        if self.branches > 1:
            draws = sample[:, -1] >= 0  # an answer shares its text with no other row
            shared = torch.where(draws, row - row % self.branches, row)
            mask[:, : self.tokens] &= (shared == row)[:, None]
            branch = torch.where(order < self.tokens, shared[:, None], row[:, None])
        return Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=sample,
            logprob=torch.cat(logprob, 1),
            mask=mask,
            trajectory=TokenOrder(commit_step=order),
            edge_id=branch,
        )
