"""Trains Janus as one policy of text and images: plans, images, answers to questions about
images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from mmrl.core.host import on_host, placed, sent
from mmrl.core.registry import POLICIES
from mmrl.core.sharding import sharded
from mmrl.core.types import Completion, Media, Point, Prompt, Rollout
from mmrl.policies.capabilities import Medium
from mmrl.policies.contracts import EvaluatesGreedily, Measures
from mmrl.policies.vlm.families import family_of
from mmrl.policies.vlm.media import Budgets
from mmrl.policies.vlm.processor import Inputs as Reader
from mmrl.zoo.models.unified import sequences, weighing
from mmrl.zoo.models.unified.net import Ask, Part
from mmrl.zoo.models.unified.passes import Passes
from mmrl.zoo.models.unified.prompts import Answer, Plan, task_of
from mmrl.zoo.models.unified.tasks import in_order
from mmrl.zoo.models.unified.tokens import Head, SegmentTokens
from mmrl.zoo.models.unified.weighing import Weigh
from samplers.warp import Warp


@POLICIES.register("janus_unified")
class JanusUnified(Passes, EvaluatesGreedily, Measures):
    """Trains both heads of Janus: plans, then images (T2I-R1, ReasonGen-R1), and answers
    (PairUni)."""

    # images, texts, or both in one batch
    capabilities = replace(Passes.capabilities, makes=None, drafts=False)
    # its passes change their shape with every text; places in texts and images differ
    not_options = ("net", "compile", "anneal", "adaptive_temperature", "record_divergence")
    idle = ("model.vision_model.", "model.aligner.", "model.vqmodel.")

    def __init__(
        self,
        path: str,
        plan: Plan | None = None,
        answer: Answer | None = None,
        weigh: Weigh = "token",
        text_share: Annotated[float, Ge(0), Le(1)] = 0.5,
        budgets: Budgets | None = None,
        **options: Any,
    ):
        """Load the model. path: folder or hub id. plan: text that is written before every image.
        answer: how prompts of the task ``understand`` are answered; None: there are none. weigh:
        every token of a row alike, or the mean of its text and the mean of its image. text_share:
        share of a row's weight that its text has with ``weigh: segment``. budgets: of the pictures
        in prompts."""
        super().__init__(path, **options)
        config = self.net.config
        generation = self.net.hf.generation_config
        self.reader = Reader(
            self.processor, config, budgets or Budgets(), family_of(config), generation
        )
        self.plan = plan
        self.answer = answer
        self.weigh = weigh
        self.text_share = text_share
        self.tokens = max(text.max_new_tokens if text else 0 for text in (plan, answer))
        self.images = len(self.net.turns)
        self.stops = dict.fromkeys(("plan", "answer"), self.reader.stops)
        self.lengths = []
        self.heads = {"image": Head(self, "", self.warp)}
        banned = self.reader.suppressed
        if answer:
            self.heads["answer"] = self._text_head(answer, banned)
        if plan and plan.turn == "same":  # the image's start is the plan's end
            banned = tuple(token for token in banned if token != self.start)
            self.stops["plan"] = (*self.reader.stops, self.start)
        if plan:
            self.heads["plan"] = self._text_head(plan, banned)

    def _text_head(self, text: Plan | Answer, banned: tuple[int, ...]) -> Head:
        return Head(self, "text_", Warp(text.temperature, text.top_k, text.top_p, banned))

    @property
    def unsharded(self) -> list[nn.Module]:
        model = self.net.hf.model  # of whose pictures only some prompts have any
        return [model.vqmodel, model.vision_model, model.aligner]

    def measures(self) -> dict[str, float]:
        lengths = self.lengths
        self.lengths = []
        return {"text/tokens": sum(lengths) / len(lengths)} if lengths else {}

    def path(self, rollout: Rollout) -> Iterator[Point]:
        for point in super().path(rollout):
            kind = (
                torch.arange(point.mask.shape[1], device=point.mask.device) >= self.tokens
            ).long()
            weight = weighing.weights(
                rollout, self.tokens, self.weigh, self.text_share, self.branches
            )
            yield point.replace(modality=kind.expand_as(point.mask), weight=weight)

    def dist(self, point: Point) -> SegmentTokens:
        mask = on_host(point.mask)
        draws = on_host(point.target)[:, -1] >= 0
        if not mask.any():  # every process makes its passes, also those that train nothing
            mask = mask.clone()
            mask[0, self.tokens if draws[0] else 0] = True
        text = torch.arange(mask.shape[1]) < self.tokens
        masks = {
            "image": mask & ~text,
            "plan": mask & text & draws[:, None],
            "answer": mask & text & ~draws[:, None],
        }
        wheres = {name: placed(masks[name], point.target.device) for name in self.heads}
        asks = {
            name: Ask(wheres[name], head.warp, head.entropies) for name, head in self.heads.items()
        }
        parts = self._parts(point, draws, masks["plan"].any(1))
        scored = self.active()("score_parts", parts, point.target, self.tokens, asks)
        return SegmentTokens(
            [head.tokens(point, wheres[name], scored[name]) for name, head in self.heads.items()]
        )

    def medium_of(self, prompt: Prompt) -> Medium:
        return "image" if task_of(prompt) == "generate" else "text"

    @contextmanager
    def untempered(self) -> Iterator[None]:
        before = {name: head.warp for name, head in self.heads.items()}
        for name, warp in before.items():
            self.heads[name].warp = Warp(suppressed=warp.suppressed)
        try:
            with super().untempered():
                yield
        finally:
            for name, warp in before.items():
                self.heads[name].warp = warp

    def decode(self, rollout: Rollout) -> Media:
        """Decode to images [B, 3, H, W]; of a policy that answers too, to a list of images [3, H,
        W] and texts."""
        draws = rollout.sample[:, -1] >= 0
        ids = rollout.sample[draws][:, self.tokens :]
        images = self.images_of(ids, len(rollout))
        if self.answer is None:
            return torch.cat(images)
        pictures = (image for part in images for image in part)
        return in_order(draws.tolist(), pictures, partial(self._text, rollout))

    def texts(self, rollout: Rollout) -> list[str]:
        """Return the plan or answer of every row, for people to read; it is not scored."""
        rows = rollout.sample[:, : self.tokens].tolist()
        return [self.reader.decode([token for token in row if token >= 0]) for row in rows]

    def sample_in_evaluation(self) -> None:
        if self.answer is not None:
            self.answer = replace(self.answer, greedy_evaluation=False)

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample plans and images as in training, and the likeliest answers with
        ``greedy_evaluation``."""
        with super().evaluating(guidance):
            if self.answer is None or not self.answer.greedy_evaluation:
                yield
                return
            head = self.heads["answer"]
            before = head.warp
            head.warp = replace(before, temperature=0.0)
            try:
                yield
            finally:
                head.warp = before

    def _parts(self, point: Point, draws: Tensor, plans: Tensor) -> list[Part]:
        """List the passes that score a point: those of texts alone, and those of images after their
        text.

        ``draws``, ``plans`` [B] bool on the CPU: rows with an image, rows whose plan is scored.
        """
        text = on_host(point.target)[:, : self.tokens]
        groups = on_host(point.group)
        device = point.target.device
        passes = []
        same = self.plan is not None and self.plan.turn == "same"
        if self.plan and not same and sharded(self.net) and not plans.any():
            plans = draws & (draws.cumsum(0) == 1)  # as other processes score plans
        alone = (~draws if same else ~draws | plans).nonzero()[:, 0]
        drawn = draws.nonzero()[:, 0]
        if len(alone):
            rows, texts = placed(alone, device), placed(text[alone], device)
            passes.append(sequences.alone(point.cond, groups[alone], rows, texts, self.pad))
        if len(drawn):
            rows, texts = placed(drawn, device), placed(text[drawn], device)
            passes.append(self._drawing(point, rows, texts, same))
        self.report.forwards += sum(
            len(part.rows) * (1 if part.empty is None else 2) for part in passes
        )
        return passes

    def _drawing(self, point: Point, rows: Tensor, text: Tensor, same: bool) -> Part:
        inputs = self._leading(point.cond, on_host(point.group)[on_host(rows)], text)
        scale = self.scored_guidance(point)
        # a plan of b tokens, the image's start behind it, is decided at the states S - 2 - b and on
        first = (
            sent(
                inputs["ids"].shape[1] - 2 - sequences.body(text, self.stops["plan"]).sum(1),
                rows.device,
            )
            if same
            else None
        )
        empty, scales = (
            (None, None)
            if scale == 1
            else (self.empty(inputs), sent(self.scales(scale), rows.device))
        )
        return Part(rows, inputs, first, empty, scales, draws=True)

    def _text(self, rollout: Rollout, row: int) -> Completion:
        ids = [token for token in rollout.sample[row, : self.tokens].tolist() if token >= 0]
        mean = float(rollout.logprob[row].sum() / max(len(ids), 1))
        return Completion(
            self.reader.decode(ids), len(ids), bool(ids) and ids[-1] in self.stops["answer"], mean
        )
