"""Moves a reward of a configuration to workers of a Ray cluster (``place: ray``)."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmrl.apps.ray import connection
from mmrl.apps.ray.connection import check_version
from mmrl.apps.ray.output import listen
from mmrl.apps.ray.parcels import packed
from mmrl.apps.ray.pool import Pool
from mmrl.apps.ray.workers import Reply, RewardWorker, Surroundings
from mmrl.core.errors import UserError
from mmrl.core.handling import Handling
from mmrl.core.registry import ALL
from mmrl.core.types import Media, Prompt
from rewards.card import Card, Sums

OURS = ("mmrl", "rewards", "samplers")
PARTS = 2  # units per worker, without a batch size


class Placed:
    """Scores samples on remote workers; to the rest of mmrl a reward like any other.

    Args:
        name: of the reward in the configuration.
        card: of the reward, which only the workers build.
        recipe: a function of an importable module, and its argument.
        handling: number of workers, and the resources of each.
        plug_ins: classes and functions that the recipe names.
    """

    def __init__(
        self,
        name: str,
        card: Card,
        recipe: tuple[Callable[[Any], Any], Any],
        handling: Handling,
        plug_ins: Iterable[Any] = (),
    ):
        check_card(name, card)
        check_version()
        self.name = name
        self.card = replace(card, differentiable=False)  # no gradient is returned
        build, spec = recipe
        pickled = importlib.import_module("ray").cloudpickle.dumps(spec)
        self.recipe = f"{build.__module__}:{build.__qualname__}", pickled
        self.surroundings = here(plug_ins)
        self.size = share_of(handling.workers)
        self.rows = handling.batch_size
        self.bundle = {"CPU": handling.worker_cpus, "GPU": handling.worker_gpus}
        self.lock = threading.Lock()
        self.pool: Pool | None = None
        self.group: Any = None  # the reserved placement group
        self.counts: dict[str, dict[str, float]] = {}  # of every worker
        self.patience = 60.0
        # reserve now, before building a large model; workers start in parallel
        self.begin()

    def begin(self) -> Pool:
        """Begin the workers, once."""
        with self.lock:
            if self.pool is None:
                ray = connection.join()
                listen()
                what = f"reward {self.name!r} with {self.size} workers"
                bundle = {key: number for key, number in self.bundle.items() if number}
                if not bundle:  # without resources nothing is reserved
                    place: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
                else:
                    group = connection.reserve(
                        ray, [bundle] * self.size, what, "SPREAD", self.patience
                    )
                    self.group = group
                    place = {"scheduling_strategy": connection.strategy_of(group)}
                actors = ray.remote(num_cpus=self.bundle["CPU"], num_gpus=self.bundle["GPU"])(
                    RewardWorker
                ).options(max_restarts=0, max_task_retries=0, **place)
                self.pool = Pool(
                    ray,
                    f"reward {self.name!r}",
                    lambda: actors.remote(self.surroundings, *self.recipe),
                    self.size,
                    self.patience,
                )
            return self.pool

    def __call__(self, media: Media, prompts: list[Prompt]) -> Any:
        """Return [B], or [B, K] of a step reward; with sums of sub-scores if it has any."""
        slices = parts_of(prompts, self.size, self.rows, self.card.of == "group")
        parcels = [packed(media, prompts, rows, self.card.of == "step") for rows in slices]
        replies = self.begin().run(parcels, self._counted)
        for reply in replies:
            if reply.problem:
                raise (UserError if reply.mistake else WorkerFailure)(reply.problem)
        values = [torch.from_numpy(reply.values.copy()) for reply in replies]
        parts: dict[str, Sums] = {}
        for reply in replies:
            for key, sums in reply.parts.items():
                parts[key] = parts.get(key, Sums()).plus(Sums(*sums))
        scores = torch.cat(values) if values else torch.zeros(0)
        return (scores, parts) if parts else scores

    def counters(self) -> dict[str, float]:
        """Return the sum of what all workers have counted."""
        sums: dict[str, float] = {}
        for counts in self.counts.values():
            for key, number in counts.items():
                sums[key] = sums.get(key, 0.0) + number
        return sums

    def close(self) -> None:
        """End the workers and release their resources."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        if self.group is not None:
            connection.release(self.group)
            self.group = None

    def _counted(self, reply: Reply) -> None:
        if reply.counters:
            self.counts[reply.worker] = reply.counters


class WorkerFailure(Exception):
    """Reports what a reward raised on its worker, with the original message."""


def check_card(name: str, card: Card) -> None:
    """Raise UserError for a reward that cannot run remotely."""
    if card.of == "batch":
        raise UserError(
            f"reward {name!r} compares all samples of an iteration in one call: leave place: ray "
            f"out"
        )


def share_of(workers: int) -> int:
    """Return this process's number of a reward's workers, as one of WORLD_SIZE."""
    return max(1, workers // int(os.environ.get("WORLD_SIZE", "1")))


def here(plug_ins: Iterable[Any] = ()) -> Surroundings:
    """Describe this process's environment for its workers, which need ``plug_ins``."""
    from mmrl.core.version import __version__

    names = ("HF_HUB_OFFLINE", "MMRL_CACHE", "MMRL_SAFE", "TOKENIZERS_PARALLELISM")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    return Surroundings(str(Path.cwd()), __version__, foreign(plug_ins), environment)


def foreign(plug_ins: Iterable[Any] = ()) -> tuple[str, ...]:
    """List external files and modules that have registered something here, or define one of
    ``plug_ins``."""
    registered = [entry for registry in ALL.values() for entry in registry.values()]
    modules = {getattr(entry, "__module__", "") for entry in [*registered, *plug_ins]}
    names = []
    for name in sorted(modules & set(sys.modules)):
        if name.partition(".")[0] in (*OURS, "builtins"):
            continue
        file = vars(sys.modules[name]).get("__file__") or ""
        lies_alone = file.endswith(".py") and "site-packages" not in file and "." not in name
        names.append(file if lies_alone else name)
    return tuple(names)


def parts_of(
    prompts: list[Prompt], workers: int, rows: int | None, whole_groups: bool
) -> list[slice]:
    """Split a batch into units of ``rows`` samples, or a few per worker; groups stay whole if the
    reward compares them."""
    count = len(prompts)
    size = rows or max(1, -(-count // (workers * PARTS)))
    if not whole_groups:
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]
    edges = [0]
    for row in range(1, count + 1):
        ends = row == count or prompts[row].get("group") != prompts[row - 1].get("group")
        if ends and (row - edges[-1] >= size or row == count):
            edges.append(row)
    return [slice(first, last) for first, last in zip(edges, edges[1:])]
