"""Calls libraries on a model's answers in a separate process, with a deadline and a memory limit: a
hang or crash costs one sample, not the run."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("foreign.py")
START = 120.0  # seconds in which the process must have imported its library
PATIENCE = 20  # wall time over CPU time that a question may take: the machine may be busy
MEMORY = 3 * 2**30  # bytes of address space


class Broken(Exception):
    """Signals that a question had no answer: it took too long, too much memory, or raised."""


class TooSlow(Broken):
    """Signals that a question took too long, or too much memory."""


class Sandbox:
    """Keeps a process that answers one kind of question, and restarts it when it dies.

    It is started by the first question and ends with this process. Several threads may ask; they
    take turns. ``function``: of ``foreign.py``, called when the process starts, so that the library
    is imported before the first deadline. ``seconds``: CPU time per question.
    """

    def __init__(self, function: str, seconds: float = 3.0, memory: int = MEMORY):
        self.function = function
        self.seconds = seconds
        self.memory = memory
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started it: a fork has none
        self.lock = threading.Lock()
        self.given_up = 0  # questions that took too long, or ended the process

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the value of a function of ``rewards.answers.foreign``. Raises Broken."""
        question = json.dumps([name, arguments]).encode("ascii") + b"\n"
        with self.lock:
            process = self._started()
            try:
                assert process.stdin is not None
                process.stdin.write(question)
                process.stdin.flush()
                reply = _line(process, PATIENCE * self.seconds)
            except (Broken, OSError) as error:
                self._end()
                self.given_up += 1
                raise TooSlow(str(error)) from error
        if reply.get("error") == "TooLong":
            self.given_up += 1
            raise TooSlow(f"more than {self.seconds:g} s")
        if "error" in reply:
            raise Broken(str(reply["error"]))
        return reply["value"]

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.owner == os.getpid() and self.process.poll() is None:
            return self.process
        self._end()
        words = [self.function, str(self.seconds), str(self.memory)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the run, which closes this process itself
        )
        self.owner = os.getpid()
        atexit.register(self._end)
        try:
            reply = _line(self.process, START)
        except Broken as error:
            self._end()
            raise RuntimeError(
                f"the process of {PROGRAM.name} for {self.function!r} does not start: {error}"
            ) from error
        if "error" in reply:
            self._end()
            raise RuntimeError(f"{PROGRAM.name}: {self.function!r} fails: {reply['error']}")
        return self.process

    def _end(self) -> None:
        process = self.process
        self.process = None
        if process is None or self.owner != os.getpid():
            return
        atexit.unregister(self._end)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not sent to a dead process
                    stream.close()


class Sandboxes:
    """Keeps a pool of processes that answer one kind of question."""

    def __init__(self, function: str, seconds: float, memory: int = MEMORY, most: int = 4):
        count = min(most, os.cpu_count() or 1)
        self.workers = [Sandbox(function, seconds, memory) for _ in range(count)]

    def patience(self, seconds: float) -> None:
        """Set the seconds per question, for processes that start from now on."""
        for worker in self.workers:
            worker.seconds = seconds

    def ask_all(self, questions: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answer questions, [name, arguments ...] each: the value, or the Broken that was
        raised."""
        answers: list[Any] = [None] * len(questions)
        waiting = deque(enumerate(questions))

        def work(worker: Sandbox) -> None:
            while True:
                try:
                    place, question = waiting.popleft()
                except IndexError:
                    return
                try:
                    answers[place] = worker.ask(*question)
                except Broken as error:
                    answers[place] = error

        helpers = self.workers[1 : len(questions)]
        if not helpers:
            work(self.workers[0])
            return answers
        with ThreadPoolExecutor(len(helpers) + 1) as pool:
            for done in [pool.submit(work, worker) for worker in (self.workers[0], *helpers)]:
                done.result()
        return answers


def _line(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    """Read one line of JSON. Raises Broken after ``seconds``, or if the process has died."""
    assert process.stdout is not None
    number = process.stdout.fileno()
    deadline = time.monotonic() + seconds
    pieces: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(number, selectors.EVENT_READ)
        while not (pieces and pieces[-1].endswith(b"\n")):
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise Broken(f"no answer in {seconds:g} s")
            piece = os.read(number, 1 << 20)
            if not piece:
                raise Broken("the process ended, killed for its memory or time")
            pieces.append(piece)
    answer: dict[str, Any] = json.loads(b"".join(pieces))
    return answer
