"""Ends a run early such that it can be resumed: which signals save, and the exit status after.

========  =================================================================================
status    after ``mmrl train``
========  =================================================================================
0         finished: the iterations or the budget are spent
2         an error that a user can fix, as one sentence; progress is saved
3         stopped by ``alarms.stop``: there was nothing to learn from; saved
75        stopped by SIGTERM, SIGHUP, SIGQUIT or ``train.time_limit``, saved, to be resumed
          (EX_TEMPFAIL of sysexits.h, which schedulers know as "try again")
130       stopped by Ctrl-C, saved unless it was typed twice, or SIGTERM came after it
========  =================================================================================
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mmrl.core.at_once import INTERRUPTED, asks_again

NOTHING_TO_LEARN = 3
RESUMABLE = 75
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # Windows has the first two
SAVING = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
# codes that processes exchange: the larger wins
GO_ON, BUDGET, TIME_LIMIT, CALLER, STUCK, SIGNAL = 0, 1, 2, 3, 4, 100


@dataclass(frozen=True)
class Ended:
    """Tells how a training ended: its folder, the exit status of a command that ran it, and why
    (and by which signal) it ended early."""

    folder: Path
    status: int = 0
    reason: str = ""
    signal: int = 0


@dataclass
class Signals:
    """Records the first signal that requests an end. A second Ctrl-C ends the process at once, as
    SIGTERM after a Ctrl-C does; other repeated signals, from schedulers and closed terminals, have
    no effect."""

    on_first: Callable[[], None]
    number: int = 0
    instant: float = -math.inf

    def handle(self, number: int, _: object) -> None:
        if self.number:
            if asks_again(self.number, number, time.monotonic() - self.instant):
                raise KeyboardInterrupt
            return
        self.number = number
        self.instant = time.monotonic()
        self.on_first()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Let signals end the run after the iteration. Those that were ignored, such as SIGHUP
        under nohup, stay so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            number: signal.signal(number, self.handle)
            for number in SAVING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def status_of(code: int) -> int:
    """Return the exit status for the reason that the processes agreed on."""
    if code < TIME_LIMIT:
        return 0
    if code == STUCK:
        return NOTHING_TO_LEARN
    return INTERRUPTED if code == SIGNAL + signal.SIGINT else RESUMABLE
