"""Finds files: configurations and pages shipped with the package, the cache of built worlds."""

from __future__ import annotations

import os
from os.path import isfile
from pathlib import Path

from mmrl.core.errors import UserError, suggest

MOST_NAMES = 6  # that a message lists
PACKAGE = Path(__file__).resolve().parents[1]


def cache_dir() -> Path:
    """Return ``$MMRL_CACHE``, else ``$XDG_CACHE_HOME/mmrl``, else ``~/.cache/mmrl``; does not
    create it."""
    if chosen := os.environ.get("MMRL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "mmrl"


def shipped_configs() -> Path:
    """Return the ``configs`` folder of an installed package, or of the repository for an editable
    install."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def shipped_pages() -> Path:
    """Return the ``docs`` folder of an installed package, or of the repository."""
    installed = PACKAGE / "docs"
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def config_names() -> list[str]:
    """List the names that ``find_config`` accepts anywhere, such as ``digits/flow_grpo``,
    sorted."""
    names = set()
    for root in (Path("configs"), shipped_configs()):
        names |= {
            path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.y*ml")
        }
    return sorted(names)


def find_config(name: str | Path) -> Path:
    """Return the configuration file of that path or name; ``.yaml`` may be left off.

    Tried as a path, then below ``./configs``, then among the shipped ones, so that
    ``digits/flow_grpo`` and ``configs/digits/flow_grpo.yaml`` are the same file everywhere. Raises
    ``UserError`` with the nearest names.
    """
    text = Path(name).as_posix()
    short = text.removeprefix("./").removeprefix("configs/")
    for place in (Path(text), Path("configs") / short, shipped_configs() / short):
        for path in (
            place,
            place.parent / f"{place.name}.yaml",
            place.parent / f"{place.name}.yml",
        ):
            if isfile(path):  # also for a name too long for the system
                return path
    if Path(text).is_dir():
        raise UserError(f"{text} is a folder, not a configuration file; {_inside(short)}")
    raise UserError(
        f"no configuration {text!r}: no such file in {Path.cwd()}, and no shipped configuration; "
        f"{_near(short.removesuffix('.yaml').removesuffix('.yml'))}"
    )


def _near(stem: str) -> str:
    """Suggest configurations of a similar name: the nearest, or those that contain it; else how to
    list all."""
    names = config_names()
    if any(name.startswith(f"{stem}/") for name in names):
        return _inside(stem)
    close = suggest(stem, names)
    if close.startswith("did"):
        return close
    last = stem.rpartition("/")[2]
    alike = [name for name in names if last and last in name]
    alike.sort(key=lambda name: not name.startswith("digits/"))  # first what needs no weights
    if alike:
        return f"with such a name: {', '.join(alike[:MOST_NAMES])}"
    return f"{len(names)} are shipped, such as digits/flow_grpo: mmrl list configs shows them"


def _inside(folder: str) -> str:
    names = [name for name in config_names() if name.startswith(folder.rstrip("/") + "/")]
    rest = f" and {len(names) - MOST_NAMES} more: mmrl list configs" * (len(names) > MOST_NAMES)
    inside = f"in it: {', '.join(names[:MOST_NAMES])}{rest}"
    return inside if names else "give the path of a .yaml file"
