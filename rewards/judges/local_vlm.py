"""Runs a judge in this process: any vision-language model of transformers, from a folder or a hub
id."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.hub import check_model
from mmrl.core.pretrained import load_model, load_processor
from mmrl.core.registry import JUDGES
from rewards.base.hf import DTYPES, Precision
from rewards.base.locks import lock_of
from rewards.judges.question import AGAIN, Question, Unreadable, Usage, _plain

Turn = dict[str, Any]  # role and content, as chat templates know them


@JUDGES.register("local")
class LocalVlm:
    """Ask a vision-language model of transformers in this process, greedily.

    The probability of a choice is the softmax over the first answer token, restricted to the tokens
    that the choices begin with, upper and lower case and with a leading blank added up. Two choices
    must not begin with the same token.

    Args:
        path: folder or hub id.
        dtype: of the weights; ``auto`` is bfloat16 on an accelerator and float32 on a CPU.
        device: ``auto`` is CUDA if there is one.
        batch_size: questions in one forward pass.
        asked_again: retries for an answer that cannot be parsed.
        max_side: pictures are downscaled to at most this many pixels a side, as for a server; None:
            only by the processor.

    Attributes:
        usage: counters since the start; ``requests`` are forward passes or generations.

    Raises:
        UserError: the model is not on this machine, cannot be loaded, or has no chat template.
    """

    def __init__(
        self,
        path: str,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: str = "auto",
        batch_size: Annotated[int, Ge(1)] = 8,
        asked_again: Annotated[int, Ge(0)] = 1,
        max_side: Annotated[int, Ge(16)] | None = 1024,
    ):
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        usual: Precision = "float32" if device == "cpu" else "bfloat16"
        precision = usual if dtype == "auto" else dtype
        self.model, self.processor = load(str(path), precision, device)
        self.batch_size = batch_size
        self.asked_again = asked_again
        self.max_side = max_side
        self.usage = Usage()

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """Return the value of every question; None if the answer cannot be parsed. Judges that
        share a model take turns."""
        with lock_of(self.model):
            return self._ask(questions)

    def _ask(self, questions: Sequence[Question]) -> list[Any]:
        values: list[Any] = [None] * len(questions)
        chosen = [i for i, question in enumerate(questions) if question.choices]
        written = [i for i, question in enumerate(questions) if not question.choices]
        for start in range(0, len(chosen), self.batch_size):
            rows = chosen[start : start + self.batch_size]
            for row, answer in zip(
                rows, self.probabilities([questions[row] for row in rows]), strict=True
            ):
                values[row] = answer
        for start in range(0, len(written), self.batch_size):
            rows = written[start : start + self.batch_size]
            for row, answer in zip(
                rows, self._generated([questions[row] for row in rows]), strict=True
            ):
                values[row] = answer
        unanswered = sum(value is None for value in values)
        self.usage.add(
            answers=len(values) - unanswered, unanswered=unanswered, unreadable=unanswered
        )
        return values

    def probabilities(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """Return choice -> probability, summing to 1, for each question."""
        inputs = self._inputs([self._conversation(question) for question in questions])
        logits = self._generate(inputs, 1, output_logits=True).logits[0].float()  # [N, vocabulary]
        self.usage.add(
            requests=1, tokens_in=int(inputs["attention_mask"].sum()), tokens_out=len(questions)
        )
        answers = []
        for row, question in zip(logits, questions, strict=True):
            ids = first_tokens(self.processor.tokenizer, question.choices)
            joint = row[
                torch.tensor([i for group in ids for i in group], device=row.device)
            ].softmax(0)
            parts = joint.split([len(group) for group in ids])
            answers.append(
                {
                    choice: float(part.sum())
                    for choice, part in zip(question.choices, parts, strict=True)
                }
            )
        return answers

    def _generated(self, questions: Sequence[Question]) -> list[Any]:
        """Return the values of free-text answers; those that cannot be parsed are asked again."""
        talks = [self._conversation(question) for question in questions]
        values: list[Any] = [None] * len(questions)
        left = list(range(len(questions)))
        for turn in range(self.asked_again + 1):
            answers = self._answers(
                [talks[i] for i in left], max(questions[i].tokens for i in left)
            )
            again = []
            for i, answer in zip(left, answers, strict=True):
                try:
                    values[i] = questions[i].value(answer)
                except Unreadable as problem:
                    self.usage.cause = f"an answer of the judge cannot be read: {problem}"
                    again.append(i)
                    talks[i] = [
                        *talks[i],
                        says("assistant", answer),
                        says("user", AGAIN.format(problem=problem)),
                    ]
            left = again
            if not left:
                break
            self.usage.add(asked_again=len(left) if turn < self.asked_again else 0)
        return values

    def _answers(self, talks: list[list[Turn]], tokens: int) -> list[str]:
        inputs = self._inputs(talks)
        length = inputs["input_ids"].shape[1]
        sequences = self._generate(inputs, tokens).sequences[:, length:]
        pad = self.processor.tokenizer.pad_token_id
        self.usage.add(
            requests=1,
            tokens_in=int(inputs["attention_mask"].sum()),
            tokens_out=int((sequences != pad).sum()),
        )
        answers: list[str] = self.processor.batch_decode(sequences, skip_special_tokens=True)
        return answers

    @torch.no_grad()
    def _generate(self, inputs: Any, tokens: int, **options: Any) -> Any:
        greedy = {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "num_beams": 1,
        }
        options |= {
            "return_dict_in_generate": True,
            "pad_token_id": self.processor.tokenizer.pad_token_id,
        }
        with torch.autocast(self.model.device.type, enabled=False):
            return self.model.generate(**inputs, max_new_tokens=tokens, **greedy, **options)

    def _inputs(self, talks: list[list[Turn]]) -> dict[str, Tensor]:
        inputs = self.processor.apply_chat_template(
            talks,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        return {
            name: value.to(
                self.model.device, self.model.dtype if value.is_floating_point() else None
            )
            for name, value in inputs.items()
        }

    def _conversation(self, question: Question) -> list[Turn]:
        content: list[dict[str, Any]] = []
        for part in [*question.parts, question.wording()]:
            if isinstance(part, str):
                content += [{"type": "text", "text": part}] if part else []
            else:
                content.append(
                    {"type": "image", "image": smaller(part.convert("RGB"), self.max_side)}
                )
        return [{"role": "user", "content": content}]


def says(role: str, text: str) -> Turn:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def smaller(picture: Any, side: int | None) -> Any:
    """Downscale a picture to at most ``side`` pixels a side, keeping its aspect ratio."""
    if side is None or max(picture.size) <= side:
        return picture
    from PIL import Image

    picture = picture.copy()
    picture.thumbnail((side, side), Image.Resampling.BICUBIC)
    return picture


def first_tokens(tokenizer: Any, choices: Sequence[str]) -> list[list[int]]:
    """Return for each choice the ids of the tokens it may begin with. Raises UserError if two
    choices share one."""
    groups: list[list[int]] = []
    for choice in choices:
        words = {choice, choice.lower(), choice.upper(), choice.capitalize()}
        forms = words | {f" {word}" for word in words}
        ids = {
            encoded[0]
            for form in forms
            if (encoded := tokenizer.encode(form, add_special_tokens=False))
        }
        # a lone blank carries no information
        groups.append(sorted(i for i in ids if _plain(tokenizer.decode([i]))))
    shared = [
        i
        for n, group in enumerate(groups)
        for i in group
        if any(i in earlier for earlier in groups[:n])
    ]
    if shared or not all(groups):
        raise UserError(
            f"the local judge cannot tell {' and '.join(map(repr, choices))} apart by "
            f"their first token; "
            "let the choices be letters or words that begin differently"
        )
    return groups


@lru_cache(maxsize=4)
def load(path: str, dtype: Precision, device: str) -> tuple[Any, Any]:
    """Load model and processor, frozen, once for all rewards that use them."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    check_model(path)
    try:
        processor = load_processor(AutoProcessor, path)
        model = load_model(AutoModelForImageTextToText, path, dtype=DTYPES[dtype])
    except UserError as error:
        raise UserError(f"cannot load the judge {path!r}: {error}") from error
    if not getattr(processor, "chat_template", None):
        raise UserError(f"the judge {path!r} has no chat template, so it cannot be asked anything")
    if processor.tokenizer.pad_token_id is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return model.eval().requires_grad_(False).to(device), processor
