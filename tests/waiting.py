"""Waiting in tests for what happens, not for how long it takes: a test passes however slow the
machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import httpx

# seconds after which something hangs; nothing that works comes near, also on a busy machine
HANG = 120.0
get = partial(httpx.get, timeout=HANG)
post = partial(httpx.post, timeout=HANG)


def until(condition: Callable[[], object]) -> None:
    """Return as soon as the condition holds; AssertionError if it never does."""
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
