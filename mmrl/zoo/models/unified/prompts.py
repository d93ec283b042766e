"""Encodes prompts of both tasks as token ids, and the texts after which an image begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.types import Prompt
from mmrl.policies.image_tokens import causal
from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.vlm.media import images_of, where

TASKS = ("generate", "understand")
HERE = "\u00a7plan\u00a7"  # where the plan stands in a new turn
ASK = (
    "A picture is to be drawn of this: {prompt}\nPlan it in at most fifty words: which "
    "things are in it, how many, "
    "their colours, sizes and places, and the background. Write the plan only."
)


@dataclass(frozen=True)
class Plan:
    """Describes what is written before an image. max_new_tokens: at most. instruction: the text
    that requests it, with {prompt} in it. turn: the image follows in the same sequence
    (ReasonGen-R1), or a new turn of prompt and plan requests it (T2I-R1). images: drawn from every
    plan; more than 1 make a tree. temperature, top_k, top_p: of the text."""

    max_new_tokens: Count = 64
    instruction: str = ASK
    turn: Literal["same", "new"] = "same"
    images: Count = 1
    temperature: Annotated[float, Gt(0)] = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0

    def __post_init__(self) -> None:
        if "{prompt}" not in self.instruction:
            raise ValueError("instruction has no {prompt} in it, where the prompt's text goes")


@dataclass(frozen=True)
class Answer:
    """Describes text answers to prompts of the task ``understand``. max_new_tokens: at most.
    temperature, top_k, top_p: of sampling and scoring. greedy_evaluation: evaluation takes the
    likeliest token."""

    max_new_tokens: Count = 256
    temperature: Annotated[float, Gt(0)] = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    greedy_evaluation: bool = True


def task_of(prompt: Prompt) -> str:
    """Return the prompt's ``task``; without one, ``understand`` where it shows an image. UserError
    for any other word."""
    task = prompt.get("task") or ("understand" if images_of(prompt) else "generate")
    if task not in TASKS:
        raise UserError(f"{where(prompt)}: task {task!r} is unknown; it is {' or '.join(TASKS)}")
    return task


def drawn(processor: Any, text: str, plan: Plan | None) -> Inputs:
    """Return ids [1, S] of the prompt before its plan, or before the image's start; of a plan that
    belongs in a new turn also those ``before`` and ``after`` it there."""
    if plan is None:
        rendered = _turn(processor, text)
        ids = processor(text=[rendered], generation_mode="image", return_tensors="pt")["input_ids"]
        return {"ids": ids[:, :-1]}  # without the image's start
    rendered = _turn(processor, plan.instruction.replace("{prompt}", text))
    inputs = {"ids": processor(text=[rendered], return_tensors="pt")["input_ids"]}
    if plan.turn == "new":
        before, _, after = _turn(processor, f"{text}. {HERE}").partition(HERE)
        encode = processor.tokenizer
        inputs["before"] = encode([before], return_tensors="pt")["input_ids"]
        inputs["after"] = encode([after], add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ].long()
    return inputs


def collated(rows: list[Tensor], pad: int) -> Inputs:
    """Join the ids [S_b] of every row to ids and mask [B, S], padded on the left."""
    return causal.padded([{"ids": ids[None]} for ids in rows], pad)


def _turn(processor: Any, text: str) -> str:
    turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    rendered: str = processor.apply_chat_template(turn, add_generation_prompt=True)
    return rendered
