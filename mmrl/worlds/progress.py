"""Shows a bar while things are built once: steps done, time left. Silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Reports steps: ``for step in progress.steps("painter", 300)`` shows a rich bar on a terminal,
    one line at start and end elsewhere."""

    def __init__(self, title: str, quiet: bool = False):
        self.title = title
        self.quiet = quiet

    def steps(self, what: str, total: int) -> Iterator[int]:
        if self.quiet:
            yield from range(total)
            return
        from rich.console import Console
        from rich.progress import track

        console = Console(file=sys.stderr)
        yield from track(
            range(total),
            f"{self.title}: {what}",
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )


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
