"""Lists the sections of ``scripts/dev/soak``, and runs them."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.dev.soak_parts import page
from scripts.dev.soak_parts.page import Soak

ROOT = Path(__file__).resolve().parents[3]

# section -> (its module in this folder, its title). A module has ``run(soak)``, which yields an
# ``Experiment`` for every row of the table.
SECTIONS = {
    "kills": ("kills", "Random kills at any moment: resumed to the bit, nothing lost"),
    "disk": ("disk", "Power cuts, a full disk, a read-only one: a sentence, resumed to the bit"),
    "odd": ("odd", "Odd clocks and locales: no traceback, the same result"),
    "long": ("long", "A long run: memory, files and seconds an iteration stay flat"),
    "mutations": ("mutations", "Mutated configurations: no traceback, no hang"),
    "rows": ("rows", "Mutated rows and files of data: no traceback, no hang, no growth"),
    "requests": ("requests", "Mutated requests: no 5xx, no hang, no growth"),
    "load": ("load", "Many clients at once: nothing lost, nothing scored twice"),
    "images": ("images", "Mutated pictures in requests: no 5xx, no hang, no growth"),
    "answers": ("answers", "Hostile answers to the rewards: no hang, no growth"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the named sections and write the page. Returns the exit status."""
    chosen = _arguments(words)
    failed = False
    for name in chosen.sections or _written():
        module, shows = SECTIONS[name]
        run = importlib.import_module(f"scripts.dev.soak_parts.{module}").run
        experiments = []
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            for experiment in run(Soak(Path(folder), chosen.seconds, chosen.seed)):
                print(f"{name}: {experiment.line()}", flush=True)
                experiments.append(experiment)
        failed = failed or not all(experiment.passed for experiment in experiments)
        page.write(chosen.page, name, shows, experiments, time.monotonic() - start)
    print(f"written to {chosen.page}")
    return int(failed)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/dev/soak")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each section")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**31)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "trust.md")
    chosen = parser.parse_args(words)
    if unknown := [name for name in chosen.sections if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    return chosen


def _written() -> list[str]:
    """List the sections whose modules exist."""
    folder = Path(__file__).parent
    missing = [
        name for name, (module, _) in SECTIONS.items() if not (folder / f"{module}.py").exists()
    ]
    if missing:
        print(f"no module yet: {', '.join(missing)}", file=sys.stderr)
    return [name for name in SECTIONS if name not in missing]
