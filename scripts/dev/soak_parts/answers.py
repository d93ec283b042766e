"""Hostile answers to every verifiable reward: no traceback, no hang, no growth."""

from __future__ import annotations

import logging
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.core.registry import REWARDS, load_built_in
from scripts.dev.soak_parts.page import Experiment, Soak
from tests.fixtures.text_rewards import SMALLEST, prompts_of
from tests.rewards.test_growth import PIECES, WRAPS

SLOW = 2.0  # CPU seconds, including worker processes, that no answer may take
GROWTH = 64 * 2**20
LENGTHS = (1, 10, 100, 1000, 10_000, 100_000)


def mutated(draw: random.Random, right: str) -> str:
    """Return the right answer with pieces inserted, removed and repeated; or only pieces."""
    text = right if draw.random() < 0.5 else ""
    for _ in range(draw.randint(1, 5)):
        at = draw.randint(0, len(text))
        change = draw.randrange(4)
        if change == 0 and text:
            text = text[:at] + text[at + draw.randint(1, 20) :]
        elif change == 1:
            piece = draw.choice(PIECES)
            count = draw.choice(LENGTHS) // len(piece) + 1
            text = text[:at] + piece * count + text[at:]
        elif change == 2:
            text = text[:at] + text[: draw.randint(0, 200)] + text[at:]
        else:
            text = text[:at] + chr(draw.choice([0, 9, 0x663, 0xD800, 0x1F600, 0x200B])) + text[at:]
    return draw.choice(WRAPS).format(text) if draw.random() < 0.3 else text


def worked() -> float:
    """Return the CPU seconds of this process and its finished children."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def judged(reward: Any, text: str, prompt: dict[str, Any]) -> str:
    """Return the outcome: "scored", or what was wrong."""
    try:
        (score,) = reward([text], [prompt]).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return "scored" if not math.isnan(score) else "no value"


def run(soak: Soak) -> Iterator[Experiment]:
    load_built_in()
    logging.disable(logging.WARNING)
    built = [
        (REWARDS.build(name, **options), prompts_of(name))
        for name, (options, _) in SMALLEST.items()
    ]
    rewards = [(reward, prompts) for reward, prompts in built if hasattr(reward, "ground_truth")]
    draw = random.Random(soak.seed)
    outcomes: Counter[str] = Counter()
    slow = 0
    slowest = 0.0
    first = memory()
    until = time.monotonic() + soak.seconds
    while time.monotonic() < until:
        reward, prompts = draw.choice(rewards)
        prompt = draw.choice(prompts)
        text = mutated(draw, reward.ground_truth(prompt))
        start = worked()
        outcomes[judged(reward, text, prompt)] += 1
        seconds = worked() - start
        slow += seconds > SLOW
        slowest = max(slowest, seconds)
        if sum(outcomes.values()) == 500:
            first = memory()
    logging.disable(logging.NOTSET)
    growth = memory() - first
    tries = sum(outcomes.values())
    odd = {what: count for what, count in outcomes.items() if what not in ("scored", "no value")}
    failed = slow + sum(odd.values()) + (growth > GROWTH)
    outcome = (
        f"{outcomes['scored']} scored, {outcomes['no value']} without a value, {sum(odd.values())} "
        f"tracebacks; slowest {slowest:.2f} s; memory {growth / 2**20:+.0f} MiB"
    )
    yield Experiment("answers", tries, failed, outcome, {"slowest": round(slowest, 3), **odd})
