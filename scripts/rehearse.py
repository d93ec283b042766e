"""Rehearses every configuration of configs/ at true size on named cards, without weights, network
or card, and writes a table of what each would take.

    python scripts/rehearse.py [--devices 8xH100] [--only sd3 vlm/counting ...] [--out STEM]
        [--seconds N]

Writes STEM.json and STEM.md (docs/results/rehearsal). What is already in STEM.json from the same
devices is taken from there, so an interrupted run goes on; --again forgets what is rehearsed anew.
Passes that two configurations share are measured once. Configurations whose prompts do not divide
among the cards take the next number that does, and the table says so.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.registry import load_built_in  # noqa: E402
from mmrl.dry_run.estimate import Estimate, Known, estimate, measure  # noqa: E402
from mmrl.dry_run.page import lines  # noqa: E402
from mmrl.utils.cards import Devices, devices  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402

GIB = 2**30
CONFIGS = ROOT / "configs"


def configurations(only: list[str]) -> list[Path]:
    """List the training configurations, or those whose name begins with one of ``only``."""
    files = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "serve")
    return [path for path in files if not only or name_of(path).startswith(tuple(only))]


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def sizes(path: Path, count: int) -> list[str]:
    """Return overrides by which a configuration can be shared by ``count`` processes; none where
    it can be as it stands."""
    from mmrl.config.options import TrainOptions
    from mmrl.run.build import read

    train = read(path, [], 1).section("train", TrainOptions)
    prompts = math.ceil(train.prompts_per_iteration / count) * count
    rows = prompts * train.group_size
    before = train.prompts_per_iteration * train.group_size
    steps = max(1, before // train.train_batch_size)
    while rows % (steps * count):
        steps -= 1
    batch = rows // steps
    share = batch // count
    divides = prompts == train.prompts_per_iteration and train.train_batch_size % count == 0
    micro_batch = None if train.micro_batch_size == "auto" else train.micro_batch_size
    if divides and (micro_batch or 1) <= share:
        return []
    overrides = [f"train.prompts_per_iteration={prompts}", f"train.train_batch_size={batch}"]
    if micro_batch:
        most = min(micro_batch, share)
        fits = max(n for n in range(1, most + 1) if share % n == 0)
        overrides.append(f"train.micro_batch_size={fits}")
    return overrides


def rehearsed(path: Path, cards: Devices, known: Known) -> dict[str, Any]:
    """Rehearse one configuration; ``failed`` says why it could not be."""
    start = time.perf_counter()
    try:
        overrides = sizes(path, cards.count)
        run = measure(path, overrides, cards.count, known)
        copies = estimate(run, cards, sharded=False)
        shards = estimate(run, cards, sharded=True)
    except UserError as error:
        return {"failed": str(error)}
    report = run.report
    return {
        "overrides": overrides,
        "model": report.path,
        "parameters": run.measured.parameters,
        "trained": run.measured.trained,
        "rows": report.plan.rows,
        "pass_rows": run.measured.rows,
        "plain": {"peak_gib": None if report.peak is None else report.peak / GIB},
        "unknown": [line for line in lines(report) if "?" in line],
        "copies": numbers(copies),
        "shards": numbers(shards),
        "seconds_here": round(time.perf_counter() - start, 1),
    }


def numbers(guess: Estimate) -> dict[str, Any]:
    return {
        "peak_gib": guess.peak / GIB,
        "fullest": guess.fullest,
        "fits": guess.fits,
        "memory_gib": {name: size / GIB for name, size in guess.memory.items()},
        "seconds": guess.whole,
        "parts": guess.seconds,
        "pflop": guess.flops / 1e15,
        "mfu": guess.mfu,
    }


def page(report: dict[str, Any]) -> str:
    """Write the table."""
    rows = report["configurations"]
    done = {name: row for name, row in rows.items() if "failed" not in row}
    fit = sum(row["copies"]["fits"] for row in done.values())
    shard = sum(row["shards"]["fits"] and not row["copies"]["fits"] for row in done.values())
    lines = [
        f"# Every configuration on {report['devices']}",
        "",
        f"Written by `{report['machine']['command']}` on {report['machine']['time']}, commit "
        f"{report['machine']['commit']}. No card was used: the real networks passed on fake "
        "tensors at true size, as `mmrl train CONFIG --dry-run --devices "
        f"{report['devices']}` does it; see [scale](../scale.md) for what is counted and what is "
        "arithmetic. No estimate of seconds was compared with a card.",
        "",
        f"{len(done)} of {len(configurations([]))} configurations were rehearsed: "
        f"{fit} fit as copies (DDP), "
        f"{shard} more in shards (FSDP2), {len(done) - fit - shard} do not fit as they stand.",
        "",
        "Peak: GiB of one card at its fullest moment. Plain: what `--dry-run` without cards "
        "estimates by its formula. s: of one iteration without rewards. A star: sizes were "
        "rounded up to be shared by all cards (the json says to what). PFLOP: 10^15 additions and "
        "multiplications of an iteration, all cards together; an H100 can do 0.99 of them a "
        "second. MFU: the share of that which would be used.",
        "",
        *_missing(rows),
        "| configuration | parameters | trained | pass | peak, copies | at | peak, shards | plain "
        "| s, copies | s, shards | PFLOP | MFU | fits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in done.items():
        copies, shards = row["copies"], row["shards"]
        how = "copies" if copies["fits"] else "shards" if shards["fits"] else "no"
        plain = row["plain"]["peak_gib"]
        lines.append(
            f"| {name}{'*' if row['overrides'] else ''} | {_count(row['parameters'])} | "
            f"{_count(row['trained'])} | {row['pass_rows']} | {copies['peak_gib']:.2f} | "
            f"{copies['fullest']} | {shards['peak_gib']:.2f} | "
            f"{'-' if plain is None else f'{plain:.2f}'} | {copies['seconds']:.3g} | "
            f"{shards['seconds']:.3g} | {copies['pflop']:.3g} | {copies['mfu']:.0%} | {how} |"
        )
    failed = {name: row["failed"] for name, row in rows.items() if "failed" in row}
    if failed:
        lines += ["", "Not rehearsed:", ""]
        lines += [f"- {name}: {why}" for name, why in failed.items()]
    return "\n".join(lines) + "\n"


def _missing(rows: dict[str, Any]) -> list[str]:
    """Say which configurations nobody has rehearsed yet."""
    names = [name for path in configurations([]) if (name := name_of(path)) not in rows]
    return [f"Not tried yet: {', '.join(names)}.", ""] if names else []


def _count(number: float) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="8xH100")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/rehearsal")
    parser.add_argument("--again", action="store_true", help="measure what is there anew")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after")
    args = parser.parse_args(words)
    load_built_in()
    cards = devices(args.devices)
    file = args.out.with_suffix(".json")
    report: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if report.get("devices") != str(cards):
        report = {"devices": str(cards), "configurations": {}}
    known: Known = {}
    start = time.perf_counter()
    chosen = configurations(args.only)
    for path in chosen if args.again else []:
        report["configurations"].pop(name_of(path), None)
    for path in chosen:
        name = name_of(path)
        if name in report["configurations"] or time.perf_counter() - start > args.seconds:
            continue
        row = rehearsed(path, cards, known)
        print(name, json.dumps(row)[:300], flush=True)
        report["configurations"][name] = row
        report["configurations"] = dict(sorted(report["configurations"].items()))
        report["machine"] = machine()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(page(report))
    failed = [name for name, row in report["configurations"].items() if "failed" in row]
    print(f"{len(report['configurations'])} rehearsed, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
