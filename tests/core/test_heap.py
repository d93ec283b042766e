"""Memory that is freed stays with the process, in huge pages where the system has them."""

import subprocess
import sys

import pytest

# a process of its own: the heap's settings are for good
FAULTS = """
import resource
import torch
from mmrl.core import heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(4_000_000) for _ in range(8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

heap.{call}
print(faults(), faults())
"""


def faults(call):
    """Count the page faults of taking 128 MB, and of taking them again."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True
    )
    return tuple(map(int, run.stdout.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
def test_memory_that_was_freed_is_taken_again_without_faults():
    _, otherwise = faults("ROOM")
    _, again = faults("keep()")
    assert otherwise > 20_000  # 128 MB in pages of 4 kB, were they given back
    assert again < 2_000


def test_another_c_library_is_left_alone(monkeypatch):
    from mmrl.core import heap

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(heap.ctypes, "CDLL", absent)
    heap.keep()
