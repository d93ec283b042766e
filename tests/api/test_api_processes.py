"""A script with the Python API that torchrun starts twice: both processes get the same run and the
same samples, and one writes."""

import json
from pathlib import Path

import pytest

from mmrl.core.registry import locate
from tests.api.worlds import TEXTS
from tests.fixtures import warm


@pytest.mark.slow
def test_two_processes_of_a_script_get_the_same_from_a_sharded_policy(tmp_path):
    locate("world:digits/sd3-test")
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    words = ["-m", "tests.fixtures.api_worker"]
    done = warm.ranks(words, cwd=tmp_path, PYTHONPATH=str(warm.ROOT))
    assert done.returncode == 0, done.stderr[:6000]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    configured, trained, of_the_trainer = first["folders"]
    assert configured == "configured" and trained == of_the_trainer
    assert first["metrics"] == [1, 1] and first["galleries"] == [["before", "after"]] * 2
    assert len(set(first["samples"])) == 3 and first["prompts"] == TEXTS[:3]
    assert (tmp_path / first["report"]).is_file() and (tmp_path / "configured").is_dir()
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == [Path(trained).name]
    assert "this is one of 2 processes" in first["compared"]
    for refusal in (first["exported"], first["again"]):
        assert refusal.startswith("each process holds a part of this policy's weights (FSDP2)")
    assert not (tmp_path / "exported").exists()
