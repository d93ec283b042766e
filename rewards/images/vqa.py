"""Scores by question answering with any vision-language model of transformers: VQAScore (Lin et al.
2024, arXiv:2404.01291) and TIFA (Hu et al. 2023, arXiv:2303.11897)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.frames import BatchSize, FrameReward, PromptReward
from rewards.base.hf import Precision
from rewards.base.prompt import field_of
from rewards.base.vlm import LocalVLM
from rewards.card import card

QUESTION = 'Does this figure show "{text}"? Please answer yes or no.'  # VQAScore's, section 3.1
Asked = tuple[str, list[str], str]  # a question, its choices, the right one
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


@card(
    media="image video",
    needs="text",
    low=0,
    high=1,
    source="any image-text-to-text model of transformers; VQAScore: CLIP-FlanT5",
    licence="of the model",
    scaling="P(yes) as in VQAScore; normalize: P(yes) / (P(yes) + P(no))",
)
@REWARDS.register("vqa_score")
class VQAScore(PromptReward):
    """Ask a model whether the picture shows the prompt; the score is P(yes).

    P(yes) is the probability of the answer's first token. For a video, the mean over its frames.

    Args:
        model: an image-text-to-text model, hub id or folder.
        question: the question, with ``{text}`` for the prompt.
        yes: answers that count; their probabilities are added.
        no: answers against, for ``normalize``.
        normalize: divide by the probability of all of these answers.
        dtype: of the model.
    """

    name = "vqa_score"

    def __init__(
        self,
        model: str = MODEL,
        question: str = QUESTION,
        yes: list[str] = ["Yes"],  # noqa: B006
        no: list[str] = ["No"],  # noqa: B006
        normalize: bool = False,
        batch_size: BatchSize = 8,
        dtype: Precision = "bfloat16",
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        if "{text}" not in question:
            raise UserError("reward 'vqa_score': the question needs {text} where the prompt goes")
        self.vlm = LocalVLM(model, self.device, dtype)
        self.question = question
        self.normalize = normalize
        self.yes, self.no = (
            sorted({self.vlm.first_token(answer) for answer in answers}) for answers in (yes, no)
        )
        if set(self.yes) & set(self.no):
            raise UserError(
                f"reward 'vqa_score': {yes} and {no} begin with the same token for {model}"
            )

    def score(self, pictures: Tensor, texts: list[str]) -> Tensor:
        questions = [self.question.replace("{text}", text) for text in texts]
        chances = self.vlm.next_token(pictures, questions).exp()
        yes = chances[:, self.yes].sum(1)
        no = chances[:, self.no].sum(1)
        return yes / (yes + no) if self.normalize else yes


@card(
    media="image video",
    needs="questions",
    low=0,
    high=1,
    source="any image-text-to-text model of transformers; questions: TIFA's files or your own",
    licence="of the model",
)
@REWARDS.register("tifa")
class TIFA(FrameReward):
    """Ask a model a prompt's questions about the picture; the score is the share of right answers.

    A prompt's ``questions`` is a list of ``{"question": ..., "choices": [...], "answer": ...}``
    (yes and no by default). The model's answer is the choice with the highest mean log-probability
    per token; the published code generates a text and takes the choice with the nearest sentence
    embedding. For a video, the mean over its frames.

    Args:
        model: an image-text-to-text model, hub id or folder.
        dtype: of the model.
    """

    name = "tifa"

    def __init__(
        self,
        model: str = MODEL,
        batch_size: BatchSize = 8,
        dtype: Precision = "bfloat16",
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.vlm = LocalVLM(model, self.device, dtype)

    def conditions(self, prompts: list[Prompt]) -> list[list[Asked]]:
        return [questions_of(prompt) for prompt in prompts]

    def score(self, pictures: Tensor, questions: list[list[Asked]]) -> Tensor:
        return torch.tensor([self.right(*row) for row in zip(pictures, questions, strict=True)])

    def right(self, picture: Tensor, questions: list[Asked]) -> float:
        """Return the share of right answers about a picture [3, H, W]."""
        flat = [(question, choice) for question, choices, _ in questions for choice in choices]
        likelihoods = []
        for start in range(0, len(flat), self.batch_size):
            part = flat[start : start + self.batch_size]
            pictures = picture.expand(len(part), -1, -1, -1)
            likelihoods.append(
                self.vlm.likelihood(pictures, [q for q, _ in part], [c for _, c in part])
            )
        scores = iter(torch.cat(likelihoods).tolist())
        hits = []
        for _, choices, answer in questions:
            choice_scores = [next(scores) for _ in choices]
            hits.append(choices[choice_scores.index(max(choice_scores))] == answer)
        return sum(hits) / len(hits)


def questions_of(prompt: Prompt) -> list[Asked]:
    """Return (question, choices, answer) of a prompt; the question lists its choices as in TIFA."""
    questions: list[Asked] = []
    for entry in field_of(prompt, "questions", "tifa", list):
        choices = list(checked_question(entry).get("choices") or ["yes", "no"])
        answer = entry["answer"]
        if answer not in choices:
            raise UserError(
                f"reward 'tifa': the answer {answer!r} is not among the choices {choices}"
            )
        questions.append((f"{entry['question']} Choices: {', '.join(choices)}.", choices, answer))
    if not questions:
        raise UserError(
            "reward 'tifa' needs at least one question in the field 'questions' of every prompt"
        )
    return questions


def checked_question(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not {"question", "answer"} <= set(entry):
        raise UserError(
            f'reward \'tifa\': a question is {{"question", "choices", "answer"}}, got '
            f"{str(entry)[:80]}"
        )
    return entry
