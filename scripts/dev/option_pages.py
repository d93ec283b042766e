"""Writes docs/options/, the tables of options, from where options are declared: run this after
changing one.

    python scripts/dev/option_pages.py
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "dev")]

from option_docs import beside, markdown, prose, table, table_rows  # noqa: E402

from mmrl.config.sections import SECTIONS  # noqa: E402
from mmrl.core.registry import (  # noqa: E402
    GRIDS,
    OPTIMIZERS,
    POLICIES,
    SOLVERS,
    STAGES,
    Plugin,
    describe,
    load_built_in,
    options,
)
from mmrl.policies.base import Policy  # noqa: E402
from mmrl.policies.diffusion.flow_policy import FlowPolicy  # noqa: E402
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy  # noqa: E402
from mmrl.policies.image_tokens.policy import ImageTokenPolicy  # noqa: E402
from mmrl.policies.masked.policy import MaskedDiffusion  # noqa: E402
from mmrl.policies.tokens import TokenPolicy  # noqa: E402
from mmrl.zoo.models.diffusion.video_pipeline import VideoFolderPolicy  # noqa: E402

FOLDER = ROOT / "docs" / "options"
NOTE = (
    "Written by `scripts/dev/option_pages.py` from where options are declared; `mmrl list NAME` "
    "prints the same.\n"
)
# classes whose options many policies have
BASES = {
    "all": Policy,
    "flow": FlowPolicy,
    "diffusers": FolderPolicy,
    "video": VideoFolderPolicy,
    "token": TokenPolicy,
    "image-token": ImageTokenPolicy,
    "masked": MaskedDiffusion,
}


def pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    load_built_in()
    return {"train.md": train(), "stages.md": stages(), "policies.md": policies()}


def train() -> str:
    parts = [f"# Options of a run\n\n{NOTE}"]
    for name, record in SECTIONS.items():
        parts += [section(name, record), *nested({name: record})]
    parts.append("## optimizer\n\nOptions as in the library's class; `lr` is the learning rate.\n")
    return "\n".join([*parts, optimizers()])


def optimizers() -> str:
    """Describe the optimizers in one table: their options are those of their libraries."""
    lines = [
        f"`{name}` | {markdown(describe(entry))} | {defaults(entry)}"
        for name, entry in own(OPTIMIZERS)
    ]
    return "\n".join(["optimizer | what it is | options", "---|---|---", *lines]) + "\n"


def defaults(entry: Plugin) -> str:
    return ", ".join(f"`{name}` {default}" for name, (default, _) in table_rows(entry).items())


def stages() -> str:
    about = (
        "Entries of `train.stages`: what chooses, changes or adds rows of an iteration. Those "
        "below run in one fixed order; [your own](../extending.md#a-stage-in-20-lines) run after "
        "them, in the order of the list."
    )
    known = {name: entry for name, entry in own(STAGES) if not STAGES.unfit(entry)}
    parts = [f"# Options of stages\n\n{NOTE}\n{about}\n"]
    for name, entry in known.items():
        parts += [section(name, entry, whole=True), *nested({name: entry}, 3)]
    return "\n".join(parts)


def policies() -> str:
    parts = [f"# Options of policies\n\n{NOTE}\n## Options that many policies share\n"]
    for title, base in BASES.items():
        rows = {name: cells for name, cells in table_rows(base).items() if name in shared(base)}
        parts.append(f"### {title} policies\n\n{table(rows)}")
    parts.append("## Policies\n")
    known: dict[str, str] = {}  # what follows a heading -> its policy
    for name, entry in own(POLICIES):
        heading, about, *rest = section(f"policy: {name}", entry, 3).split("\n\n", 2)
        text = "\n\n".join(rest)
        first = known.setdefault(text, name)
        same = f"Options as of [{first}](#policy-{first}).\n"
        parts.append("\n\n".join([heading, about, text if first == name else same]))
    parts.append("## Records of options\n")
    parts += nested(dict(own(POLICIES)), 3)
    for kind, registry in (("timestep_schedule", GRIDS), ("solver", SOLVERS)):
        parts += [section(f"{kind}: {name}", entry, 3) for name, entry in own(registry)]
    return "\n".join(parts)


def own(registry: Mapping[str, Plugin]) -> Iterator[tuple[str, Plugin]]:
    """Yield the entries that this repository registers."""
    for name, entry in sorted(registry.items()):
        if entry.__module__.partition(".")[0] in ("mmrl", "samplers"):
            yield name, entry


def shared(base: type) -> set[str]:
    """Return the options of a base that policies have, and that no base of it declares."""
    earlier = {
        name for other in BASES.values() if other in base.__mro__[1:] for name in options(other)
    }
    used = {name for _, entry in own(POLICIES) if base in entry.__mro__ for name in options(entry)}  # type: ignore[union-attr]
    return (set(options(base)) & used) - earlier


def section(title: str, entry: Any, level: int = 2, whole: bool = False) -> str:
    """Describe a plug-in or a record under a heading; ``whole``: with all of its docstring."""
    parents = [
        name for name, base in BASES.items() if inspect.isclass(entry) and base in entry.__mro__
    ]
    rows, changed = beside(entry, [BASES[name] for name in parents])
    about = markdown(prose(entry) if whole else prose(entry).partition("\n\n")[0])
    text = [f"{'#' * level} {title}\n", f"{about}\n"]
    if rows:
        text.append(table(rows))
    links = ", ".join(f"[{name}](#{name}-policies)" for name in reversed(parents))
    others = f" Here {', '.join(f'`{n}` is {d}' for n, d in changed.items())}." if changed else ""
    if parents:
        text.append(f"Also: {links}.{others}\n")
    return "\n".join(text)


def nested(entries: Mapping[str, Any], level: int = 3) -> list[str]:
    """Describe the records that are options of ``entries``, each once."""
    parts = []
    seen: set[Any] = set()
    titles: set[str] = set()
    waiting = [
        (option, name, p) for name, entry in entries.items() for option, p in options(entry).items()
    ]
    while waiting:
        place, name, parameter = waiting.pop(0)
        for record in records(parameter.annotation):
            if record in seen:
                continue
            title = f"{place} of {name}" if place in titles else place
            seen.add(record)
            titles.add(title)
            parts.append(section(title, record, level))
            waiting += [(f"{place}.{each}", name, p) for each, p in options(record).items()]
    return parts


def records(annotation: Any) -> list[Any]:
    """Return the dataclasses in an annotation."""
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [record for part in get_args(annotation) for record in records(part)]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
