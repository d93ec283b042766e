"""Provides a thread that does one call after another and may die with the process, for slow
rewards."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")
Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
Jobs = queue.SimpleQueue[Job | None]


class Worker:
    """Makes calls in the order in which they were submitted. The thread starts with the first and
    ends with the object."""

    def __init__(self, name: str):
        self.name = name
        self._jobs: Jobs | None = None

    def submit(self, call: Callable[..., Value], *args: Any) -> Future[Value]:
        if self._jobs is None:
            self._jobs = Jobs()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(
                target=_run, args=(self._jobs, device), name=self.name, daemon=True
            ).start()
            weakref.finalize(self, self._jobs.put, None)
        future: Future[Value] = Future()
        # the call runs in the caller's context, which says for example whose prompts these are
        self._jobs.put((future, copy_context().run, (call, *args)))
        return future


def _run(jobs: Jobs, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # set per thread, and 0 in a new one on every process
    while (job := jobs.get()) is not None:
        future, call, args = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*args))
            except BaseException as error:  # raised where the result is waited for
                future.set_exception(error)
        del job, future, call, args  # samples are not kept while the thread waits
