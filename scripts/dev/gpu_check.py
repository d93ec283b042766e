"""Checks and times mmrl on a CUDA machine, in at most --minutes.

    python scripts/dev/gpu_check.py [--out FOLDER] [--only PART ...] [--minutes 8]

Parts, by importance: gap (log-probs re-scored in passes of other widths: are they exact here?),
attention (the kernels of SDPA: milliseconds, the same bits with a gradient and whatever rows are
beside, what a new length costs), answers (a vision-language model of 3B: sampling and iterations),
world_of_one (an iteration under torch.distributed, as the one copy of DDP and the one shard of
FSDP2, equal to one without), image (Stable Diffusion 3.5 medium of random weights with
LoRA: iterations by mmrl and by a loop in the manner of flow_grpo's, memory, share of the measured
matmul peak), mfu (the same beside what ``mmrl train --dry-run --devices`` predicts), quantized (the
base in 8 and 4 bits), sampling (whole batches on every attention backend), sleep (what leaves the
device between phases), context_parallel (diffusers', over a group of one), tests (tests/gpu and all
marked gpu), backends (single passes on each), adamw_8bit, vllm, memory (with and without gradient
checkpointing), compiled (blocks), video (Wan 2.1 1.3B, as image), tiny (bench_iteration in fp32 and
bf16). Nothing is downloaded.

Every part runs in a separate process that is killed after the part's time limit. Parts that would
start after the end are recorded as left out. Writes gpu.json and gpu.md after every part. Exit
status: 0 all parts ran or were left out, or there is no CUDA device; 1 one failed. --small runs all
but tests on any machine, with small models, to test the parts themselves; --here runs them in this
process, without limits.

Beside torch, torchvision, transformers, accelerate, peft, safetensors, einops, timm, scikit-learn,
rich, jinja2 and pytest the machine needs diffusers (with importlib_metadata), pydantic
(pydantic_core, annotated_types, typing_inspection), open_clip_torch (ftfy, wcwidth), cachetools,
rapidfuzz and text2num;
bitsandbytes, vllm, xformers and flash-attn are tested if installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "dev"), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import measuring  # noqa: E402
import random_models as models  # noqa: E402
import torch  # noqa: E402
from gpu_parts.listing import PARTS, described, run  # noqa: E402
from gpu_parts.setting import Report, Setting  # noqa: E402
from gpu_parts.supervision import Worker, recorded  # noqa: E402

from mmrl.core.machine import machine  # noqa: E402

SLOWER = 5  # a small model on a busy CPU than a large one on a GPU
LEAST = 10  # minimum seconds to start a part
BESIDES = ("part_seconds", "runs", "ratio")  # keys that the page shows in other ways


def all_of(names: list[str], setting: Setting, minutes: float, here: bool) -> Report:
    """Run parts one after another until the time is up; return the report of each."""
    end = time.monotonic() + 60 * minutes
    about = machine()
    parts: Report = {}
    worker = Worker(run, setting)
    try:
        for name in names:
            start = time.monotonic()
            parts[name] = _part(name, setting, worker, end - start, here)
            parts[name]["part_seconds"] = round(time.monotonic() - start, 1)
            print(f"{name}: {json.dumps(parts[name])[:2000]}", flush=True)
            report = {"parts": parts, "small": setting.small, "machine": about}
            (setting.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
            (setting.out / "gpu.md").write_text(page(report))
    finally:
        worker.end()
    return parts


def _part(name: str, setting: Setting, worker: Worker, left: float, here: bool) -> Report:
    """Run a part, in this process or in the worker's; report if there is no time for it."""
    if here:
        return recorded(lambda: run(name, PARTS[name].seconds, setting))
    if left < LEAST:
        return {"left out": "no time: the minutes were over before it began"}
    most = PARTS[name].seconds * (SLOWER if setting.small else 1)
    seconds = min(float(most), left)
    report = worker.ask(name, seconds)
    if report.pop("hung", False) and seconds < most:
        report["left out"] = f"no time: the minutes were over after its first {seconds:.0f} s"
        del report["failed"]
    return report


def page(report: Report) -> str:
    about = report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    gpus = ", ".join(about["gpus"]) or "no GPU"
    lines = [
        "# What a GPU machine said",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{gpus}; {about['cpu']}, {about['cores']} cores; {versions}.",
    ]
    for name, part in report["parts"].items():
        lines += ["", f"## {name} ({part['part_seconds']} s)", "", described(name), ""]
        if "runs" in part:
            lines += [
                f"mmrl is {part['ratio']:.2f} times as fast.",
                "",
                *measuring.table(part["runs"]),
                "",
            ]
        hidden = BESIDES if "runs" in part else BESIDES[:1]
        lines += [f"- {key}: {_plain(value)}" for key, value in part.items() if key not in hidden]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/results", help="folder of the results"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="of the large models' iterations")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after which no part is begun or goes on"
    )
    parser.add_argument(
        "--small", action="store_true", help="small models, on a CPU as well; needs --out"
    )
    parser.add_argument("--here", action="store_true", help="in this process, without time limits")
    args = parser.parse_args(words)
    if not torch.cuda.is_available() and not args.small:
        print(
            "gpu_check: torch sees no CUDA device here, so there is nothing to check; run it "
            "on a machine with one"
        )
        return 0
    if args.small and args.out == parser.get_default("out"):
        parser.error("--small measures nothing worth keeping: name another folder with --out")
    names = args.only or [part for part in PARTS if not (args.small and part == "tests")]
    args.out.mkdir(parents=True, exist_ok=True)
    scale = models.SMALL if args.small else models.Scale()
    setting = Setting(scale, args.out, args.small, args.repeats)
    parts = all_of(names, setting, args.minutes, args.here)
    failed = [name for name, part in parts.items() if "failed" in part]
    left_out = [name for name, part in parts.items() if "left out" in part]
    for words, which in (("failed", failed), ("left out", left_out)):
        if which:
            print(f"{words}: {', '.join(which)}")
    print(f"{len(parts) - len(failed) - len(left_out)} parts ran; see {args.out / 'gpu.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
