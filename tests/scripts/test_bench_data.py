"""The script that measures how long data take to start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_data


def test_both_sources_are_read_twice(tmp_path):
    report = bench_data.measured(40, 20, tmp_path)
    assert [each["rows"] for each in report["prompts"] + report["vision"]] == [40, 40, 20, 20]
    assert bench_data.page(report).count("\n| ") == 5
