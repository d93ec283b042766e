"""Inverts multiple-choice questions, so that several options are right (TW-GRPO)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from mmrl.core.types import Prompt
from samplers.noise import Rng

NEGATED = {
    "did": "didn't",
    "does": "doesn't",
    "do": "don't",
    "is": "isn't",
    "are": "aren't",
    "was": "wasn't",
    "were": "weren't",
}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MARK = r"\s*\(?{letter}[).:]?\s+"  # what precedes an option's text


def inverted(prompts: Sequence[Prompt], share: float, seed: int = 0) -> list[Prompt]:
    """Invert a random ``share`` of the questions that can be inverted; others stay as they are.

    Dang et al. 2025, question-answer inversion: the verb that is the question's second word is
    negated, the right option becomes wrong and the wrong ones right, of which a random number, at
    least one, stay, in random order. It can be where ``choices`` has one right option in ``answer``
    (a letter or its text) and the second word is a form of be or do.
    """
    rng = Rng.of(seed, "inversion")
    numbers = torch.arange(len(prompts))
    draws = rng.uniform(numbers, (3,)) if len(prompts) else torch.zeros(0, 3)
    return [
        (_inverted(prompt, rng.fold(str(n)), float(draw[1])) or prompt)
        if draw[0] < share
        else prompt
        for n, (prompt, draw) in enumerate(zip(prompts, draws, strict=True))
    ]


def _inverted(prompt: Prompt, rng: Rng, draw: float) -> Prompt | None:
    """Invert one question; None if that is impossible."""
    choices = [str(choice) for choice in prompt.get("choices") or ()]
    right = _right(prompt.get("answer"), choices)
    words = _question(str(prompt["text"]), choices).split()
    if right is None or len(words) < 2 or words[1].lower() not in NEGATED:
        return None
    words[1] = NEGATED[words[1].lower()]
    wrong = [i for i in range(len(choices)) if i != right]
    order = rng.uniform(torch.zeros(1, dtype=torch.long), (2 * len(choices),))[0].tolist()
    count = 1 + int(draw * len(wrong))
    stay = sorted(wrong, key=lambda i: order[i])[:count]
    shown = sorted([right, *stay], key=lambda i: order[len(choices) + i])
    options = [choices[i] for i in shown]
    lines = [f"{letter} {option}" for letter, option in zip(LETTERS, options, strict=False)]
    letters = [LETTERS[place] for place, i in enumerate(shown) if i != right]
    return {
        **prompt,
        "text": "\n".join([" ".join(words), *lines]),
        "choices": options,
        "answer": ", ".join(letters),
        "inverted": True,
    }


def _right(answer: object, choices: Sequence[str]) -> int | None:
    """Find the one right option by its letter or its text."""
    text = str(answer or "").strip()
    letter = text.strip("().: ").upper()
    if len(letter) == 1 and letter in LETTERS[: len(choices)] and len(choices) > 1:
        return LETTERS.index(letter)
    return choices.index(text) if choices.count(text) == 1 and len(choices) > 1 else None


def _question(text: str, choices: Sequence[str]) -> str:
    """Return the text up to the first of its options, if it lists them."""
    for choice in choices[:1]:
        found_at = re.search(MARK.format(letter="A") + re.escape(choice), text)
        if found_at:
            return text[: found_at.start()]
    return text
