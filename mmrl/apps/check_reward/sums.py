"""Probes the weighted sum of a run's rewards: rewards that are right alone may prefer a wrong
answer in sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.apps.check_reward import Line, Offence, Subject, texts
from mmrl.apps.check_reward.places import where
from mmrl.core.types import Media, Prompt, Reward
from mmrl.scoring.attempt import as_values
from rewards.card import Card, card_of, method_of

FORM = "<think>\nlet me see\n</think>\n{}"


@dataclass
class Sum:
    """Sums rewards of texts with their weights."""

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]
    card: Card

    def __call__(self, answers: Media, prompts: list[Prompt]) -> Tensor:
        total = torch.zeros(len(answers))
        for name, weight in self.weights.items():
            if weight:
                values = self.rewards[name](answers, prompts)
                total += weight * as_values(values, len(answers), name)
        return total


def audit(
    rewards: Mapping[str, Reward], weights: Mapping[str, float], prompts: list[Prompt]
) -> list[Line]:
    """Compare wrong answers in good form with right ones in bad form, by the weighted sum of
    rewards of texts."""
    judges = [
        name
        for name, weight in weights.items()
        if weight > 0
        and method_of(rewards[name], "ground_truth")
        and not getattr(rewards[name], "shaping", False)
    ]
    if not judges:
        return []
    together = Sum(rewards, weights, Card())
    subject = Subject("weighted sum", together, prompts)
    first = Subject(judges[0], rewards[judges[0]], prompts)
    answers, _ = texts.ground_truths(first)
    rows = [prompts[i] for i in answers]
    wrong = [_wrong(rewards[judges[0]], row) for row in rows]
    answered = [i for i, text in enumerate(wrong) if text]
    if not answered:
        return []
    rows = [rows[i] for i in answered]
    right = [list(answers.values())[i] for i in answered]
    formed = [FORM.format(wrong[i]) for i in answered]
    best = texts.score(subject, right, rows)
    scores = texts.score(subject, formed, rows)
    offences = [
        Offence(where(row), text, s, f"the right answer without a thought scores {b:g}")
        for row, text, s, b in zip(rows, formed, scores, best)
        if not math.isnan(s) and s > b - texts.CLOSE
    ]
    rule = "less than the right answer alone"
    return [Line("wrong answer in good form", rule, scores, offences)]


def _wrong(reward: Reward, prompt: Prompt) -> str:
    """Return a plain wrong answer, in tags."""
    write = method_of(reward, "wrong_answers")
    tricks: dict[str, str] = write(prompt) if write else {}
    tagged = [text for text in tricks.values() if text.startswith("<answer>") and len(text) > 17]
    return next(iter(tagged), "")


def applies(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> bool:
    """Tell whether there are several weighted rewards, all of texts and of single samples."""
    counted = [rewards[name] for name, weight in weights.items() if weight]
    cards = [card_of(reward) for reward in counted]
    return len(counted) > 1 and all("text" in c.media and c.of == "sample" for c in cards)
