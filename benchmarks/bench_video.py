"""Measures whether a tiny Wan learns to move digits: both recipes on several seeds, to
docs/results/.

    python benchmarks/bench_video.py [--seeds 0 1 2] [--only wan wan_i2v] [--runs FOLDER]
        [key=value ...]

A run is what `mmrl train digits/wan`, `mmrl evaluate` and `mmrl report` do, in one process:
held-out captions (image to video: also first frames with unseen scans), base and trained model on
the same noise, no noise on the path. Wall and CPU seconds are those of training, including
evaluations: on a shared machine only the latter are comparable.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from measuring import described  # noqa: E402

from mmrl.cli import commands  # noqa: E402
from mmrl.core.machine import machine  # noqa: E402
from mmrl.core.paths import find_config  # noqa: E402
from mmrl.core.registry import locate  # noqa: E402
from mmrl.experiment.lifecycle import train  # noqa: E402
from mmrl.monitoring.report.charts import Chart, Series  # noqa: E402
from mmrl.monitoring.report.page import before_after_picture, write_report  # noqa: E402
from mmrl.monitoring.report.pictures import open_picture  # noqa: E402
from mmrl.worlds.moving import captions, film  # noqa: E402
from samplers.noise import Rng  # noqa: E402

RESULTS = ROOT / "docs" / "results"
RECIPES = {"wan": "text to video", "wan_i2v": "image to video"}
REWARDS = {
    "digits_motion": "motion",
    "identity": "identity",
    "judge": "identity by the judge (not trained on)",
}
STYLE = (
    "text{font:12px "
    "sans-serif;fill:#555}.grid{stroke:#e5e5e5}.axis{stroke:#aaa}.line{fill:none;stroke-width:2}"
    ".c1{stroke:#2a68cf}.c2{stroke:#d0690c}.c3{stroke:#2b8a57}.c4{stroke:#7d4ec0}.c5{stroke:#c43458}.c6{stroke:#158294}"
)


def animate(run: Path, target: Path) -> None:
    """Write the before-and-after film as an animated PNG, which Markdown shows."""
    film = open_picture(before_after_picture(run))
    first, *later = film.frames
    timing = {"duration": round(film.pace), "loop": 0}
    first.save(target, save_all=True, append_images=later, **timing)


def learn(recipe: str, seed: int, run: Path, overrides: list[str]) -> dict:
    """Train, evaluate, report, read back."""
    wall = time.perf_counter()
    cpu = time.process_time()
    train(find_config(f"digits/{recipe}"), [f"train.seed={seed}", f"run={run}", *overrides])
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    rows, _ = commands.evaluate(run)
    write_report(run)
    base, trained = (row["rewards"] for row in rows)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = {}
    for name in ("digits_motion", "identity"):
        curve[name] = [[0, base[name]["mean"]]]
        curve[name] += [
            [x["iteration"], x[f"eval/{name}"]] for x in lines if x.get(f"eval/{name}") is not None
        ]
    return {
        "seed": seed,
        **spent,
        "iterations": len(lines),
        "base": base,
        "trained": trained,
        "curve": curve,
    }


def reconstruction() -> dict[str, float]:
    """Measure the loss by the autoencoder alone: PSNR of clips with unseen scans, and their rewards
    before and after."""
    from diffusers import AutoencoderKLWan

    from mmrl.core.registry import REWARDS as known

    vae = AutoencoderKLWan.from_pretrained(locate("world:digits/wan"), subfolder="vae")
    prompts = captions()
    clips = film(prompts, Rng.of("reconstruction"), "judge").frames
    with torch.no_grad():
        latents = vae.encode(2 * clips.transpose(1, 2) - 1).latent_dist.mode()
        back = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    reader = known.build("per_frame", reward=known.build("digits"))
    numbers = {"psnr": -10 * math.log10(float((back - clips).square().mean()))}
    for name, reward in {"motion": known.build("digits_motion"), "identity": reader}.items():
        numbers |= {
            f"{name}, real": float(reward(clips, prompts).mean()),
            name: float(reward(back, prompts).mean()),
        }
    return numbers


def picture(runs: list[dict]) -> str:
    """Draw held-out motion and identity over the iterations, a curve per seed, to a file."""
    curves = [
        Series(f"{REWARDS[name]}, seed {run['seed']}", *map(list, zip(*points)))
        for name in ("digits_motion", "identity")
        for run in runs
        for points in (run["curve"][name],)
    ]
    drawing = str(Chart("held-out rewards", curves, zero=True).svg())
    size = 'xmlns="http://www.w3.org/2000/svg" width="750" height="330" style="background:white"'
    head, _, body = drawing.partition(">")
    return f"{head.replace('<svg', f'<svg {size}', 1)}><style>{STYLE}</style>{body}"


def row(runs: list[dict], reward: str, meaning: str) -> str:
    """Write the row of a reward: before, after for each seed, and the mean gain."""
    before = runs[0]["base"][reward]
    after = [run["trained"][reward]["mean"] for run in runs]
    gain = sum(after) / len(after) - sum(run["base"][reward]["mean"] for run in runs) / len(runs)
    start = f"{before['mean']:.3f} [{before['low']:.3f}, {before['high']:.3f}]"
    return f"| {meaning} | {start} | {', '.join(f'{x:.3f}' for x in after)} | {gain:+.3f} |"


def page(report: dict) -> str:
    lines = [
        "# Digits that move: a tiny Wan learns from motion and identity",
        "",
        "Written by `python benchmarks/bench_video.py`. Held-out captions, the same noise "
        "before and after, eight Euler "
        "steps, no guidance; mean and 95 % interval over captions.",
        "",
    ]
    quality = report["reconstruction"]
    lines += [
        f"The autoencoder alone: PSNR {quality['psnr']:.1f} dB; motion "
        f"{quality['motion, real']:.2f} of drawn clips, "
        f"{quality['motion']:.2f} of reconstructed ones; "
        f"identity {quality['identity, real']:.2f} and "
        f"{quality['identity']:.2f}, which is what a perfect model would reach.",
        "",
    ]
    for recipe, runs in report["runs"].items():
        lines += [f"## `mmrl train digits/{recipe}`: {RECIPES[recipe]}", ""]
        spent = ", ".join(f"{run['cpu_seconds']:.0f} ({run['seconds']:.0f})" for run in runs)
        lines += [f"{runs[0]['iterations']} iterations; processor (wall) seconds: {spent}.", ""]
        lines += ["| | before | after, each seed | mean gain |", "|---|---|---|---|"]
        lines += [row(runs, reward, meaning) for reward, meaning in REWARDS.items()] + [""]
        lines += [f"![held-out rewards over iterations](digits_video_{recipe}.svg)", ""]
        lines += [f"Before and after, seed {runs[0]['seed']}:", ""]
        lines += [f"![before and after](digits_video_{recipe}.png)", ""]
    return "\n".join([*lines, described(report["machine"]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("overrides", nargs="*", help="key=value of the configurations")
    chosen = parser.parse_args()
    commands.build_artifacts([f"digits/{recipe}" for recipe in chosen.only])
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = chosen.runs or Path(place)
        runs = {}
        for recipe in chosen.only:
            where = {seed: folder / f"{recipe}-{seed}" for seed in chosen.seeds}
            runs[recipe] = [
                learn(recipe, seed, run, chosen.overrides) for seed, run in where.items()
            ]
            (RESULTS / f"digits_video_{recipe}.svg").write_text(picture(runs[recipe]))
            animate(where[chosen.seeds[0]], RESULTS / f"digits_video_{recipe}.png")
    file = RESULTS / "digits_video.json"
    earlier = json.loads(file.read_text())["runs"] if file.is_file() else {}
    report = {
        "machine": machine(),
        "overrides": chosen.overrides,
        "reconstruction": reconstruction(),
        "runs": earlier | runs,
    }
    file.write_text(json.dumps(report, indent=1))
    (RESULTS / "digits_video.md").write_text(page(report))
    print(page(report))


if __name__ == "__main__":
    main()
