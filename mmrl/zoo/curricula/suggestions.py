"""Makes data sources that change how a question is asked: hints beside what stays hard, and several
forms of every question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.budget import Counted
from mmrl.zoo.curricula.curriculum import Around, Source, over, with_entries
from mmrl.zoo.curricula.statistics import PromptStatistics
from samplers.noise import Rng


class Suggested(Counted):
    """Draws as ``inner`` does; prompts that stay hard are asked with their hint."""

    def __init__(self, inner: Sequence[Prompt], rule: Suggestions):
        super().__init__(inner, PromptStatistics(rule.decay))
        self.rule = rule
        self.hard_visits: dict[int, int] = {}  # in a row, by entry
        self.divergence: float | None = None  # moving mean of the KL to the behaviour policy
        self.explores = rule.kl_drop is not None  # the KL has not dropped

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        prompts = super().batch(count, iteration, seed)
        return [self.rule.beside(prompt, self._stuck(prompt)) for prompt in prompts]

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        return self.rule.beside(super().presented(prompt, iteration), self._stuck(prompt))

    def over(self, prompts: Sequence[Prompt]) -> Suggested:
        return Suggested(over(self.inner, prompts), self.rule)

    def see_update(self, metrics: Mapping[str, float]) -> None:
        super().see_update(metrics)
        if self.rule.kl_drop is None:
            return
        if "kl_behavior" not in metrics:
            raise UserError(
                "suggestions: kl_drop looks at the KL to the behaviour policy, which this "
                "objective does not measure; choose policy_gradient, or leave it out"
            )
        now = metrics["kl_behavior"]
        if now == now:
            mean = now if self.divergence is None else self.divergence
            self.explores = now >= self.rule.kl_drop * mean
            self.divergence = mean + (1 - self.rule.decay) * (now - mean)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        records = self.statistics.records
        order = sorted(records, key=lambda entry: (records[entry].mean, entry))
        hard = set(order[: round(self.rule.share * len(order))])
        for outcome in outcomes:
            if outcome.rewards:
                stays = outcome.entry in hard and records[outcome.entry].mean < self.rule.below
                count = self.hard_visits.get(outcome.entry, 0) + 1
                self.hard_visits[outcome.entry] = count if stays else 0

    def _stuck(self, prompt: Prompt) -> bool:
        return not self.explores and self.hard_visits.get(prompt["entry"], 0) >= self.rule.after

    def state_dict(self) -> dict[str, Any]:
        visits = {str(entry): count for entry, count in self.hard_visits.items() if count}
        kl = {"divergence": self.divergence, "explores": self.explores}
        return super().state_dict() | {"hard": visits} | kl

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.hard_visits = {int(entry): n for entry, n in state.get("hard", {}).items()}
        self.divergence = state.get("divergence")
        self.explores = state.get("explores", self.explores)


@DATA.register("suggestions")
class Suggestions:
    """Ask prompts that stay hard with a hint beside the question: AVATAR's hints.

    Kulkarni and Fazli 2025, "AVATAR: Reinforcement Learning to See, Hear, and Reason Over Video": a
    prompt is hard while the moving average of its reward is among the lowest ``share`` of all and
    under ``below``; after ``after`` visits in a row a short hint, written beforehand, is added to
    its text, until it is hard no more. kl_drop: only after iterations in which the policy stopped
    exploring, their KL to the behaviour policy being below this many times its moving mean (the
    paper; 1.0): (rho - 1) - log rho over all tokens or steps, old answers among them
    (the stage ``response_reuse``); null: always.

    of: the data source. field: of the prompt, that holds its hint; prompts without one are asked as
    they are. between: stands between question and hint. decay: what is left of the weight of
    earlier answers at a visit, and of earlier KLs.
    """

    train: Suggested
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        field: str = "hint",
        share: Annotated[float, Gt(0), Le(1)] = 0.4,
        below: float = 0.5,
        after: Count = 2,
        between: str = "\nHint: ",
        decay: Annotated[float, Gt(0), Le(1)] = 0.5,
        kl_drop: Annotated[float, Gt(0)] | None = None,
    ):
        if all(prompt.get(field) is None for prompt in of.train):
            raise UserError(
                f"suggestions: no prompt has the field {field!r}; set field to that of the hints"
            )
        self.field = field
        self.share = share
        self.below = below
        self.after = after
        self.between = between
        self.decay = decay
        self.kl_drop = kl_drop
        self.train = Suggested(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def beside(self, prompt: Prompt, stuck: bool) -> Prompt:
        """Return the prompt, with its hint if it is ``stuck`` and has none yet."""
        hint = prompt.get(self.field)
        if hint is None or not stuck or prompt.get("hinted"):
            return prompt
        return {**prompt, "text": f"{prompt['text']}{self.between}{hint}", "hinted": True}


class Formed(Around):
    """Draws as ``inner`` does, and asks each prompt in one of several forms, or in all."""

    def __init__(self, inner: Sequence[Prompt], rule: Forms):
        super().__init__(inner)
        self.rule = rule

    @property
    def together(self) -> int:
        return len(self.rule.forms) if self.rule.together else 1

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        prompts = super().batch(count // self.together, iteration, seed)
        if not self.rule.together:
            return [self.rule.formed(prompt, iteration) for prompt in prompts]
        return [
            {**self.rule.asked_as(name, prompt), "question": place}
            for place, prompt in enumerate(prompts)
            for name in self.rule.forms
        ]

    def pick(self, u: float, iteration: int) -> Prompt:
        self._alone()
        return self.rule.formed(super().pick(u, iteration), iteration)

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        self._alone()
        return self.rule.formed(super().presented(prompt, iteration), iteration)

    def _alone(self) -> None:
        """Raise UserError where prompts are chosen one by one that are asked together."""
        if self.rule.together:
            raise UserError(
                "forms: together asks a question in all its forms at once, which dynamic sampling "
                "and data that choose single prompts would part: leave them out, or together"
            )

    def over(self, prompts: Sequence[Prompt]) -> Formed:
        return Formed(over(self.inner, prompts), self.rule)


@DATA.register("forms")
class Forms:
    """Ask each prompt in one of several forms (TempSamp-R1's hybrid training), or in all (GCPO).

    Li et al. 2025, "TempSamp-R1": one model learns to answer with its reasoning and without, asked
    now in the one form, now in the other. The form, "form" of the prompt, is a function of
    iteration and prompt, the same for its whole group; rewards may be routed by it, so that only
    answers with reasoning are judged by its format.

    of: the data source. forms: templates of the text by name, with {text}. weights: how often each
    is taken; by default alike. together: every question is asked in all forms in one iteration, so
    that each has ``train.group_size`` answers, and advantages compare the answers to all forms of
    it with each other (GCPO, Wang et al. 2025, asks with a behaviour and without); of
    ``train.prompts_per_iteration`` every form is one.
    """

    train: Formed
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        forms: dict[str, str],
        weights: dict[str, Annotated[float, Gt(0)]] | None = None,
        together: bool = False,
    ):
        if not forms or any("{text}" not in form for form in forms.values()):
            raise UserError("forms: each form is a template that has {text}, the question")
        if weights is not None and set(weights) != set(forms):
            raise UserError(f"forms: weights are needed of {', '.join(forms)}, and of no others")
        if weights is not None and together:
            raise UserError(
                "forms: together asks every form equally often: leave out weights, or together"
            )
        self.forms = forms
        self.together = together
        chosen = [(weights or dict.fromkeys(forms, 1.0))[name] for name in forms]
        self.ends = torch.tensor(chosen, dtype=torch.float64).cumsum(0) / sum(chosen)
        self.train = Formed(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def formed(self, prompt: Prompt, iteration: int) -> Prompt:
        """Return the prompt in its form of this iteration."""
        if "form" in prompt:
            return prompt
        u = Rng.of("forms", iteration).uniform(torch.tensor([prompt["entry"]]))
        name = list(self.forms)[int((u >= self.ends).sum().clamp(max=len(self.forms) - 1))]
        return self.asked_as(name, prompt)

    def asked_as(self, name: str, prompt: Prompt) -> Prompt:
        """Return the prompt in the form called ``name``."""
        return {**prompt, "text": self.forms[name].replace("{text}", prompt["text"]), "form": name}
