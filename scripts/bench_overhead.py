"""Measures what mmrl itself costs beside the network: the share of an iteration that is spent
neither in the network's forward and backward passes nor in the optimizer.

    python scripts/bench_overhead.py              # networks of about 100M parameters, on the CPU
    python scripts/bench_overhead.py --cases vlm --width 256

A forward pass is the time in the outermost call of any module of the library's model (diffusers,
transformers), in a product with its weights laid out, or in the attention of image tokens. A token
of an image passes through the library's layers by a loop of mmrl's (``llama.token``) in the place
of the library's: what it computes between modules (rotations, sums, writes of keys and values) is
shown by itself. Laying weights out is overhead, and so is what else mmrl computes of a network
without calling a module, so that the share is at most too high. A backward pass is that of the
loss, whose own part is in it. Rewards cost nothing here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

from mmrl.policies import products  # noqa: E402
from mmrl.policies.image_tokens.models import llama  # noqa: E402

# the last: linear layers of the library's that compute by oneDNN
LIBRARY = ("transformers.", "diffusers.", "torch.nn.", "mmrl.policies.products")
PROMPTS = [{"text": "a red seven"}, {"text": "two green circles"}]


def vlm(width: int, folder: Path) -> Any:
    import bench_vlm

    text = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 11,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "vocab_size": 320,
    }
    tiny = bench_vlm.SIZES["tiny"]
    sizes = {"wide": tiny | {"text": text, "rope": [8, 12, 12]}}
    with mock.patch.dict(bench_vlm.SIZES, sizes):
        bench_vlm.build("wide", folder)
    work = replace(bench_vlm.Work(), prompts=2, copies=4, tokens=16)
    return bench_vlm.ours(folder, work, bench_vlm.prompts(work, 12))


def flow(width: int, folder: Path) -> Any:
    """Build Stable Diffusion 3's network, 128 pixels."""
    import bench_iteration
    import random_models

    scale = replace(random_models.SMALL, sd3_layers=7, sd3_heads=width // 64, size=128, tokens=32)
    policy = random_models.sd3(scale, lora=None)
    policy.net.float()
    policy.compute = torch.float32
    work = bench_iteration.Work(prompts=2, copies=2, updates=1)
    return bench_iteration.mmrl_trainer(policy, work, bench_iteration.brightness)


def image_tokens(width: int, folder: Path) -> Any:
    import bench_discrete

    from mmrl.policies.image_tokens.models.janus import Janus

    bench_discrete.janus(bench_discrete.Size("janus", width, 12, width // 64, 4, 1024), folder)
    return _trainer(Janus(str(folder), guidance_scale=5.0))


def masked(width: int, folder: Path) -> Any:
    import bench_discrete

    from mmrl.policies.masked.amused import Amused

    bench_discrete.amused(bench_discrete.Size("amused", width, 9, width // 64, 8, 1024), folder)
    return _trainer(Amused(str(folder), guidance_scale=5.0, steps=4))


FAMILIES: dict[str, Callable[[int, Path], Any]] = {
    "flow": flow,
    "vlm": vlm,
    "image_tokens": image_tokens,
    "masked": masked,
}


def _trainer(policy: Any) -> Any:
    from mmrl import advantages
    from mmrl.config.options import TrainOptions
    from mmrl.objectives import PolicyGradient
    from mmrl.scoring import Scorer
    from mmrl.train.optimizers import adamw
    from mmrl.train.trainer import Trainer

    options = TrainOptions(
        prompts_per_iteration=2, group_size=2, train_batch_size=4, iterations=1, precision="fp32"
    )
    reward = Scorer({"reward": lambda media, asked: torch.rand(len(asked))})
    objective = PolicyGradient(clip_range=0.2)
    adam = partial(adamw, lr=1e-6)
    return Trainer(policy, PROMPTS, reward, advantages.flow_grpo, objective, adam, options)


class Spent:
    """Adds up CPU seconds of the process by name; of calls inside each other the outermost."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.depth = 0
        self.begun = 0.0
        self.apart_seconds = 0.0  # of what is inside passes and no part of them

    def enter(self, *_: Any) -> None:
        if self.depth == 0:
            self.begun = time.process_time()
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.seconds["forward"] += time.process_time() - self.begun

    def clocked(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work`` with its seconds added under a name."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            self.depth += 1  # passes inside are part of it
            try:
                return work(*arguments, **options)
            finally:
                self.depth -= 1
                self.seconds[name] += time.process_time() - start

        return call

    def apart(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work``, which is no part of the pass that it is called in."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return work(*arguments, **options)
            finally:
                taken = time.process_time() - start
                self.apart_seconds += taken
                self.begun += taken

        return call

    def between(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work`` with its seconds outside of modules added as "between"."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            known = self.seconds["forward"] + self.apart_seconds
            output = work(*arguments, **options)
            known -= self.seconds["forward"] + self.apart_seconds
            self.seconds["between"] += time.process_time() - start + known
            return output

        return call

    def passed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work`` counted as a part of a forward pass."""

        def call(*arguments: Any, **options: Any) -> Any:
            self.enter()
            try:
                return work(*arguments, **options)
            finally:
                self.leave()

        return call


@contextmanager
def watched(trainer: Any) -> Iterator[Counter[str]]:
    """Measure the seconds in ``forward``, ``between``, ``backward`` and ``optimizer``."""
    spent = Spent()
    hooks = []
    for part in (trainer.policy.net, getattr(trainer.policy, "vae", None)):
        for module in part.modules() if part is not None else ():
            if type(module).__module__.startswith(LIBRARY):
                hooks.append(module.register_forward_pre_hook(spent.enter))
                hooks.append(module.register_forward_hook(spent.leave, always_call=True))
    update = trainer.update
    product = spent.passed(products._product)
    attend = spent.passed(llama.attend)
    backward = spent.clocked("backward", update.device.backward)
    descend = spent.clocked("optimizer", update._descend)
    net = trainer.policy.net
    with ExitStack() as patches:
        for place, name, work in (
            (products, "_product", product),
            (products, "_laid_out", spent.apart(products._laid_out)),
            (llama, "attend", attend),
            (update.device, "backward", backward),
            (update, "_descend", descend),
        ):
            patches.enter_context(mock.patch.object(place, name, work))
        if getattr(net, "token", None) is not None:
            patches.enter_context(mock.patch.object(net, "token", spent.between(net.token)))
        yield spent.seconds
    for hook in hooks:
        hook.remove()


def measure(name: str, width: int, repeats: int) -> dict[str, Any]:
    """Measure whole iterations of one family; the first only warms up."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        trainer = FAMILIES[name](width, Path(folder))
        runs = []
        for _ in range(repeats + 1):
            with watched(trainer) as spent:
                start = time.process_time()
                trainer.iterate()
                total = time.process_time() - start
            runs.append({part: seconds / total for part, seconds in spent.items()})
    shares = [1 - sum(run.values()) for run in runs[1:]]
    return {
        "parameters": sum(p.numel() for p in trainer.policy.net.parameters()),
        "trained": sum(p.numel() for p in trainer.policy.net.parameters() if p.requires_grad),
        "shares": {part: statistics.median(run[part] for run in runs[1:]) for part in runs[-1]},
        "overhead": statistics.median(shares),
        "overheads": shares,
    }


def page(report: dict[str, Any]) -> str:
    about = report["machine"]
    lines = [
        "# What mmrl costs beside the network",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, one thread; torch {about['versions']['torch']}. Shares of the process's "
        f"own CPU time in an iteration of GRPO with random weights in float32, medians of "
        f"{report['repeats']} iterations. Forward: outermost calls of the library's modules, in "
        "sampling, scoring and decoding. Between: what mmrl's loop over the library's layers, "
        "which passes a token of an image, computes between their modules (rotations, sums, keys "
        "and values written); until 2026-11-25 it was counted as everything else. The rest, with "
        "layouts of weights and whatever else mmrl computes of weights without calling a module, "
        "is overhead. Optimizer: clipping and AdamW.",
        "",
        "| family | parameters, M | forward | between | backward | optimizer | everything else "
        "| (least - most) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in report["cases"].items():
        parts = " | ".join(
            f"{100 * case['shares'].get(part, 0):.1f} %"
            for part in ("forward", "between", "backward", "optimizer")
        )
        low, high = min(case["overheads"]), max(case["overheads"])
        lines.append(
            f"| {name} | {case['parameters'] / 1e6:.0f} | {parts} | "
            f"{100 * case['overhead']:.1f} % | {100 * low:.1f} - {100 * high:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> dict[str, Any]:
    from mmrl.utils.machine import machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/overhead")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": machine(), "repeats": args.repeats, "cases": {}}
    for name in args.cases:
        case = report["cases"][name] = measure(name, args.width, args.repeats)
        share = 100 * case["overhead"]
        print(f"{name}: {case['parameters'] / 1e6:.0f}M, overhead {share:.1f} %", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(report))
    return report


if __name__ == "__main__":
    main()
