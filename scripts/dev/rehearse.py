"""Rehearses every configuration of configs/ at true size on named cards, without weights, network
or card, and writes a table of costs.

    python scripts/dev/rehearse.py [--devices 8xH100] [--only sd3 vlm/counting ...] [--out STEM]
        [--seconds N] [--pipelines]

Writes STEM.json and STEM.md (docs/results/rehearsal). Results in STEM.json from the same devices
are reused, so an interrupted run continues; --again discards those to be rehearsed. --pipelines
rehearses published models that ``policy: pipeline`` replays instead of configurations
(docs/results/rehearsal_pipelines), each at its usual size. Configurations whose prompts do not
divide among the cards take the next number that does, as noted in the table.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mmrl.apps.dry_run.estimate import Estimate, estimate, measure  # noqa: E402
from mmrl.apps.dry_run.page import lines  # noqa: E402
from mmrl.core.cards import Devices, devices  # noqa: E402
from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.machine import machine  # noqa: E402
from mmrl.core.registry import load_built_in  # noqa: E402

GIB = 2**30
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "docs/results"
PIPELINE = CONFIGS / "digits/pipeline.yaml"  # groups, steps and objective, for all of them
ADAPTED = (
    *("policy.pipeline.dtype=bfloat16", "policy.pipeline.lora=32", "train.precision=bf16"),
    *("train.micro_batch_size=1", "train.gradient_checkpointing=true"),
)
SQUARE = {"height": 1024, "width": 1024}
CLIP = {"height": 480, "width": 832, "num_frames": 81}
# published models without a family, at the size that their pipelines' authors use: arguments of
# the call, guidance, further options of the policy
PIPELINES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "black-forest-labs/FLUX.2-dev": (SQUARE, 1, {}),
    "HiDream-ai/HiDream-I1-Full": (SQUARE, 4, {}),
    "Alpha-VLLM/Lumina-Image-2.0": (SQUARE, 4, {}),
    "THUDM/CogView4-6B": (SQUARE, 4, {}),
    "lodestones/Chroma1-HD": (SQUARE, 4, {}),
    "Qwen/Qwen-Image-Edit-2509": (SQUARE, 4, {}),
    "Tongyi-MAI/Z-Image-Omni-Base": (SQUARE, 4, {}),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": (SQUARE, 4, {}),
    "Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers": (
        SQUARE,
        1,
        {
            "steps": 2,
            "sde_type": "consistency",
            "noise_level": 1.0,
            "noise_window": "all_but_last",
        },
    ),
    "nvidia/Cosmos-Predict2-2B-Text2Image": (
        {"height": 768, "width": 1360},
        4,
        {"guardrail": False},
    ),
    "nvidia/Cosmos-Predict2-2B-Video2World": (
        {"height": 704, "width": 1280, "num_frames": 93},
        4,
        {"guardrail": False},
    ),
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": (
        {"height": 512, "width": 768, "num_frames": 121},
        4,
        {"vae_tiling": True},
    ),
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": (
        {"height": 480, "width": 832, "frames": 81},
        4,
        {},
    ),
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": (CLIP, 4, {}),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": (CLIP, 4, {}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (
        {"height": 704, "width": 1280, "num_frames": 121},
        4,
        {},
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v": (
        {"height": 480, "width": 832, "num_frames": 121},
        1,
        {"vae_tiling": True},
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v": (
        {"num_frames": 121},
        1,
        {"vae_tiling": True},
    ),
    "Lightricks/LTX-2": ({"height": 512, "width": 768, "num_frames": 121}, 4, {}),
}


def pipelines(only: list[str]) -> dict[str, tuple[Path, list[str]]]:
    """List the pipelines to rehearse, or those whose hub id begins with one of ``only``: a
    configuration and overrides for each, by a name that says its size."""
    chosen = {}
    for path, (call, guidance, further) in PIPELINES.items():
        options = {"path": path, "call": call, "guidance_scale": guidance, **further}
        words = [f"policy.pipeline.{name}={json.dumps(v)}" for name, v in options.items()]
        size = " x ".join(str(n) for n in call.values())
        if not only or path.startswith(tuple(only)):
            chosen[f"{path}, {size}, guidance {guidance}"] = (PIPELINE, [*ADAPTED, *words])
    return chosen


def configurations(only: list[str]) -> list[Path]:
    """List the training configurations, or those whose name begins with one of ``only``."""
    files = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "serve")
    return [path for path in files if not only or name_of(path).startswith(tuple(only))]


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def sizes(path: Path, count: int) -> list[str]:
    """Return overrides by which a configuration divides among ``count`` processes; none if it
    already does."""
    from mmrl.config.options import TrainOptions
    from mmrl.experiment.build import read

    train = read(path, [], 1).section("train", TrainOptions)
    prompts = math.ceil(train.prompts_per_iteration / count) * count
    rows = prompts * train.group_size
    before = train.prompts_per_iteration * train.group_size
    steps = max(1, before // train.train_batch_size)
    while rows % (steps * count):
        steps -= 1
    batch = rows // steps
    share = batch // count
    divides = prompts == train.prompts_per_iteration and train.train_batch_size % count == 0
    micro_batch = None if train.micro_batch_size == "auto" else train.micro_batch_size
    if divides and (micro_batch or 1) <= share:
        return []
    overrides = [f"train.prompts_per_iteration={prompts}", f"train.train_batch_size={batch}"]
    if micro_batch:
        most = min(micro_batch, share)
        fits = max(n for n in range(1, most + 1) if share % n == 0)
        overrides.append(f"train.micro_batch_size={fits}")
    return overrides


def rehearsed(path: Path, cards: Devices, words: Sequence[str] = ()) -> dict[str, Any]:
    """Rehearse one configuration with overrides; ``failed`` says why it could not be."""
    start = time.perf_counter()
    try:
        overrides = [*sizes(path, cards.count), *words]
        run = measure(path, overrides, cards.count)
        copies = estimate(run, cards, sharded=False)
        shards = estimate(run, cards, sharded=True)
    except UserError as error:
        return {"failed": str(error)}
    report = run.report
    return {
        "overrides": overrides,
        "model": report.path,
        "parameters": run.measured.parameters,
        "trained": run.measured.trained,
        "rows": report.plan.rows,
        "pass_rows": run.measured.rows,
        "unknown": [line for line in lines(report) if "?" in line],
        "copies": numbers(copies),
        "shards": numbers(shards),
        "seconds_here": round(time.perf_counter() - start, 1),
    }


def numbers(guess: Estimate) -> dict[str, Any]:
    return {
        "peak_gib": guess.peak / GIB,
        "fullest": guess.fullest,
        "fits": guess.fits,
        "memory_gib": {name: size / GIB for name, size in guess.memory.items()},
        "seconds": guess.whole,
        "parts": guess.seconds,
        "pflop": guess.flops / 1e15,
        "mfu": guess.mfu,
    }


def page(report: dict[str, Any]) -> str:
    """Write the table."""
    rows = report["configurations"]
    replayed = report.get("pipelines", False)
    done = {name: row for name, row in rows.items() if "failed" not in row}
    fit = sum(row["copies"]["fits"] for row in done.values())
    shard = sum(row["shards"]["fits"] and not row["copies"]["fits"] for row in done.values())
    what = "pipelines without a family" if replayed else "configurations"
    lines = [
        f"# {'Pipelines without a family' if replayed else 'Every configuration'} on "
        f"{report['devices']}",
        "",
        f"Written by `{report['machine']['command']}` on {report['machine']['time']}, commit "
        f"{report['machine']['commit']}. No card was used: the real networks passed on fake "
        "tensors at true size, as in `mmrl train CONFIG --dry-run --devices "
        f"{report['devices']}` ([what is counted](../scale.md#what-is-rehearsed)). No estimate of "
        "seconds was compared with a card.",
        "",
        *(_of_pipelines() if replayed else []),
        f"{len(done)} of {len(_all(replayed))} {what} were rehearsed: "
        f"{fit} fit as copies (DDP), "
        f"{shard} more in shards (FSDP2), {len(done) - fit - shard} do not fit as they stand.",
        "",
        "Peak: GiB of one card at its fullest moment. s: of one iteration as copies, without "
        "rewards. MFU: the used share of the card's peak. More is in the json.",
        "",
        *_missing(rows, replayed),
        f"| {'pipeline' if replayed else 'configurations'} | parameters | peak, copies "
        "| peak, shards | s | MFU | needs shards |",
        "|---|---|---|---|---|---|---|",
        *(
            _line(name, group, replayed)
            for name, group in (_one_by_one(done) if replayed else _by_folder(done)).items()
        ),
    ]
    failed = {name: row["failed"] for name, row in rows.items() if "failed" in row}
    if failed:
        lines += ["", "Not rehearsed:", ""]
        lines += [f"- {name}: {why}" for name, why in failed.items()]
    return "\n".join(lines) + "\n"


Rows = dict[str, dict[str, Any]]


def _one_by_one(rows: Rows) -> dict[str, Rows]:
    return {name: {name: row} for name, row in rows.items()}


def _by_folder(rows: Rows) -> dict[str, Rows]:
    """Group configurations by their folder, one model family or benchmark each."""
    groups: dict[str, Rows] = {}
    for name, row in rows.items():
        groups.setdefault(name.split("/")[0], {})[name] = row
    return {f"{name} ({len(group)})": group for name, group in groups.items()}


def _line(name: str, rows: Rows, replayed: bool) -> str:
    """Write a row of the table, with least and most where several share it."""

    def ranged(form: Callable[[Any], str], *keys: str) -> str:
        values = []
        for row in rows.values():
            for key in keys:
                row = row[key]
            values.append(row)
        least, most = form(min(values)), form(max(values))
        return least if least == most else f"{least} to {most}"

    sharded = [each.rpartition("/")[2] for each, row in rows.items() if not row["copies"]["fits"]]
    needs = ("yes" if replayed else ", ".join(sharded)) if sharded else ""
    cells = [
        name,
        ranged(_count, "parameters"),
        ranged("{:.1f}".format, "copies", "peak_gib"),
        ranged("{:.1f}".format, "shards", "peak_gib"),
        ranged(_seconds, "copies", "seconds"),
        ranged("{:.0%}".format, "copies", "mfu"),
        needs,
    ]
    return f"| {' | '.join(cells)} |"


def _of_pipelines() -> list[str]:
    """Describe what is common to these rows."""
    return [
        "Published models that `policy: pipeline` replays at their usual size: 16 prompts of 16 "
        "samples shared by all cards, 8 steps, 4 of them with noise, adapters of rank 32 on "
        "bfloat16 weights, gradient checkpointing, one sample a pass.",
        "",
    ]


def _all(replayed: bool) -> list[str]:
    return list(pipelines([])) if replayed else [name_of(path) for path in configurations([])]


def _missing(rows: dict[str, Any], replayed: bool) -> list[str]:
    """List configurations that have not been rehearsed yet."""
    names = [name for name in _all(replayed) if name not in rows]
    return [f"Not tried yet: {', '.join(names)}.", ""] if names else []


def _seconds(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _count(number: float) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="8xH100")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names")
    parser.add_argument("--out", type=Path, help="where to write, without the ending")
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after")
    parser.add_argument("--pipelines", action="store_true", help="published models, replayed")
    args = parser.parse_args(words)
    load_built_in()
    cards = devices(args.devices)
    out = args.out or RESULTS / ("rehearsal_pipelines" if args.pipelines else "rehearsal")
    file = out.with_suffix(".json")
    report: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if report.get("devices") != str(cards):
        report = {"devices": str(cards), "configurations": {}}
        if args.pipelines:
            report["pipelines"] = True
    start = time.perf_counter()
    chosen: dict[str, tuple[Path, list[str]]] = (
        pipelines(args.only)
        if args.pipelines
        else {name_of(path): (path, []) for path in configurations(args.only)}
    )
    for name in chosen if args.again else []:
        report["configurations"].pop(name, None)
    for name, (path, overrides) in chosen.items():
        if name in report["configurations"] or time.perf_counter() - start > args.seconds:
            continue
        row = rehearsed(path, cards, overrides)
        print(name, json.dumps(row)[:300], flush=True)
        report["configurations"][name] = row
        report["configurations"] = dict(sorted(report["configurations"].items()))
        report["machine"] = machine()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".md").write_text(page(report))
    failed = [name for name, row in report["configurations"].items() if "failed" in row]
    print(f"{len(report['configurations'])} rehearsed, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
