"""Rows of large data are kept in a file that processes map, and equal those in memory."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from mmrl.data.base import batch
from mmrl.data.prompts import Prompts
from mmrl.data.sources import stored as rows_on_disk
from mmrl.data.sources.stored import Stored, stored
from tests.fixtures import tiny_vlms

ODD = {
    "float": [0.1, 1e300, float("inf")],
    "whole": [2**70, -1, True],
    "nested": {"a": [{"b": None}, []]},
    "text": "é \ud800 \u0000 \U0001f600",
}


@pytest.fixture()
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rows"


def file_of(folder, count=60):
    path = folder / "rows.jsonl"
    rows = [{"text": f"row {i}", "extra": ODD | {"i": i}} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mapped_rows_are_the_rows(tmp_path, cache, monkeypatch):
    path = file_of(tmp_path)
    held = Prompts(path, held_out=0.0).train
    assert isinstance(held, list)
    monkeypatch.setattr(rows_on_disk, "FEW", 10)
    mapped = Prompts(path, held_out=0.0).train
    assert isinstance(mapped, Stored) and list(mapped) == held
    assert mapped[0]["origin"] == f"{path}:1" and mapped[-1] == held[-1]
    assert mapped[5:1:-2] == held[5:1:-2] and mapped[58:99] == held[58:]
    assert batch(mapped, 130, 1, 3) == batch(held, 130, 1, 3)  # over two epochs
    with pytest.raises(IndexError):
        mapped[60]
    assert pickle.loads(pickle.dumps(mapped)) == held
    mapped[0]["text"] = "changed"  # a new row at each access
    assert mapped[0] == held[0]
    (file,) = cache.iterdir()  # of one name for all processes
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1])  # cut by a full disk: written again
    assert list(Prompts(path, held_out=0.0).train) == held


def test_rows_that_cannot_be_written_stay_in_memory(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(rows_on_disk, "FEW", 1)
    for held in (tiny_vlms.image(8, 8), np.zeros((2, 2, 3), np.uint8), np.float64(0.5)):
        rows = [{"text": "q", "images": [held]}] * 2
        assert stored(rows) is rows
    cache.parent.write_text("no folder")
    assert isinstance(stored([{"text": "q"}] * 2), list)
