"""Two processes on CPUs learn from the data what one does, to the ninth decimal."""

import pytest
from safetensors.torch import load_file

from tests.fixtures import sft_worker
from tests.train.test_processes import LAUNCH, run, same


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    module = ["-m", "tests.fixtures.sft_worker"]
    for kind, words in {"one": module[1:], "two": [*LAUNCH, *module]}.items():
        folder = tmp_path / kind
        folder.mkdir()
        done = run([*words, folder])
        assert done.returncode == 0, f"{kind}: {done.stderr[-4000:]}"
    for family in sft_worker.CASES:
        single, double = (
            load_file(tmp_path / kind / f"{family}.safetensors") for kind in ("one", "two")
        )
        same(single, double, family, 1e-9)
