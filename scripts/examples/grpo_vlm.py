"""Trains a vision-language model by GRPO with a verifiable reward in one file: torch, the random
numbers of this repository, and any image-text-to-text model of transformers.

    python scripts/examples/grpo_vlm.py                    # a tiny Qwen2.5-VL on the CPU, minutes
    python scripts/examples/grpo_vlm.py --model FOLDER --device cuda --max-new-tokens 64

Read it from the bottom: ``main`` is the loop. Change ``task`` first: the prompts and the reward.
``tests/cli/test_examples.py`` checks that answers and losses equal those of ``mmrl``, which adds
what is left out here: shared prompt prefill for a group, LoRA, vLLM, several GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, LogitsProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samplers.noise import Rng

Prompt = dict[str, Any]
Reward = Callable[[list[str], list[Prompt]], Tensor]  # answers, prompts -> [B]
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def task() -> tuple[list[Prompt], list[Prompt], Reward]:
    """Return prompts to train on, prompts to test with, and the reward of their answers."""
    from mmrl.worlds.asking import Questions
    from rewards.answers.words import Count

    questions = Questions(kinds=["count"], scenes=2000, held_out="test")
    return questions.train, questions.held_out, Count()


class Draw(LogitsProcessor):
    """Makes ``generate`` sample with the random numbers ``uniform`` [B, T], so that an answer
    depends only on its row, not on the batch; ``never``: ids that are not sampled."""

    def __init__(self, uniform: Tensor | None, never: list[int]):
        self.uniform = uniform
        self.never = never
        self.token = 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.float()
        logits[:, self.never] = -torch.inf
        if self.uniform is None:
            return logits  # generate then takes the argmax
        below = logits.double().softmax(-1).cumsum(-1)
        draw = self.uniform[:, self.token, None].to(below) * below[:, -1:]
        self.token += 1
        chosen = torch.searchsorted(below, draw, right=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, chosen, 0.0)


class GRPO:
    """Samples, scores and trains, at temperature 1 and over the whole vocabulary."""

    def __init__(self, model: Any, processor: Any, max_new_tokens: int = 4, clip: float = 0.2):
        self.model = model.eval()  # no dropout: scores equal those of sampling
        self.processor = processor
        self.max_new_tokens = max_new_tokens
        self.clip_range = clip
        self.never = [value for name, value in model.config.to_dict().items() if name in MARKS]

    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Encode prompts by the chat template, left-padded."""
        chats = []
        for prompt in prompts:
            pictures = [{"type": "image", "image": image} for image in prompt["images"]]
            content = [*pictures, {"type": "text", "text": prompt["text"]}]
            chats.append([{"role": "user", "content": content}])
        inputs = self.processor.apply_chat_template(
            chats,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        return dict(inputs.to(self.model.device))

    @torch.no_grad()
    def sample(self, prompts: list[Prompt], rows: Tensor, rng: Rng | None) -> tuple[Tensor, Tensor]:
        """Answer every prompt once: token ids [B, T] and which of them are the answer's, [B, T].
        ``rows`` [B] are the ids of the answers, which key their random numbers; greedy without
        ``rng``."""
        inputs = self.encode(prompts)
        uniform = None if rng is None else rng.uniform(rows, (self.max_new_tokens,))
        ids = self.model.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            logits_processor=[Draw(uniform, self.never)],
        )[:, inputs["input_ids"].shape[1] :]
        eos = torch.tensor(self.model.generation_config.eos_token_id, device=ids.device)
        end = torch.isin(ids, eos)  # one token or several
        return ids, end.cumsum(1) - end.long() == 0  # up to the end token

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Return the texts of answers."""
        rows = [row[kept] for row, kept in zip(ids, mask, strict=True)]
        return self.processor.batch_decode(rows, skip_special_tokens=True)

    def log_prob(self, prompts: list[Prompt], ids: Tensor, mask: Tensor) -> Tensor:
        """Score the tokens of answers in one pass, [B, T]."""
        inputs = self.encode(prompts)
        more = {"input_ids": ids, "attention_mask": mask.long()}
        of_tokens = [name for name, x in inputs.items() if x.shape == inputs["input_ids"].shape]
        for name in of_tokens:
            inputs[name] = torch.cat([inputs[name], more.get(name, torch.zeros_like(ids))], 1)
        logits = self.model(**inputs, use_cache=False).logits[:, -ids.shape[1] - 1 : -1].float()
        logits[..., self.never] = -torch.inf
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0].masked_fill(~mask, 0.0)

    def loss(self, new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        """Compute the clipped surrogate [B, T] of log-probs [B, T] and advantages [B]."""
        ratio = (new - old).exp()
        a = advantage[:, None]
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return torch.maximum(-a * ratio, -a * clipped)


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Compare each reward [B] with its group: minus the mean, over the standard deviation."""
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten().float()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the mean reward of every iteration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", help="a folder or hub id; by default a tiny one of this world")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=24, help="in an iteration")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps in an iteration")
    parser.add_argument("--micro-batch", type=int, default=32, help="rows in a forward pass")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.model is None:
        from mmrl.worlds.artifacts import answers

        options.model = str(answers())

    train, held_out, reward = task()
    model = AutoModelForImageTextToText.from_pretrained(options.model).to(options.device)
    processor = AutoProcessor.from_pretrained(options.model)
    grpo = GRPO(model, processor, options.max_new_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)

    def test() -> float:
        prompts = held_out[:100]
        ids, mask = grpo.sample(prompts, torch.arange(len(prompts)), None)
        return float(reward(grpo.decode(ids, mask), prompts).mean())

    print(f"held-out reward before: {test():.3f}")
    history = []
    for iteration in range(options.iterations):
        rng = Rng.of(options.seed, iteration, "rollout")
        drawn = rng.fold("prompts").permutation(len(train))[: options.prompts].tolist()
        prompts = [train[i] for i in drawn for _ in range(options.group_size)]
        rows = torch.arange(len(prompts), device=options.device)
        ids, mask = grpo.sample(prompts, rows, rng)
        rewards = reward(grpo.decode(ids, mask), prompts).to(options.device)
        advantage = advantages(rewards, options.group_size)
        passes = rows.split(options.micro_batch)
        with torch.no_grad():
            parts = [grpo.log_prob([prompts[i] for i in p], ids[p], mask[p]) for p in passes]
            old = torch.cat(parts)
        order = rng.fold("update").permutation(len(prompts)).to(options.device)
        for batch in order.chunk(options.updates):
            for p in batch.split(options.micro_batch):
                new = grpo.log_prob([prompts[i] for i in p], ids[p], mask[p])
                loss = grpo.loss(new, old[p], advantage[p])
                (torch.where(mask[p], loss, 0.0).sum() / mask[batch].sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        history.append(float(rewards.mean()))
        print(f"iteration {iteration + 1}: reward {history[-1]:.3f}", flush=True)
    print(f"held-out reward after: {test():.3f}")
    return history


if __name__ == "__main__":
    main()
