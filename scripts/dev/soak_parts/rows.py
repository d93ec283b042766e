"""Mutates rows, files and pictures of data sets, and reads them with the data sources: the result
must be data or messages, never a traceback or a hang."""

from __future__ import annotations

import copy
import json
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in
from scripts.dev.soak_parts.answers import memory, worked
from scripts.dev.soak_parts.mutations import mutated
from scripts.dev.soak_parts.page import Experiment, Soak

SLOW = 2.0  # CPU seconds that no reading may take
GROWTH = 64 * 2**20
BOX = {"bbox": [1, 2, 20, 20], "bbox_2d": [1, 2, 20, 20], "label": "three"}
TURNS = [
    {"from": "human", "value": "<image>\nHow many?"},
    {"from": "gpt", "value": "<answer>3</answer>"},
]
PARTS = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "How many?"}]
ANNOTATION = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 20, 20], "iscrowd": 0}
COCO = {
    "images": [{"id": 1, "file_name": "0.png", "width": 32, "height": 32}],
    "categories": [{"id": 1, "name": "three"}],
    "annotations": [ANNOTATION],
}
SEEN = {"image": "0.png", "problem": "?"}
# name -> (data source, its options besides path, ending of the file, rows)
SHAPES: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "prompts": ("prompts", {}, "jsonl", [{"text": "a three", "label": 3, "tags": ["x"]}] * 4),
    "captions": ("captions", {}, "jsonl", [{"image": "0.png", "text": "a three"}] * 4),
    "plain": ("vision", {}, "jsonl", [{"image": "0.png", "problem": "?", "solution": "3"}] * 4),
    "boxes": ("vision", {"space": "original"}, "jsonl", [SEEN | BOX] * 4),
    "llava": ("vision", {}, "json", [{"id": 1, "image": "0.png", "conversations": TURNS}] * 4),
    "qwen": ("vision", {}, "jsonl", [{"messages": [{"role": "user", "content": PARTS}]}] * 4),
    "coco": ("vision", {}, "json", COCO),
    "refcoco": ("vision", {}, "json", {**COCO, "annotations": [ANNOTATION | {"caption": "it"}]}),
}  # fmt: skip
NOISE = (b"\x00", b"\xff\xfe", b'"', b"{", b"]", b"\n", b"\xe2\x80\xa8", b"\\ud800", b"9" * 5000)


def run(soak: Soak) -> Iterator[Experiment]:
    """Read mutated data until the time is up."""
    load_built_in()
    draw = random.Random(soak.seed)
    end = time.monotonic() + soak.seconds
    counts: Counter[str] = Counter()
    problems: list[str] = []
    slowest = 0.0
    start = 0
    while time.monotonic() < end:
        shape = draw.choice(list(SHAPES))
        file = _written(soak.folder, shape, draw)
        began = worked()
        came = _read(file, shape, draw)
        seconds = worked() - began
        slowest = max(slowest, seconds)
        counts[came if came in ("read", "refused") else "traceback"] += 1
        if seconds > SLOW or came not in ("read", "refused"):
            problems.append(f"{shape}: {came}, {seconds:.1f} s: {file.read_bytes()[:300]!r}")
        if counts.total() == 500:  # first imports and caches do not count as growth
            start = memory()
    grown = memory() - start if start else 0
    outcome = (
        f"{counts['read']} read, {counts['refused']} refused in a sentence, "
        f"{counts['traceback']} tracebacks; slowest {slowest:.2f} s; memory "
        f"{grown / 2**20:+.0f} MiB"
    )
    failed = len(problems) + (grown > GROWTH)
    named = "".join(f"; {problem}" for problem in problems[:3])
    numbers = {"problems": problems[:30]}
    yield Experiment(
        "rows and files of data sets", counts.total(), failed, outcome + named, numbers
    )


def _written(folder: Path, shape: str, draw: random.Random) -> Path:
    """Write a mutated file of this shape, and a picture which is sometimes damaged."""
    *_, ending, rows = SHAPES[shape]
    if draw.random() < 0.8:
        rows = mutated(copy.deepcopy(rows), draw)
    if ending == "jsonl" and isinstance(rows, list):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = json.dumps(rows)
    content = bytearray(text.encode())
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randint(0, len(content))
        content[at : at + draw.randint(0, 3)] = draw.choice(NOISE)
    file = folder / f"rows.{ending}"
    file.write_bytes(bytes(content[: draw.choice((None, None, None, len(content) // 2))]))
    picture = folder / "0.png"
    Image.new(draw.choice(("RGB", "L", "P", "I;16", "RGBA")), (32, 32)).save(picture)
    if draw.random() < 0.2:
        picture.write_bytes(picture.read_bytes()[: draw.randint(0, 60)])
    return file


def _read(file: Path, shape: str, draw: random.Random) -> str:
    """Read a file with its source; return the outcome."""
    name, options, *_ = SHAPES[shape]
    broken = {"broken": draw.choice(("error", "skip"))} if name == "vision" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = DATA.get(name)(path=file, **options, **broken)
            json.dumps([dict(prompt) for prompt in source.held_out], default=str)
        return "read"
    except UserError:
        return "refused"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
