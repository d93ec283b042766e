"""Measures samples a second of every reward alone and of a set, overlapped or not, and the cost of
a cache hit.

    python scripts/bench_rewards.py  # rewards that need no network; a minute or two
    python scripts/bench_rewards.py --rewards clip_score=model:ViT-B-32,pretrained:openai --size 512

Rewards with models are built with small random networks of the real classes unless --rewards says
otherwise, so their speed is that of the pipeline around the network. Writes docs/results/rewards.md
and rewards.json, whose numbers the table of docs/rewards.md shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import measuring  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

from mmrl.cli.reward_table import markdown, renewed, speeds  # noqa: E402
from mmrl.config import build_rewards  # noqa: E402
from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.registry import REWARDS, load_built_in  # noqa: E402
from mmrl.scoring import Handling, Scorer  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402
from rewards.card import card_of  # noqa: E402
from tests.fixtures.tiny_rewards import TINY, asked, pictures, save_head, save_tiny_clip  # noqa: E402

ELSEWHERE = ("remote",)  # needs a server
# seconds a sample that the slow reward of the set waits, as one that asks a distant server does
SLOW = 0.08


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rewards",
        nargs="*",
        default=[],
        help="YAML options by name: clip_score={model: ViT-B-32}",
    )
    parser.add_argument("--size", type=int, default=128, help="pixels a side")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on every reward")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    load_built_in()
    media = pictures(options.samples, options.size, options.size)
    prompts = asked(options.samples)
    with tempfile.TemporaryDirectory() as folder:
        configured = {
            text.partition("=")[0]: yaml.safe_load(text.partition("=")[2] or "{}")
            for text in options.rewards
        }
        small = small_options(Path(folder))
        built = rewards_of(configured, small)
        speed = {
            name: per_second(name, reward, media, prompts, options.seconds)
            for name, reward in built.items()
        }
        speed |= texts_per_second(options.samples, options.seconds)
        report = {
            "samples_per_second": {name: value for name, value in speed.items() if value},
            "small": sorted(set(small) - set(configured)),
            "overlap": overlap(built, media, prompts),
            "cache": cached(media, prompts),
        }
    report |= {"size": options.size, "samples": options.samples, "machine": machine()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rewards.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "rewards.md").write_text(page(report))
    table = ROOT / "docs" / "rewards.md"
    if options.out == ROOT / "docs" / "results":
        table.write_text(renewed(table.read_text(), markdown(speeds(ROOT / "docs"), "rewards")))
    print(page(report))


def rewards_of(configured: dict[str, Any], small: dict[str, Callable]) -> dict[str, Callable]:
    """Build those rewards of pictures that need no network, and those the user chose."""
    rewards = {}
    for name, entry in sorted(REWARDS.items()):
        card = card_of(entry)
        asks = name.startswith("judge") or name in ELSEWHERE
        if name not in configured and ("image" not in card.media or card.of != "sample" or asks):
            continue
        try:
            if name in configured:
                rewards[name] = build_rewards({name: configured[name]})[name].reward
            else:
                rewards[name] = REWARDS.build(name, **small.get(name, dict)())
        except (UserError, TypeError, ImportError) as error:
            print(f"left out {name}: {str(error).splitlines()[0][:100]}")
    return rewards


def small_options(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return options that build each reward with a small random model of its class, as the tests
    do."""
    from tests.fixtures.tiny_image_rewards import TINY_OPTIONS

    clip = save_tiny_clip(folder / "clip")
    head = save_head(folder / "head.pth", TINY["embed_dim"])
    makers: dict[str, Callable] = {
        name: partial(make, place(folder, name)) for name, make in TINY_OPTIONS.items()
    }
    makers["digits"] = makers["digits_judge"] = lambda: {"path": "world:digits/reader-test"}
    makers["clip_score"] = lambda: {"model": clip}
    makers["aesthetic"] = lambda: {"head": head, "clip": clip}
    return makers


def place(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def per_second(
    name: str, reward: Callable, media: Any, prompts: list[dict], budget: float
) -> float | None:
    """Return samples a second of the median call; None where the reward does not judge these."""
    try:
        first = measuring.seconds(lambda: reward(media, prompts))
    except Exception as error:
        print(f"left out {name}: {type(error).__name__}: {str(error)[:100]}")
        return None
    calls = max(1, min(20, int(budget / max(first, 1e-3))))
    times = sorted(measuring.seconds(lambda: reward(media, prompts)) for _ in range(calls))
    return len(prompts) / times[len(times) // 2]


def texts_per_second(samples: int, budget: float) -> dict[str, float | None]:
    """Measure every reward of texts on ground truths; those with a model of their own are left
    out."""
    from tests.fixtures.text_rewards import SMALLEST, prompts_of

    speeds = {}
    for name, (chosen, _) in SMALLEST.items():
        if name == "text_similarity":
            continue
        reward = REWARDS.build(name, **chosen)
        prompts = prompts_of(name)
        prompts = (prompts * samples)[:samples]
        texts = [reward.ground_truth(prompt) for prompt in prompts]
        speeds[name] = per_second(name, reward, texts, prompts, budget)
    return speeds


class Distant:
    """Waits before it scores: what a slow server costs, without one."""

    def __call__(self, media: torch.Tensor, prompts: list[dict]) -> torch.Tensor:
        time.sleep(SLOW * len(prompts))
        return media.flatten(1).mean(1)


def overlap(
    built: dict[str, Callable], media: torch.Tensor, prompts: list[dict], parts: int = 8
) -> dict[str, float]:
    """Time sampling (it waits as long as the slow reward) and a set with one slow reward, in
    sequence and overlapped.

    Raises AssertionError if one number differs.
    """
    names = [name for name in ("clip_score", "aesthetic", "jpeg_compressibility") if name in built]
    rewards = {name: built[name] for name in names} | {"distant": Distant()}
    step = -(-len(prompts) // parts)
    slices = [slice(i, i + step) for i in range(0, len(prompts), step)]

    def sampled(rows: slice) -> tuple[torch.Tensor, list[dict]]:
        time.sleep(SLOW * len(prompts[rows]))
        return media[rows], prompts[rows]

    def sequential() -> dict[str, torch.Tensor]:
        samples, texts = zip(*map(sampled, slices), strict=True)
        together = torch.cat(samples), sum(texts, [])
        return {name: Scorer({name: reward})(*together)[name] for name, reward in rewards.items()}

    def overlapped() -> dict[str, torch.Tensor]:
        stream = Scorer(rewards).stream(len(prompts))
        for rows in slices:
            stream.put(*sampled(rows))
        return stream.result()

    expected = sequential()
    scores = overlapped()
    for name in rewards:
        torch.testing.assert_close(expected[name], scores[name], rtol=1e-4, atol=1e-5)
    slow = measuring.seconds(sequential)
    fast = measuring.seconds(overlapped)
    return {
        "sequential": slow,
        "overlapped": fast,
        "times": slow / fast,
        "samples_per_second": {
            "sequential": len(prompts) / slow,
            "overlapped": len(prompts) / fast,
        },
        "rewards": list(rewards),
        "parts": len(slices),
    }


def cached(media: torch.Tensor, prompts: list[dict]) -> dict[str, Any]:
    """Return seconds of a miss and of a hit."""
    seconds = {}
    for name, reward in network().items():
        scorer = Scorer({name: reward}, handling={name: Handling(cache="memory")})
        reward(media[:2], prompts[:2])
        miss = measuring.seconds(lambda scorer=scorer: scorer(media, prompts))
        hit = min(measuring.seconds(lambda scorer=scorer: scorer(media, prompts)) for _ in range(3))
        seconds[name] = {"miss": miss, "hit": hit, "share": hit / miss}
    return seconds


def network() -> dict[str, Callable]:
    """Build a CLIP of the size of ViT-B/32 with random weights: a reward's model without its
    download."""
    import open_clip

    config = open_clip.get_model_config("ViT-B-32")
    with torch.random.fork_rng():
        tower = open_clip.CLIP(**config).eval().visual

    def score(media: torch.Tensor, prompts: list[dict]) -> torch.Tensor:
        fitted = torch.nn.functional.interpolate(media, (224, 224), mode="bicubic", antialias=True)
        return tower(fitted).float().mean(1)

    return {"ViT-B/32, random weights": score}


INTRODUCTION = """# Rewards: speed

Written by `scripts/bench_rewards.py`. Pictures of {size} x {size} pixels, {samples} in a call.
Rewards marked * run a
small random network of the real class: their numbers are those of the pipeline around it, not of a
real model. Rewards
of texts judge ground truths.

| reward | samples a second |
|---|---|
"""
OVERLAP = """
## Overlap

A rollout in {parts} parts, scored by {names}; `distant` waits {slow} s a sample, and so does the
sampling. One after
another {sequential:.2f} s ({before:.1f} samples a second), overlapped {overlapped:.2f} s
({after:.1f}): **{times:.2f}
times** as fast, with the same numbers.

## Cache

| reward | miss, s | hit, s | hit / miss |
|---|---|---|---|
"""


def page(report: dict[str, Any]) -> str:
    over = report["overlap"]
    about = report["machine"]
    speeds = report["samples_per_second"].items()
    rows = [
        f"| `{name}`{'*' if name in report['small'] else ''} | {value:.3g} |"
        for name, value in speeds
    ]
    text = (
        INTRODUCTION.format(size=report["size"], samples=report["samples"]) + "\n".join(rows) + "\n"
    )
    before, after = over["samples_per_second"].values()
    text += OVERLAP.format(
        **over,
        before=before,
        after=after,
        slow=SLOW,
        names=", ".join(f"`{name}`" for name in over["rewards"]),
    )
    for name, timing in report["cache"].items():
        text += f"| {name} | {timing['miss']:.4f} | {timing['hit']:.4f} | {timing['share']:.2%} |\n"
    plain = [f"* {key}: {value}\n" for key, value in about.items() if not isinstance(value, dict)]
    return f"{text}\n## Machine\n\n{''.join(plain)}"


if __name__ == "__main__":
    main()
