"""Builds a policy without weights, by the real constructor on config files, and runs an iteration
of the real trainer to count forward passes.

The network is a single number, latents have one element, and everything else (times, windows,
trees, objective, advantage, batches) follows the configuration, so that forward passes are counted,
not estimated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.apps.dry_run.published import on_meta
from mmrl.config import Config, effects
from mmrl.config.options import TrainOptions
from mmrl.core.libraries import library_class
from mmrl.core.registry import ADVANTAGES, OBJECTIVES
from mmrl.core.types import Media, Prompt, Query, Rollout
from mmrl.core.weights import Weights
from mmrl.objectives.contracts import HasTeacher
from mmrl.policies.base import MediaFormat, Report
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.pass_sizes import PassSizes
from mmrl.policies.quantization import check_frozen
from mmrl.scoring import Scorer
from mmrl.train.batch import Batch
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.any_pipeline.replayed_policy import ReplayedPolicy


class Hollow(nn.Module):
    """Replaces a network: its whole config, defaults included, and one parameter."""

    def __init__(self, cls: Any, config: dict[str, Any]):
        from diffusers.configuration_utils import FrozenDict

        super().__init__()
        known = {
            name: p.default
            for name, p in inspect.signature(cls.__init__).parameters.items()
            if name != "self"
        }
        self.config = FrozenDict({**known, **{k: v for k, v in config.items() if k in known}})
        self.weight = nn.Parameter(torch.ones(1))


class _Weightless(FolderPolicy):
    """Mixin for a family in diffusers' format: networks without weights, its autoencoder on the
    meta device."""

    def load_part(self, name: str, subfolder: str, dtype: torch.dtype | None = None) -> Any:

        if subfolder == "scheduler":
            return super().load_part(name, subfolder, dtype)
        cls = library_class("diffusers", name)
        config = dict(diffusers_folder.load_config(cls, self.place, subfolder))
        return on_meta(name, config) if subfolder == "vae" else Hollow(cls, config)

    def unused(self, net: nn.Module) -> Iterable[nn.Parameter]:
        return ()


class _Counting(FlowPolicy):
    """Mixin for a flow policy: encodes, computes and decodes nothing."""

    unseen = False

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        rows, empty = (torch.zeros(n, 1, device=self.device) for n in (len(prompts), 1))
        return {"rows": rows, "uncond": {"rows": empty}}

    def unconditional(self, empty: dict[str, Any], cond: dict[str, Any]) -> dict[str, Any]:
        return empty

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return x * next(self.net.parameters())

    def begin(self, noise: Tensor, cond: dict[str, Any]) -> Tensor:
        return noise

    def combine(self, v: Tensor, empty: Tensor, scale: float | Tensor) -> Tensor:
        return empty + 1.0 * (v - empty)

    def decode(self, rollout: Rollout) -> Media:
        return rollout.sample


class _CountingReplay(_Counting):
    """Mixin for a replayed pipeline: computes nothing; its rows count as those of any flow, one
    network row each."""

    def prepare(self, prompts: list[Prompt]) -> None:
        return None

    def rollout(self, *args: Any, **kwargs: Any) -> Rollout:
        return FlowPolicy.rollout(self, *args, **kwargs)

    def _velocities(self, point: Query, guided: bool) -> tuple[Tensor, Tensor]:
        return FlowPolicy._velocities(self, point, guided=False)


def hollow(entry: type[FolderPolicy], place: Path, options: dict[str, Any]) -> FolderPolicy:
    """Build the policy ``entry(path, **options)`` from config files alone. Raises UserError as it
    does."""
    check_frozen(options.get("quantization"), options.get("lora") is not None)
    light_options = {
        key: value
        for key, value in options.items()
        if key not in ("lora", "attention", "compile", "path", "quantization")
    }
    cls = type(entry.__name__, (_Weightless, entry), {})
    policy: FolderPolicy = cls(path=str(place), **light_options)
    return policy


@dataclass(frozen=True)
class Counted:
    """Counts one iteration of all processes: rows through the network, and the snapshots of the
    weights."""

    sampling: int
    training: int | None  # None: unknown
    decisions: int
    steps: int  # optimizer steps
    snapshots: tuple[str, ...]


def counted(policy: FlowPolicy, configuration: Config, options: TrainOptions) -> Counted:
    """Run an iteration with this configuration's objective and advantage, with the policy's
    sampling and a network of one number."""
    objective = configuration.build("objective", OBJECTIVES)
    policy = _shrunk(policy)
    if isinstance(objective, HasTeacher):
        objective.setup_dry_run(policy)
    prompts: list[Prompt] = [{"text": str(i)} for i in range(options.prompts_per_iteration)]
    if objective.requires.supervised:  # its answers are encoded outside the network
        prompts = [{**prompt, objective.field: torch.zeros(3, 1, 1)} for prompt in prompts]
        policy.media = MediaFormat()
        vars(policy)["encode_media"] = partial(_encoded, policy.shape)
    trainer = _Watched(
        policy,
        prompts,
        Scorer({"none": _noise}),
        configuration.build("advantage", ADVANTAGES),
        objective,
        partial(torch.optim.SGD, lr=0.0),
        _plain(options),
    )
    snapshots = trainer.snapshots()
    # its work depends on the gradients of the rewards
    if trainer.objective.requires.differentiates:
        rollout = trainer.collect().rollout
        return Counted(
            policy.report.forwards,
            None,
            int(rollout.mask.sum()),
            trainer.plan.steps * options.epochs,
            snapshots,
        )
    metrics = trainer.iterate()
    return Counted(
        trainer.sampling if options.preferences is None else 0,
        policy.report.forwards - trainer.sampling,
        int(metrics["decisions"]),
        int(metrics["step"]),
        snapshots,
    )


def _shrunk(policy: FlowPolicy) -> FlowPolicy:
    """Build a policy that samples as this one does, with latents of one element, and computes
    nothing."""
    is_replayed = isinstance(policy, ReplayedPolicy)
    counting = _CountingReplay if is_replayed else _Counting
    cls = type(type(policy).__name__, (counting, type(policy)), {})
    light: Any = object.__new__(cls)
    vars(light).update(vars(policy))
    if is_replayed:
        light.net = light.trained = nn.Linear(1, 1, bias=False)
        light.weights = Weights(light.net)
        light.logprob_weight = None
    light.shape = (1,) * len(policy.shape)
    light.report = Report()
    light.pass_sizes = PassSizes(light.net, light.report.warnings)
    shrunk: FlowPolicy = light
    return shrunk


def _plain(options: TrainOptions) -> TrainOptions:
    """Remove options that do not affect the count of forward passes, or need the data."""
    return replace(effects.in_dry_run(options), iterations=1, logprob_tolerance=None)


class _Watched(Trainer):
    """Records the number of network rows at the end of sampling."""

    sampling = 0

    def collect(self) -> Batch:
        batch = super().collect()
        self.sampling = self.policy.report.forwards
        return batch


def _encoded(shape: tuple[int, ...], media: Tensor) -> Tensor:
    """Return samples of one number each."""
    return media.new_zeros(len(media), *shape)


def _noise(media: Media, prompts: list[Prompt]) -> Tensor:
    """Return distinct rewards, whatever the samples."""
    return torch.arange(len(prompts), dtype=torch.float32).mul(math.pi).sin()
