"""Compares compiled passes of vision-language models with plain ones.

    python scripts/check_compiled.py                     # every family that compiles, float32
    python scripts/check_compiled.py qwen3_vl --dtype bfloat16
    python scripts/check_compiled.py llava --backend aot_eager

Samples, log-probs and gradients of tiny models with random weights; the inductor takes about a
minute of processor for each on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
STOPS = tuple(range(0, 256, 8))  # so that answers end at several places


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
    from mmrl.policies.vlm.policy import VLM
    from samplers.noise import Rng
    from tests.fixtures import tiny_vlms

    folder = str(tiny_vlms.folder(family))
    policy = VLM(folder, max_new_tokens=24, coordinate_space="original", dtype=dtype, refill="rows")
    policy.net.to(device)
    policy.fixed_batch_rows = 6
    policy.net.packs_sparse = False  # those passes are not compiled
    policy.ending = replace(policy.ending, stops=STOPS)
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
        policy.net.zero_grad()
        point = next(iter(policy.path(written)))
        logprob = policy.dist(point).log_prob(point.target)
        (logprob * written.mask).sum().backward()
        named = [p for p in policy.net.parameters() if p.grad is not None]
        gradient = torch.cat([p.grad.flatten().double() for p in named])
        results.append((rollout, logprob.detach(), gradient))
    (plain, score, gradient), (quick, quick_score, quick_gradient) = results
    same = plain.sample == quick.sample
    far = ((plain.logprob - quick.logprob).abs() * (same & plain.mask)).max()
    scored = ((score - quick_score).abs() * plain.mask).max()
    apart = (gradient - quick_gradient).norm() / gradient.norm()
    return (
        f"{family}: equal tokens {float(same.double().mean()):.3f}, log-probs of sampling "
        f"{float(far):.1e} apart, of scoring {float(scored):.1e}, gradients {float(apart):.1e} "
        f"({time.process_time() - start:.0f} s)"
    )


def main() -> None:
    import transformers

    from mmrl.policies.vlm.families import DIRECT
    from tests.fixtures import tiny_vlms, tiny_vlms_2026

    every = [*tiny_vlms.BUILDERS, *tiny_vlms.EXPERTS, *tiny_vlms_2026.BUILDERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=[name for name in every if name in DIRECT])
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
