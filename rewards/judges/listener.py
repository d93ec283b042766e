"""Rewards reasoning by whether a second vision-language model answers correctly from it."""

from __future__ import annotations

from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.thoughts import thought_of
from mmrl.core.types import Prompt
from rewards.answers.reading.parts import without_answers
from rewards.card import card
from rewards.judges.question import Question
from rewards.judges.samples import Model, OnFailure, SampleJudge
from rewards.judges.templates import Template, find

LISTEN = Template(
    "listener",
    "{{ media }}\nQuestion:\n{{ text }}\n\nSomeone has thought about it, without giving "
    "the answer:\n{{ answer }}\n\n"
    "{{ question }}",
)
CHOOSE = (
    "By this reasoning and what you see, which answer is right? Answer with one of {}, and "
    "nothing else."
)
CONFIRM = (
    'By this reasoning and what you see, is "{}" the right answer? Answer with Yes or No '
    "and nothing else."
)


@REWARDS.register("judge_listener")
@card(
    media="text",
    needs="text",
    low=0,
    high=1,
    source="arXiv 2506.22832",
    licence="the judge's",
    scaling="probability that the listener gives to the ground truth",
)
class Listener(SampleJudge):
    """Ask a listener to answer from the reasoning alone: its confidence in the right answer.

    The answer is removed from the text: what follows the thought, or is in ``<answer>`` or
    ``\\boxed{}``. If the prompt has choices the listener picks one; else it is asked whether the
    ground truth is right.

    Args:
        model: the frozen listener: ``{server: {url: ...}}`` or ``{local: {path: ...}}``.
        target: field of the prompts with the ground truth.
        choices: field of the prompts with the possible answers, if any.
        template: a file that replaces the wording; ``{{ answer }}`` is the reasoning.
        on_failure: ``nan`` leaves samples without an answer out, ``stop`` raises.
    """

    name = "judge_listener"

    def __init__(
        self,
        model: Model,
        target: str = "answer",
        choices: str = "choices",
        template: str | None = None,
        on_failure: OnFailure = "nan",
    ):
        super().__init__(model, 1, on_failure)
        self.target = target
        self.choices = choices
        self.template = LISTEN if template is None else find(template, {})
        self.card = self.needing(self.template)

    def questions(self, prompt: Prompt, shown: dict[str, Any]) -> list[Question]:
        if shown["kind"] != "answer":
            raise UserError(
                "reward 'judge_listener' reads reasoning in texts; the policy made images or videos"
            )
        _, choices, words = self._asked(prompt)
        thought = {**shown, "answer": reasoning(shown["answer"]), "question": words}
        return [Question(self.template.parts(prompt, thought), choices=choices, tokens=16)]

    def value(self, prompt: Prompt, answers: list[Any]) -> float:
        right, _, _ = self._asked(prompt)
        return float(answers[0][right])

    def _asked(self, prompt: Prompt) -> tuple[str, tuple[str, ...], str]:
        """Return the right word, all words, and the question."""
        right = prompt.get(self.target)
        if right is None:
            raise UserError(
                f"reward 'judge_listener' needs the ground truth under {self.target!r} of "
                f"every prompt (`target`); "
                f"the prompt {prompt.get('text', '')!r} has none"
            )
        listed: Any = prompt.get(self.choices)
        if not listed:
            return "Yes", ("Yes", "No"), CONFIRM.format(right)
        choices = tuple(map(str, listed))
        if str(right) not in choices:
            raise UserError(
                f"{self.target!r} is {right!r}, which is not among {self.choices!r}: "
                f"{', '.join(choices)}"
            )
        return str(right), choices, CHOOSE.format(", ".join(choices))


def reasoning(text: str) -> str:
    """Return a completion without its answer."""
    return without_answers(thought_of(text)).strip()
