"""Two processes on CPUs (gloo), as copies (DDP) and as halves (FSDP2), do to the tenth decimal what
one does."""

import shutil
import signal
import warnings

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.registry import locate
from tests.fixtures import process_worker as worker
from tests.fixtures import warm


def same(one, two, where, apart=1e-10):
    assert one.keys() == two.keys(), where
    for name in one:

        def named(message, name=name):
            return f"{where}, {name}: {message}"

        torch.testing.assert_close(
            one[name], two[name], atol=apart, rtol=0, equal_nan=True, msg=named
        )


def once_more_after_a_crash(start, folder, words):
    """The process of a whole run; where native code aborted it, that of a second run.

    One in some hundred runs of two processes has ended inside of torch ("double free or
    corruption", docs/lab-notes.md), which no line here can cause. A warning shows where.
    """
    for crashes in range(2):
        folder.mkdir()
        done = start(["-m", *words])
        if crashes or done.returncode not in (-signal.SIGABRT, -signal.SIGSEGV):
            break
        warnings.warn(f"native code crashed: {done.stderr[-6000:]}", stacklevel=2)
        shutil.rmtree(folder)
    assert done.returncode == 0, f"{folder.name}: {done.stderr[-6000:]}"


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """Samples, rewards, advantages, log-probs, metrics, evaluation, weights, snapshots and
    optimizer state; and one iteration after a checkpoint that another number of processes has
    written."""
    pytest.importorskip("bitsandbytes")
    locate("world:digits/sd3-test")
    module = "tests.fixtures.process_worker"
    one = tmp_path / "one"
    compared = {name: case for name, case in worker.CASES.items() if "alike" not in case.kinds}
    unlike = [name for name in worker.CASES if name not in compared]
    once_more_after_a_crash(warm.run, one, [module, one, "--cases", *compared])
    for kind, sharded in (("copies", []), ("halves", ["--sharded"])):
        known = {name: case for name, case in compared.items() if kind in case.kinds}
        two = tmp_path / kind
        names = [*known, *(unlike if sharded else ())]
        words = [module, two, "--start", one, *sharded, "--cases", *names]
        once_more_after_a_crash(warm.ranks, two, words)
        for name, case in known.items():
            single, double = (load_file(at / f"{name}.safetensors") for at in (one, two))
            idle = single.pop("idle"), double.pop("idle")
            assert (idle[0] == 0) == (name != "skipping") and (idle[1] > 0 or name != "skipping")
            same(single, double, f"{kind}, {name}", case.apart)
            norm = worker.NUMBERS.index("grad_norm")
            assert case.compared or single["0/metrics"][norm] > 0
            assert case.compared or single["0/sample"].dtype in (torch.float64, torch.long)
            if case.restored:
                there = {n[5:]: value for n, value in single.items() if n.startswith("next/")}
                here = worker.one_more(name, two)
                here = {n: here[n] for n in there}
                same(there, here, f"one process after {kind}, {name}", case.apart)


@pytest.mark.slow
def test_two_processes_learn_from_the_data_what_one_does(tmp_path):
    folders = tmp_path / "one", tmp_path / "two"
    for folder, start in zip(folders, (warm.run, warm.ranks), strict=True):
        once_more_after_a_crash(start, folder, ["tests.fixtures.sft_worker", folder])
    for file in folders[0].iterdir():
        same(load_file(file), load_file(folders[1] / file.name), file.stem, 1e-9)
