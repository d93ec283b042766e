"""Asks a vision-language model of transformers about pictures: next-token probabilities, the
likelihood of an answer.

Not shared with a ``local`` judge: generation keeps state in some models, and rewards run in
parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from rewards.base.hf import Precision, load_model, load_processor, to_pil
from rewards.base.locks import lock_of


class LocalVLM:
    """Holds a model with its processor; pictures go through PIL, questions through the chat
    template if there is one."""

    def __init__(
        self, model: str, device: str | torch.device = "auto", dtype: Precision = "bfloat16"
    ):
        self.model = load_model("AutoModelForImageTextToText", model, device, dtype)
        self.processor = load_processor("AutoProcessor", model)
        if not getattr(self.processor, "chat_template", None):
            raise UserError(
                f"the model {model!r} has no chat template, so it cannot be asked anything"
            )
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.padding_side = "left"

    def next_token(self, pictures: Tensor, questions: list[str]) -> Tensor:
        """Return log-probabilities [N, V] of the answer's first token for [N, 3, H, W] in 0..1 and
        N questions."""
        return self._logits(pictures, questions, [""] * len(questions))[:, -1].log_softmax(-1)

    def likelihood(self, pictures: Tensor, questions: list[str], answers: list[str]) -> Tensor:
        """Return the mean log-probability [N] of the tokens of each answer."""
        ids = [self.tokenizer(answer, add_special_tokens=False).input_ids for answer in answers]
        # left-padded: answers end each row
        logits = self._logits(pictures, questions, answers).log_softmax(-1)
        rows = []
        for row, tokens in zip(logits, ids, strict=True):
            steps = row[-len(tokens) - 1 : -1]
            rows.append(steps.gather(1, torch.tensor(tokens, device=row.device)[:, None]).mean())
        return torch.stack(rows)

    def first_token(self, answer: str) -> int:
        return int(self.tokenizer(answer, add_special_tokens=False).input_ids[0])

    @torch.no_grad()
    def _logits(self, pictures: Tensor, questions: list[str], answers: list[str]) -> Tensor:
        texts = [
            self.write(question) + answer
            for question, answer in zip(questions, answers, strict=True)
        ]
        images = [[image] for image in to_pil(pictures)]
        batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt").to(
            self.model.device
        )
        for name, value in batch.items():
            if value.is_floating_point():
                batch[name] = value.to(self.model.dtype)
        with lock_of(self.model):
            logits: Tensor = self.model(**batch, use_cache=False).logits
        return logits.float()

    def write(self, question: str) -> str:
        """Write the question after a picture in the model's format, up to where its answer
        begins."""
        message = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        ]
        text: str = self.processor.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        return text
