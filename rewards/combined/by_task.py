"""Sends samples to a reward for each task of a mixture, in which some prompts get images and others
texts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import Of, card, card_of, pictures_of
from rewards.combined.parts import refuse_memory, rows_of

Part = Annotated[Reward, REWARDS]


@REWARDS.register("by_task")
@card(source="PairUni (arXiv:2510.25682)", scaling="as the routes")
class ByTask:
    """Send each sample to the reward of its task in a mixture; the prompt's field ``task`` says
    which.

    Args:
        routes: task -> a reward and its options, such as ``{generate: hpsv2, understand: choice}``.
        by: the field that names the task.
        default: for prompts of other tasks or without one; None: they cannot be scored.
    """

    def __init__(self, routes: dict[str, Part], by: str = "task", default: Part | None = None):
        if not routes:
            raise UserError("reward 'by_task': routes is empty; name at least one, {task: reward}")
        self.routes = dict(routes)
        self.by = by
        self.default = default
        parts = self._parts()
        refuse_memory(parts)
        cards = [card_of(part) for part in parts]
        if any(card.of == "step" for card in cards):
            raise UserError(
                "reward 'by_task': its routes must be rewards of whole samples, not of steps"
            )
        of: Of = "group" if any(card.of == "group" for card in cards) else "sample"
        needs = () if default else (by,)
        self.card = replace(card_of(type(self)), needs=needs, pictures=pictures_of(parts), of=of)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score [B]; every route sees its rows at once, pictures of one size as a tensor."""
        scores = torch.full((len(prompts),), math.nan)
        rows: dict[int, tuple[Reward, list[int]]] = {}
        for i, prompt in enumerate(prompts):
            route = self.routes.get(prompt.get(self.by, ""), self.default)
            if route is not None:
                rows.setdefault(id(route), (route, []))[1].append(i)
        for route, routed in rows.values():
            values = route(rows_of(media, routed), [prompts[i] for i in routed])
            scores[routed] = torch.as_tensor(values).detach().to("cpu", torch.float32)
        return scores

    def causes(self) -> str:
        """Return why samples have no value, as far as the routes can say."""
        reasons = [str(part.causes()) for part in self._parts() if hasattr(part, "causes")]
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    def counters(self) -> dict[str, float]:
        """Return what the routes count, ``<task>/<counter>``."""
        return {
            f"{task}/{key}": number
            for task, part in {**self.routes, "default": self.default}.items()
            if part is not None and hasattr(part, "counters")
            for key, number in part.counters().items()
        }

    def _parts(self) -> list[Reward]:
        return [*self.routes.values(), *([self.default] if self.default else [])]
