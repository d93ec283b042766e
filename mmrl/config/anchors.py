"""Makes the paths in a configuration absolute, so that they are found from any working
directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config.building import weighed
from mmrl.config.values import exists, is_pattern, lies_beside

PLACES = ("path", "images", "held_out")  # options of ``data`` that name files or folders
FOLDERS = ("path", "start")  # options of any section
CODE = re.compile(r"(.+\.py)(:[\w.]+)")  # a plug-in of the user's


def anchored(value: Any, folder: Path, path: tuple[str, ...] = ()) -> Any:
    """Make paths of files and code absolute, found in the working directory or in the
    configuration's ``folder``; for some options also folders, for ``data`` also patterns. ``path``:
    the keys that lead to the value."""
    if path == ("run",):
        return value
    if isinstance(value, dict):
        named = _weighed(value) if _holds_rewards(path) else value
        several = {key: anchored(item, folder, (*path, str(key))) for key, item in named.items()}
        return _with_code(several, (Path(), folder), path)
    if isinstance(value, list):
        return [anchored(item, folder, path) for item in value]
    if not isinstance(value, str):
        return value
    return _code(value, (Path(), folder)) or _file(value, folder, path) or value


def code_beside(value: Any, folder: Path, path: tuple[str, ...] = ()) -> Any:
    """Make the path of code absolute if it is next to the configuration and not in the working
    directory."""
    if isinstance(value, dict):
        named = _weighed(value) if _holds_rewards(path) else value
        several = {key: code_beside(item, folder, (*path, str(key))) for key, item in named.items()}
        return _with_code(several, (folder,), path)
    if isinstance(value, list):
        return [code_beside(item, folder, path) for item in value]
    return (isinstance(value, str) and _code(value, (folder,))) or value


def _holds_rewards(path: tuple[str, ...]) -> bool:
    """Tell whether the section at a path has rewards with weights; a reward that is an option of
    another has none."""
    return (path[2:] if path[:1] == ("stages",) else path) in ((), ("evaluate",))


def _weighed(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a section in which rewards given as code by name alone have a weight."""
    spec = values.get("reward")
    several = [spec] if isinstance(spec, str) else spec
    is_code = isinstance(several, list) and any(CODE.fullmatch(str(name)) for name in several)
    return {**values, "reward": weighed(spec)} if is_code else values


def _with_code(
    values: dict[Any, Any], folders: Sequence[Path], path: tuple[str, ...]
) -> dict[Any, Any]:
    """Make keys that are code absolute; a reward keeps its name, and gets ``use``."""
    if path[-1:] == ("reward",) and _holds_rewards(path[:-1]):
        return values
    whole = {_code(key, folders) or key: item for key, item in values.items()}
    if "reward" in whole and _holds_rewards(path):
        whole["reward"] = _rewards(whole["reward"], folders)
    return whole


def _rewards(spec: Any, folders: Sequence[Path]) -> Any:
    if not isinstance(spec, Mapping):
        return spec
    used = {name: code for name in spec if (code := _code(name, folders))}
    options = {n: v if isinstance(v, Mapping) else {"weight": v} for n, v in spec.items()}
    return {**spec, **{n: {"use": code, **options[n]} for n, code in used.items()}}


def _code(value: Any, folders: Sequence[Path]) -> str | None:
    """Return ``file.py:name`` with the absolute path of the file, found in one of ``folders``; None
    if it is in none of them."""
    match = CODE.fullmatch(value) if isinstance(value, str) else None
    if match is None or os.path.isabs(match[1]):
        return None
    is_here = Path() not in folders and os.path.isfile(match[1])
    places = () if is_here else (os.path.abspath(folder / match[1]) for folder in folders)
    file = next(filter(os.path.isfile, places), None)
    return None if file is None else file + match[2]


def _file(value: str, folder: Path, path: tuple[str, ...]) -> str | None:
    """Return the absolute path that a value names; None if it does not exist."""
    key = path[-1] if path else ""
    is_data = "data" in path[:-1] and key in PLACES
    if os.path.isabs(value) or value.startswith("~"):
        return None
    if is_data and is_pattern(value):
        return os.path.abspath((folder if lies_beside(value, folder) else Path()) / value)
    if not (is_data or key in FOLDERS or Path(value).suffix):
        return None
    places = (each / value for each in (Path(), folder))
    return next((os.path.abspath(place) for place in places if exists(place)), None)
