"""A progress bar for building things once: steps done, time left. Silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator


class Progress:
    """``for step in progress.steps("painter", 300)``: a rich bar on a terminal, one line at start and end elsewhere."""

    def __init__(self, title: str, quiet: bool = False):
        self.title, self.quiet = title, quiet

    def steps(self, what: str, total: int) -> Iterator[int]:
        if self.quiet:
            yield from range(total)
            return
        from rich.console import Console
        from rich.progress import track

        console = Console(file=sys.stderr)
        yield from track(
            range(total), f"{self.title}: {what}", console=console, disable=not console.is_terminal, transient=True
        )
