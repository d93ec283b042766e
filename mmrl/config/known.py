"""Lists the plug-ins and their options in a table, without importing the classes, which takes
seconds.

``known.json`` is written by ``scripts/dev/known_plug_ins.py`` from the registries. For each plug-in
it has the place, ``module:attribute``, the options and, if it cannot be named, the reason. Options
are types as text, then `` = ...`` or `` = None`` if there is a default. ``Any`` is a type that a
table cannot express.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Mapping
from dataclasses import MISSING, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types

from mmrl.config.schema import OURS, unseen
from mmrl.config.values import Location
from mmrl.core.errors import called
from mmrl.core.registry import Plugin, Registry, offered

TABLE = Path(__file__).with_name("known.json")
SLACK = 10.0  # seconds in which an installation writes all files
# besides the containers of collections.abc and the constraints of annotated_types
TYPES = (bool, dict, float, int, list, str, tuple, Annotated, Any, Literal, Location, Path, Union)
DEFAULTS = {"...": ..., "None": None, "": MISSING}


def is_outdated() -> bool:
    """Tell whether code is newer than the table, as during development."""
    newest = max(path.lstat().st_mtime for folder in OURS for path in folder.rglob("*.py"))
    return newest > TABLE.stat().st_mtime + SLACK


class Known:
    """Holds a registry for each kind of plug-in whose entries are stand-ins: classes with the same
    options. ``foreign``: code of the configuration's author may register more."""

    def __init__(self, foreign: bool = False):
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        self.foreign = foreign
        self.kinds = {
            kind: StandIns(kind, self, entries) for kind, entries in table["kinds"].items()
        }
        self._records: dict[str, dict[str, str]] = table["records"]
        self._made: dict[str, Any] = {}
        modules = (abc, annotated_types)
        names = {name: vars(module)[name] for module in modules for name in module.__all__}
        names |= {getattr(kind, "__name__", str(kind)): kind for kind in TYPES}
        self._names = {**names, "plug_in": self.kinds.__getitem__, "record": self._record}

    def stand_in(self, name: str, options: Mapping[str, str]) -> type:
        """Create a class with these options, whose types are given as text."""
        fields = []
        for option, text in options.items():
            kind, _, default = text.partition(" = ")
            # the text is of this package, as annotations are
            value = eval(kind, {"__builtins__": {}}, self._names)
            fields.append((option, value, field(default=DEFAULTS[default])))
        return make_dataclass(name, fields, kw_only=True, repr=False, eq=False)

    def _record(self, place: str) -> Any:
        """Return the stand-in for a dataclass; a recursive reference is ``Any``."""
        if place not in self._made:
            self._made[place] = Any
            self._made[place] = self.stand_in(place.rpartition(":")[2], self._records[place])
        return self._made[place]


class StandIns(Registry):
    """Holds the stand-ins of a kind, created on demand."""

    def __init__(self, kind: str, known: Known, entries: Mapping[str, Mapping[str, Any]]):
        refused = {name: entry.get("refused", "") for name, entry in entries.items()}
        stand_ins = dict.fromkeys(entries, unseen)
        super().__init__(kind, stand_ins, refuses=lambda entry: refused.get(called(entry), ""))
        self.known = known
        self.entries = entries

    def __getitem__(self, name: str) -> Plugin:
        entry = super().__getitem__(name)
        if entry is unseen:
            entry = self[name] = self.known.stand_in(name, self.entries[name]["options"])
        return entry

    def __missing__(self, name: str) -> Plugin:
        raise KeyError(name)  # the table is complete

    def find(self, name: str) -> Plugin:
        """Return the stand-in; ``unseen`` if code that has not run yet may define the name."""
        self.known.foreign |= ":" in name
        if self.known.foreign or (name not in self and _others_offer()):
            return unseen
        return super().find(name)


def _others_offer() -> bool:
    """Tell whether installed packages provide plug-ins, of any kind."""
    return any(group.startswith("mmrl.") for group in offered())
