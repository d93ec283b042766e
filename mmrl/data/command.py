"""Implements ``mmrl data``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.config import Config
from mmrl.core import framing
from mmrl.core.errors import UserError
from mmrl.core.files import write_text
from mmrl.core.registry import DATA, POLICIES
from mmrl.core.registry import options as options_of
from mmrl.data import view
from mmrl.data.ledger import collecting, refuse_broken


def _size_of(configuration: Config) -> framing.Size | None:
    """Return the size of the images that the configuration's policy makes; None: unknown."""
    spec: Any = configuration.plain.get("policy") or ""
    name, chosen = next(iter(spec.items())) if isinstance(spec, dict) else (str(spec), None)
    known = options_of(POLICIES[name]) if name in POLICIES else {}
    default = known["size"].default if "size" in known else None
    return row_size({"size": (chosen or {}).get("size", default)})


def row_size(prompt: Mapping[str, Any]) -> framing.Size | None:
    """Return the size that a row asks for; None: it has none, or none that is valid."""
    size = prompt.get("size")
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        return None
    return (
        (sides[0], sides[1]) if all(isinstance(side, int) and side > 0 for side in sides) else None
    )


def show(
    configuration: Config,
    needs: Callable[[Any], None],
    unfit: Callable[[Any], list[str]],
    path: Path | None,
    count: int = 24,
) -> list[str]:
    """Read the data of a configuration, write a page about it if ``path`` names one, and return
    lines for the terminal.

    ``needs`` raises UserError if rewards need what the prompts lack; ``unfit`` lists what the
    policy cannot take. Rows at which training would stop are reported as it would report them.
    """
    with collecting() as summaries:
        source = configuration.build("data", DATA)
    problems = []
    prompts = [*source.train, *source.held_out]
    refused = partial(refuse_broken, summaries, len(prompts))
    checks: list[Callable[[], None]] = [lambda: refused(unfit(source)), lambda: needs(source)]
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    looked = view.view_of(source, summaries, problems, count)
    target = _size_of(configuration)
    targets = [row_size(prompt) or target for prompt in prompts]
    if cut := framing.sentence(framing.framed(prompts, targets)):
        looked = replace(looked, framed=cut)
    if path is None:
        return [*looked.lines(), "with pictures: the same with --out data.html"]
    write_text(path, view.render(looked, configuration.file))
    return [*looked.lines(), f"written to {path}"]
