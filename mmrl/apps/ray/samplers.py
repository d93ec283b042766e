"""Defines the actor that samples for a trainer. It imports little before it starts, as in
``ranks``."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from typing import Any

from mmrl.apps.ray.pool import Started
from mmrl.apps.ray.workers import Surroundings, Worker, prepared


@dataclass(frozen=True)
class Draw:
    """Requests the samples of a few prompts.

    ``weights``: a reference to the trainable weights, in a list, which keeps Ray from fetching them
    for a worker that has them; ``version`` identifies them. ``rows``: of every pass. ``decode``:
    also return pictures.
    """

    weights: list[Any]
    version: str
    prompts: list[dict[str, Any]]
    copies: Any
    rng: Any
    context: Any
    rows: int | None


@dataclass(frozen=True)
class Samples:
    """Holds what was sampled: a rollout on the CPU, its pictures (None: texts, which the trainer
    decodes), and rows that went through the network."""

    rollout: Any
    media: Any
    forwards: int
    warnings: tuple[str, ...] = ()


class RolloutWorker(Worker):
    """Samples with its own policy, under the weights of the request."""

    def __init__(self, surroundings: Surroundings, configuration: bytes):
        self.surroundings = surroundings
        self.configuration = configuration
        self.policy: Any = None
        self.version = ""

    def begin(self) -> Started:
        """Build the policy of the configuration."""
        from mmrl.core.errors import UserError

        started = self.where()
        started.problem = prepared(self.surroundings)
        if started.problem:
            return started
        from mmrl.apps.ray.sampling import sampling_policy

        try:
            self.policy = sampling_policy(pickle.loads(self.configuration))
        except (UserError, SystemExit) as error:
            started.problem = f"node {started.address}: {error}"
        return started

    def work(self, draw: Draw) -> Samples:
        """Sample."""
        torch = importlib.import_module("torch")
        if draw.version != self.version:
            tensors, state = importlib.import_module("ray").get(draw.weights[0])
            self.policy.weights.load(tensors)
            if state is not None:
                self.policy.load_state_dict(state)
            self.version = draw.version
        self.policy.pass_sizes.rows = draw.rows
        before = self.policy.report.forwards
        with torch.no_grad():
            rollout = self.policy.rollout(draw.prompts, draw.copies, draw.rng, draw.context)
            pictures = self.policy.capabilities.makes != "text"
            media = self.policy.decode(rollout) if pictures else None
        media = media.cpu() if isinstance(media, torch.Tensor) else None
        warnings = tuple(self.policy.report.warnings)
        self.policy.report.warnings.clear()
        return Samples(rollout.to("cpu"), media, self.policy.report.forwards - before, warnings)
