"""Rewards by a judge that answers yes or no, with its probability."""

from __future__ import annotations

import math
from typing import Any, Literal

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.reading.spelled import UNITS
from rewards.card import card
from rewards.judges.question import Question
from rewards.judges.samples import Frames, Model, OnFailure, SampleJudge
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
LEAST = 1e-12  # lower bound of a probability in a geometric mean


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
class YesNo(SampleJudge):
    """Ask a judge whether the picture shows its text, or the prompt's questions: P(yes).

    P(yes) / (P(yes) + P(no)), upper and lower case added up, from log-probabilities. For a server
    without them, the text of the answer gives 1 or 0. With ``questions: vqa_list, combine:
    geometric`` it is GenEval 2's Soft-TIFA of whole prompts (its mean over questions with
    ``combine: mean``); probabilities are normalised over the possible answers, in the benchmark
    over all tokens.

    Args:
        model: the judge: ``{server: {url: ...}}`` or ``{local: {path: ...}}``.
        questions: field of the prompts that lists questions; each is a text whose right answer is
            yes, or ``[text, right answer]`` with yes, no, or a count from 0 to 9 (a digit or its
            word). The reward combines the probabilities of the right answers. None: one question
            about the whole text.
        combine: mean or geometric (mean) of several questions.
        template: a file that replaces the wording; ``{{ question }}`` is the question; counts keep
            mmrl's wording.
        frames: frames shown of a video, evenly spaced.
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

    def questions(self, prompt: Prompt, shown: dict[str, Any]) -> list[Question]:
        return [
            Question(
                (COUNTS if right in DIGITS else self.template).parts(
                    prompt, {**shown, "question": text}
                ),
                choices=DIGITS if right in DIGITS else ("Yes", "No"),
                tokens=16,
            )
            for text, right in self._asked(prompt)
        ]

    def value(self, prompt: Prompt, answers: list[Any]) -> float:
        shares = [answer[right] for (_, right), answer in zip(self._asked(prompt), answers)]
        if not self.geometric:
            return float(sum(shares) / len(shares))
        return math.exp(sum(math.log(max(share, LEAST)) for share in shares) / len(shares))

    def _asked(self, prompt: Prompt) -> list[tuple[str, str]]:
        """Return each question and the word of its right answer. Raises UserError."""
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
    """Return the choice of a right answer: Yes, No or a digit; nothing for any other."""
    word = str(right).strip().lower()
    if word in ("yes", "no"):
        return word.capitalize()
    return word if word in DIGITS else str(UNITS.index(word)) if word in UNITS[:10] else ""
