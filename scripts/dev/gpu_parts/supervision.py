"""Runs each part of gpu_check.py in a separate process with a time limit, so that a hang or crash
does not affect the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Report = dict[str, Any]
# (part, seconds) -> its results so far, repeatedly; the last is complete
Run = Callable[..., Iterator[Report]]


def serve(connection: Any, run: Run, words: tuple[Any, ...]) -> None:
    """Run requested parts, in the process of a ``Worker``, until it is stopped."""
    os.setsid()  # so that a part's children can be ended with it
    while True:
        name, seconds = connection.recv()
        if name is None:
            return
        report = recorded(
            lambda: run(name, seconds, *words),  # noqa: B023 - called at once
            lambda found: connection.send((False, found)),
        )
        connection.send((True, report))


def recorded(
    run: Callable[[], Iterator[Report]], note: Callable[[Report], Any] = lambda found: None
) -> Report:
    """Run a part and ``note`` its results so far; a failure is added to them, so that the next part
    runs."""
    report: Report = {}
    try:
        for report in run():
            note(report)
        return report
    except (Exception, SystemExit) as error:  # a refused command line exits
        return report | {
            "failed": f"{type(error).__name__}: {error}",
            "where": traceback.format_exc().splitlines()[-6:],
        }


class Worker:
    """Runs parts in another process, which is reused unless a part has failed, or is ``alone``.

    A failed kernel can leave a CUDA device unusable in its process, hence a new one after it.
    """

    def __init__(self, run: Run, *words: Any):
        self.run = run
        self.words = words
        self.process: Any = None
        self.connection: Any = None

    def ask(self, name: str, seconds: float) -> Report:
        """Run a part for at most ``seconds``, including the start of a process. One that is ended
        reports its results so far."""
        end = time.monotonic() + seconds
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, self.run, self.words))
            self.process.start()
            other.close()
        done, answer = False, {}
        try:
            self.connection.send((name, seconds))
            while not done:
                if not self.connection.poll(max(0.0, end - time.monotonic())):
                    self.kill()
                    words = f"it was not over after {seconds:.0f} s, and was ended"
                    return answer | {"failed": words, "hung": True}
                done, answer = self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            status = self.process.exitcode
            self.kill()
            return answer | {"failed": f"its process ended with status {status}"}
        if "failed" in answer or answer.pop("alone", False):
            self.end()
        return answer

    def end(self) -> None:
        """Let the process end, and kill it if it does not."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            self.connection.send((None, 0))
        self.process.join(5)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.process is None:
            return
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                # it has its own process group once it has started
                own = os.getpgid(self.process.pid) == self.process.pid
                (os.killpg if own else os.kill)(self.process.pid, signal.SIGKILL)
        self.process.join(10)
        self.connection.close()
        self.process = None
