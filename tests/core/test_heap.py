"""Memory that is freed stays with the process, in huge pages where the system has them."""

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.core import heap

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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

heap.keep()
faults()
maps = open("/proc/self/smaps").read().split("[heap]")
flags = [part.partition("VmFlags:")[2].partition(chr(10))[0].split() for part in maps[1:]]
print(faults(), int(any("hg" in each for each in flags)))
"""
PAGES = 128_000_000 // mmap.PAGESIZE  # of the blocks

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/proc/self/smaps").exists(),
    reason="the heap of glibc, on Linux",
)


def again(**environment):
    """Return the page faults of taking 128 MB a second time, and whether the heap asks for huge
    pages."""
    untold = {k: v for k, v in os.environ.items() if k not in (*heap.CHOSEN, "LD_PRELOAD")}
    run = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=untold | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    faults, asks = map(int, run.stdout.split())
    return faults, bool(asks)


@glibc
def test_memory_that_was_freed_is_taken_again_without_faults():
    faults, asks = again()
    assert faults < PAGES / 10
    assert asks or not HUGE.exists()  # a kernel without them refuses to be asked


@glibc
def test_who_has_told_glibc_how_to_keep_memory_is_left_alone():
    faults, asks = again(MALLOC_MMAP_THRESHOLD_="1000000")
    assert not asks
    if not HUGE.exists() or "[always]" not in HUGE.read_text():  # a fault takes more than a page
        assert faults > PAGES / 2


def test_another_c_library_is_left_alone(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(heap.ctypes, "CDLL", absent)
    heap.keep()
