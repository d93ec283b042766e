"""Compares two processes with one for every family: copies (DDP) and shards (FSDP2).

    python scripts/dev/check_shards.py                         # all, into docs/results/shards.md
    python scripts/dev/check_shards.py --only vlm-llava modular-echo --out FOLDER

Results are kept in shards.json; cases that are not rerun keep theirs, with their run. Tiny models
of the real classes with random weights train for two iterations, on gloo: samples, rewards,
log-probs, advantages, metrics and all weights. In float64; in float32 if a network mixes in values
of a fixed dtype. The suite has some of them (tests/train/test_processes.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
KINDS = {"one": (), "copies": (), "shards": ("--sharded",)}
EQUAL = 1e-13  # differences up to this are listed without their numbers


class Row(NamedTuple):
    """Holds the page's row of a case."""

    cells: str  # after its name
    run: str  # when, of which commit, where


def names() -> list[str]:
    """List the cases: vision-language families, replayed pipelines and modular ones."""
    from tests.fixtures.replay_cases import CASES, MODULAR
    from tests.policies.vlm.test_vlm_families import NAMES

    pipelines = [f"pipeline-{name}" for name, case in CASES.items() if not case.refused]
    return [f"vlm-{name}" for name in NAMES] + pipelines + [f"modular-{name}" for name in MODULAR]


def run(case: str, folder: Path, single: bool) -> dict[str, str]:
    """Run one case by one process and by two; return what failed, by the way it was run."""
    from tests.fixtures import warm

    precise = ("--single",) if single else ()
    for kind, words in KINDS.items():
        (folder / kind).mkdir(parents=True)
        start = warm.run if kind == "one" else warm.ranks
        module = ["-m", "tests.fixtures.family_worker", *precise]
        done = start([*module, folder / kind, *words, "--cases", case])
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "Error" in line]
            return {kind: (said or ["no error was printed"])[-1][:160]}
    return {}


def apart(case: str, folder: Path, kind: str) -> tuple[float, float]:
    """Return the largest difference of two processes from one, and the norm of the gradient."""
    from safetensors.torch import load_file

    from tests.fixtures.process_worker import NUMBERS

    single, double = (load_file(folder / k / f"{case}.safetensors") for k in ("one", kind))
    single.pop("idle"), double.pop("idle")
    if single.keys() != double.keys():
        raise SystemExit(f"{case}: {kind} wrote other tensors")
    far = [farthest(value, double[name]) for name, value in single.items() if value.numel()]
    return max(far), float(single["1/metrics"][NUMBERS.index("grad_norm")])


def farthest(single: Any, double: Any) -> float:
    """Return the largest difference of two tensors of one shape; NaN in only one is infinitely
    far."""
    difference = (single.double() - double.double()).abs()
    difference[single.isnan() & double.isnan()] = 0.0
    return float(difference.nan_to_num(float("inf")).max())


def compare(case: str) -> dict[str, Any]:
    """Compare one case, in float32 if float64 does not run or gives NaN."""
    for single in (False, True):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            failed = run(case, folder, single)
            if failed and not single:
                continue
            result: dict[str, Any] = {"case": case, "type": "float32" if single else "float64"}
            if failed:
                return result | {"failed": failed}
            for kind in ("copies", "shards"):
                result[kind], result["gradient"] = apart(case, folder, kind)
            if single or result["gradient"] == result["gradient"]:
                return result
    raise AssertionError("both were tried")


def cells(result: dict[str, Any]) -> str:
    """Format a result for a row."""
    if "failed" in result:
        ((kind, why),) = result["failed"].items()
        return f"{result['type']} | failed as {kind}: {why.replace('|', '/')} | | "
    numbers = [f"{result[name]:.1e}" for name in ("copies", "shards")]
    return f"{result['type']} | {' | '.join(numbers)} | {result['gradient']:.2g}"


def described() -> str:
    """Format date, commit and machine of this run."""
    from mmrl.core.machine import machine

    about = machine()
    names = ("torch", "transformers", "diffusers")
    libraries = ", ".join(f"{name} {about['versions'][name]}" for name in names)
    return f"{about['time']} | {about['commit']} | {about['cpu']} | {libraries}"


def equal(row: Row) -> bool:
    """Whether a case in float64 equals one process, with a gradient to compare."""
    kind, *numbers, gradient = row.cells.split(" | ")
    if kind != "float64" or len(numbers) != 2:
        return False
    return max(map(float, numbers)) < EQUAL and float(gradient) > 0


def page(rows: Mapping[str, Row], known: list[str]) -> str:
    """Write the page of the rows of known cases, in their order."""
    rows = {case: rows[case] for case in known if case in rows}
    ran = sum("failed as " not in row.cells for row in rows.values())
    lacking = [case for case in known if case not in rows]
    same = [case for case, row in rows.items() if equal(row)]
    runs = sorted({" ".join(row.run.split(" | ")[1:3]) for row in rows.values()})
    return "\n".join(
        [
            "# Two processes compared with one, by family",
            "",
            "Written by `scripts/dev/check_shards.py`. Tiny models of the real classes with random",
            "weights, two iterations on gloo: the largest difference of samples, rewards,",
            f"log-probs, advantages, metrics and weights. Commits and machines: {'; '.join(runs)}.",
            "",
            f"{ran} of {len(rows)} ran."
            + (f" Not measured: {', '.join(lacking)}." if lacking else ""),
            f"In float64 {len(same)} differ by less than {EQUAL:.0e}, as copies and as shards:",
            f"{', '.join(same)}.",
            "",
            "The others. A gradient of 0: all rewards were equal, so only sampling and scoring",
            "were compared; nan: no step was taken. Networks in float32 use values of that type.",
            "",
            "| case | in | copies (DDP) | shards (FSDP2) | norm of the gradient |",
            "|---|---|---|---|---|",
            *(f"| {case} | {row.cells} |" for case, row in rows.items() if case not in same),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    known = names()
    strangers = sorted(set(arguments.only or ()) - set(known))
    if strangers:
        parser.error(f"--only: {', '.join(strangers)}: choose from {', '.join(known)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, record = (arguments.out / f"shards.{kind}" for kind in ("md", "json"))
    known_rows = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    rows = {case: Row(*row) for case, row in known_rows.items()}
    run_now = described()
    for case in arguments.only or known:
        rows[case] = Row(cells(compare(case)), run_now)
        print(f"| {case} | {rows[case].cells} |", flush=True)
        record.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        file.write_text(page(rows, known), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
