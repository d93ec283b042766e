"""Measures what workers of a Ray cluster do for a reward: samples a second with 1, 2 and 4.

    python scripts/bench_ray.py             # a minute

A simulated cluster of three nodes on this machine. The reward waits 20 ms a sample, as one does
that asks a server or a GPU: so that what is measured is how work is shared and not how many cores
the machine has. Beside it the same reward in the process itself. Pictures have 256 x 256 pixels.
Writes ``docs/results/ray_rewards.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

PAGE = ROOT / "docs" / "results" / "ray_rewards.md"
SAMPLES = 256
SIZE = 256
WORKERS = (1, 2, 4)
WAIT = 0.02  # seconds a sample


def waiting(media: Any, prompts: list[dict[str, Any]]) -> torch.Tensor:
    """The mean of a picture, after a while."""
    time.sleep(WAIT * len(prompts))
    return media.flatten(1).mean(1)


def throughput(score: Any, media: torch.Tensor, repeats: int) -> float:
    """Samples a second: of the best of so many calls, after one that is not counted."""
    prompts = [{"text": str(i)} for i in range(len(media))]
    truth = media.flatten(1).mean(1)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        values = score(media, prompts)
        seconds.append(time.perf_counter() - start)
        assert torch.equal(values, truth), "a worker's values are not those of here"
    return len(media) / min(seconds[1:])


def measured(samples: int = SAMPLES, repeats: int = 3) -> dict[str, Any]:
    """Begin the cluster and measure; ends it again."""
    import ray
    from ray.cluster_utils import Cluster

    from mmrl.config import build_rewards
    from mmrl.utils.machine import machine

    media = torch.rand(samples, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    rates = {"here": throughput(waiting, media, repeats)}
    node = {"num_cpus": 2, "object_store_memory": 400 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**node)
    ray.init(address=cluster.address, namespace="mmrl", logging_level="ERROR")
    try:
        for workers in WORKERS:
            options = {"place": "ray", "workers": workers, "batch_size": 8}
            (weighted,) = build_rewards({f"{__file__}:waiting": options}).values()
            rates[str(workers)] = throughput(weighted.reward, media, repeats)
            weighted.reward.reward.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {
        "samples_per_second": rates,
        "samples": samples,
        "pixels": SIZE,
        "wait": WAIT,
        "load": os.getloadavg()[0],
        "machine": machine(),
        "ray": ray.__version__,
    }


def page(numbers: dict[str, Any]) -> str:
    """Write the table."""
    rates = numbers["samples_per_second"]
    rows = "\n".join(
        f"| {'in the process' if name == 'here' else f'{name} worker' + 's' * (name != '1')} | "
        f"{rate:.0f} | {rate / rates['1']:.2f} |"
        for name, rate in rates.items()
    )
    side = numbers["pixels"]
    text = f"""\
`python scripts/bench_ray.py`: a batch of {numbers["samples"]} pictures of {side} x {side} pixels in
parts of 8, a reward that waits {1000 * numbers["wait"]:g} ms a sample (so at most
{1 / numbers["wait"]:g} samples a second by one). Ray {numbers["ray"]}, three simulated nodes on one
machine of {os.cpu_count()} cores, at a load of {numbers["load"]:.1f} by others before it; best
of three calls. Values were equal to the bit.

| | samples a second | of one worker's |
|---|---|---|
{rows}

A picture of that size is {3 * side**2 * 4 / 2**20:.2f} MiB in float32. What one worker loses to the
rate in the process is the way of the samples through the object store. Rewards that compute gain no
more than there are cores or GPUs.
"""
    return "# Rewards on Ray workers\n\n" + text


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    numbers = measured(arguments.samples)
    arguments.out.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    arguments.out.write_text(page(numbers))
    print(page(numbers))


if __name__ == "__main__":
    main()
