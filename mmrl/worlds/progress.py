"""Shows how far things are that are built once: a bar on a terminal, elsewhere a line now and
then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mmrl.utils.output import redraws

SOON = 3.0  # seconds after which somebody wonders what is going on
OFTEN = 20.0  # seconds between lines


class Progress:
    """Reports steps: ``for step in progress.steps("painter", 300)`` shows a rich bar on a terminal,
    plain lines elsewhere, the first of them when it takes longer than a moment."""

    def __init__(
        self, title: str, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        self.title = title
        self.quiet = quiet
        self.clock = clock
        self.next = clock() + SOON  # when the next line is due

    def steps(self, what: str, total: int) -> Iterator[int]:
        if self.quiet:
            yield from range(total)
        elif redraws(sys.stderr):
            yield from self._bar(what, total)
        else:
            yield from self._lines(what, total)

    def _bar(self, what: str, total: int) -> Iterator[int]:
        from rich.console import Console
        from rich.progress import track

        console = Console(file=sys.stderr)
        title = f"{self.title}: {what}"
        yield from track(range(total), title, console=console, transient=True)

    def _lines(self, what: str, total: int) -> Iterator[int]:
        began = self.clock()
        for step in range(total):
            now = self.clock()
            if now >= self.next:
                self.next = now + OFTEN
                left = (now - began) / step * (total - step) if step else 0.0
                rest = f", about {left:.0f} s left of this part" if step else ""
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
