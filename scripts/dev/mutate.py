"""Mutation testing of the core: finds small changes of the code that no test notices.

    python scripts/dev/mutate.py trace                 # once: which test runs which line, how long
    python scripts/dev/mutate.py run --share 0.2       # a fifth of the mutants, then the page
    python scripts/dev/mutate.py run --files mmrl/core/distributions.py --rerun survived
    python scripts/dev/mutate.py run --changed main    # mutants of lines that a revision lacks
    python scripts/dev/mutate.py trace tests/core/test_distributions.py   # retrace only these files
    python scripts/dev/mutate.py list --files mmrl/core/distributions.py  # the mutants, untested
    python scripts/dev/mutate.py page                  # only rewrite docs/results/mutation.md

One process imports everything and collects the tests. Every mutant is a fork of it with the changed
code, which runs the tests that execute the line: first those that killed its neighbours, then short
ones, other cases of one function later, until one fails. A test that takes five times its normal
time has also failed. Tests that start other processes do not see a mutant there. Results are kept
in the cache (``mutation/``), so that a stopped run continues; a mutant is tested again when its
function has changed. Equivalent mutants are listed in ``scripts/dev/equivalent_mutants.yaml``, each
with the reason.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "dev")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import mutations  # noqa: E402
import pytest  # noqa: E402
import yaml  # noqa: E402
from hypothesis import Phase  # noqa: E402
from hypothesis import settings as hypothesis_settings  # noqa: E402

from mmrl.core.paths import cache_dir  # noqa: E402

CORE = (
    "mmrl/advantages",
    "mmrl/core/distributions.py",
    "mmrl/train/minibatches.py",
    "samplers",
    "mmrl/objectives",
    "mmrl/train/trainer.py",
)
TESTS = """
    advantages advantages_by_loop alarms minibatches batching contract contract_policies coupled
    curriculum distributions families fitting flow_objectives forward_objectives kernels log masked
    masked_objectives replay_buffer mixture module_policy noise objective_pairs objectives resume
    reward_handling schedules scoring scoring_beside text_reference text_training trainer trees
    ground_truth unified var vlm_features vlm_policy warp
""".split()  # tests/**/test_<name>.py: fast ones that execute the core
PAGE = ROOT / "docs" / "results" / "mutation.md"
EQUIVALENT = ROOT / "scripts" / "dev" / "equivalent_mutants.yaml"
NOTICED = ("killed", "hung")


def store() -> Path:
    folder = cache_dir() / "mutation"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def core_files() -> list[str]:
    """List the files whose mutants are tested, below the root."""
    listed = []
    for place in CORE:
        path = ROOT / place
        listed += sorted(path.glob("*.py")) if path.is_dir() else [path]
    return [str(path.relative_to(ROOT)) for path in listed]


def pytest_main(names: Iterable[str], plugin: object) -> int:
    """Run tests in this process, with a plugin."""
    phases = (Phase.explicit, Phase.generate)  # no shrinking
    hypothesis_settings.register_profile(
        "mutate", phases=phases, derandomize=True, deadline=None, database=None
    )
    hypothesis_settings.load_profile("mutate")
    folder = f"--basetemp=/tmp/mutate-{os.getpid()}"
    quiet = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--capture=no",
        "--tb=no",
        "-r",
        "f",
        folder,
    ]
    return pytest.main([*quiet, "--rootdir", str(ROOT), *names], plugins=[plugin])


# -- which test executes which line --------------------------------------------------------------


class Tracer:
    """A pytest plugin that records the lines of the core that each test executes, including
    fixtures."""

    def __init__(self, files: list[str]):
        self.paths = {str(ROOT / file): file for file in files}
        self.lines: set[tuple[str, int]] = set()
        self.fixtures: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self.tests: dict[str, dict[str, Any]] = {}
        self.passed = False

    def on_call(self, frame: Any, event: str, argument: Any) -> Any:
        return self.on_line if frame.f_code.co_filename in self.paths else None

    def on_line(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.on_line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        outer = self.lines
        self.lines = set()
        try:
            return (yield)
        finally:
            self.fixtures[id(fixturedef)] |= self.lines
            self.lines |= outer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.lines = set()
        self.passed = False
        start = time.process_time()
        threading.settrace(self.on_call)
        sys.settrace(self.on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            for definitions in item._fixtureinfo.name2fixturedefs.values():
                self.lines |= self.fixtures[id(definitions[-1])]
            by_file = defaultdict(list)
            for path, line in sorted(self.lines):
                by_file[self.paths[path]].append(line)
            seconds = round(time.process_time() - start, 4)
            if self.passed:
                self.tests[item.nodeid] = {"seconds": seconds, "lines": by_file}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.passed = report.passed


def trace(names: list[str]) -> None:
    """Write ``trace.json``: tests with their lines and seconds, and the modules that they
    imported."""
    tracer = Tracer(core_files())
    pytest_main(
        names or [str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in TESTS], tracer
    )
    target = store() / "trace.json"
    known = (
        json.loads(target.read_text())
        if target.exists() and names
        else {"tests": {}, "modules": [], "hashes": {}}
    )
    again = {Path(name).as_posix().partition("::")[0] for name in names}
    unchanged = {
        key: test for key, test in known["tests"].items() if key.partition("::")[0] not in again
    }
    heavy = (
        "mmrl",
        "samplers",
        "rewards",
        "torch",
        "transformers",
        "diffusers",
        "peft",
        "accelerate",
        "PIL",
        "scipy",
    )
    modules = [
        name for name in sys.modules if name.partition(".")[0] in heavy and "test" not in name
    ]
    hashes = (
        known["hashes"]
        if names and known["tests"]
        else {file: layout(file) for file in core_files()}
    )
    modules = sorted({*known["modules"], *modules})
    content = {"tests": unchanged | tracer.tests, "modules": modules, "hashes": hashes}
    target.write_text(json.dumps(content))
    print(
        f"{len(content['tests'])} tests, "
        f"{sum(t['seconds'] for t in content['tests'].values()):.0f} s: {target}"
    )


def layout(file: str) -> str:
    """Hash which statement is on which line."""
    places = [
        (type(node).__name__, node.lineno)
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.stmt)
    ]
    return hashlib.sha256(repr(places).encode()).hexdigest()[:12]


# -- mutants -------------------------------------------------------------------------------------


class Results:
    """Stores one line of JSON for every tested mutant; the last one counts."""

    def __init__(self) -> None:
        self.path = store() / "results.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known = {entry["name"]: entry for entry in map(json.loads, lines)}

    def of(self, mutant: mutations.Mutant) -> dict[str, Any] | None:
        entry = self.known.get(mutant.name)
        return entry if entry and entry["source"] == mutant.source else None

    def add(self, mutant: mutations.Mutant, **fields: Any) -> None:
        entry = {"name": mutant.name, "source": mutant.source, **fields}
        self.known[mutant.name] = entry
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def equivalents() -> dict[str, str]:
    """Read the equivalent mutants, each with its reason."""
    return yaml.safe_load(EQUIVALENT.read_text()) or {} if EQUIVALENT.exists() else {}


def in_sample(mutant: mutations.Mutant, share: float, seed: int) -> bool:
    """Tell by a hash of its name whether a mutant is in the sample: a larger share contains a
    smaller one."""
    digest = hashlib.sha256(f"{seed}:{mutant.name}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64 < share


def changed_lines(revision: str, file: str) -> set[int]:
    """Return lines of a file that differ from a revision."""
    command = ["git", "diff", "-U0", revision, "--", file]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines: set[int] = set()
    for start, count in re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", text, re.MULTILINE):
        lines |= set(range(int(start), int(start) + int(count or 1)))
    return lines


def chosen_mutants(args: argparse.Namespace) -> Iterator[tuple[int, mutations.Mutant]]:
    """Yield index in the file and mutant, for the requested files, lines and share."""
    for file in core_files():
        if args.files and not any(file.startswith(prefix) for prefix in args.files):
            continue
        lines = changed_lines(args.changed, file) if args.changed else None
        for index, mutant in enumerate(mutations.mutants(file)):
            touched = lines is None or lines & set(range(mutant.lines[0], mutant.lines[1] + 1))
            matches = not args.match or args.match in mutant.name
            if touched and matches and in_sample(mutant, args.share, args.seed):
                yield index, mutant


class Runner:
    """A plugin that replaces pytest's loop: the session tests mutants in forks of itself."""

    def __init__(self, args: argparse.Namespace, known: dict[str, Any]):
        self.args = args
        self.tests = known["tests"]
        self.results = Results()
        self.by_line: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, test in self.tests.items():
            for file, lines in test["lines"].items():
                for line in lines:
                    self.by_line[file, line].append(name)
        self.turn = turns(self.tests)
        self.killers: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.alive = mutations.functions(core_files())
        gc.collect()
        gc.freeze()
        if self.args.check:
            self.check()
            return True
        skipped = set(equivalents())
        queue = [pair for pair in chosen_mutants(self.args) if pair[1].name not in skipped]
        queue = [pair for pair in queue if self.due(pair[1])]
        end = time.time() + 60 * self.args.minutes
        for place, (index, mutant) in enumerate(queue):
            if time.time() > end:
                break
            outcome = self.test(index, mutant)
            self.results.add(mutant, **outcome)
            if outcome["status"] in NOTICED:
                self.killers[mutant.file, mutant.scope][outcome["by"]] += 1
            else:
                print(f"{outcome['status']}: {mutant.name} (line {mutant.line})", flush=True)
            if place % 50 == 49:
                print(f"{place + 1} of {len(queue)}", flush=True)
        return True

    def due(self, mutant: mutations.Mutant) -> bool:
        entry = self.results.of(mutant)
        if entry and entry["status"] in NOTICED:
            self.killers[mutant.file, mutant.scope][entry["by"]] += 1
        return entry is None or entry["status"] in self.args.rerun

    def test(self, index: int, mutant: mutations.Mutant) -> dict[str, Any]:
        """Fork, change, run. Returns the status, the test that noticed and the seconds."""
        names, left = self.tests_of(mutant)
        if not names:
            return {"status": "unexecuted", "by": "", "seconds": 0.0}
        start, (reader, writer) = time.time(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self.child(index, mutant, names, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()
        _, code = os.waitpid(pid, 0)
        end_group(pid)
        at = lines[-1] if lines else ""
        seconds = round(time.time() - start, 2)
        if os.WIFSIGNALED(code):
            status = "hung" if os.WTERMSIG(code) in (signal.SIGPROF, signal.SIGALRM) else "killed"
            return {"status": status, "by": at, "seconds": seconds}
        status = {0: "survived", 1: "killed", 3: "unplaceable"}.get(os.WEXITSTATUS(code), "killed")
        outcome = {"status": status, "by": at if status == "killed" else "", "seconds": seconds}
        return outcome | ({"unrun": left} if status == "survived" and left else {})

    def tests_of(self, mutant: mutations.Mutant) -> tuple[list[str], int]:
        """Return the tests that execute the statement, in running order, and how many the budget
        excludes."""
        first, last = mutant.lines
        if mutant.where in ("class", "module"):
            inside = mutant.owner[-1] if mutant.owner else None
            first, last = (inside.lineno, inside.end_lineno) if inside else (1, 10**6)
        names = {
            name
            for line in range(first, min(last, 5000) + 1)
            for name in self.by_line[mutant.file, line]
        }
        if not names and mutant.where in ("class", "module"):
            names = {
                name
                for (file, _), each in self.by_line.items()
                if file == mutant.file
                for name in each
            }
        names = {name for name in names if name in self.items}
        killers = self.killers[mutant.file, mutant.scope]

        def order(name: str) -> tuple[float, float]:
            seconds = self.tests[name]["seconds"]
            return (
                (-1, seconds / killers[name])
                if killers[name]
                else (0, seconds * (1 + self.turn[name]))
            )

        ordered = sorted(names, key=order)
        spent = 0.0
        for place, name in enumerate(ordered):
            spent += self.tests[name]["seconds"]
            if spent > self.args.budget and place:
                return ordered[:place], len(ordered) - place
        return ordered, 0

    def child(
        self, index: int, mutant: mutations.Mutant | None, names: list[str], writer: int
    ) -> None:
        """Run the tests on a mutant; never returns. Exit status 1: a test failed; its name is the
        last line in the pipe."""
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _address_space() + 6 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            if mutant is not None:
                mutations.place(mutant.file, index, self.alive[mutant.file])
        except mutations.Unplaceable:
            os._exit(3)
        except Exception:  # the changed constant cannot be computed
            os._exit(1)
        try:
            for name, following in zip(names, [*names[1:], None]):
                os.write(writer, f"{name}\n".encode())
                self.failed = False
                seconds = self.tests[name]["seconds"]
                signal.setitimer(signal.ITIMER_PROF, 10 + 5 * seconds)
                signal.setitimer(signal.ITIMER_REAL, 120 + 30 * seconds)
                item = self.items[name]
                after = self.items.get(following)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self.failed and mutant is not None:
                    os._exit(1)
                if self.failed:
                    os.write(writer, f"failed {name}\n".encode())
        except BaseException:
            os._exit(1)
        os._exit(0)

    def check(self) -> None:
        """Run all tests in a fork without a mutant, in the order of a run; remove those that fail
        from the trace."""
        names = sorted(self.items.keys() & self.tests.keys())
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self.child(0, None, names, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()
        _, code = os.waitpid(pid, 0)
        end_group(pid)
        unfit = [line.removeprefix("failed ") for line in lines if line.startswith("failed ")]
        unfit += lines[-1:] if code else []
        target = store() / "trace.json"
        known = json.loads(target.read_text())
        known["tests"] = {name: test for name, test in known["tests"].items() if name not in unfit}
        target.write_text(json.dumps(known))
        print(f"{len(names)} tests without a mutant, exit {code}; left out: {unfit or 'none'}")


def turns(tests: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the rank of each test among those of its function, short ones first, so that functions
    come before cases."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tests, key=lambda name: tests[name]["seconds"]):
        cases[name.partition("[")[0]].append(name)
    return {name: place for names in cases.values() for place, name in enumerate(names)}


def end_group(pid: int) -> None:
    """Kill what a child process has left running."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def run(args: argparse.Namespace) -> None:
    """Test the mutants that have no result yet."""
    known = json.loads((store() / "trace.json").read_text())
    stale = [file for file in core_files() if known["hashes"].get(file) != layout(file)]
    if stale:
        sys.exit(
            f"changed since the trace, lines may have moved: {', '.join(stale)}; run trace again"
        )
    for name in known["modules"]:
        try:
            importlib.import_module(name)
        except Exception:  # another package's module that loads only conditionally
            continue
    files = sorted({name.partition("::")[0] for name in known["tests"]})
    pytest_main([file for file in files if (ROOT / file).exists()], Runner(args, known))


# -- the page ------------------------------------------------------------------------------------


def page() -> None:
    """Write docs/results/mutation.md: results by file, and surviving mutants."""
    results = Results()
    skipped = equivalents()
    rows = []
    alive = []
    sums = Counter()
    unknown = set(skipped)
    for file in core_files():
        counts = Counter()
        for mutant in mutations.mutants(file):
            counts["all"] += 1
            entry = results.of(mutant)
            unknown.discard(mutant.name)
            status = (
                "equivalent"
                if mutant.name in skipped
                else (entry or {"status": "untested"})["status"]
            )
            counts["killed" if status in NOTICED else status] += 1
            if status in ("survived", "unexecuted"):
                alive.append(
                    f"* line {mutant.line} `{mutant.name}`" + " (no test executes "
                    "it)" * (status[0] == "u")
                )
        sums.update(counts)
        rows.append(_row(file, counts))
    head = (
        "| file | mutants | tested | killed | equivalent | survived | share killed "
        "|\n|---|---|---|---|---|---|---|"
    )
    text = f"""# Mutation tests of the core

Written by `python scripts/dev/mutate.py page`. To repeat:
`python scripts/dev/mutate.py trace`, then
`nice python scripts/dev/mutate.py run --share 1 --seed 0`. The share counts mutants that are not
equivalent
(`scripts/dev/equivalent_mutants.yaml` has the reasons); mutants that no test executes count as
survivors.
{sums["untested"]} of {sums["all"]} mutants have not been tested, {sums["unplaceable"]} cannot be
put into a running
process.

{head}
{chr(10).join(rows)}
{_row("all", sums)}

## Survivors

{chr(10).join(alive) or "None."}
"""
    PAGE.write_text(text)
    print(_row("all", sums), f"unknown equivalents: {sorted(unknown)}" if unknown else "", sep="\n")


def _row(name: str, counts: Counter[str]) -> str:
    survived = counts["survived"] + counts["unexecuted"]
    judged = counts["killed"] + survived
    share = f"{100 * counts['killed'] / judged:.1f} %" if judged else ""
    tested = judged + counts["equivalent"]
    return (
        f"| {name} | {counts['all']} | {tested} | {counts['killed']} | "
        f"{counts['equivalent']} | {survived} | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tracing = commands.add_parser("trace", help="which test executes which line")
    tracing.add_argument("tests", nargs="*", help="test files; none: the chosen ones")
    for name in ("run", "list"):
        command = commands.add_parser(name)
        command.add_argument(
            "--files", nargs="*", default=[], help="files or folders of the core; none: all"
        )
        command.add_argument("--match", default="", help="text that the mutant's name contains")
        command.add_argument(
            "--share", type=float, default=1.0, help="of the mutants of every file, drawn by hash"
        )
        command.add_argument("--seed", type=int, default=0, help="of the draw")
        command.add_argument(
            "--changed", default="", metavar="REVISION", help="only lines that differ from it"
        )
        command.add_argument(
            "--rerun", nargs="*", default=[], help="statuses to test again, such as survived"
        )
        command.add_argument(
            "--budget", type=float, default=60.0, help="seconds of tests a mutant, at most"
        )
        command.add_argument("--minutes", type=float, default=1e6, help="stop after so many")
        command.add_argument(
            "--check", action="store_true", help="run all tests in a fork without a mutant"
        )
    commands.add_parser("page", help="write docs/results/mutation.md")
    args = parser.parse_args()
    if args.command == "trace":
        trace(args.tests)
    elif args.command == "list":
        for _, mutant in chosen_mutants(args):
            print(f"{mutant.line:4} {mutant.where:8} {mutant.name}")
    elif args.command == "run":
        run(args)
    if args.command in ("run", "page"):
        page()


if __name__ == "__main__":
    main()
