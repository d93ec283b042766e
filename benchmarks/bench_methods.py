"""Compares all image methods on the digits world: reward and cost from one base model.

    python benchmarks/bench_methods.py  # whatever is missing, then the page
    python benchmarks/bench_methods.py --only Flow-GRPO DGPO --seeds 0 --runs /tmp/try
    python benchmarks/bench_methods.py --page  # only rewrite the page

Each run is a separate process (a fork, so that libraries are imported once). Its numbers are
written when it ends, and a run whose file exists is not repeated. Evaluation is the same for all:
held-out captions, the same noise, eight Euler steps of the base's grid, not timed. Wall and CPU
seconds are given: on a shared machine only the latter are comparable.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import methods_page  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mmrl.core.machine import machine  # noqa: E402
from mmrl.core.paths import find_config  # noqa: E402
from mmrl.experiment import evaluation  # noqa: E402
from mmrl.experiment.build import Session, read  # noqa: E402
from mmrl.train.trainer import Trainer  # noqa: E402
from samplers.batching import peak_bytes  # noqa: E402

SIZES = (
    "train.prompts_per_iteration=6",
    "train.group_size=16",
    "train.train_batch_size=32",
    "train.iterations=12",
)
# samples per held-out caption; iterations between points of the curve, their samples
COPIES = 4
EVERY = 4
CURVE = 1


@dataclass(frozen=True)
class Method:
    """Holds a shipped configuration with the changes for short runs."""

    config: str
    family: str
    lr: float
    changes: tuple[str, ...] = ()

    def overrides(self, seed: int) -> list[str]:
        return [*SIZES, *self.changes, f"optimizer.adamw.lr={self.lr}", f"train.seed={seed}"]


# guidance scale of the base and of all evaluations; FLUX has 3
OWN_GRID = "policy.timestep_schedule.shifted.shift=1.0"
NOISE = "policy.noise_level=0.5"  # with few long steps 0.3, as published, explores too little
PATH, SHARED, NOISED, PAIRS, GRADIENT = methods_page.FAMILIES
METHODS = {
    "Flow-GRPO": Method("flow_grpo", PATH, 4e-4),
    "Flow-GRPO, all steps, KL": Method(
        "flow_grpo",
        PATH,
        4e-4,
        (
            "policy.noise_window=all_but_last",
            "objective.policy_gradient.kl={weight: 0.04, form: flow_grpo}",
        ),
    ),
    "DanceGRPO": Method(
        "dance_grpo",
        PATH,
        4e-4,
        (OWN_GRID, NOISE),
    ),
    "GRPO-Guard": Method("grpo_guard", PATH, 4e-4),
    "Flow-DPPO": Method("flow_dppo", PATH, 4e-4),
    "TempFlow weights": Method("tempflow_grpo", PATH, 4e-4),
    "DDPO": Method("ddpo", PATH, 1.5e-4),
    "RLCM": Method("rlcm", PATH, 1.5e-4),
    "Flow-GRPO-Fast": Method("flow_grpo_fast", SHARED, 4e-4),
    "MixGRPO": Method("mix_grpo", SHARED, 4e-4, ("policy.noise_window.progressive.every=3",)),
    "MixGRPO-Flash": Method(
        "mix_grpo_flash", SHARED, 4e-4, ("policy.noise_window.progressive.every=3",)
    ),
    "BranchGRPO": Method(
        "branch_grpo",
        SHARED,
        4e-4,
        (OWN_GRID, NOISE),
    ),
    "BranchGRPO, width pruned": Method(
        "branch_grpo",
        SHARED,
        4e-4,
        (OWN_GRID, NOISE, "advantage={branch: {prune_width: siblings}}"),
    ),
    "BranchGRPO, depth pruned": Method(
        "branch_grpo", SHARED, 4e-4, (OWN_GRID, NOISE, "advantage={branch: {prune_depth: [6, 7]}}")
    ),
    "BranchGRPO, both pruned": Method(
        "branch_grpo",
        SHARED,
        4e-4,
        (OWN_GRID, NOISE, "advantage={branch: {prune_depth: [7], prune_width: siblings}}"),
    ),
    "BranchGRPO-Mix": Method(
        "branch_mix",
        SHARED,
        4e-4,
        (OWN_GRID, NOISE),
    ),
    "DGPO": Method("dgpo", NOISED, 4e-4, ("objective.dgpo.num_noise_draws=2",)),
    "DiffusionNFT": Method("nft", NOISED, 4e-4, ("objective.nft.num_noise_draws=3",)),
    "AWM": Method("awm", NOISED, 2e-4, ("objective.awm.num_noise_draws=3",)),
    "FPO": Method("fpo", NOISED, 4e-4, ("objective.fpo.num_noise_draws=3",)),
    "CRD": Method("crd", NOISED, 4e-4, ("objective.crd.num_noise_draws=2",)),
    "RWR": Method("rwr", NOISED, 1.5e-4, ("objective.rwr.num_noise_draws=3",)),
    "Diffusion-DPO, online": Method("diffusion_dpo", PAIRS, 4e-4),
    "D3PO": Method("d3po", PAIRS, 2e-4, ("train.train_batch_size=48",)),
    "SePPO": Method(
        "seppo",
        PAIRS,
        2e-4,
        (
            "objective.seppo.num_noise_draws=4",
            "train.prompts_per_iteration=24",
            "train.group_size=4",
            "train.train_batch_size=48",
        ),
    ),
    "DRaFT": Method("draft", GRADIENT, 3e-4),
    "DRaFT-2, KL": Method("draft_divergence", GRADIENT, 3e-4, ("objective.draft.divergence=kl",)),
    "DRaFT-2, Hellinger": Method("draft_divergence", GRADIENT, 3e-4),
    "Adjoint Matching": Method("adjoint_matching", GRADIENT, 3e-4, ("train.iterations=5",)),
}


@dataclass
class Clock:
    """Measures wall seconds and CPU seconds of this process, while it runs."""

    wall: float = 0.0
    cpu: float = 0.0
    started: tuple[float, float] = field(default=(0.0, 0.0))

    def __enter__(self) -> Clock:
        self.started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self.started[0]
        self.cpu += time.process_time() - self.started[1]


class Judge:
    """Evaluates weights in the same way, whatever trained them."""

    def __init__(self) -> None:
        self.session = Session.of(read(find_config("digits/flow_grpo"), []))
        self.policy, self.prompts = self.session.policy, self.session.prompts()
        self.policy.pass_sizes.rows = 64
        self.policy.encode([*self.session.source.train, *self.prompts])
        self.scorer = self.session.judges()

    def __call__(self, weights: dict[str, Tensor], copies: int) -> dict[str, Tensor]:
        """Return [P, copies] of every reward, and the distance of a caption's samples."""
        self.policy.weights.load(weights)
        with torch.no_grad():
            media, repeated = evaluation.sample(self.policy, self.prompts, copies, seed=1)
        rewards = self.scorer(media, repeated)
        scores = {name: value.view(-1, copies).double() for name, value in rewards.items()}
        return scores | {"diversity": apart(media.unflatten(0, (-1, copies)))}

    def session_of(self, method: Method, seed: int, overrides: tuple[str, ...] = ()) -> Session:
        """Open a session that shares the encoded captions."""
        session = Session.of(
            read(find_config(f"digits/{method.config}"), [*method.overrides(seed), *overrides])
        )
        session.policy.texts.encodings |= self.policy.texts.encodings
        return session


def apart(media: Tensor) -> Tensor:
    """Return the mean distance [P, 1] of two pictures of a caption, root mean square over pixels,
    of media [P, n, 3, H, W]."""
    flat = media.flatten(2).double()
    distance = torch.cdist(flat, flat) / flat.shape[2] ** 0.5  # [P, n, n]
    return (distance.sum((1, 2)) / (flat.shape[1] * (flat.shape[1] - 1)))[:, None]


def look(judge: Judge, weights: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return means of the samples of every held-out caption, by reward."""
    return {name: value.mean(1).tolist() for name, value in judge(weights, COPIES).items()}


def learn(judge: Judge, name: str, seed: int, before: dict[str, list[float]]) -> dict[str, Any]:
    """Train, with evaluations during and after training. ``before``: those of the shared base."""
    method = METHODS[name]
    session = judge.session_of(method, seed)
    trainer = session.trainer()
    clock = Clock()
    curve = [[0, 0.0, mean(before["digits"])]]
    log = []
    for iteration in range(1, session.options.iterations + 1):
        with clock:
            log.append(trainer.iterate())
        if iteration % EVERY == 0 and iteration < session.options.iterations:
            reward = judge(session.policy.weights.full(), CURVE)["digits"].mean()
            curve.append([iteration, clock.cpu, float(reward)])
    after = look(judge, session.policy.weights.full())
    curve.append([session.options.iterations, clock.cpu, mean(after["digits"])])
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "method": name,
        "seed": seed,
        "config": method.config,
        "overrides": method.overrides(seed),
        "curve": curve,
        "images": session.options.iterations
        * session.options.prompts_per_iteration
        * session.options.group_size,
        "forwards": sum(line["forwards"] for line in log),
        "decisions": sum(line["decisions"] for line in log),
        "train_reward": [line["reward/mean"] for line in log],
        "skipped": sum(line["skipped_steps"] for line in log),
        "wall": clock.wall,
        "cpu": clock.cpu,
        "resident_bytes": resident,
        # slow to count, and independent of the seed
        "tensor_bytes": None if seed else peak_bytes(trainer.iterate, "cpu"),
        "before": before,
        "after": after,
    }


# -------------------------------------------------------------------------------------------------
# time an iteration

TWENTY = ("policy.steps=20", "train.prompts_per_iteration=2", "train.train_batch_size=32")
PUBLISHED_TREE = "policy.tree={splits: [0, 3, 6, 9], factor: 2, noise: correlated, scale: 4.0}"
RACERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "DanceGRPO, all steps": ("dance_grpo", ("objective.policy_gradient.timestep_fraction=1.0",)),
    "DanceGRPO, 0.6 of the steps": ("dance_grpo", ()),
    "BranchGRPO": ("branch_grpo", (PUBLISHED_TREE,)),
    "BranchGRPO, width pruned": (
        "branch_grpo",
        (PUBLISHED_TREE, "advantage={branch: {prune_width: siblings}}"),
    ),
    "BranchGRPO, depth pruned": (
        "branch_grpo",
        (PUBLISHED_TREE, "advantage={branch: {prune_depth: [15, 16, 17, 18, 19]}}"),
    ),
    "BranchGRPO, both pruned": (
        "branch_grpo",
        (
            PUBLISHED_TREE,
            "advantage={branch: {prune_depth: [15, 16, 17, 18, 19], prune_width: siblings}}",
        ),
    ),
    "BranchGRPO-Mix": ("branch_mix", (PUBLISHED_TREE, "policy.noise_window.window.stop=4")),
    "BranchGRPO-Mix, short tail": (
        "branch_mix",
        (
            PUBLISHED_TREE,
            "policy.noise_window.window.stop=4",
            "policy.flash_step_ratio=0.4",
            "policy.solver=dpm",
        ),
    ),
    "MixGRPO": ("mix_grpo", ("policy.noise_window.progressive.size=4",)),
}


CHECKPOINTED = (
    "DanceGRPO, all steps",
    "BranchGRPO",
    "BranchGRPO, both pruned",
    "BranchGRPO-Mix",
    "BranchGRPO-Mix, short tail",
)


def speed(
    judge: Judge, repeats: int, names: Iterable[str] = RACERS, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Measure CPU seconds per iteration, alternately: A B C A B C ... Twenty steps and 16 leaves,
    as published."""
    trainers: dict[str, Trainer] = {}
    for name in names:
        config, changes = RACERS[name]
        trainers[name] = judge.session_of(
            Method(config, "", 1e-4, (*TWENTY, *changes, *overrides)), 0
        ).trainer()
    speeds: dict[str, Any] = {name: {"cpu": [], "wall": []} for name in trainers}
    for turn in range(repeats + 1):  # the first warms up
        for name, trainer in trainers.items():
            clock = Clock()
            with clock:
                metrics = trainer.iterate()
            if turn:
                speeds[name]["cpu"].append(clock.cpu)
                speeds[name]["wall"].append(clock.wall)
            speeds[name] |= {key: metrics[key] / 32 for key in ("forwards", "decisions")}
            speeds[name] |= {
                key.replace("/", "_"): metrics[key] for key in metrics if key.startswith("time/")
            }
    return speeds


# --------------------------------------------------------------------------------------------------
# time to a reward

# iterations before the first evaluation
SPRINTER = METHODS["DGPO"]
SOON = 2


def sprint(judge: Judge, seed: int, goal: float, most: int = 12) -> dict[str, Any]:
    """Train DGPO until the held-out reward reaches ``goal``; evaluations are not timed."""
    session = judge.session_of(SPRINTER, seed)
    trainer = session.trainer()
    clock = Clock()
    curve = []
    forwards = 0
    reward = 0.0
    while reward < goal and trainer.iteration < most:
        with clock:
            forwards += trainer.iterate()["forwards"]
        if trainer.iteration >= SOON:
            reward = float(judge(session.policy.weights.full(), COPIES)["digits"].mean())
            curve.append([trainer.iteration, clock.cpu, reward])
    images = trainer.iteration * session.options.prompts_per_iteration * session.options.group_size
    return {
        "seed": seed,
        "goal": goal,
        "curve": curve,
        "reached": reward >= goal,
        "cpu": clock.cpu,
        "wall": clock.wall,
        "forwards": forwards,
        "images": images,
        "overrides": SPRINTER.overrides(seed),
    }


# --------------------------------------------------------------------------------------------------
# runs


def apart_from_us(path: Path, task: Any, *args: Any) -> None:
    """Run a task in a fork unless its result exists."""
    if path.exists():
        return

    def work() -> None:
        start = time.monotonic()
        report = task(*args) | {"machine": machine()}
        path.write_text(json.dumps(report))
        print(f"{path.stem}: {time.monotonic() - start:.0f} s", flush=True)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()


def all_runs(folder: Path, names: list[str], seeds: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    judge = Judge()
    apart_from_us(folder / "base.json", look, judge, judge.policy.weights.full())
    base = json.loads((folder / "base.json").read_text())
    base.pop("machine")
    for seed in seeds:
        for name in names:
            apart_from_us(folder / f"{slug(name)}-{seed}.json", learn, judge, name, seed, base)
    if repeats:
        apart_from_us(folder / "speed.json", speed, judge, repeats)
        # as published: the models do not fit without it
        often = ("train.gradient_checkpointing=true",)
        apart_from_us(
            folder / "speed_checkpointed.json", speed, judge, repeats, CHECKPOINTED, often
        )
    for seed in seeds:
        rivals = [folder / f"{slug(name)}-{seed}.json" for name in methods_page.RIVALS]
        if repeats and all(path.exists() for path in rivals):
            goal = max(json.loads(path.read_text())["curve"][-1][2] for path in rivals)
            apart_from_us(folder / f"sprint-{seed}.json", sprint, judge, seed, goal)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/bench_methods", help="a JSON file a run"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed iterations; 0: no timing and no race"
    )
    parser.add_argument(
        "--page", action="store_true", help="only write the page of the runs that are there"
    )
    chosen = parser.parse_args()
    chosen.runs.mkdir(parents=True, exist_ok=True)
    if not chosen.page:
        all_runs(chosen.runs, chosen.only, chosen.seeds, chosen.repeats)
    methods_page.write(
        chosen.runs, {name: (method.family, method.lr) for name, method in METHODS.items()}
    )


if __name__ == "__main__":
    main()
