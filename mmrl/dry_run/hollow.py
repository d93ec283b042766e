"""A policy without its weights: the real constructor on config files, and an iteration of the real
trainer to count.

The network is a single number, latents have one element, and everything else (times, windows,
trees, objective, advantage, batches) is what the configuration says, so that forwards are counted,
not estimated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config import Config
from mmrl.config.options import TrainOptions
from mmrl.core.registry import ADVANTAGES, OBJECTIVES
from mmrl.core.types import Media, Prompt, Rollout
from mmrl.dry_run.published import on_meta
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.scoring import Scorer
from mmrl.train.trainer import Trainer


class Hollow(nn.Module):
    """Stands for a network: its whole config, defaults included, and one parameter."""

    def __init__(self, cls: type, config: dict[str, Any]):
        from diffusers.configuration_utils import FrozenDict

        super().__init__()
        known = {
            name: p.default
            for name, p in inspect.signature(cls.__init__).parameters.items()
            if name != "self"
        }
        self.config = FrozenDict({**known, **{k: v for k, v in config.items() if k in known}})
        self.of = cls
        self.weight = nn.Parameter(torch.ones(1))


class _Weightless:
    """Before a family in diffusers' folder format: its networks hollow, its autoencoder on the meta
    device."""

    def load_part(self, name: str, subfolder: str, dtype: torch.dtype | None = None) -> Any:
        import diffusers

        if subfolder == "scheduler":
            return super().load_part(name, subfolder, dtype)
        cls = getattr(diffusers, name)
        config = dict(diffusers_folder.load_config(cls, self.place, subfolder))
        return on_meta(name, config) if subfolder == "vae" else Hollow(cls, config)

    def unused(self, net: nn.Module) -> tuple:
        return ()


class _Counting:
    """Before any flow policy: encodes, computes and decodes nothing."""

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        return {"rows": torch.zeros(len(prompts), 1), "uncond": {"rows": torch.zeros(1, 1)}}

    def unconditional(self, own: dict[str, Any], cond: dict[str, Any]) -> dict[str, Any]:
        return own

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return x * next(self.net.parameters())

    def begin(self, noise: Tensor, cond: dict[str, Any]) -> Tensor:
        return noise

    def combine(self, v: Tensor, empty: Tensor, scale: float | Tensor) -> Tensor:
        return empty + 1.0 * (v - empty)

    def decode(self, rollout: Rollout) -> Media:
        return rollout.sample


def hollow(entry: type[FolderPolicy], place: Path, options: dict[str, Any]) -> FolderPolicy:
    """The policy that ``entry(path, **options)`` would be, from config files alone. Raises
    UserError as it does."""
    own = {
        key: value
        for key, value in options.items()
        if key not in ("lora", "attention", "compile", "path")
    }
    cls = type(entry.__name__, (_Weightless, entry), {})
    return cls(path=str(place), **own)


@dataclass(frozen=True)
class Counted:
    """One iteration of all processes: rows through the network, and what was kept of the
    weights."""

    sampling: int
    training: int | None  # None: unknown
    decisions: int
    steps: int  # optimizer steps
    snapshots: tuple[str, ...]


def counted(policy: FlowPolicy, found: Config, options: TrainOptions) -> Counted:
    """An iteration with this configuration's objective and advantage, on a hollow policy, whose
    latents it shrinks."""
    policy.__class__ = type(type(policy).__name__, (_Counting, type(policy)), {})
    policy.shape = (1,) * len(policy.shape)
    policy.fixed_batch_rows = None
    policy.sampling_memory_gib = None
    plain = replace(
        options,
        precision="fp32",
        gradient_checkpointing=False,
        micro_batch_size=None,
        iterations=1,
        max_new_tokens_schedule=(),
        ground_truth_rollout=None,
        reward_overlap_chunks=1,
        logprob_tolerance=None,
        dynamic_sampling_rounds=0,
        loss_denominator=None,
    )
    trainer = Trainer(
        policy,
        [{"text": str(i)} for i in range(options.prompts_per_iteration)],
        Scorer({"none": _noise}),
        found.build("advantage", ADVANTAGES),
        found.build("objective", OBJECTIVES),
        partial(torch.optim.SGD, lr=0.0),
        plain,
    )
    kept = trainer.snapshots()
    # what it does depends on its rewards' gradients
    if trainer.objective.differentiates:
        rollout, _ = trainer.collect()
        return Counted(
            policy.forwards,
            None,
            int(rollout.mask.sum()),
            trainer.plan.steps * options.epochs,
            kept,
        )
    seen: dict[str, int] = {}
    trainer.collect = _watched(trainer.collect, policy, seen)
    metrics = trainer.iterate()
    training = policy.forwards - seen["rows"]
    return Counted(seen["rows"], training, int(metrics["decisions"]), int(metrics["step"]), kept)


def _watched(collect: Callable, policy: FlowPolicy, seen: dict[str, int]) -> Callable:
    def collecting() -> Any:
        found = collect()
        seen["rows"] = policy.forwards
        return found

    return collecting


def _noise(media: Media, prompts: list[Prompt]) -> Tensor:
    """Rewards that differ."""
    return torch.arange(len(prompts), dtype=torch.float32).mul(math.pi).sin()
