"""Trains a flow model by Flow-GRPO (Liu et al. 2025) in one file: torch, the samplers of this
repository, and Stable Diffusion 3 from diffusers.

    python scripts/examples/grpo_flow.py                      # a tiny SD3 on the CPU, minutes
    python scripts/examples/grpo_flow.py --model FOLDER --size 512 --device cuda

Read it from the bottom: ``main`` is the loop. Change ``task`` first: the prompts and the reward.
``tests/cli/test_examples.py`` checks that samples and losses equal those of ``mmrl``, which adds
what is left out here: LoRA, guidance, several GPUs, checkpoints, other samplers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samplers.kernels import flow_sde
from samplers.noise import Rng

Prompt = dict[str, Any]
Reward = Callable[[Tensor, list[Prompt]], Tensor]  # images [B, 3, H, W] in 0..1, prompts -> [B]


def task() -> tuple[list[Prompt], list[Prompt], Reward]:
    """Return prompts to train on, prompts to test with, and the reward of their images."""
    from mmrl.worlds.data import Digits
    from rewards.images.digits import Digits as DigitsReward

    captions = Digits(kind="single")  # such as "a red seven"
    return captions.train, captions.held_out, DigitsReward()


class Rollout(NamedTuple):
    """Records how B samples were drawn, in K steps."""

    states: Tensor  # [B, K + 1, *] latents, from noise to sample
    logprob: Tensor  # [B, K] of the steps with noise; 0 for the others
    cond: dict[str, Tensor]  # [B, *] encoded prompts


class FlowGRPO:
    """Samples, scores and trains; the first ``noisy`` of ``steps`` steps add noise of
    ``noise_level``, the others none."""

    def __init__(
        self,
        pipe: Any,
        size: int = 32,
        steps: int = 8,
        noisy: int = 4,
        noise_level: float = 0.7,
        clip_range: float = 1e-3,
        advantage_clip: float = 5.0,
    ):
        self.pipe = pipe
        self.net = pipe.transformer.eval()  # no dropout: scores equal those of sampling
        self.shape = (pipe.transformer.config.in_channels, *[size // pipe.vae_scale_factor] * 2)
        pipe.scheduler.set_timesteps(steps)
        self.times = pipe.scheduler.sigmas.double()  # [K + 1], from 1 to 0
        self.noise_level = [noise_level * (k < noisy) for k in range(steps)]
        self.clip_range = clip_range
        self.advantage_clip = advantage_clip

    @torch.no_grad()
    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Encode prompts by the three text encoders, [B, *]."""
        texts = [prompt["text"] for prompt in prompts]
        t5 = self.pipe.tokenizer_3  # None where the largest encoder was left out
        longest = 256 if t5 is None else min(256, t5.model_max_length)
        text, _, pooled, _ = self.pipe.encode_prompt(
            texts, texts, texts, do_classifier_free_guidance=False, max_sequence_length=longest
        )
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images [B, 3, H, W] in 0..1."""
        vae = self.pipe.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)

    def step(self, x: Tensor, k: int, cond: dict[str, Tensor], noise_level: float) -> Any:
        """Return mean [B, *] and standard deviation [B, 1, ...] of the state after step k."""
        t, s = self.times[k].to(x), self.times[k + 1].to(x)
        velocity = self.net(
            hidden_states=x, timestep=1000 * t.expand(len(x)), return_dict=False, **cond
        )[0]
        # its noise is infinite at t = 1: it must know the grid's second time to tell the first step
        return flow_sde(x, velocity, t, s, noise_level, second=float(self.times[1]))

    @torch.no_grad()
    def sample(self, prompts: list[Prompt], rows: Tensor, rng: Rng, noise: bool = True) -> Rollout:
        """Sample one image for every prompt; ``rows`` [B] are their ids, which key the noise."""
        cond = self.encode(prompts)
        states = [rng.normal(rows, self.shape)]
        logprobs = []
        for k, level in enumerate(self.noise_level):
            mean, std = self.step(states[-1], k, cond, level if noise else 0.0)
            states.append(mean + std * rng.normal(rows, self.shape, k + 1))
            logprobs.append(log_prob(states[-1], mean, std))
        return Rollout(torch.stack(states, 1), torch.stack(logprobs, 1), cond)

    def loss(self, rollout: Rollout, advantage: Tensor, rows: Tensor, k: int) -> Tensor:
        """Compute the clipped surrogate [B] of the step k of some rows (eq. 5)."""
        cond = {name: x[rows] for name, x in rollout.cond.items()}
        mean, std = self.step(rollout.states[rows, k], k, cond, self.noise_level[k])
        new = log_prob(rollout.states[rows, k + 1], mean, std)
        ratio = (new - rollout.logprob[rows, k]).exp()
        a = advantage[rows].clamp(-self.advantage_clip, self.advantage_clip)
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return torch.maximum(-a * ratio, -a * clipped)


def log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density [B] of a step, averaged over dimensions as published; 0 without
    noise."""
    if not bool((std > 0).all()):
        return x.new_zeros(len(x))
    return torch.distributions.Normal(mean, std).log_prob(x).flatten(1).mean(1)


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Compare each reward [B] with its group: minus the group's mean, over the std of all."""
    groups = rewards.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(correction=0) + 1e-4)).flatten().float()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the mean reward of every iteration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", help="a folder or hub id; by default the tiny SD3 of this world")
    parser.add_argument("--size", type=int, default=32, help="pixels")
    parser.add_argument("--iterations", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=15, help="in an iteration")
    parser.add_argument("--group-size", type=int, default=16, help="images of each prompt")
    parser.add_argument("--updates", type=int, default=3, help="optimizer steps in an iteration")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.model is None:
        from mmrl.worlds.artifacts import base

        options.model = str(base())

    train, held_out, reward = task()
    pipe = StableDiffusion3Pipeline.from_pretrained(options.model).to(options.device)
    grpo = FlowGRPO(pipe, options.size)
    optimizer = torch.optim.AdamW(grpo.net.parameters(), options.lr, weight_decay=1e-4)

    def test() -> float:
        prompts = held_out[:60]
        rows = torch.arange(len(prompts), device=options.device)
        rollout = grpo.sample(prompts, rows, Rng.of("test"), noise=False)
        return float(reward(grpo.decode(rollout.states[:, -1]), prompts).mean())

    print(f"held-out reward before: {test():.3f}")
    history = []
    for iteration in range(options.iterations):
        rng = Rng.of(options.seed, iteration, "rollout")
        drawn = rng.fold("prompts").permutation(len(train))[: options.prompts].tolist()
        prompts = [train[i] for i in drawn for _ in range(options.group_size)]
        rows = torch.arange(len(prompts), device=options.device)
        rollout = grpo.sample(prompts, rows, rng)
        rewards = reward(grpo.decode(rollout.states[:, -1]), prompts)
        advantage = advantages(rewards, options.group_size)
        order = rng.fold("update").permutation(len(prompts)).to(options.device)
        for batch in order.chunk(options.updates):
            decisions = [k for k, level in enumerate(grpo.noise_level) if level]
            for k in decisions:  # one after another: the memory of one pass is enough
                loss = grpo.loss(rollout, advantage, batch, k).mean() / len(decisions)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(grpo.net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        history.append(float(rewards.mean()))
        print(f"iteration {iteration + 1}: reward {history[-1]:.3f}", flush=True)
    print(f"held-out reward after: {test():.3f}")
    return history


if __name__ == "__main__":
    main()
