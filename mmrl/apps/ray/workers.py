"""Defines the reward workers on the nodes of a cluster. It imports little before it starts: numeric
libraries read their settings when torch is loaded, so those come first."""

from __future__ import annotations

import importlib
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.apps.ray.pool import Started

if TYPE_CHECKING:  # it imports torch, and a worker is prepared before that
    from mmrl.apps.ray.parcels import Parcel


@dataclass(frozen=True)
class Surroundings:
    """Holds the driver's environment, so that a worker finds what a configuration names: the
    working directory, and the files and modules of plug-ins."""

    folder: str
    version: str
    plugins: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def enter(self) -> str:
        """Apply it in a worker. Returns a sentence if this node lacks something; else ""."""
        from mmrl.core.registry import import_file, import_module, load_built_in
        from mmrl.core.version import __version__

        node = f"node {address()}"
        if __version__ != self.version:
            return f"{node} has mmrl {__version__}, and the run {self.version}: install one version"
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        load_built_in()
        for name in self.plugins:
            try:
                import_file(Path(name)) if name.endswith(".py") else import_module(name)
            except Exception as error:
                return (
                    f"{node} cannot import the plug-in {name} ({type(error).__name__}: {error}); "
                    f"every node must have it at the same place"
                )
        return ""


@dataclass(frozen=True)
class Reply:
    """Holds a worker's result: ``values`` [n] or [n, K]; or ``problem``, what it raised;
    ``mistake``: whether that is the user's. ``counters``: its counters since the start; ``parts``:
    sums and counts of the sub-scores of these samples."""

    values: Any = None
    problem: str = ""
    mistake: bool = False
    worker: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)


class Worker:
    """Base of workers: reports where it runs."""

    def where(self) -> Started:
        """Return the process and the node."""
        context = importlib.import_module("ray").get_runtime_context()
        return Started(os.getpid(), address(), str(context.get_node_id()))


class RewardWorker(Worker):
    """Scores samples with one reward, on its node. ``build``: ``module:function`` that builds the
    reward from ``spec``, which is pickled: it may name classes of plug-ins, which are imported
    first."""

    def __init__(self, surroundings: Surroundings, build: str, spec: bytes):
        self.surroundings = surroundings
        self.build = build
        self.spec = spec
        self.reward: Any = None
        self.name = ""

    def begin(self) -> Started:
        """Build the reward."""
        started = self.where()
        started.problem = prepared(self.surroundings)
        if started.problem:
            return started
        try:
            module, _, function = self.build.partition(":")
            build = getattr(importlib.import_module(module), function)
            self.reward = build(pickle.loads(self.spec))
        except (Exception, SystemExit) as error:  # whatever a user's reward raises
            started.problem = f"node {started.address}: {type(error).__name__}: {error}"
        self.name = f"{started.pid}@{started.address}"
        return started

    def work(self, parcel: Parcel) -> Reply:
        """Score one parcel; what the reward raises is returned, not raised."""
        from mmrl.apps.ray.parcels import opened
        from mmrl.core.errors import UserError
        from mmrl.scoring.attempt import as_values, describe
        from rewards.card import card_of, method_of

        media, prompts = opened(parcel)
        try:
            values = self.reward(media, prompts)
            values = as_values(values, len(prompts), "", card_of(self.reward).of)
        except UserError as error:
            return Reply(problem=str(error), mistake=True)
        except (Exception, SystemExit) as error:
            return Reply(problem=describe(error).text)
        counters = method_of(self.reward, "counters")
        counts = counters() if counters else {}
        parts = self.reward.sub_scores.taken()
        return Reply(values=values.numpy(), worker=self.name, counters=counts, parts=parts)


def prepared(surroundings: Surroundings) -> str:
    """Prepare this process for work, before torch is loaded. Returns a sentence on failure."""
    from mmrl.core.rounding import prepare

    os.environ.update(surroundings.environment)
    prepare()
    return surroundings.enter()


def address() -> str:
    """Return the address of this node."""
    return str(importlib.import_module("ray.util").get_node_ip_address())
