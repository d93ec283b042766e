"""Compares compiled passes of vision-language models with plain ones.

    python scripts/dev/check_compiled.py                     # every family that compiles, float32
    python scripts/dev/check_compiled.py qwen3_vl --dtype bfloat16
    python scripts/dev/check_compiled.py llava --backend aot_eager

Samples, log-probs and gradients of tiny models with random weights; the inductor takes about a
minute of CPU time for each. In bfloat16 also the distance of both from float64 passes of the same
weights: a compiled pass that is further away than a plain one is wrong, not just rounded.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
STOPS = tuple(range(0, 256, 8))  # so that answers have several lengths


def questions() -> list[dict]:
    from tests.fixtures import tiny_vlms

    return [
        {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
        {"text": "hello, what is a much longer question than the others?"},
        {"text": "and?", "images": [tiny_vlms.image(56, 56, 1)]},
    ]


def compare(family: str, dtype: str, backend: str, device: str) -> str:
    """Return a line about one family."""
    from mmrl.core.errors import UserError
    from mmrl.policies.vlm.options import compile_passes
    from samplers.noise import Rng

    policy = tiny(family, dtype)
    policy.net.to(device)
    results = []
    start = time.process_time()
    for compiled in (False, True):
        if compiled:
            try:
                compile_passes(policy, policy.net, backend)
            except UserError as error:
                return f"{family}: {error}"
        with torch.no_grad():
            rollout = policy.rollout(questions(), 5, Rng.of("compiled"))
        written = results[0][0] if results else rollout
        results.append((rollout, *scored(policy, written)))
    (plain, score, gradient), (quick, quick_score, quick_gradient) = results
    same = plain.sample == quick.sample
    far = ((plain.logprob - quick.logprob).abs() * (same & plain.mask)).max()
    rescored = ((score - quick_score).abs() * plain.mask).max()
    apart = (gradient - quick_gradient).norm() / gradient.norm()
    line = (
        f"{family}: equal tokens {float(same.double().mean()):.3f}, log-probs of sampling "
        f"{float(far):.1e} apart, of scoring {float(rescored):.1e}, gradients {float(apart):.1e} "
        f"({time.process_time() - start:.0f} s)"
    )
    return line + from_float64(family, device, results) if dtype != "float32" else line


def tiny(family: str, dtype: str) -> Any:
    from mmrl.policies.vlm.policy import VLM
    from tests.fixtures import tiny_vlms

    folder = str(tiny_vlms.folder(family))
    policy = VLM(folder, max_new_tokens=24, coordinate_space="original", dtype=dtype, refill="rows")
    policy.pass_sizes.rows = 6
    policy.net.packs_sparse = False  # those passes are not compiled
    policy.ending = replace(policy.ending, stops=STOPS)
    return policy


def scored(policy: Any, rollout: Any) -> tuple[Tensor, Tensor]:
    """Return the log-probs [B, T] of the answers, and the gradient of their sum."""
    policy.net.zero_grad()
    point = next(iter(policy.path(rollout)))
    logprob = policy.dist(point).log_prob(point.target)
    (logprob * rollout.mask).sum().backward()
    named = [p for p in policy.net.parameters() if p.grad is not None]
    return logprob.detach(), torch.cat([p.grad.flatten().double() for p in named])


def from_float64(family: str, device: str, results: list[tuple[Any, Tensor, Tensor]]) -> str:
    """Return lines about the distance of plain and compiled passes from float64 ones of the same
    rounded weights; ``results``: of plain and compiled passes, scored on the plain ones' answers.
    """
    exact = tiny(family, "bfloat16")
    exact.net.to(device, torch.float64)
    written = results[0][0]
    logprob, gradient = scored(exact, written)
    lines = []
    for name, (rollout, score, own_gradient) in zip(("plain", "compiled"), results, strict=True):
        sampled = (rollout.logprob - scored(exact, rollout)[0]).abs()[rollout.mask]
        again = (score - logprob).abs()[written.mask]
        apart = (own_gradient - gradient).norm() / gradient.norm()
        lines.append(
            f"    {name} from float64: sampling {float(sampled.mean()):.1e} (at most "
            f"{float(sampled.max()):.1e}), scoring {float(again.mean()):.1e} (at most "
            f"{float(again.max()):.1e}), gradient {float(apart):.1e}"
        )
    return "\n" + "\n".join(lines)


def main() -> None:
    import transformers

    from mmrl.policies.vlm.families import DIRECT
    from tests.fixtures import tiny_vlms

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "families", nargs="*", default=[name for name in tiny_vlms.ROWS if name in DIRECT]
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in args.families:
        print(compare(family, args.dtype, args.backend, args.device), flush=True)


if __name__ == "__main__":
    main()
