"""Times an iteration of a Stable-Diffusion-3-format model by mmrl and by a straightforward loop.

    python benchmarks/bench_iteration.py  # the tiny model of the digits world, a minute or two
    python benchmarks/bench_iteration.py --path FOLDER --size 512 --lora 32 --precision bf16

The straightforward loop follows Flow-GRPO's published code: every sampling batch of a few rows
takes one guided forward pass a step and keeps its log-probs; then every micro-batch takes one
forward and one backward pass for each trained time step, and the optimizer steps at the end. Both
do equal work: the same rows, steps, trained steps and optimizer steps, the same update. This is
verified: both are first run in float64 on the same noise and must end at the same weights. Then
whole iterations are timed alternately, in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import measuring  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mmrl import advantages  # noqa: E402
from mmrl.config.options import TrainOptions  # noqa: E402
from mmrl.core.machine import machine  # noqa: E402
from mmrl.core.types import Media, Prompt, Rollout  # noqa: E402
from mmrl.data import base  # noqa: E402
from mmrl.objectives import PolicyGradient  # noqa: E402
from mmrl.policies.diffusion.flow_policy import FlowPolicy  # noqa: E402
from mmrl.scoring import Scorer  # noqa: E402
from mmrl.train import minibatches  # noqa: E402
from mmrl.train.optimizers import adamw  # noqa: E402
from mmrl.train.trainer import Trainer  # noqa: E402
from samplers.noise import Rng  # noqa: E402

NUMBERS = "zero one two three four five six seven eight nine".split()
PROMPTS = [
    {"text": f"a {colour} {number}"} for colour in ("red", "blue", "green") for number in NUMBERS
]
CLIP = 1e-4
ADVANTAGE_CLIP = 5.0
TARGET = 1.3
AGREE = 1e-9


@dataclass(frozen=True)
class Work:
    """Describes one iteration. Sizes are those of the digits world; the rest is as published with
    Flow-GRPO."""

    prompts: int = 6
    copies: int = 16
    updates: int = 2  # optimizer steps
    fraction: float = (
        0.99  # share of the steps, from the first, that is trained on: all but the last
    )
    lr: float = 1e-4
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    plain_rows: int = 8  # rows of a sampling batch and of a micro-batch in the straightforward loop
    micro_batch: int | None = None  # mmrl's; None: its default, all rows of an optimizer step

    @property
    def rows(self) -> int:
        return self.prompts * self.copies


def brightness(media: Media, prompts: list[Prompt]) -> Tensor:
    return media.flatten(1).mean(1)


def by_place(media: Media, prompts: list[Prompt]) -> Tensor:
    """Score by the position in the batch, which is independent of rounding in the decoder."""
    return torch.arange(len(prompts)).sin()


class FreshDraws:
    """Draws noise and order for the straightforward loop from torch's generator."""

    def __init__(self, policy: FlowPolicy, work: Work):
        self.shape = policy.shape
        self.dtype = policy.dtype
        self.device = policy.device
        self.work = work

    def noise(self, rows: Tensor, step: int) -> Tensor:
        return torch.randn(len(rows), *self.shape, dtype=self.dtype, device=self.device)

    def order(self) -> list[Tensor]:
        """Return row numbers [rows of an optimizer step] for each optimizer step."""
        return list(torch.randperm(self.work.rows).split(self.work.rows // self.work.updates))


class KeyedDraws(FreshDraws):
    """Repeats the exact noise and order of mmrl's first iteration with seed 0."""

    def noise(self, rows: Tensor, step: int) -> Tensor:
        return Rng.of(0, 0, "rollout").normal(rows.to(self.device), self.shape, step, self.dtype)

    def order(self) -> list[Tensor]:
        names = torch.arange(self.work.rows)
        empty = Rollout(group=names, row_id=names, sample=names, logprob=names, mask=names)
        sizes = [self.work.copies] * (self.work.rows // self.work.copies)
        parts = minibatches.batches(empty, sizes, self.work.updates, Rng.of(0, 0, "update", 0))
        return [part.row_id for part in parts]


class PlainLoop:
    """Runs Flow-GRPO's loop for one model without optimisations; ``policy`` provides network,
    decoder and settings."""

    def __init__(self, policy: FlowPolicy, work: Work, reward: Callable, draws: FreshDraws):
        self.net = policy.net
        self.vae = policy.vae.to(policy.device)
        self.compute = policy.compute
        self.work = work
        self.encode = policy.encode
        self.reward = reward
        self.draws = draws
        self.dtype = policy.dtype
        self.sigmas = policy.times.tolist()
        self.noise_level = policy.noise_level
        self.scale = policy.guidance_scale
        self.trained = int((len(self.sigmas) - 1) * work.fraction)
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        self.parameters = parameters
        self.optimizer = adamw(parameters, lr=work.lr)
        self.autocast = partial(
            torch.autocast, policy.device.type, torch.bfloat16, enabled=work.precision == "bf16"
        )
        if work.gradient_checkpointing:
            self.net.enable_gradient_checkpointing()

    def iterate(self) -> None:
        batch = base.batch(PROMPTS, self.work.prompts, 0, 0)
        cond = self.encode(batch)
        names = torch.arange(self.work.rows)
        self.empty = cond.pop("uncond")
        self.cond = {
            name: value.repeat_interleave(self.work.copies, 0) for name, value in cond.items()
        }
        sampled = [self.sample(rows) for rows in names.split(self.work.plain_rows)]
        self.path, self.logprob, images = (torch.cat(each) for each in zip(*sampled, strict=True))
        rewards = self.reward(images, [p for p in batch for _ in range(self.work.copies)]).to(
            self.logprob
        )
        groups = rewards.view(-1, self.work.copies)
        advantage = (groups - groups.mean(1, keepdim=True)) / (rewards.std(correction=0) + 1e-4)
        self.advantage = advantage.flatten().clamp(-ADVANTAGE_CLIP, ADVANTAGE_CLIP)
        self.improve()

    @torch.no_grad()
    def sample(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample latents [B, K + 1, C, H, W], log-probs [B, K], images [B, 3, H, W]."""
        states = [self.draws.noise(rows, 0)]
        logprobs = []
        with self.autocast():
            for k in range(len(self.sigmas) - 1):
                mean, std = self.step(states[-1], rows, k)
                states.append(mean + std * self.draws.noise(rows, k + 1))
                logprobs.append(log_prob(states[-1], mean, std))
        images = (self.pixels(states[-1].to(self.vae.dtype)) / 2 + 0.5).clamp(0, 1)
        return torch.stack(states, 1), torch.stack(logprobs, 1), images

    def pixels(self, latents: Tensor) -> Tensor:
        return self.vae.decode(
            latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        ).sample

    def improve(self) -> None:
        """Make one forward and one backward pass for each micro-batch and time step."""
        stats = []
        for part in self.draws.order():
            for rows in part.split(self.work.plain_rows):
                for k in range(self.trained):
                    loss, gap = self.loss(rows, k)
                    (loss * len(rows) / (len(part) * self.trained)).backward()
                    stats.append(torch.stack([loss, (gap**2).mean() / 2]).detach())
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.stats = torch.stack(stats).mean(0).tolist()

    def loss(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the clipped loss [] at step k, and the change of the log-probs [B]."""
        with self.autocast():
            mean, std = self.step(self.path[rows, k], rows, k)
        gap = log_prob(self.path[rows, k + 1], mean, std) - self.logprob[rows, k]
        ratio = gap.exp()
        advantage = self.advantage[rows]
        return torch.maximum(
            -advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
        ).mean(), gap

    def step(self, x: Tensor, rows: Tensor, k: int) -> tuple[Tensor, float]:
        """Return mean [B, C, H, W] and standard deviation of the stochastic step k (Liu et al.
        2025, eq. 9)."""
        t = self.sigmas[k]
        s = self.sigmas[k + 1]
        v = self.velocity(x, t, rows)
        dt = s - t
        noise = self.noise_level * (t / (1 - (s if t == 1 else t))) ** 0.5
        mean = x * (1 + noise**2 / (2 * t) * dt) + v * (1 + noise**2 * (1 - t) / (2 * t)) * dt
        return mean, noise * (-dt) ** 0.5

    def velocity(self, x: Tensor, t: float, rows: Tensor) -> Tensor:
        """Return the velocity [B, C, H, W]; with guidance the two branches in one forward pass."""
        cond = {name: value[rows] for name, value in self.cond.items()}
        guided = self.scale != 1
        if guided:
            cond = {
                name: torch.cat([self.empty[name].expand_as(value), value])
                for name, value in cond.items()
            }
            x = torch.cat([x, x])
        net_dtype = torch.float64 if self.dtype == torch.float64 else self.compute
        times = torch.full((len(x),), 1000 * t, dtype=net_dtype, device=x.device)
        v = self.call(
            x.to(net_dtype), times, {name: value.to(net_dtype) for name, value in cond.items()}
        )
        if not guided:
            return v.to(self.dtype)
        empty, conditional = v.to(self.dtype).chunk(2)
        return empty + self.scale * (conditional - empty)

    def call(self, x: Tensor, times: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Call the network of Stable Diffusion 3."""
        return self.net(
            hidden_states=x,
            timestep=times,
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            return_dict=False,
        )[0]


def log_prob(x: Tensor, mean: Tensor, std: float) -> Tensor:
    """Average [B] over dimensions the Gaussian log-density, as published."""
    each = -((x.detach() - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return each.flatten(1).mean(1)


Make = Callable[[], FlowPolicy]  # a new policy, always with the same weights


def mmrl_trainer(policy: FlowPolicy, work: Work, reward: Callable) -> Trainer:
    options = TrainOptions(
        prompts_per_iteration=work.prompts,
        group_size=work.copies,
        train_batch_size=work.rows // work.updates,
        iterations=1,
        precision=work.precision,
        micro_batch_size=work.micro_batch,
        gradient_checkpointing=work.gradient_checkpointing,
    )
    objective = PolicyGradient(
        clip_range=CLIP, advantage_clip=ADVANTAGE_CLIP, timestep_fraction=work.fraction
    )
    scorer = Scorer({"reward": reward})
    policy.unseen = False  # it checks a new network's row independence once per run
    return Trainer(
        policy,
        PROMPTS,
        scorer,
        advantages.flow_grpo,
        objective,
        partial(adamw, lr=work.lr),
        options,
    )


def plain_loop(
    policy: FlowPolicy,
    work: Work,
    reward: Callable,
    draws: type[FreshDraws] = FreshDraws,
    kind: type[PlainLoop] = PlainLoop,
) -> PlainLoop:
    from accelerate import PartialState

    policy.net.to(PartialState().device)
    return kind(policy, work, reward, draws(policy, work))


def agreement(make: Make, work: Work, kind: type[PlainLoop] = PlainLoop) -> dict[str, float]:
    """Measure the largest differences after one iteration of both in float64, from the same weights
    and noise.

    Raises SystemExit if they exceed 1e-9, or no weight has moved by more than that.
    """
    work = replace(work, precision="fp32")
    ours = make()
    plain = make()
    for policy in (ours, plain):
        policy.net.double()
    before = ours.weights.full()
    trainer = mmrl_trainer(ours, work, by_place)
    loop = plain_loop(plain, work, by_place, KeyedDraws, kind)
    rollouts: list[Rollout] = []
    collect = trainer.collect
    trainer.collect = lambda: rollouts.append((batch := collect()).rollout) or batch
    trainer.iterate()
    loop.iterate()
    rollout = rollouts[0]
    weights = ours.weights.full()
    theirs = plain.weights.full()
    visit = rollout.latents.visit
    visited = loop.path if visit is None else loop.path[:, visit[0] >= 0]
    differences = {
        "latents": float((rollout.latents.states - visited).abs().max()),
        "log_probs": float((rollout.logprob - loop.logprob).abs().max()),
        "weights": max(float((weights[n] - theirs[n]).abs().max()) for n in weights),
        "weights_moved": max(float((weights[n] - before[n]).abs().max()) for n in weights),
    }
    apart = max(differences["latents"], differences["log_probs"], differences["weights"])
    if not apart < AGREE or not differences["weights_moved"] > 1000 * AGREE:
        raise SystemExit(f"the two loops do not do the same work: {differences}")
    return differences


def measure(
    make: Make, work: Work, repeats: int, explain: bool = False, kind: type[PlainLoop] = PlainLoop
) -> dict[str, Any]:
    """Measure whole iterations of both, alternately: seconds, passes, memory."""
    torch.manual_seed(0)
    plain = f"plain loop, {work.plain_rows} rows"
    runs: dict[str, Trainer | PlainLoop] = {
        plain: plain_loop(make(), work, brightness, kind=kind),
        "mmrl": mmrl_trainer(make(), work, brightness),
    }
    if explain:
        pass_rows = work.micro_batch or work.rows // work.updates
        same = replace(work, micro_batch=work.plain_rows)
        runs[f"mmrl, micro_batch {work.plain_rows}"] = mmrl_trainer(make(), same, brightness)
        runs[f"plain loop, {pass_rows} rows"] = plain_loop(
            make(), replace(work, plain_rows=pass_rows), brightness, kind=kind
        )
    costs = {
        name: measuring.cost(run.iterate, _net(run)) for name, run in runs.items()
    }  # the first iteration also warms up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(measuring.seconds(run.iterate))
    summaries = {name: measuring.summary(seconds[name], costs[name]) for name in runs}
    return {"ratio": summaries[plain]["seconds"] / summaries["mmrl"]["seconds"], "runs": summaries}


def _net(run: Trainer | PlainLoop) -> torch.nn.Module:
    return run.policy.net if isinstance(run, Trainer) else run.net


def digits_policy(args: argparse.Namespace, guidance: float) -> FlowPolicy:
    from mmrl.core.registry import locate
    from mmrl.zoo.models.diffusion.sd3 import SD3

    torch.manual_seed(0)  # a new adapter is initialised at random
    return SD3(
        locate(args.path),
        size=args.size,
        steps=args.steps,
        guidance_scale=guidance,
        lora=args.lora,
        dtype=args.dtype,
    )


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--path", default="world:digits/sd3-test", help="SD3-format folder or world:NAME"
    )
    parser.add_argument("--size", type=int, default=32, help="pixels")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--guidance", type=float, nargs="+", default=[4.5, 1.0], help="one case each"
    )
    parser.add_argument("--lora", type=int, help="rank; all weights are trained if not given")
    parser.add_argument("--dtype", default="float32", help="of the frozen weights")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    for name in ("prompts", "copies", "updates", "plain_rows", "micro_batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Work(), name))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--explain", action="store_true", help="also both loops with each other's rows per pass"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs/results/bench_iteration",
        help=".json and .md are added",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[str, Any]:
    args = arguments(words)
    torch.set_num_threads(args.threads)
    names = ("prompts", "copies", "updates", "plain_rows", "micro_batch", "precision")
    work = Work(**{name: getattr(args, name) for name in names})
    cases = {}
    for guidance in args.guidance:
        make = partial(digits_policy, args, guidance)
        name = f"guidance {guidance:g}" if guidance != 1 else "no guidance"
        small = replace(work, prompts=2, copies=8)
        cases[name] = {"agreement": agreement(make, small)} | measure(
            make, work, args.repeats, args.explain
        )
        print(
            f"{name}: {cases[name]['ratio']:.2f} times as fast",
            *measuring.table(cases[name]["runs"]),
            sep="\n",
            flush=True,
        )
    cuda = torch.cuda.is_available()
    report = {
        "cases": cases,
        "work": asdict(work),
        "path": args.path,
        "size": args.size,
        "steps": args.steps,
        "repeats": args.repeats,
        "threads": args.threads,
        "device": "cuda" if cuda else "cpu",
        "machine": machine(),
        "memory": "the allocator's count" if cuda else "storages counted as they are made",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(measuring.page(report))
    reached = all(case["ratio"] >= TARGET for case in cases.values())
    print(
        f"{'reached' if reached else 'NOT reached'}: {TARGET} times as fast in every case; "
        f"see {args.out}.md"
    )
    return report


if __name__ == "__main__":
    main()
