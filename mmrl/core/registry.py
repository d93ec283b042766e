"""Maps names in a configuration to the callables they stand for. The callable's signature is the
schema.

An entry is one of two things:

* a **class**: building it calls ``cls(**options)``; the options are the parameters of ``__init__``
  (``**options`` in ``__init__`` means: and whatever the base class accepts);
* a **function**: building it binds its *keyword-only* parameters, the positional ones stay open for
  the caller, so ``def jpeg(media, prompts, *, quality=95)`` is a reward with one option.

This module imports nothing heavy: ``rewards`` depends on it and must stay light.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mmrl.core.errors import UserError, suggest

Plugin = Callable[..., Any]  # a class or a function
SAFE = "MMRL_SAFE"  # environment variable
Registered = TypeVar("Registered", bound=Plugin)


def describe(entry: Plugin) -> str:
    """Return the first sentence or paragraph of the docstring, in one line, to show in tables."""
    lines = []
    for line in (inspect.getdoc(entry) or "").split("\n"):
        if not line.strip():
            break
        lines.append(line.strip())
        if line.rstrip().endswith(".") and not line.rstrip().endswith("et al."):
            break
    return " ".join(lines)


def options(entry: Plugin) -> dict[str, inspect.Parameter]:
    """Return the parameters a configuration may set, in order, with annotations resolved to types
    where possible."""
    if not inspect.isclass(entry):
        signature = inspect.signature(entry, eval_str=True).parameters.values()
        return {p.name: p for p in signature if p.kind is p.KEYWORD_ONLY}
    parameters: dict[str, inspect.Parameter] = {}
    for cls in (c for c in entry.__mro__ if "__init__" in vars(c) and c is not object):
        signature = inspect.signature(vars(cls)["__init__"], eval_str=True).parameters.values()
        for p in list(signature)[1:]:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                parameters.setdefault(p.name, p)
        if not any(p.kind is p.VAR_KEYWORD for p in signature):
            break
    # what a subclass fills in itself, such as the network
    hidden = getattr(entry, "not_options", ())
    return {name: p for name, p in parameters.items() if name not in hidden}


class Registry(dict[str, Plugin]):
    """Holds one kind of plug-in: ``name -> class or function``."""

    # typing hashes what stands in Annotated[Kernel, KERNELS]; a dict says it has no hash
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, kind: str, entries: Mapping[str, Plugin] = {}, group: str | None = None):
        super().__init__(entries)
        self.kind = kind
        self.group = group or f"mmrl.{kind}s"  # the entry-point group a third party registers under

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Register the decorated entry. Two different entries under one name are refused."""

        def add(entry: Registered) -> Registered:
            known = self.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (
                entry.__module__,
                entry.__qualname__,
            ):
                raise ValueError(f"two {self.kind}s are called {name!r}: {known} and {entry}")
            self[name] = entry
            return entry

        return add

    def find(self, name: str, former: Mapping[str, str] = {}) -> Plugin:
        """Return the entry of that name, or of ``module:name`` or ``file.py:name``; raise a
        UserError with a suggestion if there is none, also of names that entries had, ``former``."""
        if name in self:
            return self[name]
        if isinstance(name, str) and ":" in name:
            return import_name(name, self.kind)
        raise UserError(f"unknown {self.kind} {name!r}; {suggest(name, self, former)}")

    def discover(self) -> None:
        """Register what installed packages offer by entry points; warn of one that cannot be
        imported and leave it out."""
        for entry in importlib.metadata.entry_points(group=self.group):
            if entry.name in self:
                continue
            try:
                self.register(entry.name)(entry.load())
            except Exception as error:  # another package's code can raise anything
                warnings.warn(
                    f"{self.kind} {entry.name!r} ({entry.value}) cannot be loaded: {error}",
                    stacklevel=2,
                )

    def build(self, name: str, **chosen: Any) -> Any:
        """Construct a class, or bind a function's options. Types are checked in ``mmrl.config``,
        not here."""
        entry = self.find(name)
        if inspect.isclass(entry):
            return entry(**chosen)
        return partial(entry, **chosen) if chosen else entry


def refuse_foreign_code() -> None:
    """Let configurations name only what is registered, in this process and those it starts
    (``mmrl --safe``)."""
    os.environ[SAFE] = "1"


def is_safe() -> bool:
    """Tell whether configurations may name only what is registered."""
    return os.environ.get(SAFE, "") not in ("", "0")


def import_name(name: str, kind: str = "plug-in") -> Plugin:
    """Import ``module:attribute`` or ``path/to/file.py:attribute``; modules are also looked up in
    the working directory. Raises UserError under ``--safe``, which runs no code of others."""
    if is_safe():
        raise UserError(
            f"{kind} {name!r} is code of the configuration's author, which --safe refuses; read "
            f"it, then run without --safe (and MMRL_SAFE), or take a registered {kind}"
        )
    place, _, attribute = name.rpartition(":")
    try:
        module = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    except ModuleNotFoundError as error:
        raise UserError(
            f"cannot import {kind} {name!r}: {error}; looked in {os.getcwd()} and sys.path"
        ) from error
    if not hasattr(module, attribute):
        raise UserError(
            f"{place!r} has no {attribute!r}; {suggest(attribute, public_names(module))}"
        )
    plugin: Plugin = getattr(module, attribute)
    if not callable(plugin):
        raise UserError(f"{name!r} is a {type(plugin).__name__}, not a {kind}: nothing to call")
    return plugin


def public_names(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def import_module(place: str) -> Any:
    """Import a module from sys.path or the working directory."""
    look_in(Path.cwd())
    return importlib.import_module(place)


def import_file(path: Path) -> Any:
    """Import a .py file as a module, executed once however often it is named; it may import its
    neighbours."""
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    path = path.resolve()
    look_in(path.parent)
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        # another file has its name already
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader  # Python knows how to load a .py file
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def look_in(folder: Path) -> None:
    """Put a user's folder on ``sys.path``, which an installed command does not do by itself."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


POLICIES = Registry("policy", group="mmrl.policies")
OBJECTIVES = Registry("objective")
ADVANTAGES = Registry("advantage")
REWARDS = Registry("reward")
DATA = Registry("data source", group="mmrl.data")
OPTIMIZERS = Registry("optimizer")
KERNELS = Registry("SDE type", group="mmrl.sde_types")
GRIDS = Registry("timestep schedule", group="mmrl.timestep_schedules")
WINDOWS = Registry("noise window", group="mmrl.noise_windows")
SOLVERS = Registry("solver")
# of the text objective: losses of the ratio
SURROGATES = Registry("surrogate", group="mmrl.surrogates")
# when an objective looks at a finished sample anew
TIMES = Registry("timestep sampler", group="mmrl.timestep_samplers")
# of the masked objective: which states it looks at
ESTIMATORS = Registry("estimator", group="mmrl.estimators")
STAGES = Registry("stage")  # stages change which rows of an iteration are trained on
MONITORS = Registry("monitor")  # metrics of what an iteration sampled
JUDGES = Registry("judge")  # vision-language models that rewards query
ARTIFACTS = Registry("artifact")  # things a world builds and caches: () -> folder

ALL = {
    "policies": POLICIES,
    "objectives": OBJECTIVES,
    "advantages": ADVANTAGES,
    "rewards": REWARDS,
    "data": DATA,
    "optimizers": OPTIMIZERS,
    "sde_types": KERNELS,
    "timestep_schedules": GRIDS,
    "noise_windows": WINDOWS,
    "solvers": SOLVERS,
    "surrogates": SURROGATES,
    "timestep_samplers": TIMES,
    "estimators": ESTIMATORS,
    "stages": STAGES,
    "monitors": MONITORS,
    "judges": JUDGES,
    "artifacts": ARTIFACTS,
}

BUILT_IN = (
    "samplers",
    "rewards",
    "mmrl.policies",
    "mmrl.objectives",
    "mmrl.advantages",
    "mmrl.rollout",
    "mmrl.monitoring.monitors",
    "mmrl.train.optimizers",
    "mmrl.data.prompts",
    "mmrl.data.vision",
    "mmrl.data.augmentation",
    "mmrl.data.budget",
    "mmrl.data.captions",
    "mmrl.data.curriculum",
    "mmrl.data.selection",
    "mmrl.data.self_instruct",
    "mmrl.data.subsets",
    "mmrl.data.suggestions",
    "mmrl.data.tracked",
    "mmrl.worlds",
)


def load_built_in() -> None:
    """Import every package that registers something. None of them imports diffusers or transformers
    to do so."""
    for module in BUILT_IN:
        importlib.import_module(module)
    import samplers

    KERNELS.update(samplers.KERNELS)
    GRIDS.update(samplers.GRIDS)
    WINDOWS.update(samplers.WINDOWS)
    SOLVERS.update(samplers.SOLVERS)
    for registry in ALL.values():
        registry.discover()


def locate(path: str) -> str:
    """Return a model path that the loaders accept: ``world:digits/sd3`` is built and cached,
    anything else passes through."""
    if not str(path).startswith("world:"):
        return str(path)
    load_built_in()
    return str(ARTIFACTS.find(str(path).removeprefix("world:"))())
