"""Vision-language models: any image-text-to-text model of transformers, by its real classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from samplers.batching import chunks
from samplers.noise import Rng
from samplers.warp import Warp

from ...options import Count
from ...registry import POLICIES, UserError, locate
from ...types import Completion, Media, Point, Prompt, Rollout, tree_map
from ..base import NetPolicy
from ..lora import Lora
from .answers import AnswerTokens
from .families import Coords, family_of, modules_of
from .generate import Answers, Ending, generate
from .inputs import Inputs
from .media import Budgets
from .prefix import Prefix, SharedPrefix

Storage = Literal["float32", "bfloat16", "float16", "auto"]
Encoded = dict[str, Tensor]


@POLICIES.register("vlm")
class VLM(NetPolicy):
    """Vision-language models: images, several images, video or text in, text out; any folder or hub id."""

    adjacent = True

    def __init__(
        self,
        path: str,
        tokens: Count = 512,
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_k: Count | None = None,
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0,
        stop: Sequence[str] = (),
        greedy: bool = True,
        budgets: Budgets | None = None,
        coords: Coords | None = None,
        share: Literal["auto", "prefix", "none"] = "auto",
        dtype: Storage = "float32",
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
        lora: Lora | int | None = None,
        **options: Any,
    ):
        """path: folder, hub id or world:NAME. tokens: an answer's largest number. temperature, top_k, top_p: of
        sampling and of scoring. stop: strings after which an answer ends. greedy: evaluation takes the likeliest token. budgets:
        what images, videos and prompts may cost. coords: the space of the model's coordinates, where its family's is
        unknown. share: prefix reads a prompt once for its whole group, none once for every answer. dtype: of the
        weights. attention: transformers' implementation."""
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.place = locate(path)
        hf = _loaded(AutoModelForImageTextToText, self.place, dtype=_dtype(dtype), attn_implementation=attention)
        processor, family = _loaded(AutoProcessor, self.place), family_of(hf.config, coords)
        self.inputs = Inputs(processor, hf.config, budgets or Budgets(), family, hf.generation_config)
        self.warp = Warp(temperature, top_k, top_p, self.inputs.suppressed)
        self.ending = Ending(tokens, self.inputs.stops, self.inputs.pad, tuple(stop), self.inputs.decode)
        self.greedy, self.entropies = greedy, False
        if isinstance(lora, int):
            lora = Lora(lora)
        if lora is not None and lora.targets is None:
            lora = Lora(lora.rank, lora.alpha, [n for n in modules_of(hf, "language") if not n.endswith("lm_head")])
        super().__init__(SharedPrefix(hf, share=share != "none"), lora=lora, **options)

    def rollout(self, prompts: list[Prompt], copies: int, rng: Rng) -> Rollout:
        taken = [self.inputs.take(prompt) for prompt in prompts]
        cond = tree_map(lambda tensor: tensor.to(self.device), [encoded for encoded, _ in taken])
        row = rng.rows(len(prompts), copies).to(self.device)
        group = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
        size = self.chunk(len(row), lambda n: self._try(cond, group[:n]))
        parts = [self._answer(cond, group, row, rng, whole, size) for whole in self._blocks(len(prompts), copies, size)]
        answers = [answer for part in parts for answer in part]
        ids, mask, logprob = (torch.cat([getattr(a, name) for a in answers]) for name in ("ids", "mask", "logprob"))
        order = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        seen = tuple({**prompt, "view": view} for prompt, (_, view) in zip(prompts, taken, strict=True))
        return Rollout(
            group=group, cond=cond, row=row, sample=ids, mask=mask, logprob=logprob, order=order, prompts=seen
        )  # fmt: skip

    def path(self, rollout: Rollout) -> Iterator[Point]:
        yield Point(
            group=rollout.group, cond=rollout.cond, row=rollout.row, state=rollout.sample, target=rollout.sample,
            mask=rollout.mask, logprob=rollout.logprob, advantage=rollout.advantage, length=rollout.mask.sum(1),
            sampled=rollout.sampled,
        )  # fmt: skip

    def renoise(self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False) -> Iterator[Point]:
        for point in self.path(rollout):
            yield point.replace(logprob=None)

    def dist(self, point: Point) -> AnswerTokens:
        where = point.mask
        if not where.any():  # every process makes its passes, also those that train nothing
            where = where.clone()
            where[0, 0] = True
        inputs, rows = self._collated(point.cond, point.group, each=not self.net.share)
        hidden, scored = self.active()("score", inputs, rows, point.target, where, self.warp, self.entropies)
        return AnswerTokens(self, point, where, hidden, scored)

    def decode(self, rollout: Rollout) -> Media:
        lengths = rollout.mask.sum(1)
        means = (rollout.logprob * rollout.mask).sum(1) / lengths.clamp_min(1)
        return [
            self._completion(ids[:n], mean)
            for ids, n, mean in zip(rollout.sample.tolist(), lengths.tolist(), means.tolist(), strict=True)
        ]

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        kept = self.warp
        if self.greedy:
            self.warp = Warp(temperature=0.0, suppressed=kept.suppressed)
        try:
            yield
        finally:
            self.warp = kept

    def export(self, folder: Path) -> None:
        """The model, or its adapter where only one was trained, with processor and chat template."""
        self.net.hf.save_pretrained(folder)
        self.inputs.save(folder)

    def _collated(self, cond: list[Encoded], group: Tensor, each: bool) -> tuple[Encoded, Tensor]:
        """The prompts of ``group`` [B] as one batch, each once or (``each``) once a row, and where every row's is."""
        unique, rows = group.unique(return_inverse=True)
        if each:
            unique, rows = group, torch.arange(len(group), device=group.device)
        return self.inputs.collate([cond[i] for i in unique.tolist()]), rows

    def _blocks(self, prompts: int, copies: int, size: int) -> Iterator[slice]:
        """Prompts to read at once: as many as ``size`` rows answer, at least one."""
        return chunks(prompts, max(1, size // copies))

    def _answer(
        self, cond: list[Encoded], group: Tensor, row: Tensor, rng: Rng, prompts: slice, size: int
    ) -> Iterator[Answers]:
        """Answers to a block of prompts, which is read once, ``size`` rows at a time."""
        mine = ((group >= prompts.start) & (group < prompts.stop)).nonzero()[:, 0]
        prefix: Prefix = self.net("read", self.inputs.collate(cond[prompts]))
        for part in chunks(len(mine), size):
            at = mine[part]
            yield generate(self.net, prefix, group[at] - prompts.start, row[at], rng, self.warp, self.ending)

    def _try(self, cond: list[Encoded], group: Tensor) -> None:
        """What sampling these rows needs at most."""
        inputs, rows = self._collated(cond, group, each=False)
        generate(self.net, self.net("read", inputs), rows, rows, Rng.of("try"), self.warp, self.ending)

    def _completion(self, ids: list[int], logprob: float) -> Completion:
        text, ending = self.inputs.decode(ids), self.ending
        stopped = bool(ids) and ids[-1] in ending.stops or any(s in text for s in ending.strings)
        return Completion(text, len(ids), stopped, logprob)


def _loaded(auto: Any, place: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(place, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"policy.vlm.path {place}: {auto.__name__} cannot load it: {error}") from error


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)
