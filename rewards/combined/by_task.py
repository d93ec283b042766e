"""Routes samples to the reward of their task in a mixture, in which some prompts get images and
others texts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import Card, card, card_of, method_of, pictures_of
from rewards.combined.members import counters_of, refuse_memory, rows_of

Part = Annotated[Reward, REWARDS]


class Routes(ABC):
    """Holds the reward of each task of a mixture; the prompt's field ``by`` names its task."""

    name: ClassVar[str]

    def __init__(self, routes: dict[str, Part], by: str = "task", default: Part | None = None):
        if not routes:
            raise UserError(
                f"reward {self.name!r}: routes is empty; name at least one, {{task: reward}}"
            )
        self.routes = dict(routes)
        self.by = by
        self.default = default
        self.parts = [*routes.values(), *([default] if default else [])]
        refuse_memory(self.parts)
        self.card = replace(
            card_of(type(self)),
            needs=() if default else (by,),
            pictures=pictures_of(self.parts),
            **self.described([card_of(part) for part in self.parts]),
        )

    @abstractmethod
    def described(self, cards: list[Card]) -> dict[str, Any]:
        """Return the other fields of the card, merged from the parts. Raises UserError."""

    def route_of(self, prompt: Prompt) -> Reward | None:
        """Return the reward of a prompt; None if its task has none."""
        task = prompt.get(self.by)
        return self.default if task is None else self.routes.get(str(task), self.default)

    def rows_by_route(self, prompts: Sequence[Prompt]) -> list[tuple[Reward | None, list[int]]]:
        """List each reward with its rows, which it scores in one batch."""
        rows: dict[int, tuple[Reward | None, list[int]]] = {}
        for i, prompt in enumerate(prompts):
            route = self.route_of(prompt)
            rows.setdefault(id(route), (route, []))[1].append(i)
        return list(rows.values())


@REWARDS.register("by_task")
@card(source="PairUni (arXiv:2510.25682)", scaling="as the routes")
class ByTask(Routes):
    """Send each sample to the reward of its task in a mixture, named in the prompt's field
    ``task``.

    Args:
        routes: task -> a reward and its options, such as ``{generate: hpsv2, understand: choice}``.
        by: the field that names the task.
        default: for prompts of other tasks or without one; None: they cannot be scored.
    """

    name = "by_task"

    def described(self, cards: list[Card]) -> dict[str, Any]:
        if any(card.of == "step" for card in cards):
            raise UserError(
                "reward 'by_task': its routes must be rewards of whole samples, not of steps"
            )
        return {"of": "group" if any(card.of == "group" for card in cards) else "sample"}

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score [B]; every route gets its rows in one batch, pictures of one size as a tensor."""
        scores = torch.full((len(prompts),), math.nan)
        for route, rows in self.rows_by_route(prompts):
            if route is not None:
                values = route(rows_of(media, rows), [prompts[i] for i in rows])
                scores[rows] = torch.as_tensor(values).detach().to("cpu", torch.float32)
        return scores

    def causes(self) -> str:
        """Return why samples have no value, as far as the routes report it."""
        says = (method_of(part, "causes") for part in self.parts)
        reasons = [str(say()) for say in says if say]
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    def counters(self) -> dict[str, float]:
        """Return the counters of the routes, ``<task>/<counter>``."""
        return counters_of({**self.routes, **({"default": self.default} if self.default else {})})
