"""scripts/bench_products.py, small: passes of both layers are the same and the page says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_products as bench


def test_passes_are_measured_and_written(tmp_path):
    out = tmp_path / "products"
    bench.main(["--sizes", "width 128, 3 layers", "--repeats", "1", "--out", str(out)])
    (passes,) = json.loads(out.with_suffix(".json").read_text())["sizes"].values()
    assert list(passes) == ["sampling", "update"]
    assert all(found["factor"] > 0 and found["apart"] < 1e-5 for found in passes.values())
    assert "| width 128, 3 layers | 32 x 16 | sampling |" in out.with_suffix(".md").read_text()
