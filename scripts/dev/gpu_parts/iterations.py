"""The parts of gpu_check.py that time whole iterations, and that run the suite's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import bench_iteration as bench
import measuring
import random_models as models
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpu_parts.kernels import rescored
from gpu_parts.setting import Report, Setting, free
from mmrl.core.types import Rollout
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from samplers.noise import Rng

ROOT = Path(__file__).resolve().parents[3]
WIDTHS = (1, 2, 4, 8, 16)  # rows of a pass
LEAST_TO_REPEAT = 45  # seconds of a part that suffice to time two loops repeatedly on an H100


def tests(setting: Setting) -> Report:
    """Run tests/gpu, and other tests marked gpu."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if _is_of_gpu(path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *map(str, sorted(marked))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=setting.seconds,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(lines[-60:]))
    return {"summary": lines[-1] if lines else ""}


def _is_of_gpu(path: Path) -> bool:
    """Tell whether a file has GPU tests, so that pytest need not collect all others."""
    return path.parent.name == "gpu" or "pytest.mark.gpu" in path.read_text()


def tiny(setting: Setting) -> Report:
    """Run ``bench_iteration`` in both precisions, with its own result files."""
    ratios = {}
    options = (
        ["--repeats", "1", "--prompts", "2", "--copies", "4", "--steps", "3", "--threads", "1"]
        if setting.small
        else ["--repeats", "7"]
    )
    for precision in ("fp32", "bf16"):
        stem = setting.out / f"bench_iteration_gpu_{precision}"
        report = bench.main(["--precision", precision, *options, "--out", str(stem)])
        ratios[precision] = {name: case["ratio"] for name, case in report["cases"].items()}
    return {"ratio": ratios}


def matmul_peak(size: int) -> float:
    """Measure the operations a second of a bf16 matrix product, the fastest of several."""
    a = torch.randn(size, size, device=models.device(), dtype=torch.bfloat16)
    return 2 * size**3 / min(measuring.seconds(lambda: a @ a) for _ in range(10))


def iterations(
    setting: Setting, make: bench.Make, kind: type[bench.PlainLoop] = bench.PlainLoop
) -> Report:
    """Measure both loops, memory, operations of mmrl's iteration and their share of a matrix
    product's peak."""
    repeats = setting.repeats if setting.seconds >= LEAST_TO_REPEAT else 1
    report = bench.measure(make, setting.work(), repeats, kind=kind)
    trainer = bench.mmrl_trainer(make(), setting.work(), bench.brightness)
    with FlopCounterMode(display=False) as counter:
        trainer.iterate()
    operations = counter.get_total_flops()
    peak = matmul_peak(256 if setting.small else 8192)
    reached = operations / report["runs"]["mmrl"]["seconds"]
    return report | {
        "teraflop an iteration": operations / 1e12,
        "matmul peak, teraflop/s": peak / 1e12,
        "share of the peak": reached / peak,
        "attention": trainer.policy.attending.used,
    }


def image(setting: Setting) -> Report:
    """Time whole iterations of Stable Diffusion 3.5 medium's size, by both loops."""
    return iterations(setting, partial(models.sd3, setting.scale))


def video(setting: Setting) -> Report:
    """Time whole iterations of Wan 2.1 1.3B's size, by both loops."""
    return iterations(setting, partial(models.wan, setting.scale), models.PlainWan)


def compiled(setting: Setting) -> Report:
    """Compare iterations with compiled and plain blocks; the first compiles, and must still be
    exactly on-policy."""
    report: Report = {}
    for name, option in (("plain", False), ("compiled", "aot_eager" if setting.small else True)):
        policy = models.sd3(setting.scale, compile=option)
        trainer = bench.mmrl_trainer(policy, setting.work(), bench.brightness)
        clock = measuring.Clock()
        metrics = trainer.iterate()
        report[name] = {
            "first": clock.seconds(),
            "ratio/max_deviation": metrics["ratio/max_deviation"],
        }
        report[name]["seconds"] = min(setting.times(trainer.iterate))
        del policy, trainer
        free()
    return report


def memory(setting: Setting) -> Report:
    """Measure peak bytes and seconds of an iteration on top of the weights, by rows per pass and
    gradient checkpointing."""
    report = {}
    for checkpointing in (False, True):
        for rows in (4, 8):
            chosen = setting.work(rows, gradient_checkpointing=checkpointing)
            trainer = bench.mmrl_trainer(models.sd3(setting.scale), chosen, bench.brightness)
            cost = measuring.cost(trainer.iterate, trainer.policy.net)
            name = f"{rows} rows a pass, " + (
                "checkpointing" if checkpointing else "all activations kept"
            )
            report[name] = {
                "gib": cost["peak_bytes"] / 2**30,
                "seconds": measuring.seconds(trainer.iterate),
            }
            del trainer
            free()
            if not setting.has_time():
                return report
    return report


def gap(setting: Setting) -> Iterator[Report]:
    """Measure the largest |re-scored - recorded log-prob| for passes of each width, sampled in
    passes of 8."""
    makers = {
        "tiny, fp32": lambda: bench.digits_policy(bench.arguments([]), 4.5),
        "image, bf16 weights": partial(models.sd3, setting.scale),
        "video, bf16 weights": partial(models.wan, setting.scale),
    }
    gaps: Report = {}
    for name, make in makers.items():
        policy = make()  # trains the tiny base if it is not cached: with gradients
        policy.net.to(models.device())
        policy.pass_sizes.rows = 8
        with torch.no_grad():
            rollout = policy.rollout(bench.PROMPTS[:2], setting.scale.copies, Rng.of(0))
            gaps[name] = {}
            for width in WIDTHS:
                gaps[name][width] = _gap(policy, rollout, width)
                yield gaps


def _gap(policy: FlowPolicy, rollout: Rollout, width: int) -> float:
    policy.pass_sizes.rows = width
    return rescored(policy, rollout, width)
