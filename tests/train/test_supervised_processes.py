"""Two processes on CPUs learn from the data what one does, to the ninth decimal."""

import pytest
from safetensors.torch import load_file

from tests.fixtures import sft_worker, warm
from tests.train.test_processes import same


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    for kind, start in {"one": warm.run, "two": warm.ranks}.items():
        folder = tmp_path / kind
        folder.mkdir()
        done = start(["-m", "tests.fixtures.sft_worker", folder])
        assert done.returncode == 0, f"{kind}: {done.stderr[-4000:]}"
    for family in (*sft_worker.CASES, *(f"{name}-pairs" for name in sft_worker.PAIRED)):
        single, double = (
            load_file(tmp_path / kind / f"{family}.safetensors") for kind in ("one", "two")
        )
        same(single, double, family, 1e-9)
