"""A second Ctrl-C ends a command also where its main thread runs no Python."""

import signal
import subprocess
import sys

import pytest

from mmrl.core.at_once import HANDED_ON, SAME_INSTANT, asks_again
from tests.fixtures.waiting import HANG

# hours in one call of a library, during which Python's handlers do not run; the first signal may
# come before the call, and must not end the process there
BUSY = """
import hashlib, signal
from mmrl.core import at_once
at_once.SAME_INSTANT, at_once.GRACE = -1.0, 0.1
signal.signal(signal.SIGINT, lambda number, frame: None)
with at_once.ending_at_once():
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha512", b"", b"", 2**31 - 1)
"""


def test_which_signals_ask_for_an_end_at_once(subtests):
    for first, number, seconds, ends in [
        (signal.SIGINT, signal.SIGINT, 2 * SAME_INSTANT, True),
        (signal.SIGINT, signal.SIGINT, SAME_INSTANT / 2, False),  # a launcher's copy of it
        (signal.SIGINT, signal.SIGTERM, 2 * HANDED_ON, True),
        (signal.SIGINT, signal.SIGTERM, HANDED_ON / 2, False),  # torchrun's, after its own Ctrl-C
        (signal.SIGTERM, signal.SIGTERM, 2 * HANDED_ON, False),  # a scheduler's
        (signal.SIGTERM, signal.SIGINT, 2 * SAME_INSTANT, True),
        (signal.SIGINT, signal.SIGHUP, 2 * HANDED_ON, False),
    ]:
        with subtests.test(first=first, number=number):
            assert asks_again(first, number, seconds) == ends


def test_a_library_that_never_returns_is_ended():
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # one Ctrl-C waits for the library
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130 and "ended without saving" in errors
