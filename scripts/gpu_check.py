"""Everything worth asking a CUDA machine, in one go: python scripts/gpu_check.py [--out FOLDER] [--only PART ...]

Parts: tests (pytest -m gpu), attention (which kernels run, how fast), tiny (bench_iteration in fp32 and bf16), large (a
Stable Diffusion 3.5 medium of random weights with LoRA: rollout and update by mmrl and by the straightforward loop),
memory (with and without gradient checkpointing), gap (log-probs re-scored in passes of other widths). Nothing is
downloaded. Writes gpu_check.json and gpu_check.md. Exit status: 0 all parts ran, 1 one failed, 2 no CUDA device.

Ten minutes on an H200 are enough. Beside torch, torchvision, transformers, accelerate, peft, safetensors, einops, timm,
scikit-learn, rich, jinja2 and pytest the machine needs diffusers (with importlib_metadata), pydantic (pydantic_core,
annotated_types, typing_inspection) and open_clip_torch (ftfy, wcwidth); xformers is looked at where it is installed.
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
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from mmrl.batches import passes  # noqa: E402
from mmrl.machine import machine, version  # noqa: E402
from mmrl.policies.flow import FlowPolicy  # noqa: E402
from mmrl.policies.sd3 import SD3  # noqa: E402
from mmrl.types import Prompt, Rollout  # noqa: E402
from samplers.noise import Rng  # noqa: E402
from samplers.schedules import flow_match_euler  # noqa: E402

TOKENS = 333  # of a prompt: 77 of CLIP, 256 of T5
LARGE = bench.Work(prompts=2, copies=8, updates=1, plain_rows=8, micro_batch=8, precision="bf16")


class RandomSD3(SD3):
    """Stable Diffusion 3.5 medium by its sizes, with random weights in bf16, a small decoder and random texts."""

    def __init__(self, layers: int = 24, size: int = 512, **options: Any):
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        self.compute, self.shape = torch.bfloat16, (16, size // 8, size // 8)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            net = SD3Transformer2DModel(
                sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=layers,
                attention_head_dim=64, num_attention_heads=24, caption_projection_dim=1536, joint_attention_dim=4096,
                pooled_projection_dim=2048, pos_embed_max_size=384, qk_norm="rms_norm",
                dual_attention_layers=tuple(range(min(13, layers))),
            ).to(torch.bfloat16)  # fmt: skip
            self.vae = AutoencoderKL(
                block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=16, norm_num_groups=8,
                scaling_factor=1.5, shift_factor=0.06,
            )  # fmt: skip
        FlowPolicy.__init__(self, net, grid=partial(flow_match_euler, shift=3.0), **options)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        return self._texts([p["text"] for p in prompts]) | {"uncond": self._texts([""])}

    def _texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Normal numbers that depend on the text."""
        rows = torch.arange(1, device=self.device)
        sizes = {"text": (TOKENS, 4096), "pooled": (2048,)}
        drawn = {
            n: [Rng.of(n, text).normal(rows, size, 0, torch.bfloat16) for text in texts] for n, size in sizes.items()
        }
        return {name: torch.cat(each) for name, each in drawn.items()}


def large(layers: int, **options: Any) -> FlowPolicy:
    return RandomSD3(layers, **{"steps": 4, "guidance": 4.5, "lora": 32} | options)


def tests(args: argparse.Namespace) -> dict[str, Any]:
    """The suite's GPU tests."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.test_seconds)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(lines[-60:]))
    return {"summary": lines[-1] if lines else ""}


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of forward and backward at the size of SD3.5 medium, for each kernel that runs."""
    shape = (8, 24, TOKENS + (args.size // 16) ** 2, 64)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kernels = {"torch's choice": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
               "memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}  # fmt: skip
    found = {}
    for name, kernel in kernels.items():
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            found[name] = _milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), q)
    if version("xformers"):
        from xformers.ops import memory_efficient_attention

        rows = q.detach().transpose(1, 2).contiguous().requires_grad_()
        found["xformers"] = _milliseconds(lambda: memory_efficient_attention(rows, rows, rows), rows)
    return {"shape": list(shape), "milliseconds": found}


def _milliseconds(attend: Callable[[], Tensor], q: Tensor) -> float | str:
    def both() -> None:
        attend().sum().backward()
        q.grad = None

    try:
        both()
    except RuntimeError as error:
        return f"does not run: {str(error).splitlines()[0]}"
    return 1000 * sorted(measuring.seconds(both) for _ in range(9))[4]


def tiny(args: argparse.Namespace) -> dict[str, Any]:
    """``bench_iteration`` in both precisions, with its own result files."""
    found = {}
    for precision in ("fp32", "bf16"):
        out = args.out / f"bench_iteration_gpu_{precision}"
        result = bench.main(["--precision", precision, "--repeats", "7", "--explain", "--out", str(out)])
        found[precision] = {name: case["ratio"] for name, case in result["cases"].items()}
    return {"ratio": found}


def large_iteration(args: argparse.Namespace) -> dict[str, Any]:
    """Whole iterations of the large model, by both loops."""
    return bench.measure(partial(large, args.layers, size=args.size), LARGE, args.repeats)


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes and seconds of an iteration on top of the weights, by rows per pass and gradient checkpointing."""
    found = {}
    for checkpointing in (False, True):
        for rows in (4, 8):
            work = bench.replace(LARGE, micro_batch=rows, gradient_checkpointing=checkpointing)
            trainer = bench.mmrl_trainer(large(args.layers, size=args.size), work, bench.brightness)
            cost = measuring.cost(trainer.iterate, trainer.policy.net)
            name = f"{rows} rows a pass, " + ("checkpointing" if checkpointing else "all activations kept")
            found[name] = {"gib": cost["peak_bytes"] / 2**30, "seconds": measuring.seconds(trainer.iterate)}
            del trainer
            torch.cuda.empty_cache()
    return found


@torch.no_grad()
def gap(args: argparse.Namespace) -> dict[str, Any]:
    """Largest |re-scored - recorded log-prob| for passes of each width, sampled in passes of 8."""
    found: dict[str, Any] = {}
    makers = {
        "large, bf16 weights": partial(large, args.layers, size=args.size),
        "tiny, fp32": lambda: bench.digits_policy(bench.arguments([]), 4.5),
    }
    for name, make in makers.items():
        policy = make()
        policy.net.to("cuda")
        policy.width = 8
        rollout = policy.rollout(bench.PROMPTS[:2], 8, Rng.of(0))
        found[name] = {width: _gap(policy, rollout, width) for width in (1, 2, 4, 8, 16)}
    return found


def _gap(policy: FlowPolicy, rollout: Rollout, width: int) -> float:
    policy.width = width
    parts = passes(policy.path(rollout), width)
    return max(float((policy.dist(p).log_prob(p.target) - p.logprob).abs().max()) for p in parts)


PARTS = {"tests": tests, "attention": attention, "tiny": tiny, "large": large_iteration, "memory": memory, "gap": gap}


@contextmanager
def recorded(name: str, found: dict[str, Any]) -> Iterator[None]:
    """A part that breaks is written down, and the next one runs."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        found[name] = {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc().splitlines()[-6:]}
    found[name]["part_seconds"] = round(time.perf_counter() - start, 1)
    print(f"{name}: {json.dumps(found[name])[:2000]}", flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def page(found: dict[str, Any]) -> str:
    about = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    lines = [
        "# What a GPU machine said",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{', '.join(about['gpus'])}; {about['cpu']}, {about['cores']} cores; {versions}.",
    ]
    for name, part in found["parts"].items():
        lines += ["", f"## {name} ({part['part_seconds']} s)", "", PARTS[name].__doc__ or "", ""]
        if "runs" in part:
            lines += [f"mmrl is {part['ratio']:.2f} times as fast.", "", *measuring.table(part["runs"])]
        else:
            lines += [f"- {key}: {_plain(value)}" for key, value in part.items() if key != "part_seconds"]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=24, help="of the large model; 24 is SD3.5 medium")
    parser.add_argument("--size", type=int, default=512, help="pixels of the large model")
    parser.add_argument("--repeats", type=int, default=3, help="of the large model's iteration")
    parser.add_argument("--test-seconds", type=int, default=300, help="time limit of the tests")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here, so there is nothing to check; run it on a machine with one")
        return 2
    parts: dict[str, Any] = {}
    for name in args.only:
        with recorded(name, parts):
            parts[name] = PARTS[name](args)
    found = {"parts": parts, "machine": machine()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "gpu_check.md").write_text(page(found))
    failed = [name for name, part in parts.items() if "failed" in part]
    print(f"failed: {', '.join(failed)}" if failed else f"all parts ran; see {args.out / 'gpu_check.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
