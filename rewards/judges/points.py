"""Rewards by a vision-language model as judge that gives scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge

from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.card import card
from rewards.judges.question import Question
from rewards.judges.samples import Frames, Model, OnFailure, SampleJudge
from rewards.judges.templates import BUILT_IN, Template, find


@REWARDS.register("judge")
@card(
    needs="text",
    low=0,
    high=1,
    source="the judge's; UnifiedReward: arXiv 2503.05236",
    licence="the judge's",
)
class Judge(SampleJudge):
    """Ask a vision-language model for the scores of a template; the reward is their mean, scaled to
    1.

    Args:
        model: who judges: ``{server: {url: ...}}`` or ``{local: {path: ...}}``.
        template: ``rating`` (0 to 10, pictures or answers), ``reference`` (0 to 10, answers with
            the prompt's right one in ``answer``), ``unified_reward`` (1 to 5), ``unified_reward_2``
            (three scores of 1 to 5), ``unified_reward_think`` (1 to 10, after reasons and scores by
            dimension), or a file.
        aspects: which of several scores count; None: all.
        pattern: regular expression whose group 1 is the score, for a file; None: the answer is JSON
            with ``score``.
        low, high: worst and best score on the judge's scale, for a file (0 and 10); ``high``
            becomes 1.
        frames: frames shown of a video, evenly spaced.
        tokens: maximum of an answer; None: the template's, 2048 if it reasons, else 512.
        on_failure: ``nan`` leaves samples without an answer out, ``stop`` raises.

    Raises:
        UserError: a template that does not fit, with its file and line; a judge that refuses every
            question.
    """

    name = "judge"

    def __init__(
        self,
        model: Model,
        template: str = "rating",
        aspects: list[str] | None = None,
        pattern: str | None = None,
        low: float | None = None,
        high: float | None = None,
        frames: Frames = 8,
        tokens: Annotated[int, Ge(1)] | None = None,
        on_failure: OnFailure = "nan",
    ):
        super().__init__(model, frames, on_failure)
        patterns = None if pattern is None else {"score": pattern}
        self.template = find(
            template, BUILT_IN, patterns=patterns, low=low, high=high, tokens=tokens
        )
        self.aspects = chosen_aspects(aspects, self.template)
        self.card = self.needing(self.template)

    def questions(self, prompt: Prompt, shown: dict[str, Any]) -> list[Question]:
        return [self.template.question(prompt, shown)]

    def value(self, prompt: Prompt, answers: list[Any]) -> float:
        scores = answers[0]
        total: float = sum(scores[name] for name in self.aspects)
        return total / len(self.aspects) / self.template.high


def chosen_aspects(aspects: Sequence[str] | None, template: Template) -> list[str]:
    """Return the names of the scores that count, as in the template."""
    known = {name.lower(): name for name in template.patterns or template.fields}
    for name in aspects or ():
        if name.lower() not in known:
            raise UserError(
                f"template {template.name} has no score called {name!r}; {suggest(name, known)}"
            )
    if aspects is not None and not aspects:
        raise UserError("`aspects` is an empty list; leave it out to take all")
    return [known[name.lower()] for name in aspects or known]
