"""Scores by a vision-language model as judge that says yes or no, and how sure it is."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt
from rewards._ask import Question
from rewards._judge_templates import REQUEST, Template, find
from rewards.card import card
from rewards.judged import Frames, Judged, Model, OnFailure, kind_of, shown_of

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


@REWARDS.register("judge_yes_no")
@card(
    needs="text",
    low=0,
    high=1,
    source="the judge's; VQAScore arXiv 2404.01291, TIFA arXiv 2303.11897",
    licence="the judge's",
    scaling="P(yes) / (P(yes) + P(no))",
)
class YesNo(Judged):
    """Ask a judge whether the picture shows its text, or each question of the prompt: P(yes).

    P(yes) / (P(yes) + P(no)), upper and lower case added up, from log-probabilities. A server
    without them gives its answer in words: 1 or 0.

    Args:
        model: who judges: ``{server: {url: ...}}`` or ``{local: {path: ...}}``.
        questions: field of the prompts that lists questions; each is a text whose right answer is
            yes, or ``[text, "no"]``. The reward is their mean probability of the right answer.
            None: one question about the whole text.
        template: file of your own in place of the wording; ``{{ question }}`` is the question.
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
    ):
        super().__init__(model, frames, on_failure)
        self.field = questions
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
                parts = self.template.parts(
                    prompts[row], kind_of(media), {**shown, "question": text}
                )
                rows.append(row)
                right_words.append(right)
                questions.append(Question(parts, choices=("Yes", "No"), tokens=16))
        shares_of: dict[int, list[float]] = {}
        for row, right, answer in zip(rows, right_words, self.answers(questions), strict=True):
            shares_of.setdefault(row, []).append(torch.nan if answer is None else answer[right])
        values = torch.full((len(prompts),), torch.nan)
        for row, shares in shares_of.items():
            values[row] = sum(shares) / len(shares)
        return values

    def _questions(self, prompt: Prompt) -> list[tuple[str, Literal["Yes", "No"]]]:
        if self.field is None:
            return [("", "Yes")]
        listed = prompt.get(self.field)
        pairs = (
            [(entry, "yes") if isinstance(entry, str) else entry for entry in listed or ()]
            if listed != ""
            else []
        )
        good = isinstance(listed, (list, tuple)) and all(
            len(pair) == 2 and isinstance(pair[0], str) and str(pair[1]).lower() in ("yes", "no")
            for pair in pairs
        )
        if not good or not pairs:
            raise UserError(
                f"reward 'judge_yes_no' expects questions under {self.field!r} of every "
                f"prompt, texts or "
                f'[text, "no"]; the prompt {prompt.get("text", "")!r} has {str(listed)[:80]}'
            )
        return [(text, "Yes" if str(right).lower() == "yes" else "No") for text, right in pairs]
