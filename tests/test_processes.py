"""Two processes under ``accelerate launch`` (CPU, gloo, DDP) do to the tenth decimal what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from . import toys

ROOT = Path(__file__).parents[1]


def launch(folder, processes):
    folder.mkdir()
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
                "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    command = [*launcher, "-m"] if processes == 2 else [sys.executable, "-m"]
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "RANK", "WORLD", "LOCAL_", "MASTER_"))
    }
    done = subprocess.run(
        [*command, "tests.process_worker", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=500,
        env=clean | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def named(name, message):
    return f"{name}: {message}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return launch(folder / "one", 1), launch(folder / "two", 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", toys.POLICIES)
def test_two_processes_equal_one(runs, family):
    one, two = (load_file(run / f"{family}.safetensors") for run in runs)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], two[name], atol=1e-10, rtol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert one["0/sample"].shape[0] == 64
