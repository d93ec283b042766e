"""Measures what the grouped core costs: advantages, surrogates and bookkeeping of an iteration.

    python scripts/bench_core.py            # about ten minutes on one core

One iteration of 4,096 rows each of a flow model and of a vision-language model of the digits world.
What is spent outside the network, its gradient, the optimizer, decoding and the rewards is the
core. Then every advantage and every surrogate by itself, on the rows of these iterations. The
models are tiny, so that the shares are upper bounds: the core costs the same for a large one.
Seconds are the processor's, one thread. Writes ``docs/results/core.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.registry import ADVANTAGES, SURROGATES  # noqa: E402
from mmrl.core.types import Rewards, Rollout  # noqa: E402
from mmrl.run.build import Session, read  # noqa: E402
from mmrl.train.trainer import Trainer  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402
from mmrl.utils.paths import find_config  # noqa: E402

PAGE = ROOT / "docs" / "results" / "core.md"
ROWS = 4096
WORKLOADS = {
    "flow": (
        "digits/flow_grpo",
        ("train.prompts_per_iteration=256", "train.group_size=16", "train.train_batch_size=1024"),
    ),
    "VLM": (
        "digits/counting",
        ("train.prompts_per_iteration=512", "train.group_size=8", "train.train_batch_size=1024"),
    ),
}


@dataclass
class Parts:
    """Adds up seconds of the processor by part; a part inside another counts for the outer one."""

    seconds: dict[str, float] = field(default_factory=dict)
    inside: bool = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self.inside:
            yield
            return
        self.inside = True
        started = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - started
            self.inside = False

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the calls of ``owner.method`` as ``name``."""
        plain = getattr(owner, method)

        def counted(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return plain(*args, **options)

        setattr(owner, method, counted)


def watched(trainer: Trainer) -> Parts:
    """Count everything of an iteration that is not the core's."""
    parts = Parts()
    for method in ("rollout", "decode"):
        parts.watch(trainer.policy, method, "sampling")
    parts.watch(trainer.policy, "dist", "network")
    parts.watch(trainer, "scorer", "rewards")
    parts.watch(torch.Tensor, "backward", "gradient")
    parts.watch(torch.autograd, "backward", "gradient")
    parts.watch(trainer.update.optimizer, "step", "optimizer")
    return parts


def median_seconds(fn: Callable[[], Any], repeats: int) -> float:
    """Return the median of the processor's seconds of ``fn``, after one call that warms up."""
    fn()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        fn()
        times.append(time.process_time() - started)
    return statistics.median(times)


def of_advantages(rewards: Rewards, rollout: Rollout, repeats: int) -> dict[str, float | str]:
    """Measure every advantage on these rows: seconds, or why it does not apply to them."""
    measured: dict[str, float | str] = {}
    for name in sorted(ADVANTAGES):
        try:
            advantage = ADVANTAGES.build(name)
            measured[name] = median_seconds(lambda a=advantage: a(rewards, rollout), repeats)
        except (UserError, TypeError, KeyError, ValueError) as error:
            measured[name] = f"not on these rows: {str(error).splitlines()[0][:90]}"
    return measured


def of_surrogates(rollout: Rollout, repeats: int) -> dict[str, float | str]:
    """Measure every surrogate's loss and gradient on these rows and decisions."""
    old = rollout.logprob.float()
    advantage = rollout.advantage.float().expand_as(old)
    mask = rollout.mask
    measured: dict[str, float | str] = {}
    for name in sorted(SURROGATES):
        surrogate = SURROGATES.build(name)

        def once(surrogate: Any = surrogate) -> None:
            logp = (old + 0.01 * torch.randn_like(old)).requires_grad_()
            surrogate(logp, old, advantage, mask).sum().backward()

        measured[name] = median_seconds(once, repeats)
    return measured


def workload(name: str, repeats: int) -> dict[str, Any]:
    """Run one iteration to warm up and one that is measured, then the parts on its rows."""
    config, changes = WORKLOADS[name]
    trainer = Session.of(read(find_config(config), list(changes))).trainer()
    seen: list[tuple[Rewards, Rollout]] = []
    compare = trainer._compare
    trainer._compare = lambda drawn, rewards: record(seen, rewards, compare(drawn, rewards))  # type: ignore[method-assign]
    trainer.iterate()
    parts = watched(trainer)
    started = time.process_time()
    metrics = trainer.iterate()
    total = time.process_time() - started
    rewards, rollout = seen[-1]
    return {
        "config": config,
        "changes": list(changes),
        "rows": len(rollout),
        "decisions": int(rollout.mask.sum()),
        "forwards": metrics["forwards"],
        "seconds": total,
        "parts": parts.seconds,
        "core": total - sum(parts.seconds.values()),
        "advantages": of_advantages(rewards, rollout, repeats),
        "surrogates": of_surrogates(rollout, repeats),
    }


def record(seen: list[tuple[Rewards, Rollout]], rewards: Rewards, rollout: Rollout) -> Rollout:
    seen.append((rewards, rollout))
    return rollout


def page(report: dict[str, Any]) -> str:
    """Return the results as markdown."""
    about = report["machine"]
    lines = [
        "# What the grouped core costs",
        "",
        "Written by `python scripts/bench_core.py`. Seconds of the processor, one thread, "
        f"{about['cpu']}, commit {about['commit']}, {about['time']}.",
        "",
        "One iteration of 4,096 rows. *Core*: everything outside sampling and decoding, the "
        "network's passes in training, their gradient, the optimizer and the rewards: advantages, "
        "losses, stages, monitors, the cutting of batches. The networks are tiny (one row of one "
        "pass takes about a millisecond), so the shares are upper bounds.",
        "",
        "| | seconds | " + " | ".join(ORDER) + " | core | core, % |",
        "|---|---|" + "---|" * (len(ORDER) + 2),
    ]
    for name, one in report["workloads"].items():
        parts = " | ".join(f"{one['parts'].get(part, 0.0):.2f}" for part in ORDER)
        share = 100 * one["core"] / one["seconds"]
        lines.append(
            f"| {name} | {one['seconds']:.1f} | {parts} | {one['core']:.2f} | {share:.2f} |"
        )
    for kind in ("advantages", "surrogates"):
        lines += table(kind, report["workloads"])
    return "\n".join(lines) + "\n"


ORDER = ("sampling", "rewards", "network", "gradient", "optimizer")


def table(kind: str, workloads: dict[str, Any]) -> list[str]:
    """Return the milliseconds of every plug-in, and the largest share of an iteration."""
    what = "loss and gradient" if kind == "surrogates" else "of all rows"
    lines = ["", f"## {kind.capitalize()}, milliseconds {what}", ""]
    for name, one in workloads.items():
        known = {key: value for key, value in one[kind].items() if isinstance(value, float)}
        worst = max(known, key=lambda key: known[key])
        lines.append(
            f"{name}: median {1000 * statistics.median(known.values()):.1f}, most "
            f"{1000 * known[worst]:.1f} (`{worst}`), "
            f"{100 * known[worst] / one['seconds']:.3f} % of the iteration."
        )
        lines.append("")
    names = sorted({key for one in workloads.values() for key in one[kind]})
    lines += [f"| | {' | '.join(workloads)} |", "|---|" + "---|" * len(workloads)]
    for key in names:
        cells = [one[kind].get(key, "") for one in workloads.values()]
        shown = [f"{1000 * cell:.2f}" if isinstance(cell, float) else "-" for cell in cells]
        lines.append(f"| `{key}` | {' | '.join(shown)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("--repeats", type=int, default=5, help="calls of each plug-in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "machine": machine(),
        "workloads": {name: workload(name, args.repeats) for name in WORKLOADS},
    }
    PAGE.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    PAGE.write_text(page(report))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
