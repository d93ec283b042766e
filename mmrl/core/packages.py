"""Makes ``rewards`` and ``samplers`` mean mmrl's packages, whatever is in the working directory.

The two packages are next to ``mmrl`` in a checkout and inside it in an installed wheel, and are
found there by path, never by ``sys.path``: ``python -m mmrl`` and ``accelerate launch -m mmrl`` put
the working directory first, which may hold a user's ``rewards.py``. That file stays usable:

* ``rewards:redness`` in a configuration is the user's if there is such a file, else mmrl's;
* ``from rewards import redness`` in a user's code falls back from mmrl's module to theirs;
* internally, the user's module is called ``users_rewards``.

For users, mmrl's packages are also ``mmrl.rewards`` and ``mmrl.samplers``, the same modules under
unambiguous names: ``from mmrl.rewards import clip_score``.

Importing this module installs the finder; it needs the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

OURS = ("rewards", "samplers")
USERS = "users_"
PUBLIC = "mmrl."
PACKAGE = Path(__file__).resolve().parents[1]


def folder_of(name: str) -> Path:
    """Return the folder of mmrl's package of that name: inside ``mmrl`` in a wheel, else next to
    it."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def is_ours(module: ModuleType) -> bool:
    """Tell whether a module called ``rewards`` or ``samplers`` is mmrl's."""
    return any(place == folder_of(module.__name__) for place in _places(module.__spec__))


def import_named(place: str) -> ModuleType:
    """Import a module that a configuration names: the user's if there is one, else mmrl's."""
    if place.partition(".")[0] in OURS:
        theirs = USERS + place
        try:
            return importlib.import_module(theirs)
        except ModuleNotFoundError as error:
            if not f"{theirs}.".startswith(f"{error.name}."):
                raise  # the user's module exists, but one of its own imports is missing
    return importlib.import_module(place)


class OurPackages(MetaPathFinder):
    """Finds mmrl's packages by path, the user's modules of the same names, and the public names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, below = name.partition(".")
        if name in OURS:
            init = folder_of(name) / "__init__.py"
            return _spec(name, str(init), [str(init.parent)], _Open(name, str(init)))
        if top in OURS:
            return PathFinder.find_spec(name, path) or _alias(name, USERS + name)
        if top == PUBLIC.rstrip(".") and below.partition(".")[0] in OURS:
            return _alias(name, below)
        if name.removeprefix(USERS) in OURS:
            return _of_the_user(name)
        return None


class _Open(SourceFileLoader):
    """Loads mmrl's package, with a fallback for names that only the user's module has."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _open(module)


class _Same(Loader):
    """Loads a module under a second name, as the same object."""

    def __init__(self, known_as: ModuleSpec):
        self.known_as = known_as

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = self.known_as.name
        loaded = importlib.import_module(name)
        # Python sets an imported submodule as an attribute of its parent, where a reward's class
        # may have that name: what is loaded is not imported again under its second name.
        for known in [known for known in sys.modules if known.startswith(f"{name}.")]:
            sys.modules[module.__name__ + known.removeprefix(name)] = sys.modules[known]
        sys.modules[module.__name__] = loaded

    def get_code(self, name: str) -> CodeType | None:
        """Return the code to run for ``python -m``."""
        loader: Any = self.known_as.loader
        code: CodeType | None = loader.get_code(self.known_as.name)
        return code


def _spec(name: str, origin: str | None, folders: list[str] | None, loader: Loader) -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(
        name, origin, loader=loader, submodule_search_locations=folders
    )
    assert spec is not None  # a loader is given
    return spec


def _alias(name: str, known_as: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(known_as)
    except ModuleNotFoundError:
        return None
    if spec is None:
        return None
    alias = ModuleSpec(name, _Same(spec), origin=spec.origin)
    alias.submodule_search_locations = spec.submodule_search_locations
    return alias


def _of_the_user(name: str) -> ModuleSpec | None:
    """Find a user's ``rewards`` in the working directory or on ``sys.path``, as
    ``users_rewards``."""
    ours = name.removeprefix(USERS)
    for entry in dict.fromkeys([os.getcwd(), *(place or os.getcwd() for place in sys.path)]):
        spec = PathFinder.find_spec(ours, [entry])
        if spec is None or any(_of_some_mmrl(place) for place in _places(spec)):
            continue
        folders = spec.submodule_search_locations
        if spec.origin is None:  # a folder without __init__.py
            namespace = ModuleSpec(name, None, is_package=True)
            namespace.submodule_search_locations = list(folders or ())
            return namespace
        return importlib.util.spec_from_file_location(
            name, spec.origin, submodule_search_locations=list(folders) if folders else None
        )
    return None


def _places(spec: ModuleSpec | None) -> list[Path]:
    return [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]


def _of_some_mmrl(folder: Path) -> bool:
    """Tell whether a package is mmrl's, including a second checkout on ``sys.path``."""
    return (folder.parent / "mmrl" / "core" / "registry.py").is_file() or folder.parent == PACKAGE


def _open(package: ModuleType) -> None:
    """Let ``from rewards import redness`` find the user's ``redness`` if mmrl's package has
    none."""
    name = package.__name__
    find = vars(package).get("__getattr__")

    def missing(attribute: str) -> Any:
        # for an mmrl module that is not loaded yet, Python asks here first
        ours = PathFinder.find_spec(f"{name}.{attribute}", list(package.__path__))
        if ours is None and not attribute.startswith("__"):
            try:
                if find:
                    return find(attribute)
            except AttributeError as error:
                if error.name != attribute:
                    raise
            try:
                return getattr(importlib.import_module(USERS + name), attribute)
            except ModuleNotFoundError as error:
                if error.name != USERS + name:
                    raise
            except AttributeError:
                pass
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    vars(package)["__getattr__"] = missing


def install() -> None:
    """Install the finder, and rename the user's modules if they were imported before mmrl."""
    if any(isinstance(finder, OurPackages) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, OurPackages())
    for name in OURS:
        module = sys.modules.get(name)
        if module is None:
            continue
        if is_ours(module):
            _open(module)
            continue
        for known in [x for x in sys.modules if x == name or x.startswith(f"{name}.")]:
            sys.modules[USERS + known] = sys.modules.pop(known)


install()
