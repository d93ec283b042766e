"""Runs the parts of gpu_check.py in a process of their own each with a time limit, so that one that
hangs or kills its process does not take the others with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]  # of a part's name and its seconds


def serve(connection: Any, run: Run, words: tuple[Any, ...]) -> None:
    """Run every part that is asked for, in the process of a ``Worker``, until it is told to end."""
    os.setsid()  # so that what a part starts can be ended with it
    while True:
        name, seconds = connection.recv()
        if name is None:
            return
        connection.send(recorded(lambda: run(name, seconds, *words)))  # noqa: B023 - called at once


def recorded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a part; a failure is what it reports, so that the next one runs."""
    try:
        return run()
    except (Exception, SystemExit) as error:  # a command line that is refused exits
        return {
            "failed": f"{type(error).__name__}: {error}",
            "where": traceback.format_exc().splitlines()[-6:],
        }


class Worker:
    """Runs parts in another process, which is used for the next part unless one has failed, or says
    that it has to be ``alone``.

    A failed kernel can leave a CUDA device unusable to its process, hence a new one after it.
    """

    def __init__(self, run: Run, *words: Any):
        self.run = run
        self.words = words
        self.process: Any = None
        self.connection: Any = None

    def ask(self, name: str, seconds: float) -> dict[str, Any]:
        """Run a part for at most so many seconds, the start of a process included."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, self.run, self.words))
            self.process.start()
            other.close()
        answer: dict[str, Any]
        try:
            self.connection.send((name, seconds))
            if not self.connection.poll(seconds):
                self.kill()
                words = f"it was not over after {seconds:.0f} s, and was ended"
                return {"failed": words, "hung": True}
            answer = self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            status = self.process.exitcode
            self.kill()
            return {"failed": f"its process ended with status {status}"}
        if "failed" in answer or answer.pop("alone", False):
            self.end()
        return answer

    def end(self) -> None:
        """Let the process end, and end it where it does not."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            self.connection.send((None, 0))
        self.process.join(5)
        self.kill()

    def kill(self) -> None:
        """End the process and what it has started."""
        if self.process is None:
            return
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                # its group is its own once it has begun; until then there is only itself
                own = os.getpgid(self.process.pid) == self.process.pid
                (os.killpg if own else os.kill)(self.process.pid, signal.SIGKILL)
        self.process.join(10)
        self.connection.close()
        self.process = None
