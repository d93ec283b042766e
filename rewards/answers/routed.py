"""Defines ``routed``, which scores the answers of a mixture of tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt, Reward
from rewards.answers.coords import Unscorable
from rewards.answers.verifiable import Verdict, Verifiable
from rewards.card import Card, card, method_of
from rewards.combined.by_task import Routes


@REWARDS.register("routed")
@card(
    media="text",
    source="Mixed-R1 (arXiv:2505.24164), VLAA-Thinker (arXiv:2504.11468)",
    scaling="as the routes",
)
class Routed(Routes, Verifiable):
    """Send each answer to the verifier of its task in a mixture, named in the prompt's field
    ``task``.

    Args:
        routes: task -> a reward and its options, such as ``{detect: {detection: {measure: f1}},
            count: count}``.
        by: the field that names the task.
        default: for prompts of other tasks or without one; None: they cannot be scored.
    """

    name = "routed"

    def described(self, cards: list[Card]) -> dict[str, Any]:
        low = [card.low for card in cards if card.low is not None]
        high = [card.high for card in cards if card.high is not None]
        return {
            "low": min(low) if len(low) == len(cards) else None,
            "high": max(high) if len(high) == len(cards) else None,
        }

    def verdicts(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Verdict]:
        """Judge the rows of each route in one batch."""
        self._check(texts, prompts)
        verdicts: dict[int, Verdict] = {}
        for route, rows in self.rows_by_route(prompts):
            batch = [texts[i] for i in rows], [prompts[i] for i in rows]
            if route is None:
                judged = [Verdict(math.nan, "ok", self._lack(prompt)) for prompt in batch[1]]
            elif judge := method_of(route, "verdicts"):
                judged = judge(*batch)
            else:
                judged = [Verdict(float(value)) for value in route(*batch)]
            verdicts |= zip(rows, judged)
        return [verdicts[i] for i in range(len(prompts))]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        (verdict,) = self.verdicts([text], [prompt])
        if math.isnan(verdict.score):
            raise Unscorable(verdict.note)
        return verdict

    def tasks(self, prompts: Sequence[Prompt]) -> dict[str, tuple[Reward, list[Prompt]]]:
        """Group prompts by task, each with its reward: this one if there is no route."""
        tasks: dict[str, tuple[Reward, list[Prompt]]] = {}
        for prompt in prompts:
            route = self.route_of(prompt) or cast(Reward, self)
            task = str(prompt.get(self.by, "default"))
            tasks.setdefault(task, (route, []))[1].append(prompt)
        return tasks

    def ground_truth(self, prompt: Prompt) -> str:
        answer: str = self._own(prompt).ground_truth(prompt)
        return answer

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        answers: dict[str, str] = self._own(prompt).wrong_answers(prompt)
        return answers

    def _own(self, prompt: Prompt) -> Any:
        route = self.route_of(prompt)
        if route is None:
            raise Unscorable(self._lack(prompt))
        if not method_of(route, "ground_truth"):
            raise Unscorable(
                f"the reward of task {prompt.get(self.by)!r} cannot write down a ground truth"
            )
        return route

    def _lack(self, prompt: Prompt) -> str:
        task, routes = prompt.get(self.by), ", ".join(self.routes)
        return f'"{self.by}" is {task!r}; there are routes for: {routes}'
