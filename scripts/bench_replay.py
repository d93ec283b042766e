"""Measures by how much a family written by hand is faster than the same folder replayed.

    python scripts/bench_replay.py [--repeats 5]

Writes docs/results/replay.md. Both are timed in turns in one process, so that the ratio does not
depend on what else the machine does; seconds are not compared with those of other runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from mmrl.core.registry import POLICIES, load_built_in  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402
from samplers.noise import Rng  # noqa: E402
from tests.fixtures import tiny_diffusers  # noqa: E402

PROMPTS = [{"text": text} for text in ("a red seven", "a blue two")]
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sd3": ({"size": 32}, {"height": 32, "width": 32, "max_sequence_length": 16}),
    "flux": (
        {"size": 16, "text_length": 16},
        {"height": 16, "width": 16, "max_sequence_length": 16, "guidance_scale": 3.5},
    ),
}


def seconds(work: Callable[[], Any]) -> float:
    """Time one call in seconds of the processor, which other processes do not lengthen."""
    start = time.process_time()
    work()
    return time.process_time() - start


def sampled(policy: Any) -> Any:
    with torch.no_grad():
        return policy.rollout(PROMPTS, 8, Rng.of("bench"))


def updated(policy: Any, rollout: Any) -> None:
    for point in policy.path(rollout):
        policy.dist(point).log_prob(point.target).sum().backward()


def measured(name: str, steps: int, repeats: int) -> tuple[float, float]:
    """Return how many times as long the replay takes to sample and to update: medians of ratios."""
    own, call = FAMILIES[name]
    place = "world:digits/sd3-test" if name == "sd3" else str(tiny_diffusers.folder(name))
    shared = {"path": place, "steps": steps}
    pair = [
        POLICIES.build(name, **shared, **own),
        POLICIES.build("pipeline", **shared, call=call, check=False, together=True),
    ]
    rollouts = [sampled(policy) for policy in pair]
    ratios: list[list[float]] = [[], []]
    for _ in range(repeats):
        sampling = [seconds(lambda p=policy: sampled(p)) for policy in pair]
        updating = [
            seconds(lambda p=policy, r=rollout: updated(p, r))
            for policy, rollout in zip(pair, rollouts)
        ]
        for kept, (family, replay) in zip(ratios, (sampling, updating)):
            kept.append(replay / family)
    return median(ratios[0]), median(ratios[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    load_built_in()
    about = machine()
    lines = [
        "# The policy `pipeline` beside the families written by hand",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}: "
        f"{about['cpu']}, torch {about['versions']['torch']}. 16 samples of 2 prompts, tiny",
        "networks with random weights, one CPU thread; medians of ratios of processor time, in",
        "turns. The networks are so small that nearly all of the time is the pipeline's own",
        "Python: this is the overhead at its worst, not what a model of billions of weights",
        "would show.",
        "",
        "| folder | steps | sampling takes | scoring and gradients take |",
        "|---|---|---|---|",
    ]
    for name in FAMILIES:
        for steps in (4, 16):
            sampling, updating = measured(name, steps, repeats)
            lines.append(f"| {name} | {steps} | {sampling:.1f} x | {updating:.1f} x |")
    page = ROOT / "docs" / "results" / "replay.md"
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
