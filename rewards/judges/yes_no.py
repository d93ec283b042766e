"""Scores by a vision-language model as judge that says yes or no, and how sure it is."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt
from rewards.answers.reading.spelled import UNITS
from rewards.card import card
from rewards.judges.question import Question
from rewards.judges.samples import Frames, Judged, Model, OnFailure, kind_of, shown_of
from rewards.judges.templates import REQUEST, Template, find

SHOWS = Template(
    "shows",
    "{{ media }}\n{% if answer is defined %}" + REQUEST + "Is this answer right?{% else %}"
    'Does the {{ kind }} show "{{ text }}"?{% endif %} Answer with Yes or No and nothing else.',
)
ASKS = Template(
    "asks",
    "{{ media }}\n{% if answer is defined %}" + REQUEST + "{% endif %}{{ question }} "
    "Answer with Yes or No.",
)


COUNTS = Template(
    "counts",
    "{{ media }}\n{% if answer is defined %}" + REQUEST + "{% endif %}{{ question }} "
    "Answer with one digit and nothing else.",
)
DIGITS = tuple("0123456789")
LEAST = 1e-12  # a probability is not let below in a geometric mean


@REWARDS.register("judge_yes_no")
@card(
    needs="text",
    low=0,
    high=1,
    source="the judge's; VQAScore arXiv 2404.01291, TIFA arXiv 2303.11897, "
    "Soft-TIFA arXiv 2512.16853",
    licence="the judge's",
    scaling="P(yes) / (P(yes) + P(no))",
)
class YesNo(Judged):
    """Ask a judge whether the picture shows its text, or each question of the prompt: P(yes).

    P(yes) / (P(yes) + P(no)), upper and lower case added up, from log-probabilities. A server
    without them gives its answer in words: 1 or 0. With ``questions: vqa_list, combine: geometric``
    it is GenEval 2's Soft-TIFA of whole prompts (its mean over questions with ``combine: mean``);
    probabilities are those among the possible answers, the benchmark takes them among all words.

    Args:
        model: who judges: ``{server: {url: ...}}`` or ``{local: {path: ...}}``.
        questions: field of the prompts that lists questions; each is a text whose right answer is
            yes, or ``[text, right answer]`` with yes, no, or a count from 0 to 9 (a digit or its
            word). The reward combines the probabilities of the right answers. None: one question
            about the whole text.
        combine: mean or geometric (mean) of several questions.
        template: file of your own in place of the wording; ``{{ question }}`` is the question;
            counts keep a wording of ours.
        frames: pictures shown of a video, evenly spaced.
        on_failure: ``nan`` leaves samples without an answer out, ``stop`` raises.
    """

    name = "judge_yes_no"

    def __init__(
        self,
        model: Model,
        questions: str | None = None,
        template: str | None = None,
        frames: Frames = 8,
        on_failure: OnFailure = "nan",
        combine: Literal["mean", "geometric"] = "mean",
    ):
        super().__init__(model, frames, on_failure)
        self.field = questions
        self.geometric = combine == "geometric"
        default = SHOWS if questions is None else ASKS
        self.template = default if template is None else find(template, {})
        self.card = self.needing(self.template)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W], videos [B, F, 3, H, W] in 0..1, or B texts -> [B] float32 on
        the CPU, in 0..1."""
        rows = []
        right_words = []
        questions = []
        for row, pictures in self.shown_rows(media, prompts):
            shown = shown_of(media, row, pictures, prompts[row])
            for text, right in self._questions(prompts[row]):
                count = right in DIGITS
                parts = (COUNTS if count else self.template).parts(
                    prompts[row], kind_of(media), {**shown, "question": text}
                )
                rows.append(row)
                right_words.append(right)
                choices = DIGITS if count else ("Yes", "No")
                questions.append(Question(parts, choices=choices, tokens=16))
        shares_of: dict[int, list[float]] = {}
        for row, right, answer in zip(rows, right_words, self.answers(questions), strict=True):
            shares_of.setdefault(row, []).append(torch.nan if answer is None else answer[right])
        values = torch.full((len(prompts),), torch.nan)
        for row, shares in shares_of.items():
            values[row] = self._combined(shares)
        return values

    def _combined(self, shares: list[float]) -> float:
        if not self.geometric or any(math.isnan(share) for share in shares):
            return sum(shares) / len(shares)
        return math.exp(sum(math.log(max(share, LEAST)) for share in shares) / len(shares))

    def _questions(self, prompt: Prompt) -> list[tuple[str, str]]:
        if self.field is None:
            return [("", "Yes")]
        listed = prompt.get(self.field)
        pairs = (
            [(entry, "yes") if isinstance(entry, str) else entry for entry in listed or ()]
            if listed != ""
            else []
        )
        good = isinstance(listed, (list, tuple)) and all(
            len(pair) == 2 and isinstance(pair[0], str) and choice_of(pair[1]) for pair in pairs
        )
        if not good or not pairs:
            raise UserError(
                f"reward 'judge_yes_no' expects questions under {self.field!r} of every "
                f"prompt, texts or "
                f"[text, right answer] with yes, no or a count from 0 to 9; the prompt "
                f"{prompt.get('text', '')!r} has {str(listed)[:80]}"
            )
        return [(text, choice_of(right)) for text, right in pairs]


def choice_of(right: object) -> str:
    """Return the choice that a right answer is: Yes, No or a digit; nothing if it is another."""
    word = str(right).strip().lower()
    if word in ("yes", "no"):
        return word.capitalize()
    return word if word in DIGITS else str(UNITS.index(word)) if word in UNITS[:10] else ""
