"""Generates thoughts for a configuration's training rows with its untrained policy.

    python -m mmrl.apps.prepare.reverse_thinking CONFIG --out FILE
        [--instruction TEXT] [key=value ...]

The model gets every question with its right answer, and is asked for the thoughts that lead there
(reverse thinking of TON, Wang et al. 2025, in our wording). Writes JSON lines, the rows with its
text under ``thought``, for ``objective: sft`` with a template. For a configuration with stages the
first is used. Truncated answers are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mmrl.config import load_stages
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.experiment import build
from mmrl.policies.base import RolloutContext
from samplers.noise import Rng

INSTRUCTION = (
    "{text}\n\nThe right answer is: {answer}\nWrite down the thoughts by which somebody who sees "
    "the question for the first time comes to it, step by step. Do not state the answer itself, "
    "and write nothing but the thoughts."
)
DERIVED = ("origin", "view", "system")  # keys of a prompt that are not part of its row


def requests(prompts: list[Prompt], instruction: str, field: str) -> Iterator[Prompt]:
    """Yield the prompts that ask for thoughts. UserError names a row without an answer."""
    for prompt in prompts:
        if prompt.get(field) is None:
            raise UserError(
                f"{prompt.get('origin', prompt['text'])}: no {field!r} to think towards"
            )
        text = instruction.replace("{answer}", str(prompt[field])).replace("{text}", prompt["text"])
        rest = {key: value for key, value in prompt.items() if key not in ("system", "messages")}
        yield {**rest, "text": text}


def thoughts(session: build.Session, prompts: list[Prompt], batch: int) -> Iterator[str | None]:
    """Yield the policy's greedy answer to each prompt; None if truncated."""
    policy = session.policy
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        rng = Rng(Rng.of(session.options.seed, "thoughts").key, first)
        with torch.no_grad(), policy.evaluating():
            texts = policy.decode(policy.rollout(part, 1, rng, RolloutContext(reads="sample")))
        for text in texts:
            yield str(text).strip() if text.finished else None


def row_of(prompt: Prompt, thought: str) -> dict[str, Any]:
    """Return the row with its thought. UserError if it is not JSON-serialisable."""
    row = {key: value for key, value in prompt.items() if key not in DERIVED}
    try:
        json.dumps(row)
    except TypeError as error:
        place = prompt.get("origin", prompt["text"])
        raise UserError(f"{place}: {error}; give pictures as files, not inside a table") from error
    return {**row, "thought": thought}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, as for mmrl train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instruction", default=INSTRUCTION, help="with {text} and {answer}")
    parser.add_argument("--field", default="answer", help="of a row, that holds the answer")
    parser.add_argument("--batch", type=int, default=8, help="rows at once")
    parser.add_argument("--limit", type=int, default=None, help="of the training rows")
    options = parser.parse_intermixed_args()
    written = 0
    try:
        _, stages = load_stages(options.config, options.overrides)
        chosen = [f"stage={stages[0]}"] if stages else []
        session = build.base(options.config, [*options.overrides, *chosen])
        if session.policy.capabilities.makes != "text":
            raise UserError("reverse thinking is for models that write text")
        prompts = list(session.source.train)[: options.limit]
        asking = list(requests(prompts, options.instruction, options.field))
        with options.out.open("w", encoding="utf-8") as file:
            pairs = zip(prompts, thoughts(session, asking, options.batch), strict=True)
            for prompt, thought in pairs:
                if thought:
                    line = row_of(prompt, thought)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    written += 1
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{written} of {len(prompts)} rows have a thought: {options.out}")


if __name__ == "__main__":
    main()
