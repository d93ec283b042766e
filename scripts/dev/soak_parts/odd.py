"""Runs commands under a clock that jumps and under locales that are not UTF-8."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.dev.soak_parts import killing
from scripts.dev.soak_parts.page import Experiment, Soak

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 300.0  # seconds of a command
LOCALES = {
    "ASCII": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "Latin-1 output": {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
    "UTF-16 output": {"PYTHONIOENCODING": "utf-16", "PYTHONUTF8": "0"},
}
CLOCKS = {
    "a day back, then on": ("@2026-01-02 12:00:00", "@2026-01-01 12:00:00"),
    "back to 1970": ("@2026-01-02 12:00:00", "@1970-01-02 00:00:00"),
    "a year ahead, then back": ("@2027-01-02 12:00:00", "@2026-01-01 12:00:00"),
}
WORDS = "ein Zug f\u00e4hrt \u2192 \u6771\u4eac \U0001f682"


@dataclass(frozen=True)
class Done:
    """Holds what a command ended with and what it printed, as bytes."""

    status: int
    printed: bytes

    def problem(self, *expected: int) -> str:
        """Say what is wrong: another status, or a traceback."""
        if b"Traceback" in self.printed:
            return f"traceback: {self.printed[-400:]!r}"
        allowed = expected or (0,)
        return "" if self.status in allowed else f"status {self.status}: {self.printed[-400:]!r}"


def mmrl(
    *words: object, env: Mapping[str, str] | None = None, before: tuple[str, ...] = ()
) -> Done:
    """Run a command to its end. ``before``: words that start it, such as ``faketime -f ...``."""
    command = [*before, sys.executable, "-m", "mmrl", *map(str, words)]
    plain = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=plain | dict(env or {}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    return Done(done.returncode, done.stdout)


def run(soak: Soak) -> Iterator[Experiment]:
    """Train, resume, rerun and report in every odd surrounding, on prompts beyond ASCII."""
    folder = soak.folder / "odd"
    config = killing.configuration(folder, "ToyCausal", 6, log__rollouts=1)
    prompts = folder / "prompts.jsonl"
    rows = [json.loads(line) for line in prompts.read_text("utf-8").splitlines()]
    worded = [
        json.dumps({**row, "text": f"{row['text']} {WORDS}"}, ensure_ascii=False) for row in rows
    ]
    prompts.write_text("\n".join(worded) + "\n", encoding="utf-8")
    plain = _trained(config, folder / "plain", {}, {})
    assert not plain, plain
    expected = killing.left_behind(folder / "plain")
    yield _locales(config, folder, expected)
    if shutil.which("faketime"):
        yield _clocks(config, folder, expected)


def _locales(config: Path, folder: Path, expected: dict[str, object]) -> Experiment:
    problems = []
    for name, env in LOCALES.items():
        place = folder / name
        problem = _trained(config, place, env, env)
        problem = problem or mmrl("report", place, env=env).problem()
        problem = problem or mmrl("rerun", place, env=env).problem()
        named = mmrl("train", config, f"run={folder / name}-\u00e9t\u00e9 \u6771", env=env)
        problem = problem or named.problem(0, 2)  # a name this locale cannot encode: a message
        problem = problem or ", ".join(killing.differences(expected, killing.left_behind(place)))
        problems += [f"{name}: {problem}"] if problem else []
    return _experiment(
        f"train, resume, report, rerun under {', '.join(LOCALES)}", 5 * len(LOCALES), problems
    )


def _clocks(config: Path, folder: Path, expected: dict[str, object]) -> Experiment:
    """Set the clock back between the first half of a run and its resume, and during it."""
    problems = []
    library = _library()
    for name, (first, second) in CLOCKS.items():
        place = folder / name.replace(",", "")
        early, late = ({"LD_PRELOAD": library, "FAKETIME": time} for time in (first, second))
        problem = _trained(config, place, early, late)
        problem = problem or mmrl("report", place, env=late).problem()
        problem = problem or ", ".join(killing.differences(expected, killing.left_behind(place)))
        problems += [f"{name}: {problem}"] if problem else []
    problem = _jumping(config, folder / "jumping", library)
    problem = problem or ", ".join(
        killing.differences(expected, killing.left_behind(folder / "jumping"))
    )
    problems += [f"jumping inside a run: {problem}"] if problem else []
    return _experiment(
        f"clock (libfaketime): {'; '.join(CLOCKS)}; jumping twice inside a run",
        3 * len(CLOCKS) + 1,
        problems,
    )


def _library() -> str:
    """Return the path of libfaketime."""
    done = subprocess.run(
        ["faketime", "-f", "+0", "printenv", "LD_PRELOAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _trained(config: Path, place: Path, env: dict[str, str], later: dict[str, str]) -> str:
    """Train a half, then resume it; say what is wrong."""
    first: Done = mmrl("train", config, f"run={place}", "train.time_limit=0.001", env=env)
    return (
        first.problem(75)
        or mmrl("train", "--resume", place, "train.time_limit=null", env=later).problem()
    )


def _jumping(config: Path, place: Path, library: str) -> str:
    """Train while the clock, which is read from a file each time, moves back."""
    with tempfile.NamedTemporaryFile("w+", suffix=".rc") as clock:
        Path(clock.name).write_text("@2026-03-01 12:00:00\n")
        env = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": clock.name,
            "FAKETIME_NO_CACHE": "1",
            "MMRL_SOAK_CLOCK": clock.name,
        }
        plugin = place.with_name("jumping.py")
        plugin.write_text(JUMPING)
        done = mmrl("train", config, f"run={place}", f"plugins=[{plugin}]", env=env)
    return done.problem()


JUMPING = '''
"""Moves the clock when iterations end."""
import os
from pathlib import Path
from mmrl.monitoring.log import RunLog

TIMES = {2: "@2025-03-01 12:00:00", 4: "@2026-06-01 12:00:00", 5: "@2001-01-01 00:00:00"}
plain = RunLog.metrics

def metrics(log, iteration, *args, **options):
    if iteration in TIMES:
        Path(os.environ["MMRL_SOAK_CLOCK"]).write_text(TIMES[iteration] + chr(10))
    return plain(log, iteration, *args, **options)

RunLog.metrics = metrics
'''


def _experiment(name: str, tries: int, problems: list[str]) -> Experiment:
    wrong = "; ".join(problems[:3]) if problems else "no traceback; all bit-equal to a plain run"
    return Experiment(name, tries, len(problems), wrong, {"problems": problems})
