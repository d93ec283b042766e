"""Measures how long data take to start, and what of memory a process holds for them.

    python scripts/bench_data.py --rows 1000000 --pictures 100000 --out bench/data

Rows of text are read twice (a resume reads them again), and questions about pictures twice: the
first time every file is looked at, the second time its size and time alone. Each is read by a
process of its own, whose resident memory is that after reading without that before, and beside the
seconds on the clock stand those of the processor, since others may use the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from measuring import publish  # noqa: E402

from mmrl.utils.machine import machine  # noqa: E402

READ = """
import json, os, sys, time
from mmrl.core.registry import DATA, load_built_in
load_built_in()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before, begin, work = resident(), time.perf_counter(), time.process_time()
source = DATA.build(sys.argv[1], path=sys.argv[2])
print(json.dumps({
    "rows": len(source.train) + len(source.held_out),
    "seconds": time.perf_counter() - begin,
    "processor_seconds": time.process_time() - work,
    "mib": resident() - before,
}))
"""


def texts(folder: Path, count: int) -> Path:
    """Write rows of about 60 bytes."""
    path = folder / "texts.jsonl"
    with path.open("w") as file:
        file.writelines(
            f'{{"text": "a red cube number {i} on a table", "id": {i}}}\n' for i in range(count)
        )
    return path


def questions(folder: Path, count: int) -> Path:
    """Write a JPEG of 320 x 240 and a question for every row."""
    from PIL import Image

    stream = io.BytesIO()
    Image.effect_noise((320, 240), 40).convert("RGB").save(stream, "JPEG")
    pictures = folder / "pictures"
    pictures.mkdir()
    path = folder / "questions.jsonl"
    with path.open("w") as file:
        for i in range(count):
            (pictures / f"{i:07d}.jpg").write_bytes(stream.getvalue())
            row = {"text": f"what is {i}?", "image": f"pictures/{i:07d}.jpg", "answer": "noise"}
            file.write(json.dumps(row) + "\n")
    return path


def reading(kind: str, path: Path, cache: Path) -> dict[str, Any]:
    """Read a source in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "MMRL_CACHE": str(cache)}
    words = [sys.executable, "-c", READ, kind, str(path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measured(rows: int, pictures: int, folder: Path) -> dict[str, Any]:
    works = {"prompts": (texts, rows), "vision": (questions, pictures)}
    report: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()}
    for kind, (write, count) in works.items():
        place = folder / kind
        place.mkdir()
        path = write(place, count)
        report[kind] = [reading(kind, path, place / "cache") for _ in range(2)]
    return report


def page(report: dict[str, Any]) -> str:
    known = report["machine"]
    lines = [
        "# Start of data",
        "",
        f"{known['cpu']}, {known['cores']} cores, {known['memory_gib']:.0f} GiB, load "
        f"{report['load'][0]:.1f}, {known['time']}, commit {known['commit']}",
        "",
        "| source | rows | start | seconds | of the processor | MiB a process |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("prompts", "vision"):
        for start, each in zip(("first", "second"), report[kind]):
            lines.append(
                f"| {kind} | {each['rows']} | {start} | {each['seconds']:.1f} | "
                f"{each['processor_seconds']:.1f} | {each['mib']:.0f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("bench/data"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measured(chosen.rows, chosen.pictures, Path(folder))
    publish(chosen.out, report, page(report))


if __name__ == "__main__":
    main()
