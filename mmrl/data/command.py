"""Implements ``mmrl data``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.config import Config
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.data import view
from mmrl.data.ledger import collecting
from mmrl.utils.files import write_text


def show(
    configuration: Config, needs: Callable[[Any], None], path: Path | None, count: int = 24
) -> list[str]:
    """Read the data of a configuration, write a page about it if ``path`` names one, and return
    lines for the terminal.

    ``needs`` raises UserError where rewards need what the prompts do not have. Broken rows are
    listed, also where training would stop at them.
    """
    with collecting(lenient=True) as summaries:
        source = configuration.build("data", DATA)
    problems = [
        f"training stops at {len(summary.dropped)} broken rows of {summary.name}: fix "
        f"these rows, or leave them out with broken: skip"
        for summary in summaries
        if summary.stops
    ]
    try:
        needs(source)
    except UserError as error:
        problems.append(str(error))
    looked = view.view_of(source, summaries, problems, count)
    if path is None:
        return [*looked.lines(), "with pictures: the same with --out data.html"]
    write_text(path, view.render(looked, configuration.file))
    return [*looked.lines(), f"written to {path}"]
