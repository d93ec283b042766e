"""Mutates configurations at random: the result must be success or messages, never a traceback or a
hang."""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from scripts.dev.soak_parts import answers, killing
from scripts.dev.soak_parts.page import Experiment, Soak

ROOT = Path(__file__).resolve().parents[3]
HANG = 20.0  # seconds after which a dry run is ended
SLOW = 2.0  # CPU seconds that no dry run may take
MOST_GROWTH = 64.0  # MiB between the second and the last quarter
WARM = ("digits/flow_grpo.yaml", "digits/counting.yaml", "digits/mask_grpo.yaml")
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 10**18, -(10**30), 10**400, 0.5, -2.5, 1e300, 1e-300,
    float("nan"), float("inf"), "", " ", "x", "é\u2028\U0001f600", "1e-4", "null", "a: b", "{",
    "../..", "./gone.txt", "os:sep", "os:getcwd", ":", "no.module:fn", "world:gone", "/", "~",
    [], {}, [1], ["x"], [[]], [None], {"a": 1}, {"": None}, {"x": {"y": {}}}, "x" * 10_000,
    list(range(1000)), 3.0, "policy_gradient", "grpo", {"group": {}}, {"grpo": {"eps": -1}},
]  # fmt: skip


def run(soak: Soak) -> Iterator[Experiment]:
    """Mutate shipped configurations until the time is up."""
    killing.warm()
    log = soak.folder / "outcomes.jsonl"
    shipped = [path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "serve"]
    end = time.monotonic() + soak.seconds
    seed = soak.seed
    deaths = 0
    while time.monotonic() < end:
        seed += 1
        part = soak.folder / str(seed)
        part.mkdir()
        words = part, sorted(shipped), random.Random(seed), end, log
        pid = killing.forked(lambda words=words: _mutate(*words), part / "log")
        status = killing.waited(pid, soak.seconds + 4 * HANG)
        deaths += status != 0
    outcomes = [json.loads(line) for line in log.read_text().splitlines()]
    counts = Counter(outcome["kind"] for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome["why"] or outcome["seconds"] > SLOW]
    slowest = max((outcome["seconds"] for outcome in outcomes), default=0.0)
    causes = Counter(outcome["why"] or f"slow, {outcome['source']}" for outcome in wrong)
    named = "; ".join(f"{count} x {why}" for why, count in causes.most_common(3))
    yield Experiment(
        "mutated configurations, dry run",
        len(outcomes),
        len(wrong) + deaths,
        f"{counts['accepted']} accepted, {counts['refused']} refused in sentences, "
        f"{counts['traceback']} tracebacks, {counts['hang']} over {HANG:g} s, {deaths} deaths, "
        f"the slowest {slowest:.1f} s of a processor" + (f": {named}" if named else ""),
        {"wrong": wrong[:50], "slowest": slowest},
    )
    quarter = max(1, len(outcomes) // 4)
    sizes = [outcome["mib"] for outcome in outcomes]
    before, after = median(sizes[quarter : 2 * quarter] or [0]), median(sizes[-quarter:] or [0])
    yield Experiment(
        "memory over them",
        len(sizes),
        int(after - before > MOST_GROWTH),
        f"{before:.0f} MiB in the second quarter, {after:.0f} MiB in the last",
    )


def mutated(plain: Any, rng: random.Random) -> Any:
    """Change one to three places: another value, a missing key, a new key, a swapped section."""
    changed = copy.deepcopy(plain)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(changed))
        parent, key = rng.choice(places)
        act = rng.random()
        if act < 0.7:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        elif act < 0.8:
            del parent[key]
        elif isinstance(parent, dict):
            parent[rng.choice([f"{key}x", "seed", "path", 3, ""])] = copy.deepcopy(
                rng.choice(VALUES)
            )
        if not changed:
            return changed
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)) and value[key]:
            yield from _places(value[key])


class _Hang(BaseException):
    """Ends a dry run that takes too long."""


def _mutate(folder: Path, shipped: list[Path], rng: random.Random, end: float, log: Path) -> None:
    """Dry-run mutated configurations in this process and record the outcomes."""
    from mmrl.apps.dry_run.dryrun import dry_run

    def hang(*_: object) -> None:
        raise _Hang

    signal.signal(signal.SIGALRM, hang)
    os.chdir(folder)
    for name in WARM:  # a first import is not a hang
        dry_run(ROOT / "configs" / name)
    while time.monotonic() < end:
        source = rng.choice(shipped)
        plain = mutated(yaml.safe_load(source.read_text()), rng)
        file = folder / "mutated.yaml"
        file.write_text(yaml.safe_dump(plain, sort_keys=False))
        line = _tried(file)
        if line["seconds"] > SLOW and not line["why"]:  # retry: a first import is not a hang
            line = {"first": line["seconds"], **_tried(file)}
        if line["why"] or max(line["seconds"], line.get("first", 0.0)) > SLOW:
            line["source"] = source.name
            line["text"] = repr(plain)[:1000]
        gc.collect()
        line["mib"] = answers.memory() / 2**20
        with log.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def _tried(file: Path) -> dict[str, Any]:
    """Dry-run a file and return its outcome and CPU seconds."""
    from mmrl.apps.dry_run.dryrun import dry_run
    from mmrl.core.errors import UserError

    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANG)
    why = ""
    try:
        dry_run(file)
        kind = "accepted"
    except UserError:
        kind = "refused"
    except _Hang:
        kind, why = "hang", "hang"
    except BaseException as error:
        kind = "traceback"
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {"kind": kind, "why": why, "seconds": time.process_time() - start}
