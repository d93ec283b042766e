"""Checks and times all that mmrl does on a CUDA machine, in one go.

    python scripts/gpu_check.py [--out FOLDER] [--only PART ...]

Parts: tests (pytest -m gpu), attention (which kernels run, how fast), backends (whole networks on
each attention backend: difference and speed), tiny (bench_iteration in fp32 and bf16), image and
video (Stable Diffusion 3.5 medium and Wan 2.1 1.3B of random weights with LoRA: iterations by mmrl
and by a loop in the manner of flow_grpo's, memory, share of the measured matmul peak), compiled
(the same with compiled blocks), memory (with and without gradient checkpointing), gap (log-probs
re-scored in passes of other widths). Nothing is downloaded. Writes gpu.json and gpu.md. Exit
status: 0 all parts ran, or there is no CUDA device; 1 one failed. --small runs all but the first on
any machine, with models that are small, to see that the parts themselves work.

Twenty minutes on an H200 are enough. Beside torch, torchvision, transformers, accelerate, peft,
safetensors, einops, timm, scikit-learn, rich, jinja2 and pytest the machine needs diffusers (with
importlib_metadata), pydantic (pydantic_core, annotated_types, typing_inspection) and
open_clip_torch (ftfy, wcwidth); xformers and flash-attn are looked at where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import bench_iteration as bench  # noqa: E402
import measuring  # noqa: E402
import random_models as models  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.types import Rollout  # noqa: E402
from mmrl.policies.diffusion import attention_backends  # noqa: E402
from mmrl.policies.diffusion.flow_policy import FlowPolicy  # noqa: E402
from mmrl.train.minibatches import passes  # noqa: E402
from mmrl.utils.machine import machine, version  # noqa: E402
from samplers.noise import Rng  # noqa: E402

Found = dict[str, Any]


def work(args: argparse.Namespace, rows: int = 8, **options: Any) -> bench.Work:
    """Describe two prompts, one optimizer step, passes of ``rows``."""
    copies = args.scale.copies
    size = min(rows, 2 * copies)
    plain = {
        "prompts": 2,
        "copies": copies,
        "updates": 1,
        "plain_rows": size,
        "micro_batch": size,
        "precision": "bf16",
    }
    return bench.Work(**plain | options)


def tests(args: argparse.Namespace) -> Found:
    """Run the suite's GPU tests."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=args.test_seconds
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(lines[-60:]))
    return {"summary": lines[-1] if lines else ""}


def attention(args: argparse.Namespace) -> Found:
    """Measure milliseconds of forward and backward at SD3.5 medium's size, for each kernel that
    runs."""
    scale = args.scale
    shape = (8, scale.sd3_heads, scale.tokens + (scale.size // 16) ** 2, 64)
    q = torch.randn(shape, device=models.device(), dtype=torch.bfloat16, requires_grad=True)
    chosen = {
        "torch's choice": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    milliseconds: Found = {}
    for name, kernel in chosen.items():
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            milliseconds[name] = _milliseconds(
                lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), q
            )
    if version("xformers") and q.is_cuda:
        from xformers.ops import memory_efficient_attention

        rows = q.detach().transpose(1, 2).contiguous().requires_grad_()
        milliseconds["xformers"] = _milliseconds(
            lambda: memory_efficient_attention(rows, rows, rows), rows
        )
    return {"shape": list(shape), "milliseconds": milliseconds}


def _milliseconds(attend: Callable[[], Tensor], q: Tensor) -> float | str:
    def forward_and_backward() -> None:
        attend().sum().backward()
        q.grad = None

    try:
        forward_and_backward()
    except RuntimeError as error:
        return f"does not run: {str(error).splitlines()[0]}"
    return 1000 * sorted(measuring.seconds(forward_and_backward) for _ in range(9))[4]


def backends(args: argparse.Namespace) -> Found:
    """Run whole networks on every backend of the option ``attention``: largest difference of the
    velocity from SDPA's, relative to its largest value, and milliseconds of a pass; and what
    ``auto`` chooses."""
    return {
        "image": _backends(models.sd3(args.scale), args),
        "video": _backends(models.wan(args.scale), args),
    }


@torch.no_grad()
def _backends(policy: FlowPolicy, args: argparse.Namespace) -> Found:
    policy.net.to(models.device())
    rollout = policy.rollout(bench.PROMPTS[:1], 2, Rng.of(0))
    point = next(iter(policy.path(rollout))).to(models.device())

    def velocity() -> Tensor:
        return policy._velocities(point, guided=True)[0]

    report: Found = {"auto": policy.attending.used}
    attention_backends.use(policy.net, "sdpa")
    expected = velocity()
    for name in attention_backends.BACKENDS:
        try:
            attention_backends.check(name)
            attention_backends.use(policy.net, name)
            apart = float((velocity() - expected).abs().max() / expected.abs().max())
            report[name] = {
                "apart": apart,
                "milliseconds": 1000 * min(measuring.seconds(velocity) for _ in range(5)),
            }
        except (UserError, RuntimeError, ValueError, TypeError) as error:
            report[name] = f"does not run: {str(error).splitlines()[0]}"
            attention_backends.use(policy.net, "sdpa")
    return report


def tiny(args: argparse.Namespace) -> Found:
    """Run ``bench_iteration`` in both precisions, with its own result files."""
    ratios = {}
    options = (
        ["--repeats", "1", "--prompts", "2", "--num-samples", "4", "--steps", "3"]
        if args.small
        else ["--repeats", "7"]
    )
    for precision in ("fp32", "bf16"):
        stem = args.out / f"bench_iteration_gpu_{precision}"
        report = bench.main(["--precision", precision, *options, "--out", str(stem)])
        ratios[precision] = {name: case["ratio"] for name, case in report["cases"].items()}
    return {"ratio": ratios}


def matmul_peak(size: int) -> float:
    """Measure the operations a second of a bf16 matrix product, the fastest of several."""
    a = torch.randn(size, size, device=models.device(), dtype=torch.bfloat16)
    return 2 * size**3 / min(measuring.seconds(lambda: a @ a) for _ in range(10))


def iterations(
    args: argparse.Namespace, make: bench.Make, kind: type[bench.PlainLoop] = bench.PlainLoop
) -> Found:
    """Measure both loops, memory, operations of mmrl's iteration and their share of a matrix
    product's peak."""
    report = bench.measure(make, work(args), args.repeats, kind=kind)
    trainer = bench.mmrl_trainer(make(), work(args), bench.brightness)
    with FlopCounterMode(display=False) as counter:
        trainer.iterate()
    operations = counter.get_total_flops()
    peak = matmul_peak(256 if args.small else 8192)
    reached = operations / report["runs"]["mmrl"]["seconds"]
    return report | {
        "teraflop an iteration": operations / 1e12,
        "matmul peak, teraflop/s": peak / 1e12,
        "share of the peak": reached / peak,
        "attention": trainer.policy.attending.used,
    }


def image(args: argparse.Namespace) -> Found:
    """Time whole iterations of Stable Diffusion 3.5 medium's size, by both loops."""
    return iterations(args, partial(models.sd3, args.scale))


def video(args: argparse.Namespace) -> Found:
    """Time whole iterations of Wan 2.1 1.3B's size, by both loops."""
    return iterations(args, partial(models.wan, args.scale), models.PlainWan)


def compiled(args: argparse.Namespace) -> Found:
    """Compare iterations with compiled blocks and plain ones; the first compiles, and must still be
    exactly on policy."""
    report: Found = {}
    for name, option in (("plain", False), ("compiled", "aot_eager" if args.small else True)):
        policy = models.sd3(args.scale, compile=option)
        trainer = bench.mmrl_trainer(policy, work(args), bench.brightness)
        clock = measuring.Clock()
        metrics = trainer.iterate()
        report[name] = {
            "first": clock.seconds(),
            "ratio/max_deviation": metrics["ratio/max_deviation"],
        }
        report[name]["seconds"] = min(
            measuring.seconds(trainer.iterate) for _ in range(args.repeats)
        )
    return report


def memory(args: argparse.Namespace) -> Found:
    """Measure peak bytes and seconds of an iteration on top of the weights, by rows per pass and
    gradient checkpointing."""
    report = {}
    for checkpointing in (False, True):
        for rows in (4, 8):
            chosen = work(args, rows, gradient_checkpointing=checkpointing)
            trainer = bench.mmrl_trainer(models.sd3(args.scale), chosen, bench.brightness)
            cost = measuring.cost(trainer.iterate, trainer.policy.net)
            name = f"{rows} rows a pass, " + (
                "checkpointing" if checkpointing else "all activations kept"
            )
            report[name] = {
                "gib": cost["peak_bytes"] / 2**30,
                "seconds": measuring.seconds(trainer.iterate),
            }
            del trainer
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return report


@torch.no_grad()
def gap(args: argparse.Namespace) -> Found:
    """Measure the largest |re-scored - recorded log-prob| for passes of each width, sampled in
    passes of 8."""
    makers = {
        "image, bf16 weights": partial(models.sd3, args.scale),
        "video, bf16 weights": partial(models.wan, args.scale),
        "tiny, fp32": lambda: bench.digits_policy(bench.arguments([]), 4.5),
    }
    gaps: Found = {}
    for name, make in makers.items():
        policy = make()
        policy.net.to(models.device())
        policy.fixed_batch_rows = 8
        rollout = policy.rollout(bench.PROMPTS[:2], args.scale.copies, Rng.of(0))
        gaps[name] = {width: _gap(policy, rollout, width) for width in (1, 2, 4, 8, 16)}
    return gaps


def _gap(policy: FlowPolicy, rollout: Rollout, width: int) -> float:
    policy.fixed_batch_rows = width
    parts = [part.to(models.device()) for part in passes(policy.path(rollout), width)]
    return max(float((policy.dist(p).log_prob(p.target) - p.logprob).abs().max()) for p in parts)


PARTS = {
    "tests": tests,
    "attention": attention,
    "backends": backends,
    "tiny": tiny,
    "image": image,
    "video": video,
    "compiled": compiled,
    "memory": memory,
    "gap": gap,
}


@contextmanager
def recorded(name: str, report: Found) -> Iterator[None]:
    """Record the failure of a part, so that the next one runs, and its seconds."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        report[name] = {
            "failed": f"{type(error).__name__}: {error}",
            "where": traceback.format_exc().splitlines()[-6:],
        }
    report[name]["part_seconds"] = round(time.perf_counter() - start, 1)
    print(f"{name}: {json.dumps(report[name])[:2000]}", flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def page(report: Found) -> str:
    about = report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    lines = [
        "# What a GPU machine said",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{', '.join(about['gpus'])}; {about['cpu']}, {about['cores']} cores; {versions}.",
    ]
    for name, part in report["parts"].items():
        lines += ["", f"## {name} ({part['part_seconds']} s)", "", PARTS[name].__doc__ or "", ""]
        if "runs" in part:
            lines += [
                f"mmrl is {part['ratio']:.2f} times as fast.",
                "",
                *measuring.table(part["runs"]),
                "",
            ]
        hidden = ("part_seconds", "runs", "ratio") if "runs" in part else ("part_seconds",)
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
    parser.add_argument("--test-seconds", type=int, default=300, help="time limit of the tests")
    parser.add_argument(
        "--small", action="store_true", help="small models, on a CPU as well; needs --out"
    )
    args = parser.parse_args(words)
    if not torch.cuda.is_available() and not args.small:
        print(
            "gpu_check: torch sees no CUDA device here, so there is nothing to check; run it "
            "on a machine with one"
        )
        return 0
    if args.small and args.out == parser.get_default("out"):
        parser.error("--small measures nothing worth keeping: name another folder with --out")
    args.scale = models.SMALL if args.small else models.Scale()
    parts: Found = {}
    for name in args.only or [part for part in PARTS if not (args.small and part == "tests")]:
        with recorded(name, parts):
            parts[name] = PARTS[name](args)
    report = {"parts": parts, "small": args.small, "machine": machine()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "gpu.md").write_text(page(report))
    failed = [name for name, part in parts.items() if "failed" in part]
    print(f"failed: {', '.join(failed)}" if failed else f"all parts ran; see {args.out / 'gpu.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
