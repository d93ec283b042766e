"""Trains a masked discrete diffusion model by MaskGRPO (Ma et al. 2025) in one file: torch, the
samplers of this repository, and aMUSEd from diffusers.

    python scripts/examples/mask_grpo.py                      # a tiny aMUSEd on the CPU, minutes
    python scripts/examples/mask_grpo.py --model amused/amused-256 --device cuda

An image is a grid of tokens that all start masked. Sampling predicts the masked ones and keeps some
of them, pass by pass. Training remasks most of the finished tokens, at rates that grow from update
to update, and scores them. Read it from the bottom: ``main`` is the loop. Change ``task`` first.
``tests/cli/test_examples.py`` checks that samples and losses equal those of ``mmrl``, which adds
what is left out here: guidance, other samplers and estimators, several GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AmusedPipeline
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samplers import unmask
from samplers.noise import Rng

Prompt = dict[str, Any]
Reward = Callable[[Tensor, list[Prompt]], Tensor]  # images [B, 3, H, W] in 0..1, prompts -> [B]


def task() -> tuple[list[Prompt], list[Prompt], Reward]:
    """Return prompts to train on, prompts to test with, and the reward of their images."""
    from mmrl.worlds.data import Digits
    from rewards.images.digits import Digits as DigitsReward

    captions = Digits(kind="single")  # such as "a red seven"
    return captions.train, captions.held_out, DigitsReward()


class MaskGRPO:
    """Samples in ``steps`` passes, scores and trains; ``lowest``: the lowest mask rate in
    training."""

    def __init__(self, pipe: Any, steps: int = 4, lowest: float = 0.8, clip: float = 0.2):
        self.pipe = pipe
        self.net = pipe.transformer.eval()  # no dropout: scores equal those of sampling
        factor = 2 ** (len(pipe.vqvae.config.block_out_channels) - 1)  # pixels of a token
        self.grid = self.net.config.sample_size
        self.side = self.grid * factor
        self.mask_id = pipe.scheduler.config.mask_token_id
        self.rates = unmask.cosine(steps)  # [T + 1] the share of hidden tokens before each pass
        self.lowest = lowest
        self.clip_range = clip

    @torch.no_grad()
    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Encode prompts by the text encoder, [B, *]."""
        tokenizer = self.pipe.tokenizer
        ids = tokenizer(
            [prompt["text"] for prompt in prompts],
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=tokenizer.model_max_length,
        ).input_ids.to(self.net.device)
        encoded = self.pipe.text_encoder(ids, return_dict=True, output_hidden_states=True)
        # size, crop, and the aesthetic score that the pipeline needs
        micro = torch.tensor([[self.side, self.side, 0, 0, 6.0]], device=ids.device)
        return {
            "encoder_hidden_states": encoded.hidden_states[-2],
            "pooled_text_emb": encoded.text_embeds,
            "micro_conds": micro.expand(len(ids), -1),
        }

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Decode tokens [B, L] to images [B, 3, H, W] in 0..1."""
        vae = self.pipe.vqvae
        shape = (len(ids), self.grid, self.grid, vae.config.latent_channels)
        codes = ids.view(-1, self.grid, self.grid)
        return vae.decode(codes, force_not_quantize=True, shape=shape).sample.clamp(0, 1)

    def logprobs(self, ids: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Compute the log-probs of all tokens [B, L, V], given partly masked ids [B, L]."""
        logits = self.net(ids.view(-1, self.grid, self.grid), **cond)
        return logits.flatten(2).transpose(1, 2).float().log_softmax(-1)

    @torch.no_grad()
    def sample(self, cond: dict[str, Tensor], rows: Tensor, rng: Rng) -> Tensor:
        """Sample tokens [B, L]; ``rows`` [B] are the ids of the samples, which key their random
        numbers. Which tokens a pass keeps is chosen at random, independently of the network."""
        length = self.grid**2
        ids = torch.full((len(rows), length), self.mask_id, device=rows.device)
        for step in range(len(self.rates) - 1):
            hidden = ids == self.mask_id
            below = self.logprobs(ids, cond).double().exp().cumsum(-1)
            draw = rng.uniform(rows, (length,), 2 * step)[..., None].to(below) * below[..., -1:]
            token = torch.searchsorted(below, draw, right=True)[..., 0]
            choice = rng.uniform(rows, (length,), 2 * step + 1)
            ids = torch.where(unmask.emerge(choice, hidden, self.rates, step), token, ids)
        return ids

    def masks(self, rows: Tensor, rng: Rng, updates: int) -> list[Tensor]:
        """Choose the tokens [B, L] that each update remasks, more in later ones."""
        masks = []
        for n in range(updates):
            rate = min(self.lowest + (1 - self.lowest) * (n + 1) / updates, 0.999)
            masks.append(rng.fold("mask", n).uniform(rows, (self.grid**2,)) < rate)
        return masks

    def log_prob(self, ids: Tensor, hide: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Score the masked tokens, given the others, [B, L]; 0 for the others."""
        every = self.logprobs(torch.where(hide, self.mask_id, ids), cond)
        return every.gather(-1, ids[..., None])[..., 0].masked_fill(~hide, 0.0)

    def loss(self, new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        """Compute the clipped surrogate [B, L] of log-probs [B, L] and advantages [B]."""
        ratio = (new - old).exp()
        a = advantage[:, None]
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return torch.maximum(-a * ratio, -a * clipped)


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Compare each reward [B] with its group: minus the group's mean, over the std of all."""
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(correction=0) + 1e-4)).flatten().float()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the mean reward of every iteration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", help="a folder or hub id; by default a tiny one of this world")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="in an iteration")
    parser.add_argument("--group-size", type=int, default=8, help="images of each prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps in an iteration")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.model is None:
        from mmrl.worlds.artifacts import masked

        options.model = str(masked())

    train, held_out, reward = task()
    pipe = AmusedPipeline.from_pretrained(options.model).to(options.device)
    grpo = MaskGRPO(pipe)
    optimizer = torch.optim.AdamW(grpo.net.parameters(), options.lr, weight_decay=0.0)

    def test() -> float:
        prompts = [prompt for prompt in held_out[:60] for _ in range(4)]
        rows = torch.arange(len(prompts), device=options.device)
        ids = grpo.sample(grpo.encode(prompts), rows, Rng.of("test"))
        return float(reward(grpo.decode(ids), prompts).mean())

    print(f"held-out reward before: {test():.3f}")
    history = []
    for iteration in range(options.iterations):
        rng = Rng.of(options.seed, iteration, "rollout")
        drawn = rng.fold("prompts").permutation(len(train))[: options.prompts].tolist()
        prompts = [train[i] for i in drawn for _ in range(options.group_size)]
        rows = torch.arange(len(prompts), device=options.device)
        cond = grpo.encode(prompts)
        ids = grpo.sample(cond, rows, rng)
        rewards = reward(grpo.decode(ids), prompts)
        advantage = advantages(rewards, options.group_size)
        masks = grpo.masks(rows, rng.fold("update"), options.updates)
        with torch.no_grad():  # ratios are relative to the weights before the first update
            olds = [grpo.log_prob(ids, hide, cond) for hide in masks]
        for hide, old in zip(masks, olds, strict=True):
            loss = grpo.loss(grpo.log_prob(ids, hide, cond), old, advantage)
            (loss.masked_fill(~hide, 0.0).sum() / hide.sum()).backward()
            torch.nn.utils.clip_grad_norm_(grpo.net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        history.append(float(rewards.mean()))
        print(f"iteration {iteration + 1}: reward {history[-1]:.3f}", flush=True)
    print(f"held-out reward after: {test():.3f}")
    return history


if __name__ == "__main__":
    main()
