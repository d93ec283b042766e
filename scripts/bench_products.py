"""Times passes of a flow model in float32 on a CPU by torch's products and by mmrl's, in turns.

    python scripts/bench_products.py --threads 2  # about a minute

The network is diffusers' SD3 transformer with random weights, of three sizes: a forward pass as in
sampling, and forward and back as in the update. Where oneDNN is not faster than what torch takes
(mmrl.policies.products.faster) both are the same. Writes ``docs/results/products.md`` and
``.json``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import measuring  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from mmrl.policies.products import faster, quicken  # noqa: E402

TEXT = 16  # tokens of the prompt
# heads of 64, layers, latents a side, images
SIZES = {
    "width 128, 3 layers": (2, 3, 8, 16),
    "width 256, 4 layers": (4, 4, 16, 16),
    "width 512, 6 layers": (8, 6, 32, 8),
}


def network(heads: int, layers: int, side: int) -> nn.Module:
    """Make an SD3 transformer with random weights."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=256,
        caption_projection_dim=64 * heads,
        pooled_projection_dim=128,
        pos_embed_max_size=side,
    ).eval()


def work(net: nn.Module, side: int, images: int) -> dict[str, Callable[[], Tensor]]:
    """Return a pass of sampling, and one of the update, each with what it computes."""
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    inputs = {
        "hidden_states": random(images, 4, side, side),
        "encoder_hidden_states": random(images, TEXT, 256),
        "pooled_projections": random(images, 128),
        "timestep": torch.linspace(100, 900, images),
    }

    @torch.no_grad()
    def sampling() -> Tensor:
        return net(**inputs).sample

    def update() -> Tensor:
        net.zero_grad()
        net(**inputs).sample.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    return {"sampling": sampling, "update": update}


def measure(heads: int, layers: int, side: int, images: int, repeats: int) -> dict[str, Any]:
    """Measure both in turns; a factor is the median of the ratios of neighbours."""
    net = network(heads, layers, side)
    ours = copy.deepcopy(net)
    quicken(ours)
    found: dict[str, Any] = {}
    works = work(net, side, images), work(ours, side, images)
    for name in works[0]:
        plain, quick = (each[name] for each in works)
        expected = plain()
        apart = ((quick() - expected).abs().max() / expected.abs().max()).item()
        seconds = [(measuring.seconds(plain), measuring.seconds(quick)) for _ in range(repeats)]
        ratios = sorted(a / b for a, b in seconds)
        found[name] = {
            "torch": statistics.median(a for a, _ in seconds),
            "mmrl": statistics.median(b for _, b in seconds),
            "factor": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
            "apart": apart,
        }
    return found


def page(report: dict[str, Any]) -> str:
    """Return the results as markdown."""
    about = report["machine"]
    lines = [
        "# Products of flow models in float32 on a CPU",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, {about['cores']} cores, {report['threads']} threads; torch "
        f"{about['versions']['torch']}, diffusers {about['versions']['diffusers']}. oneDNN is "
        f"{'' if report['faster'] else 'not '}used here. Diffusers' SD3 transformer with random "
        f"weights, {report['repeats']} repeats in turns; factors are medians of the ratios of "
        "neighbours, by the clock. Apart: largest difference of outputs, or of gradients, by the "
        "largest value.",
        "",
        "| network | tokens x images | pass | torch's, s | mmrl's, s | times as fast | apart |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, passes in report["sizes"].items():
        _, _, side, images = SIZES[name]
        lines += [
            f"| {name} | {(side // 2) ** 2 + TEXT} x {images} | {kind} | {found['torch']:.3f} "
            f"| {found['mmrl']:.3f} | {found['factor']:.2f} ({found['least']:.2f} - "
            f"{found['most']:.2f}) | {found['apart']:.0e} |"
            for kind, found in passes.items()
        ]
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> None:
    """Measure the chosen sizes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "products")
    args = parser.parse_args(words)
    from mmrl.utils.machine import machine

    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "machine": machine(),
        "threads": args.threads,
        "repeats": args.repeats,
        "faster": faster(),
        "sizes": {name: measure(*SIZES[name], args.repeats) for name in args.sizes},
    }
    measuring.publish(args.out, report, page(report))


if __name__ == "__main__":
    main()
