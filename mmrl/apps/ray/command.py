"""Runs ``mmrl train CONFIG --engine ray``: the driver, which does not train itself."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mmrl.config as config
from mmrl.apps.ray import connection
from mmrl.apps.ray.output import last_output, listen, show_by, where
from mmrl.apps.ray.pool import cause_of
from mmrl.apps.ray.ranks import Control, Job, Outcome, TrainerRank
from mmrl.apps.ray.rewards import here
from mmrl.apps.ray.rollouts import misfits
from mmrl.config import Config
from mmrl.config.sections import SECTIONS, RayOptions
from mmrl.core.at_once import INTERRUPTED
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.experiment.build import CONFIG, check_trackers, config_of, read
from mmrl.experiment.lifecycle import run_folder
from mmrl.experiment.stopping import RESUMABLE, Signals

ENGINES = ("ray",)
# variables set by `accelerate launch --use_fsdp --fsdp_version 2 ...`
STRATEGIES = {
    "ddp": {},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    },
}
HEARD = 60.0  # seconds until the death of a node is known everywhere
LAST = 60.0  # seconds for the other ranks to end after one has failed


def train(
    engine: str, name: Path, overrides: Sequence[str], resume: bool = False, accept: bool = False
) -> int:
    """Train on a Ray cluster. Returns the exit status, as ``mmrl train`` without Ray.

    Raises UserError for everything a user can fix, mostly before anything is loaded.
    """
    if engine not in ENGINES:
        raise UserError(f"--engine: unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    connection.check_version()
    configuration = configured(name, overrides, resume)
    options = configuration.section("ray", RayOptions)
    config.raise_all(list(misfits(configuration)))
    ray = connection.join(options.address, options.timeout)
    connection.check_fit(ray, list(places(configuration, options)), "ray: this run")
    folder = name if resume else run_folder(configuration, name)
    added = [] if resume else [*overrides, f"run={json.dumps(str(folder))}"]
    words = tuple(overrides) if resume else tuple(added)
    driver = Driver(ray, options, folder)
    with driver.signals.caught():
        return driver.run(Job(str(name), words, resume, accept))


def configured(name: Path, overrides: Sequence[str], resume: bool) -> Config:
    """Read and check the configuration, or the first stage of one with stages."""
    file = config_of(name) if resume else name
    _, stages = config.load_stages(file, overrides)
    chosen = [*overrides, f"stage={stages[0]}"] if stages else list(overrides)
    configuration = read(file, chosen)
    check_trackers(configuration)
    processes = configuration.section("ray", RayOptions).trainers
    if processes > 1:
        config.check(configuration, SECTIONS, {"optimizer": ("parameters",)}, processes)
    return configuration


def places(configuration: Config, options: RayOptions) -> Iterator[dict[str, float]]:
    """List the resources of every actor of a run: trainers, rollout workers, reward workers."""
    trainer = {"CPU": options.cpus_per_trainer, "GPU": options.gpus_per_trainer}
    yield from [trainer] * options.trainers
    sampler = {"CPU": options.cpus_per_rollout_worker, "GPU": options.gpus_per_rollout_worker}
    yield from [sampler] * options.rollout_workers
    problems: list[str] = []
    spec = configuration.plain.get("reward") or {}
    chosen = config.resolve_rewards(spec, REWARDS, configuration.place(("reward",)), problems)
    for entry in chosen.values():
        handling = entry.handling.options
        if handling.get("place") == "ray":
            worker = {"CPU": handling.get("worker_cpus", 1), "GPU": handling.get("worker_gpus", 0)}
            yield from [worker] * max(handling.get("workers", 1), options.trainers)


class Lost(Exception):
    """Signals that a trainer has died: the run can resume from its last checkpoint."""


@dataclass
class Driver:
    """Starts the trainers of a run, forwards signals, and restarts them if one is lost."""

    ray: Any
    options: RayOptions
    folder: Path
    signals: Signals = field(default_factory=lambda: Signals(lambda: None))
    ranks: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # where each rank runs
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)  # placement group of the trainers

    def run(self, job: Job) -> int:
        """Train to the end; after a loss, resume from the last checkpoint, up to ``max_restarts``
        times."""
        listen()
        show_by(self._show)
        for restart in range(self.options.max_restarts + 1):
            try:
                return self._attempt(job)
            except Lost as loss:
                message = str(loss) + last_output(str(loss))
            if restart < self.options.max_restarts:
                print(
                    f"warning: {message}\ngoing on from the last checkpoint "
                    f"({restart + 1} of {self.options.max_restarts} restarts)",
                    flush=True,
                )
            if (self.folder / CONFIG).is_file():
                job = Job(str(self.folder), (), True, job.accept)
        raise UserError(f"{message}\nray.max_restarts={self.options.max_restarts} are used up")

    def _attempt(self, job: Job) -> int:
        """Place the trainers and wait for their end."""
        options = self.options
        bundle = {"CPU": options.cpus_per_trainer, "GPU": options.gpus_per_trainer}
        held = {key: number for key, number in bundle.items() if number} or {"CPU": 0.001}
        what = f"ray.trainers={options.trainers}"
        group = connection.reserve(
            self.ray, [held] * options.trainers, what, "PACK", options.timeout
        )
        # on the driver's node: it must live as long
        control = (
            self.ray.remote(num_cpus=0)(Control)
            .options(scheduling_strategy=connection.beside(self.ray))
            .remote()
        )
        actors = self.ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle["GPU"])(TrainerRank)
        surroundings = here()
        self.ranks = [
            actors.options(
                max_restarts=0, scheduling_strategy=connection.strategy_of(group, rank)
            ).remote(surroundings, control)
            for rank in range(options.trainers)
        ]
        try:
            return self._followed(job, control)
        finally:
            for actor in [*self.ranks, control]:
                self.ray.kill(actor)
            connection.release(group)
            connection.release_left(self.owner)

    def _followed(self, job: Job, control: Any) -> int:
        """Let all ranks train; wait for them."""
        try:
            started = self.ray.get([rank.where.remote() for rank in self.ranks])
            port = self.ray.get(self.ranks[0].port.remote())
        except self.ray.exceptions.RayActorError as error:
            raise Lost(f"a trainer has died before it began: {cause_of(error)}") from error
        self.names = [where(place.pid, place.address) for place in started]
        gpus = self.options.gpus_per_trainer > 0
        refs = {}
        for rank, actor in enumerate(self.ranks):
            surroundings = environment(rank, len(self.ranks), started[0].address, port, gpus)
            surroundings |= STRATEGIES[self.options.strategy] | {connection.OWNER: self.owner}
            refs[actor.train.remote(job, surroundings)] = rank
        return self._awaited(refs, control)

    def _awaited(self, refs: dict[Any, int], control: Any) -> int:
        outcomes: dict[int, Outcome] = {}
        waiting = list(refs)
        sent = 0
        deadline = float("inf")
        while waiting and time.monotonic() < deadline:
            ready, waiting = self.ray.wait(waiting, timeout=0.5)
            if self.signals.number and not sent:
                sent = self.signals.number
                control.stop.remote(sent)
            for ref in ready:
                rank = refs[ref]
                try:
                    outcomes[rank] = self.ray.get(ref)
                except self.ray.exceptions.RayActorError as error:
                    if sent:
                        return INTERRUPTED if sent == 2 else RESUMABLE
                    raise self._loss(rank, error) from error
                except self.ray.exceptions.RayTaskError as error:
                    # ranks that wait for a dead one also fail, and may be reported first
                    if (lost := self._lost(waiting, refs)) and not sent:
                        raise lost from error
                    raise
                if outcomes[rank].problem:
                    deadline = min(deadline, time.monotonic() + LAST)
        time.sleep(1.0)  # wait for their last output
        problems = dict.fromkeys(o.problem for o in outcomes.values() if o.problem)
        if problems:
            text = "\n".join(problems)
            raise UserError(text + ("" if "last output of" in text else last_output(text)))
        return max(outcome.status for outcome in outcomes.values())

    def _lost(self, waiting: Sequence[Any], refs: dict[Any, int]) -> Lost | None:
        """Return the loss of a trainer, if one of the awaited ones has died."""
        ended, _ = self.ray.wait(list(waiting), num_returns=len(waiting), timeout=HEARD)
        for ref in ended:
            try:
                self.ray.get(ref)
            except self.ray.exceptions.RayActorError as error:
                return self._loss(refs[ref], error)
            except self.ray.exceptions.RayTaskError:
                continue
        return None

    def _loss(self, rank: int, error: Exception) -> Lost:
        return Lost(f"trainer {rank} {self.names[rank]} has died: {cause_of(error)}")

    def _show(self, worker: tuple[str, str], name: str, lines: list[str]) -> None:
        """Print the output of workers: the first trainer's unchanged, others' with their name."""
        process = where(int(worker[0]), worker[1]) if worker[0].isdigit() else ""
        if process and process in self.names:
            rank = self.names.index(process)
            prefix = f"[trainer {rank}] " if rank else ""
        elif name:
            prefix = f"[{name} {worker[0]} on {worker[1]}] "
        else:
            return  # Ray's own
        for line in lines:
            print(prefix + line, flush=True)


def environment(rank: int, size: int, address: str, port: int, gpus: bool) -> dict[str, str]:
    """Return what torchrun would set for a rank. Ray shows each actor only its own GPUs, so that it
    is always the first."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0" if gpus else str(rank),
        "LOCAL_WORLD_SIZE": "1" if gpus else str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    threads = os.environ.get("OMP_NUM_THREADS") or ("1" if size > 1 else None)
    shared = {"OMP_NUM_THREADS": threads} if threads else {}
    return (variables if size > 1 else {}) | shared
