"""Shows the progress of builds, a bar on a terminal, else a line now and then, and saves their
training, so that an interrupted build resumes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mmrl.core.output import redraws
from mmrl.worlds.unfinished import Unfinished

SOON = 3.0  # seconds before the first line
OFTEN = 20.0  # seconds between lines
SAVED = 20.0  # seconds between saves


class Progress:
    """Reports steps: ``for step in progress.steps(what, 300, ...)`` shows a rich bar on a terminal,
    plain lines elsewhere, the first of them after ``SOON``. With ``unfinished`` what an optimizer
    trains in these steps is saved, and a later build skips the steps done."""

    def __init__(
        self,
        title: str,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        unfinished: Unfinished | None = None,
    ):
        self.title = title
        self.quiet = quiet
        self.clock = clock
        self.unfinished = unfinished
        self.next = clock() + SOON  # when the next line is due

    def steps(self, what: str, total: int, optimizer: Any, schedule: Any) -> Iterator[int]:
        """Yield the numbers of the remaining steps; the randomness of a step must depend on its
        number alone."""
        store = self.unfinished
        first = store.restore(what, optimizer, schedule) if store else 0
        if first:
            print(f"building {self.title}: {what} resumes at {first}/{total}", file=sys.stderr)
        began = saved = self.clock()
        for step in self._shown(what, first, total):
            yield step
            now = self.clock()
            done = step + 1 == total and now > began + SOON
            if store and (done or now > saved + SAVED):
                store.save(what, step + 1, optimizer, schedule)
                saved = now

    def _shown(self, what: str, first: int, total: int) -> Iterator[int]:
        if self.quiet:
            yield from range(first, total)
        elif redraws(sys.stderr):
            yield from self._bar(what, first, total)
        else:
            yield from self._lines(what, first, total)

    def _bar(self, what: str, first: int, total: int) -> Iterator[int]:
        from rich.console import Console
        from rich.progress import track

        console = Console(file=sys.stderr)
        title = f"{self.title}: {what}"
        rest = range(first, total)
        yield from track(rest, title, total=total, completed=first, console=console, transient=True)

    def _lines(self, what: str, first: int, total: int) -> Iterator[int]:
        began = self.clock()
        for step in range(first, total):
            now = self.clock()
            if now >= self.next:
                self.next = now + OFTEN
                done = step - first
                left = (now - began) / done * (total - step) if done else 0.0
                rest = f", about {left:.0f} s left of this part" if done else ""
                print(
                    f"building {self.title}, once: {what} {step}/{total}{rest}",
                    file=sys.stderr,
                    flush=True,
                )
            yield step


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the progress bars of transformers and diffusers while folders are written and read;
    restore them afterwards."""
    import diffusers.utils.logging as diffusers_log
    import transformers.utils.logging as transformers_log

    before = transformers_log.is_progress_bar_enabled(), diffusers_log.is_progress_bar_enabled()
    transformers_log.disable_progress_bar()
    diffusers_log.disable_progress_bar()
    try:
        yield
    finally:
        for log, enabled in zip((transformers_log, diffusers_log), before):
            if enabled:
                log.enable_progress_bar()
