"""Measures the untrained policy's rewards on a configuration's training prompts.

    python -m mmrl.apps.prepare.reference_rewards CONFIG --out FILE
        [--num-samples N] [key=value ...]

Writes JSON lines, {"text": the prompt, "reward": the weighted sum for each sample}, which the
advantages pvpo, aapo and single_stream read as ``file``, and which measure the difficulty of a
prompt. If the configuration's advantage names the file to be written, override it with
advantage=grpo.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.experiment import build
from mmrl.policies.base import RolloutContext
from samplers.noise import Rng


def measured(
    session: build.Session, prompts: list[Prompt], copies: int, batch: int, seed: int
) -> Iterator[list[float]]:
    """Yield the finite rewards of every prompt's samples, sampled as in training."""
    policy = session.policy
    policy.prepare(prompts)
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        rng = Rng(Rng.of(seed, "reference").key, first)
        with torch.no_grad():
            rollout = policy.rollout(part, copies, rng, RolloutContext(reads="sample"))
            rewards = session.scorer(policy.decode(rollout), rollout.prompt_per_row())
        total = rewards.per_row().total().view(len(part), copies)
        for row in total.tolist():
            yield [value for value in row if abs(value) < float("inf")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, as for mmrl train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--batch", type=int, default=8, help="prompts sampled at once")
    parser.add_argument("--limit", type=int, default=None, help="of the training prompts")
    options = parser.parse_intermixed_args()
    try:
        session = build.base(options.config, options.overrides)
        train = list(session.source.train)[: options.limit]
        prompts = list({str(prompt["text"]): prompt for prompt in train}.values())
        sizes = (options.num_samples, options.batch, session.options.seed)
        with options.out.open("w", encoding="utf-8") as file:
            for prompt, rewards in zip(prompts, measured(session, prompts, *sizes), strict=True):
                if rewards:
                    line = {"text": prompt["text"], "reward": rewards}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{len(prompts)} prompts, {options.num_samples} samples each: {options.out}")


if __name__ == "__main__":
    main()
