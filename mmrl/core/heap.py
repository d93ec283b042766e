"""Keeps the memory of passes on a CPU between them, in huge pages.

A pass frees what it computed, glibc gives large blocks back to the system, and the next pass takes
them again page by page: each page is a fault, which a virtual machine makes dear.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

# of malloc.h
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# bytes at the heap's end that are kept, and of the largest block that lies in the heap: mallopt
# takes a C int
MOST = 2**31 - 1
ROOM = 2**30  # bytes that the heap is made ready for; without use they are addresses only
# by which users tell glibc how to keep memory
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep() -> None:
    """Let the heap of this process keep what passes free, and back its next ``ROOM`` bytes by huge
    pages, where the system has them; does nothing where the user has told glibc how to keep
    memory (``CHOSEN``), or with another C library."""
    if any(name in os.environ for name in CHOSEN):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        huge = mmap.MADV_HUGEPAGE
        if not libc.mallopt(TRIM_THRESHOLD, MOST) or not libc.mallopt(MMAP_THRESHOLD, MOST):
            return
        block = libc.malloc(ROOM)
        if block is None:  # under a limit of addresses
            return
        begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(begin, ROOM - mmap.PAGESIZE, huge)
        libc.free(block)
