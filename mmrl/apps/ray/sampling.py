"""Builds the policy that a worker samples with."""

from __future__ import annotations

from pathlib import Path

from mmrl.config import Config, import_plugins
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES
from mmrl.data.by_size import BySize
from mmrl.experiment import build
from mmrl.policies.base import Policy
from mmrl.train.device import Device


def sampling_policy(configuration: Config) -> Policy:
    """Build the policy of a configuration to sample with, as a trainer builds it."""
    import_plugins(configuration)
    options = configuration.section("train", TrainOptions)
    build.seed_everything(options.seed)
    policy: Policy = configuration.build("policy", POLICIES)
    if start := configuration.plain.get("start"):
        build.begin_with(policy, configuration, Path(start))
    source, summaries = build.read_data(configuration)
    source = build.admitted(policy, source, summaries)
    if isinstance(source.train, BySize):
        raise UserError(
            "rows of several sizes are for runs without --engine ray, whose trainers do not sample"
        )
    Device(options).place(policy)
    policy.prepare([*source.train, *source.held_out])
    return policy
