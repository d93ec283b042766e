"""Measures whether image tokens learn: the digits world's discrete recipes on several seeds, to
docs/results/.

    OMP_NUM_THREADS=1 python scripts/bench_discrete_learning.py [--seeds 0 1 2] [--only NAME ...]
        [--runs FOLDER]

Runs are made one after the other in this process, each from the recipe a user would train. What a
run measured is written when it ends; a second call goes on with those that are missing, and several
calls may share a folder. Seconds are the process's own CPU time (one thread) of sampling, scoring
and training, evaluations left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from mmrl.core.metrics import Meter
from mmrl.monitoring.report.charts import Chart, Series
from mmrl.objectives import mask_estimators
from mmrl.objectives.masked import Masked
from mmrl.run import evaluation
from mmrl.run.build import Session, read, seed_everything
from mmrl.utils.machine import machine
from mmrl.utils.paths import find_config
from samplers.noise import Rng

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
LOOKS = 3  # evaluations of a run after the first
SCALE = 4.0  # of guidance, where scores with and without it are compared
ONE_PASS = "objective.masked.estimator={trajectory: {passes: 1}}"
STYLE = (
    "text{font:12px "
    "sans-serif;fill:#555}.grid{stroke:#e5e5e5}.axis{stroke:#aaa}.line{fill:none;stroke-width:2}"
    ".c1{stroke:#2a68cf}.c2{stroke:#d0690c}.c3{stroke:#2b8a57}.c4{stroke:#7d4ec0}.c5{stroke:#c43458}.c6{stroke:#158294}"
)


class Run(NamedTuple):
    title: str
    recipe: str
    changes: tuple[str, ...] = ()


def guided(family: str, recipe: str, dist: str) -> Run:
    title = f"{family.upper() if family == 'var' else 'LlamaGen'}, {dist}"
    changes = (
        f"policy.{family}.guidance_scale={SCALE}",
        f"policy.{family}.logprob_guidance={dist}",
    )
    return Run(title, recipe, changes)


RUNS = {
    "ar_grpo": Run("AR-GRPO, LlamaGen", "ar_grpo"),
    "janus_grpo": Run("AR-GRPO, Janus", "janus_grpo"),
    "var_grpo": Run("VAR-GRPO", "var_grpo"),
    "mask_exact": Run("exact trajectory", "mask_exact"),
    "mask_exact_1": Run("exact, one random pass", "mask_exact", (ONE_PASS,)),
    "mask_grpo": Run("MaskGRPO, fixed", "mask_grpo"),
    "mask_grpo_published": Run("MaskGRPO, published", "mask_grpo_published"),
    "unigrpo": Run("UniGRPO", "unigrpo"),
    "d1": Run("d1", "d1"),
    "ar_guided": guided("llamagen", "ar_grpo", "guided"),
    "ar_conditional": guided("llamagen", "ar_grpo", "conditional"),
    "var_guided": guided("var", "var_grpo", "guided"),
    "var_conditional": guided("var", "var_grpo", "conditional"),
}
ESTIMATORS = {
    "mask_exact": mask_estimators.trajectory,
    "mask_exact_1": partial(mask_estimators.trajectory, passes=1),
    "mask_grpo": mask_estimators.mask_grpo,
    "mask_grpo_published": partial(mask_estimators.mask_grpo, fixed=False),
    "unigrpo": mask_estimators.uni_grpo,
    "d1": mask_estimators.d1,
}
GROUPS = {
    "autoregressive": (
        "Token after token and scale after scale",
        ("ar_grpo", "janus_grpo", "var_grpo"),
    ),
    "masked": (
        "Masked diffusion, one base model",
        ("mask_exact", "mask_exact_1", "mask_grpo", "mask_grpo_published", "unigrpo", "d1"),
    ),
    "guidance": (
        f"Guidance {SCALE:g} in the rollout, in the score or not",
        ("ar_guided", "ar_conditional", "var_guided", "var_conditional"),
    ),
}
AXES = {"iteration": "iterations", "cpu": "CPU seconds", "forwards": "rows through the network"}


def learn(run: Run, seed: int, overrides: list[str], base: dict[str, Any] | None) -> dict[str, Any]:
    """Train one recipe and look at held-out prompts on the way; ``base`` is what another seed saw
    before training."""
    changes = [*run.changes, f"train.seed={seed}", "evaluate.guidance=[]", *overrides]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mismatch is what is measured
        session = Session.of(read(find_config(Path(f"digits/{run.recipe}")), changes))
        seed_everything(seed)
        trainer = session.trainer()
    judges = session.judges()
    total = session.options.iterations

    def look() -> dict[str, Any]:
        estimates = evaluation.evaluate(
            session.policy, session.prompts(), judges, session.evaluation
        )
        return {name: asdict(estimate) for name, estimate in estimates.items()}

    session.policy.prepare([*session.source.train, *session.source.held_out])
    spent = {"cpu": 0.0, "wall": 0.0, "forwards": 0}
    curve = [{"iteration": 0, **spent, "rewards": base or look()}]
    for iteration in range(1, total + 1):
        start_cpu = time.process_time()
        clock = time.perf_counter()
        spent["forwards"] += int(trainer.iterate()["forwards"])
        spent["cpu"] += time.process_time() - start_cpu
        spent["wall"] += time.perf_counter() - clock
        if any(iteration == round(total * (i + 1) / LOOKS) for i in range(LOOKS)):
            curve.append({"iteration": iteration, **spent, "rewards": look()})
    samples = session.options.prompts_per_iteration * session.options.group_size
    return {"seed": seed, "curve": curve, "samples": samples, "prompts": len(session.prompts())}


def gradients(batches: int = 4) -> dict[str, list[float]]:
    """Measure every estimator at the base model, on the same pictures and advantages: the mean
    cosine of its gradients of two iterations, which says how much of one is signal, and the mean
    cosine with the exact one."""
    session = Session.of(read(find_config(Path("digits/mask_exact")), ["train.max_grad_norm=null"]))
    trainer = session.trainer()
    plain = session.options
    gradients_of: dict[str, list[torch.Tensor]] = {name: [] for name in ESTIMATORS}

    def remember(meter: Meter) -> bool:
        gradients_of[called[-1]].append(
            torch.cat([p.grad.flatten() for p in session.policy.net.parameters()])
        )
        trainer.update.optimizer.zero_grad()
        return True

    called: list[str] = []
    trainer.update._descend = remember
    for trainer.iteration in range(batches):
        batch = trainer.collect()
        for name, estimator in ESTIMATORS.items():
            called.append(name)
            trainer.update.objective = trainer.update.passes.objective = Masked(estimator)
            trainer.update.options = replace(
                plain,
                loss_agg_mode="seq_mean_token_mean"
                if estimator is mask_estimators.uni_grpo
                else "token_mean",
            )
            rng = Rng.of("gradients", trainer.iteration)
            trainer.update.improve(batch, batch.rollout, rng, True, Meter())
    pairs = list(itertools.combinations(range(batches), 2))
    exact = gradients_of["mask_exact"]
    return {
        name: [mean(cosine(each[i], each[j]) for i, j in pairs), mean(map(cosine, each, exact))]
        for name, each in gradients_of.items()
    }


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def table(runs: dict[str, list[dict]], names: tuple[str, ...]) -> list[str]:
    head = (
        "| run | seed | before | after | judge before | judge after | iterations | CPU s | "
        "wall s | forwards |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for name in names:
        for run in runs.get(name, []):
            first = run["curve"][0]
            last = run["curve"][-1]
            cells = [
                cell(point["rewards"][r])
                for r in ("digits", "digits_judge")
                for point in (first, last)
            ]
            sizes = (
                f"{last['iteration']} | {last['cpu']:.0f} | {last['wall']:.0f} | "
                f"{last['forwards'] / 1e3:.0f}k"
            )
            lines.append(f"| {RUNS[name].title} | {run['seed']} | {' | '.join(cells)} | {sizes} |")
    return lines


def cell(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def picture(runs: dict[str, list[dict]], names: tuple[str, ...], axis: str) -> str:
    """Draw the held-out reward, the mean of the seeds, over one of AXES, as a file of its own."""
    curves = []
    for name in (name for name in names if name in runs):
        points = list(zip(*(run["curve"] for run in runs[name])))
        along = [sum(p[axis] for p in each) / len(each) for each in points]
        rewards = [sum(p["rewards"]["digits"]["mean"] for p in each) / len(each) for each in points]
        curves.append(Series(RUNS[name].title, along, rewards))
    drawing = str(Chart(f"held-out reward over {AXES[axis]}", curves, zero=True).svg())
    size = 'xmlns="http://www.w3.org/2000/svg" width="750" height="330" style="background:white"'
    head, _, body = drawing.partition(">")
    return f"{head.replace('<svg', f'<svg {size}', 1)}><style>{STYLE}</style>{body}"


def summary(runs: dict[str, list[dict]]) -> list[str]:
    """Write a line a run: mean gain of the seeds, and in how many of them it is clear."""
    lines = [
        "| run | seeds | before | after | gain | of them clear | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in runs.items():
        ends = [
            (run["curve"][0]["rewards"]["digits"], run["curve"][-1]["rewards"]["digits"])
            for run in seeds
        ]
        before, after = (sum(pair[i]["mean"] for pair in ends) / len(ends) for i in (0, 1))
        clear = sum(
            b["mean"] - a["mean"] > math.hypot(a["high"] - a["mean"], b["high"] - b["mean"])
            for a, b in ends
        )
        cpu = sum(run["curve"][-1]["cpu"] for run in seeds) / len(seeds)
        sizes = f"{after - before:+.3f} | {clear} of {len(ends)} | {cpu:.0f} |"
        lines.append(f"| {RUNS[name].title} | {len(seeds)} | {before:.3f} | {after:.3f} | {sizes}")
    return lines


def signal(ratios: dict[str, list[float]]) -> list[str]:
    """Write what ``gradients`` measured, with the reason why exactness does not show."""
    lines = [
        "### How much of a gradient is signal",
        "",
        "At the base model, of four iterations, all estimators on the same pictures: the "
        "cosine of the gradients of",
        "two iterations, and of the same iteration's with the exact one. Unbiased is not "
        "the same as quiet: with this",
        "many pictures exact gradients of two iterations have little in common, those at "
        "states hidden anew have",
        "more, and a biased but steady estimator learns as fast or faster. The exact one "
        "also pays for all passes.",
        "",
        "| estimator | cosine of two iterations | with the exact one |",
        "|---|---|---|",
    ]
    return [
        *lines,
        *(f"| {RUNS[name].title} | {a:.2f} | {b:.2f} |" for name, (a, b) in ratios.items()),
        "",
    ]


def page(
    runs: dict[str, list[dict]], about: dict[str, Any], noise: dict[str, list[float]] | None = None
) -> str:
    first_run = next(iter(runs.values()))[0]
    lines = [
        "# Image tokens learn from a reward",
        "",
        "Written by `python scripts/bench_discrete_learning.py`. The reward is `digits`; "
        "it and the independent judge",
        f"look at pictures of {first_run['prompts']} held-out captions, which neither "
        f"pre-training nor reinforcement saw,",
        "from the same noise before and after. Mean, 95 % interval over captions. A "
        "group begins from one model.",
        "",
        *summary(runs),
        "",
        "Clear: the gain is more than its 95 % interval is wide to one side, before and after "
        "taken as independent. An iteration",
        f"is {first_run['samples']} pictures. The learning rate of the masked runs falls to 0, "
        f"that of the others stays.",
        "Forwards are rows through the network, sampling included; a guided row counts "
        "twice. CPU seconds are the",
        "process's own, on one thread of a machine that others used too, evaluations left out.",
        "",
    ]
    for key, (title, names) in GROUPS.items():
        if any(name in runs for name in names):
            lines += [f"## {title}", "", *table(runs, names), ""]
            lines += [
                f"![held-out reward over {AXES[axis]}](discrete_{key}_{axis}.svg)"
                for axis in axes(key)
            ] + [""]
            lines += signal(noise) if noise and key == "masked" else []
    return "\n".join([*lines, f"Machine: `{json.dumps(about)}`", ""])


def axes(key: str) -> tuple[str, ...]:
    return tuple(AXES) if key == "masked" else ("iteration", "cpu")


def gathered(folder: Path) -> dict[str, list[dict]]:
    """Read the present results of every run, by seed."""
    runs = {
        name: [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-?.json"))]
        for name in RUNS
    }
    return {name: each for name, each in runs.items() if each}


def make(name: str, seed: int, folder: Path, overrides: list[str]) -> None:
    """Make one run into its file, unless it is there or another process is at it."""
    from filelock import FileLock, Timeout

    file = folder / f"{name}-{seed}.json"
    try:
        with FileLock(file.with_suffix(".lock"), blocking=False):
            if file.exists():
                return
            known = gathered(folder).get(name)
            learned = learn(
                RUNS[name], seed, overrides, known[0]["curve"][0]["rewards"] if known else None
            )
            file.write_text(json.dumps(learned))
    except Timeout:
        return
    first, last = (learned["curve"][i]["rewards"]["digits"]["mean"] for i in (0, -1))
    print(
        f"{name} seed {seed}: {first:.3f} to {last:.3f}, {learned['curve'][-1]['cpu']:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/bench_discrete_learning"), help="one file a run"
    )
    parser.add_argument(
        "--gradients", action="store_true", help="compare the estimators' gradients, too"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the page of the runs that are there, train nothing",
    )
    parser.add_argument("overrides", nargs="*", help="key=value of all recipes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.runs.mkdir(parents=True, exist_ok=True)
    for seed, name in [] if chosen.page else itertools.product(chosen.seeds, chosen.only):
        make(name, seed, chosen.runs, chosen.overrides)
    noisy = chosen.runs / "gradients.json"
    if chosen.gradients and not noisy.exists():
        noisy.write_text(json.dumps(gradients()))
    if runs := gathered(chosen.runs):
        about = machine()
        noise = json.loads(noisy.read_text()) if noisy.exists() else None
        (RESULTS / "discrete.json").write_text(
            json.dumps({"machine": about, "runs": runs, "gradients": noise})
        )
        (RESULTS / "discrete.md").write_text(page(runs, about, noise))
        for key, (_, names) in GROUPS.items():
            for axis in axes(key):
                (RESULTS / f"discrete_{key}_{axis}.svg").write_text(picture(runs, names, axis))


if __name__ == "__main__":
    main()
