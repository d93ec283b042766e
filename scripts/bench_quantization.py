"""Measures what a base in 4 or 8 bits costs beside the base as it is: the gap of log-probs and of
samples at equal noise, and the held-out reward of short trainings.

    python scripts/bench_quantization.py [--worlds sd3 vlm flux] [--kinds 8bit nf4]
        [--seeds 0 1 2] [--iterations N] [--out docs/results/quantization]

Writes OUT.json after every run, and OUT.md at the end. What OUT.json has is not measured again, so
an interrupted call goes on; --again forgets it. Everything runs in this process, on one thread.

Adapters begin at zero, so before training the two networks differ by the quantisation alone. First
ratios are those of the quantised policy with itself. Trainings of one seed share noise, prompts and
first adapters; their adapters are then also put on the base as it is, as an export for other
programs would be used. Differences are paired by seed and prompt, as in ``mmrl compare``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from mmrl.core.registry import POLICIES, load_built_in  # noqa: E402
from mmrl.core.statistics import paired  # noqa: E402
from mmrl.policies.quantization import QuantizedLinear, blocks_of, parameters  # noqa: E402
from mmrl.run.build import Session, read  # noqa: E402
from mmrl.run.evaluation import scores  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402
from mmrl.utils.paths import find_config  # noqa: E402
from samplers.noise import Rng  # noqa: E402
from samplers.windows import all_but_last  # noqa: E402

RESULT = ROOT / "docs" / "results" / "quantization"
PLAIN = "none"
KINDS = ("8bit", "nf4")
TINY = [{"text": "a red cat"}, {"text": "a dog on a hill"}]


@dataclass(frozen=True)
class World:
    """Describes what is measured: a recipe with changes, and how long it is trained."""

    says: str
    config: str = ""  # none: random weights, which are not trained
    changes: tuple[str, ...] = ()
    policy: str = ""
    reward: str = ""
    iterations: int = 0


WORLDS = {
    "sd3": World(
        "`digits/flow_grpo`: the digits world's Stable Diffusion 3, LoRA of rank 32",
        "digits/flow_grpo",
        (
            "policy.sd3.lora=32",
            "optimizer.adamw.lr=3e-3",
            "train.prompts_per_iteration=8",
            "train.group_size=12",
            "train.train_batch_size=48",
            "evaluate={prompts: 32, num_samples: 4}",
        ),
        "sd3",
        "digits",
        16,
    ),
    "vlm": World(
        "`digits/counting`: the digits world's Qwen2.5-VL, LoRA of rank 16",
        "digits/counting",
        (
            "policy.vlm.lora=16",
            "optimizer.adamw.lr=3e-3",
            "train.lr_schedule=constant",
            "train.evaluate_every=0",
            "data.digits_questions.scenes=600",
            "evaluate={prompts: 200, num_samples: 1}",
        ),
        "vlm",
        "count",
        40,
    ),
    "flux": World("a tiny FLUX with random weights, LoRA of rank 4"),
}


def session_of(world: World, kind: str, seed: int = 0) -> Session:
    """Build a recipe's parts with its base quantised, or as it is."""
    changes = [*world.changes, f"train.seed={seed}"]
    if kind != PLAIN:
        changes.append(f"policy.{world.policy}.quantization={kind}")
    return Session.of(read(find_config(world.config), changes))


def policy_of(world: World, kind: str) -> tuple[Any, list[dict[str, Any]]]:
    """Build a policy with fresh adapters, and prompts for it."""
    if world.config:
        session = session_of(world, kind)
        return session.policy, list(session.prompts())[:8]
    from tests.fixtures import tiny_diffusers

    torch.manual_seed(0)
    options: dict[str, Any] = {} if kind == PLAIN else {"quantization": kind}
    sizes = {"size": 32, "steps": 6, "text_length": 16, "noise_window": all_but_last}
    return POLICIES["flux"](tiny_diffusers.folder("flux"), lora=4, **sizes, **options), TINY


def stored(policy: Any) -> dict[str, float]:
    """Count the bits a weight of the blocks takes, and the share of the weights that are there."""
    layers = [layer for layer in policy.net.modules() if isinstance(layer, QuantizedLinear)]
    weights = blocks_of(policy.net).weights
    size = sum(layer.weight.nbytes + layer.scales.nbytes for layer in layers)
    return {"bits": 8 * size / weights, "share": weights / parameters(policy.net)}


def gaps(scoring: Any, rollout: Any) -> Iterator[torch.Tensor]:
    """Score every decision of a rollout again; yield how far each is from what was recorded."""
    for point in scoring.path(rollout):
        gap = scoring.dist(point).log_prob(point.target).double() - point.recorded.double()
        yield gap[point.current()].abs()


@torch.no_grad()
def gap_of(world: World, kind: str, copies: int = 8) -> dict[str, Any]:
    """Compare a quantised policy with itself, and with the policy of the base as it is."""
    plain, prompts = policy_of(world, PLAIN)
    policy, _ = policy_of(world, kind)
    rng = Rng.of("quantization")
    rollouts = [each.rollout(prompts, copies, rng) for each in (plain, policy)]
    itself = torch.cat(list(gaps(policy, rollouts[1])))
    between = torch.cat(list(gaps(policy, rollouts[0])))
    media = [each.decode(rollout) for each, rollout in zip((plain, policy), rollouts, strict=True)]
    return {
        **stored(policy),
        "ratio": float(itself.max().expm1()),
        "decisions": between.numel(),
        "logprob_mean": float(between.mean()),
        "logprob_max": float(between.max()),
        "samples": differ(*media),
    }


def differ(first: Any, second: Any) -> dict[str, float]:
    """Compare samples of the same noise: pixels in 0..1 by their root mean square, or the share of
    answers that are other texts."""
    if isinstance(first, torch.Tensor):
        other = first.flip(0)  # how far samples of other noise are apart
        return {
            "rms": float((first - second).square().mean().sqrt()),
            "rms_of_others": float((first - other).square().mean().sqrt()),
        }
    changed = sum(str(a) != str(b) for a, b in zip(first, second, strict=True))
    return {"changed": changed / len(first), "answers": len(first)}


def learn(world: World, kind: str, seed: int, iterations: int) -> dict[str, Any]:
    """Train for a few iterations; held-out rewards by prompt before, after, and of the adapters on
    the base as it is."""
    start = time.process_time()
    session = session_of(world, kind, seed)
    trainer = session.trainer()
    before = rewards_of(session, session.policy, world.reward)
    curve = [trainer.iterate()["reward/mean"] for _ in range(iterations)]
    after = rewards_of(session, session.policy, world.reward)
    moved = after
    if kind != PLAIN:
        base = session_of(world, PLAIN, seed).policy
        base.weights.load(session.policy.weights.full())
        base.fixed_batch_rows = session.policy.fixed_batch_rows
        moved = rewards_of(session, base, world.reward)
    return {
        "before": before,
        "after": after,
        "on_plain_base": moved,
        "curve": curve,
        "cpu_seconds": time.process_time() - start,
    }


def rewards_of(session: Session, policy: Any, reward: str) -> list[float]:
    """Measure a held-out reward: the mean of every prompt's samples."""
    held_out = session.prompts()
    measured = scores(policy, held_out, session.scorer, session.evaluation)
    return [float(value) for value in measured.rewards[reward].double().mean(1)]


def page(report: dict[str, Any]) -> str:
    """Write the results as markdown."""
    about = report["machine"]
    lines = [
        "# A base in 4 or 8 bits beside the base as it is",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}: "
        f"{about['cpu']}, one thread, torch {about['versions']['torch']}, bitsandbytes "
        f"{report['bitsandbytes']}. Tiny networks: what is lost on large ones was not measured "
        "here (larger layers lose less as a rule: Dettmers et al. 2023).",
        "",
        "## The gap before training",
        "",
        "Bits: of a weight of the blocks, scales included. First ratio: the largest deviation from "
        "1 when the quantised policy scores its own samples again. Log-probs: of samples of the "
        "unquantised policy, a decision's distance between the two. Samples: the same noise "
        "through both.",
        "",
        "| policy | base | bits | first ratio - 1 | log-prob gap, mean | max | samples |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kinds in report["gaps"].items():
        lines += [_gap_line(name, kind, gap) for kind, gap in kinds.items()]
    lines += ["", *(f"* {name}: {WORLDS[name].says}." for name in report["gaps"])]
    for name, runs in report["runs"].items():
        lines += ["", *_learning(name, runs)]
    return "\n".join(lines) + "\n"


def _gap_line(name: str, kind: str, gap: dict[str, Any]) -> str:
    apart = gap["samples"]
    samples = (
        f"{apart['rms']:.2g} rms (other noise: {apart['rms_of_others']:.2g})"
        if "rms" in apart
        else f"{apart['changed']:.0%} of {apart['answers']} answers are others"
    )
    return (
        f"| {name} | {kind} | {gap['bits']:.2f} | {gap['ratio']:.1e} "
        f"| {gap['logprob_mean']:.2g} | {gap['logprob_max']:.2g} | {samples} |"
    )


def _learning(name: str, runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    world = WORLDS[name]
    seeds = sorted(runs[PLAIN])
    length = len(runs[PLAIN][seeds[0]]["curve"])
    yield f"## {name}: held-out `{world.reward}` of {length} iterations, {len(seeds)} seeds"
    yield ""
    yield (
        "Mean over seeds and prompts; the difference to the unquantised base after training, "
        "paired by seed and prompt, with its 95 % interval."
    )
    yield ""
    yield (
        "| base | before | after | seeds | difference | adapters on the unquantised base "
        "| CPU s a run |"
    )
    yield "|---|---|---|---|---|---|---|"
    plain = _table(runs[PLAIN], seeds, "after")
    for kind, by_seed in runs.items():
        if sorted(by_seed) != seeds:
            continue
        before, after, moved = (
            _table(by_seed, seeds, part) for part in ("before", "after", "on_plain_base")
        )
        each = ", ".join(f"{row.mean():.3f}" for row in after)
        apart = paired(plain, after)
        shown = f"{apart.mean:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}]"
        seconds = np.mean([by_seed[seed]["cpu_seconds"] for seed in seeds])
        yield (
            f"| {'as it is' if kind == PLAIN else kind} | {before.mean():.3f} | {after.mean():.3f} "
            f"| {each} | {'' if kind == PLAIN else shown} "
            f"| {'' if kind == PLAIN else f'{moved.mean():.3f}'} | {seconds:.0f} |"
        )


def _table(by_seed: dict[str, Any], seeds: Sequence[str], part: str) -> Any:
    return np.array([by_seed[seed][part] for seed in seeds])


def main(words: Sequence[str] | None = None) -> None:
    import bitsandbytes

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=["8bit", "nf4", "fp4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, help="of a training; default: the world's")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--again", action="store_true", help="forget what OUT.json has")
    chosen = parser.parse_args(words)
    torch.set_num_threads(1)
    load_built_in()
    file = chosen.out.with_suffix(".json")
    report: dict[str, Any] = {"gaps": {}, "runs": {}}
    if file.is_file() and not chosen.again:
        report = json.loads(file.read_text())
    report |= {"machine": machine(), "bitsandbytes": bitsandbytes.__version__}

    def keep() -> None:
        file.write_text(json.dumps(report, indent=1) + "\n")

    for name in chosen.worlds:
        world = WORLDS[name]
        for kind in chosen.kinds:
            known = report["gaps"].setdefault(name, {})
            if kind not in known:
                known[kind] = gap_of(world, kind)
                keep()
                print(name, kind, known[kind], flush=True)
        for seed in chosen.seeds if world.config else ():
            for kind in (PLAIN, *chosen.kinds):
                known = report["runs"].setdefault(name, {}).setdefault(kind, {})
                if str(seed) not in known:
                    count = chosen.iterations or world.iterations
                    run = known[str(seed)] = learn(world, kind, seed, count)
                    keep()
                    ends = (np.mean(run[part]) for part in ("before", "after", "on_plain_base"))
                    print(name, kind, seed, *(f"{end:.3f}" for end in ends), flush=True)
    keep()
    chosen.out.with_suffix(".md").write_text(page(report))


if __name__ == "__main__":
    main()
