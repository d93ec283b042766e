"""Data sources that change how a question is asked: hints for hard prompts, and several forms of
every question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome, batch
from mmrl.zoo.curricula.drawing import Around, Counted, Portion, Source, keyed_by_entry
from samplers.noise import Rng


@DATA.register("suggestions")
@dataclass(eq=False)
class Suggestions(Counted):
    """Add a hint to the question of prompts that stay hard: AVATAR's hints.

    Kulkarni and Fazli 2025, "AVATAR: Reinforcement Learning to See, Hear, and Reason Over Video": a
    prompt is hard while the moving average of its reward is among the lowest ``share`` of all and
    under ``below``; after ``after`` consecutive hard visits a short hint from the data is added to
    its text, until it is no longer hard. kl_drop: only after iterations in which the policy stopped
    exploring, that is whose KL to the behaviour policy was below ``kl_drop`` times its moving mean
    (the paper; 1.0): (rho - 1) - log rho over all tokens or steps, including those of reused
    answers (the stage ``response_reuse``); null: always.

    of: the data source. field: the prompt's field with its hint; prompts without one are asked as
    they are. between: separates question and hint. decay: factor on the weight of earlier answers
    at a visit, and of earlier KLs.

    share: of all prompts, those of the lowest rewards. below: reward under which a prompt can be
    hard. after: hard visits in a row before the hint.
    """

    field: str = "hint"
    share: Portion = 0.4
    below: float = 0.5
    after: Count = 2
    between: str = "\nHint: "
    decay: Portion = 0.5
    kl_drop: Annotated[float, Gt(0)] | None = None

    memory = {"hard": keyed_by_entry, "divergence": copy, "explores": bool}

    def __post_init__(self, of: Source) -> None:
        if all(prompt.get(self.field) is None for prompt in of.train):
            raise UserError(
                f"suggestions: no prompt has the field {self.field!r}; set field to that of the "
                f"hints"
            )
        super().__post_init__(of)

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.hard: dict[int, int] = {}  # consecutive visits at which a prompt was hard, by entry
        self.divergence: float | None = None  # moving mean of the KL to the behaviour policy
        self.explores = self.kl_drop is not None  # the KL has not dropped

    def asked(self, prompt: Prompt, iteration: int) -> Prompt:
        """Add the hint to a prompt that stays hard, unless it has one."""
        hint = prompt.get(self.field)
        stuck = not self.explores and self.hard.get(prompt["entry"], 0) >= self.after
        if hint is None or not stuck or prompt.get("hinted"):
            return prompt
        return {**prompt, "text": f"{prompt['text']}{self.between}{hint}", "hinted": True}

    def see_update(self, metrics: Mapping[str, float]) -> None:
        super().see_update(metrics)
        if self.kl_drop is None:
            return
        if "kl_behavior" not in metrics:
            raise UserError(
                "suggestions: kl_drop follows the KL to the behaviour policy, which this "
                "objective does not measure; choose policy_gradient, or leave it out"
            )
        now = metrics["kl_behavior"]
        if now == now:
            mean = now if self.divergence is None else self.divergence
            self.explores = now >= self.kl_drop * mean
            self.divergence = mean + (1 - self.decay) * (now - mean)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        records = self.statistics.records
        order = sorted(records, key=lambda entry: (records[entry].mean, entry))
        hardest = set(order[: round(self.share * len(order))])
        for outcome in outcomes:
            if outcome.rewards:
                stays = outcome.entry in hardest and records[outcome.entry].mean < self.below
                self.hard[outcome.entry] = self.hard.get(outcome.entry, 0) + 1 if stays else 0


@DATA.register("forms")
@dataclass(eq=False)
class Forms(Around):
    """Ask each prompt in one of several forms (TempSamp-R1's hybrid training), or in all (GCPO).

    Li et al. 2025, "TempSamp-R1": one model learns to answer with reasoning and without, as either
    form asks. The form, the prompt's field "form", depends on iteration and prompt and is the same
    for its whole group; rewards can be routed by it, so that only answers with reasoning are judged
    by its format.

    of: the data source. forms: templates of the text by name, with {text}. weights: of the forms;
    equal by default. together: every question is asked in all forms in one iteration, each with
    ``train.group_size`` answers, and advantages compare the answers to all forms of a question
    (GCPO, Wang et al. 2025, asks with a behaviour and without); each form counts as one of
    ``train.prompts_per_iteration``.
    """

    forms: dict[str, str]
    weights: dict[str, Annotated[float, Gt(0)]] | None = None
    together: bool = False

    def __post_init__(self, of: Source) -> None:
        forms, weights = self.forms, self.weights
        if not forms or any("{text}" not in form for form in forms.values()):
            raise UserError("forms: each form is a template that has {text}, the question")
        if weights is not None and set(weights) != set(forms):
            raise UserError(f"forms: weights are needed of {', '.join(forms)}, and of no others")
        if weights is not None and self.together:
            raise UserError(
                "forms: together asks every form equally often: leave out weights, or together"
            )
        super().__post_init__(of)
        chosen = [(weights or dict.fromkeys(forms, 1.0))[name] for name in forms]
        self.ends = torch.tensor(chosen, dtype=torch.float64).cumsum(0) / sum(chosen)

    @property
    def prompts_per_question(self) -> int:
        return len(self.forms) if self.together else 1

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        if not self.together:
            return super().batch(count, iteration, seed)
        questions = batch(self.inner, count // len(self.forms), iteration, seed)
        return [
            {**self.asked_as(name, prompt), "question": place}
            for place, prompt in enumerate(questions)
            for name in self.forms
        ]

    def asked(self, prompt: Prompt, iteration: int) -> Prompt:
        """Return the prompt in its form of this iteration. Raises UserError where prompts are
        chosen one by one that are asked together."""
        if self.together:
            raise UserError(
                "forms: together asks a question in all its forms at once, which dynamic sampling "
                "and data that choose single prompts would part: leave them out, or together"
            )
        if "form" in prompt:
            return prompt
        u = Rng.of("forms", iteration).uniform(torch.tensor([prompt["entry"]]))
        name = list(self.forms)[int((u >= self.ends).sum().clamp(max=len(self.forms) - 1))]
        return self.asked_as(name, prompt)

    def asked_as(self, name: str, prompt: Prompt) -> Prompt:
        """Return the prompt in the form called ``name``."""
        return {**prompt, "text": self.forms[name].replace("{text}", prompt["text"]), "form": name}
