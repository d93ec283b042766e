"""Shows the progress of a long job: a bar on a terminal, occasional plain lines in a file or
pipe."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from mmrl.core.output import redraws

NARROW = 64  # minimum columns of a terminal for a bar


class Progress(Protocol):
    """Shows the progress of a job; ``RunLog.progress`` yields one."""

    def begin(self, total: int, start: int) -> None: ...
    def update(self, iteration: int, reward: float | None = None, note: str = "") -> None:
        """Show that ``iteration`` iterations are done (so the last call says ``total``)."""

    def end(self) -> None: ...


def progress_for(title: str, active: bool = True) -> Progress:
    """Choose a bar on a terminal, plain lines elsewhere, nothing except in the main process."""
    if not active:
        return _Silent()
    if in_notebook():
        return _Cell(title)
    return _Bar(title) if redraws(sys.stdout) else _Lines(title)


class _Silent:
    def begin(self, total: int, start: int) -> None:
        pass

    def update(self, iteration: int, reward: float | None = None, note: str = "") -> None:
        pass

    def end(self) -> None:
        pass


class _Bar:
    """Draws a bar with rich."""

    def __init__(self, title: str):
        from rich import progress as p
        from rich.console import Console

        console = Console()
        columns: list[p.ProgressColumn] = [
            p.MofNCompleteColumn(),
            p.TextColumn("{task.fields[text]}"),
            p.TextColumn("left"),
            p.TimeRemainingColumn(),
        ]
        if console.width >= NARROW:
            columns[:0] = [
                p.TextColumn("[bold]{task.description}"),
                p.BarColumn(bar_width=None),
            ]
            columns.insert(-2, p.TimeElapsedColumn())
        self.title = title
        self.bar = p.Progress(*columns, console=console, speed_estimate_period=120)

    def begin(self, total: int, start: int) -> None:
        self.bar.start()
        self.task = self.bar.add_task(self.title, total=total, completed=start, text="")

    def update(self, iteration: int, reward: float | None = None, note: str = "") -> None:
        self.bar.update(self.task, completed=iteration, text=_status(reward, note))

    def end(self) -> None:
        self.bar.stop()


def in_notebook() -> bool:
    """Tell whether this runs in a cell of a notebook, whose output can be changed later."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class _Cell:
    """Draws a plain-text bar in a notebook's cell, and redraws it as it grows."""

    def __init__(self, title: str):
        self.title = title

    def begin(self, total: int, start: int) -> None:
        from IPython import display

        self.total, self.start, self.began = total, start, time.monotonic()
        show: Any = display.display
        text = {"text/plain": self._text(start)}
        self.handle = show(text, raw=True, display_id=True)

    def update(self, iteration: int, reward: float | None = None, note: str = "") -> None:
        text = self._text(iteration, _status(reward, note))
        self.handle.update({"text/plain": text}, raw=True)

    def end(self) -> None:
        pass

    def _text(self, iteration: int, status: str = "") -> str:
        spent = time.monotonic() - self.began
        done = iteration - self.start
        left = spent / done * (self.total - iteration) if done else 0.0
        filled = 24 * iteration // max(1, self.total)
        parts = [
            f"{self.title} {'█' * filled}{'░' * (24 - filled)} {iteration}/{self.total}",
            status,
            clock_time(spent),
            f"{clock_time(left)} left" if left else "",
        ]
        return "  ".join(part for part in parts if part)


class _Lines:
    """Prints plain lines for files and pipes: the first and last update, and one about every
    ``seconds`` in between."""

    def __init__(
        self, title: str, seconds: float = 15.0, clock: Callable[[], float] = time.monotonic
    ):
        self.title = title
        self.seconds = seconds
        self.clock = clock

    def begin(self, total: int, start: int) -> None:
        self.total, self.start, self.began = total, start, self.clock()
        self.shown: float | None = None

    def update(self, iteration: int, reward: float | None = None, note: str = "") -> None:
        now = self.clock()
        if self.shown is not None and now - self.shown < self.seconds and iteration < self.total:
            return
        self.shown = now
        done = iteration - self.start
        spent = now - self.began
        left = f"{clock_time(spent / done * (self.total - iteration))} left" if done > 0 else ""
        parts = [
            f"{self.title} {iteration}/{self.total}",
            _status(reward, note),
            clock_time(spent),
            left,
        ]
        print(_fitting([part for part in parts if part]), flush=True)

    def end(self) -> None:
        pass


def _fitting(parts: list[str]) -> str:
    """Join the parts of a line, dropping the last ones on a narrow terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    while len(line := "  ".join(parts)) > width and len(parts) > 1:
        parts = parts[:-1]
    return line


def clock_time(seconds: float) -> str:
    """Write seconds as ``4:05`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _status(reward: float | None, note: str) -> str:
    shown = f"reward {reward:.3f}" if reward is not None else ""
    return f"{shown}  {note}".strip()
