"""Measures the loading time and memory of data: rows of text, and questions about pictures, each
read twice. `python benchmarks/bench_data.py [ROWS [PICTURES]]`

Each is read in its own process. Memory is the growth of resident memory by reading, before any row
of the shared memory-mapped file is accessed. CPU seconds are reported as well as wall seconds,
since the machine may be shared.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mmrl.core.machine import machine

READ = """
import json, os, sys, time
from mmrl.core.registry import DATA, load_built_in
load_built_in()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before, begin, work = resident(), time.perf_counter(), time.process_time()
source = DATA.build(sys.argv[1], path=sys.argv[2])
print(
    f"{sys.argv[1]}, {len(source.train) + len(source.held_out)} rows, {sys.argv[3]} start: "
    f"{time.process_time() - work:.1f} s of the processor, {time.perf_counter() - begin:.1f} s on "
    f"the clock, {resident() - before:.0f} MiB a process"
)
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
    """Write a 320 x 240 JPEG and a question for every row."""
    from PIL import Image

    stream = io.BytesIO()
    Image.effect_noise((320, 240), 40).convert("RGB").save(stream, "JPEG")
    path = folder / "questions.jsonl"
    with path.open("w") as file:
        for i in range(count):
            (folder / f"{i:07d}.jpg").write_bytes(stream.getvalue())
            row = {"text": f"what is {i}?", "image": f"{i:07d}.jpg", "answer": "noise"}
            file.write(json.dumps(row) + "\n")
    return path


def main(rows: int = 1_000_000, pictures: int = 100_000) -> None:
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {os.getloadavg()[0]:.1f}, {about['time']}")
    for kind, write, count in (("prompts", texts, rows), ("vision", questions, pictures)):
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), count)
            env = os.environ | {"MMRL_CACHE": str(Path(folder, "cache"))}
            for start in ("first", "second"):
                words = [sys.executable, "-c", READ, kind, str(path), start]
                subprocess.run(words, env=env, check=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
