"""Times attention of long answers in float32 on a CPU by mmrl's code and by torch's, in turns.

    python scripts/bench_attention.py  # half a minute
    git show 907311c2:mmrl/policies/vlm/attention.cpp > /tmp/before.cpp
    python scripts/bench_attention.py --before /tmp/before.cpp

A layer of a small vision-language model in the update: 32 answers of 255 tokens, 8 to a prompt, 4
heads of 16 with 2 of keys, forwards and backwards. torch's side copies each prompt to its answers,
as compiled passes do without the code here. With ``--before`` the other side is an earlier
attention.cpp. Writes ``docs/results/vlm_attention.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import measuring  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from mmrl.policies.vlm import cpu_attention  # noqa: E402

PROMPTS, COPIES, HEADS, GROUPS, SIZE = 4, 8, 4, 2, 16
SCALE = SIZE**-0.5
CALLS = 10  # of a pass in one measurement


def inputs(prompt_tokens: int, tokens: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Make q, k, v [B, heads, T, D] of answers, keys and values [P, heads, S, D] of prompts, the
    prompt of each row [B] and the first column of each prompt [P]."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.arange(PROMPTS).repeat_interleave(COPIES)
    of_answers = [(len(rows), tokens, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    x = [torch.randn(*shape, generator=draw).transpose(1, 2) for shape in of_answers]
    x += [torch.randn(PROMPTS, GROUPS, prompt_tokens, SIZE, generator=draw) for _ in range(2)]
    return [tensor.requires_grad_() for tensor in x], rows, torch.zeros(PROMPTS, dtype=torch.long)


def by_mmrl(x: list[Tensor], rows: Tensor, start: Tensor, bias: Tensor) -> Tensor:
    """Attend by the code of mmrl, which needs no mask ``bias``; returns [B, T, H, D]."""
    attended: Tensor = torch.ops.mmrl_vlm.attend(*x, rows, start, SCALE)[0]
    return attended


def by_torch(x: list[Tensor], rows: Tensor, start: Tensor, bias: Tensor) -> Tensor:
    """Attend by torch to prompts that are copied to their rows, under ``bias`` [T, S + T]."""
    q, k, v, pk, pv = x
    keys = torch.cat([pk.index_select(0, rows), k], 2)
    values = torch.cat([pv.index_select(0, rows), v], 2)
    attended = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=bias, scale=SCALE, enable_gqa=True
    )
    return attended.transpose(1, 2)


@contextmanager
def source(path: Path) -> Iterator[None]:
    """Let mmrl's attention be computed by this file within the block."""
    with mock.patch.object(cpu_attention, "SOURCE", path):
        yield


def passes(attend: Callable[..., Tensor], path: Path, *given: Any) -> dict[str, Callable[[], Any]]:
    """Return the passes that are timed, each of CALLS calls, by the code at ``path``."""
    x = given[0]
    with source(path):
        attended = attend(*given)
    gradient = torch.ones_like(attended)

    def forward() -> None:
        with source(path), torch.no_grad():
            for _ in range(CALLS):
                attend(*given)

    def backward() -> list[Tensor]:
        with source(path):
            for _ in range(CALLS):
                found = torch.autograd.grad(attended, x, gradient, retain_graph=True)
        return list(found)

    return {"forward": forward, "backward": backward}


def measure(prompt_tokens: int, tokens: int, repeats: int, before: Path | None) -> dict[str, Any]:
    """Measure both in turns; a factor is the median of the ratios of neighbours."""
    x, rows, start = inputs(prompt_tokens, tokens)
    seen = torch.ones(tokens, prompt_tokens + tokens, dtype=torch.bool).tril(prompt_tokens)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    ours = passes(by_mmrl, cpu_attention.SOURCE, x, rows, start, bias)
    attend = by_mmrl if before else by_torch
    other = passes(attend, before or cpu_attention.SOURCE, x, rows, start, bias)
    apart = max(
        ((a - b).abs().max() / b.abs().max()).item()
        for a, b in zip(ours["backward"](), other["backward"](), strict=True)
    )
    found: dict[str, Any] = {"apart": apart}
    for name in ours:
        both = (other[name], ours[name])
        for work in both:
            work()
        times = [[measuring.seconds(work) / CALLS for work in both] for _ in range(repeats)]
        ratios = sorted(a / b for a, b in times)
        found[name] = {
            "other": statistics.median(a for a, _ in times),
            "mmrl": statistics.median(b for _, b in times),
            "factor": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
        }
    return found


def page(report: dict[str, Any]) -> str:
    """Return the results as markdown."""
    about, other = report["machine"], report["other"]
    lines = [
        "# Attention of long answers on a CPU",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, {about['cores']} cores, {report['threads']} threads; torch "
        f"{about['versions']['torch']}. One layer in float32: {PROMPTS} prompts with {COPIES} "
        f"answers each of {report['tokens']} tokens, {HEADS} heads of {SIZE}, {GROUPS} of keys; "
        f"{report['repeats']} repeats in turns, factors are medians of the ratios of neighbours "
        "with the least and the most. Apart: largest difference of gradients, by the largest "
        "value.",
        "",
        f"| prompt tokens | pass | {other}, ms | mmrl, ms | times as fast | apart |",
        "|---|---|---|---|---|---|",
    ]
    for prompt_tokens, found in report["prompt_tokens"].items():
        lines += [
            f"| {prompt_tokens} | {kind} | {1e3 * found[kind]['other']:.1f} "
            f"| {1e3 * found[kind]['mmrl']:.1f} | {found[kind]['factor']:.2f} "
            f"({found[kind]['least']:.2f} - {found[kind]['most']:.2f}) | {found['apart']:.0e} |"
            for kind in ("forward", "backward")
        ]
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> None:
    """Measure the chosen lengths and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[43, 203])
    parser.add_argument("--tokens", type=int, default=255)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", type=Path, help="an earlier attention.cpp, in torch's place")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "vlm_attention")
    args = parser.parse_args(words)
    if args.before is not None and not args.before.is_file():
        parser.error(f"--before: there is no file {args.before}")
    if not cpu_attention.serves(SIZE, torch.zeros(1)):
        parser.error("this CPU has no AVX-512, or there is no C++ compiler: torch attends here")
    from mmrl.utils.machine import machine

    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "machine": machine(),
        "threads": args.threads,
        "repeats": args.repeats,
        "tokens": args.tokens,
        "other": f"before ({args.before.name})" if args.before else "torch",
        "prompt_tokens": {
            n: measure(n, args.tokens, args.repeats, args.before) for n in args.prompt_tokens
        },
    }
    measuring.publish(args.out, report, page(report))


if __name__ == "__main__":
    main()
