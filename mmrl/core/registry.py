"""Maps names in a configuration to callables, whose signature is the schema.

An entry is one of two things:

* a **class**: building it calls ``cls(**options)``; the options are the parameters of ``__init__``
  (``**options`` in ``__init__`` adds those of the base class, or of the dataclasses in its
  ``term_types``, such as the terms of the policy gradient);
* a **function**: building it binds its *keyword-only* parameters, the positional ones are left to
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from mmrl.core import packages
from mmrl.core.added_options import is_kept, parameters_of
from mmrl.core.errors import UserError, a_or_an, suggest

Plugin = Callable[..., Any]  # a class or a function
SAFE = "MMRL_SAFE"  # environment variable
# in Annotated[Callable[[], Policy], POLICIES, LATER]: the option is a function that builds the
# plug-in, such as a model that a dry run does not load
LATER = "LATER"
# prefix of names that exist only in the Python session of an ``mmrl.Trainer``
IN_PYTHON = "python"
Registered = TypeVar("Registered", bound=Plugin)


def describe(entry: Plugin) -> str:
    """Return the first sentence or paragraph of the docstring, in one line, for tables."""
    lines = []
    for line in (inspect.getdoc(entry) or "").split("\n"):
        if not line.strip():
            break
        lines.append(line.strip())
        if line.rstrip().endswith(".") and not line.rstrip().endswith("et al."):
            break
    return " ".join(lines)


def documentation(entry: Plugin) -> str:
    """Return the docstring, with those of the terms whose options the base lacks."""
    known = {part for base in getattr(entry, "__mro__", ())[1:] for part in _terms(base)}
    parts = (entry, *(part for part in _terms(entry) if part not in known))
    return "\n\n".join(inspect.getdoc(part) or "" for part in parts)


def _terms(entry: Plugin) -> tuple[type, ...]:
    """Return the dataclasses that a constructor builds from its ``**options``."""
    terms: tuple[type, ...] = declared(entry, "term_types", ())
    return terms


def options(entry: Plugin) -> dict[str, inspect.Parameter]:
    """Return the parameters a configuration may set, in order, with annotations resolved to types
    if possible."""
    if isinstance(entry, type):
        return dict(_options_of(entry))
    arguments = inspect.signature(entry, eval_str=True).parameters.values()
    return {p.name: p for p in arguments if p.kind is p.KEYWORD_ONLY}


@cache
def _options_of(entry: type) -> Mapping[str, inspect.Parameter]:
    parameters: dict[str, inspect.Parameter] = {}
    for cls in (c for c in entry.__mro__ if "__init__" in vars(c) and c is not object):
        signature = _fields_of(cls) if _has_fields(cls) else _arguments_of(cls)
        for p in signature:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                parameters.setdefault(p.name, p)
        passed_on = is_kept(cls) or any(p.kind is p.VAR_KEYWORD for p in signature)
        if not passed_on and not (_is_generated(cls) and _hides_base(entry)):
            break
    else:
        for part in _terms(entry):
            parameters.update((p.name, p) for p in _fields_of(part))
    # filled in by the subclass, such as the network
    hidden = declared(entry, "not_options", ())
    return {name: p for name, p in parameters.items() if name not in hidden}


def make(entry: type, chosen: Mapping[str, Any]) -> Any:
    """Construct a plug-in from its options.

    A dataclass whose base is not one also gets the base's options: as dataclasses do not call their
    base's constructor, that is called first.
    """
    if not _hides_base(entry):
        return entry(**chosen)
    fields = {p.name for p in _fields_of(_first(entry))}
    plug_in: Any = object.__new__(entry)
    rest = {name: value for name, value in chosen.items() if name not in fields}
    vars(_written_base(entry))["__init__"](plug_in, **rest)
    vars(_first(entry))["__init__"](plug_in, **{n: v for n, v in chosen.items() if n in fields})
    return plug_in


def _is_generated(cls: type) -> bool:
    """Tell whether ``@dataclass`` generated the constructor of this class itself."""
    return not is_kept(cls) and bool(getattr(vars(cls).get("__dataclass_params__"), "init", False))


def _has_fields(cls: type) -> bool:
    """Tell whether the constructor of this class itself takes its fields."""
    return is_kept(cls) or _is_generated(cls)


def _first(cls: type) -> type:
    """Return the class whose constructor is called."""
    return next(c for c in cls.__mro__ if "__init__" in vars(c))


def _written_base(cls: type) -> type:
    """Return the nearest class with a hand-written constructor; object: none."""
    return next(c for c in cls.__mro__ if "__init__" in vars(c) and not _is_generated(c))


def _hides_base(entry: type) -> bool:
    """Tell whether the constructor of a dataclass hides a base's with options."""
    base = _written_base(entry)
    if not _is_generated(_first(entry)) or base is object:
        return False
    return any(p.kind is p.POSITIONAL_OR_KEYWORD for p in _arguments_of(base))


@cache
def _arguments_of(cls: type) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a class's own constructor, annotations resolved."""
    return tuple(inspect.signature(vars(cls)["__init__"], eval_str=True).parameters.values())[1:]


@cache
def _fields_of(cls: type) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of the fields. The annotation of an inherited field is resolved in the
    base's module."""
    written = inspect.signature(vars(cls)["__init__"]).parameters.values()
    parameters = parameters_of(cls) if is_kept(cls) else list(written)[1:]
    return tuple(p.replace(annotation=_resolved(cls, p)) for p in parameters)


def _resolved(cls: type, parameter: inspect.Parameter) -> Any:
    """Return the annotation of a dataclass's parameter as a type."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        owner = next(c for c in cls.__mro__ if parameter.name in vars(c).get("__annotations__", {}))
        names = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
        # evaluated as by inspect and typing: the text is the class's own code
        annotation = eval(annotation, dict(names), dict(vars(owner)))
    return annotation.type if isinstance(annotation, InitVar) else annotation


# (kind, name that papers and other libraries use) -> name here
NAMES_OF_THE_FIELD = {
    ("objective", "grpo"): "policy_gradient",
    ("objective", "ppo"): "policy_gradient",
    ("objective", "reinforce"): "policy_gradient",
    ("reward", "embedding_head"): "fitted_head",
    ("option", "r"): "rank",  # peft's names, within ``lora``
    ("option", "lora_alpha"): "alpha",
    ("option", "target_modules"): "targets",
}


class Registry(dict[str, Plugin]):
    """Holds one kind of plug-in: ``name -> class or function``."""

    # typing hashes the arguments of Annotated[Kernel, KERNELS]; a dict is not hashable
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, Plugin] = {},
        group: str | None = None,
        takes: Sequence[str] = (),
        has: Sequence[str] = (),
        least: int | None = None,
        refuses: Callable[[Plugin], str] = lambda entry: "",
    ):
        """``group``: of entry points by which third parties register. ``takes``: the arguments with
        which a function, or an object of a class, is called. ``has``: what a class must define;
        then functions do not fit. ``least``: minimum number of ``takes`` for a function.
        ``refuses`` says why an otherwise valid entry cannot be named."""
        super().__init__(entries)
        self.kind = kind
        self.group = group or f"mmrl.{kind}s"
        self.takes = tuple(takes)
        self.has = tuple(has)
        self.refuses = refuses
        self.counts = range(least or len(self.takes), len(self.takes) + 1)

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

    def __missing__(self, name: str) -> Plugin:
        """Import the module of an entry that was not loaded yet."""
        load_built_in()
        if name in self:
            return self[name]
        raise KeyError(name)

    def find(self, name: str) -> Plugin:
        """Return the entry of that name, or of ``module:name`` or ``file.py:name``; raise a
        UserError with a suggestion if there is none."""
        if name not in self and isinstance(name, str) and ":" in name:
            return import_name(name, self.kind)
        with suppress(KeyError):
            return self[name]
        own_name = NAMES_OF_THE_FIELD.get((self.kind, name))
        hint = f"it is called {own_name!r} here"
        if own_name not in self:
            hint = suggest(name, [each for each in self if not self.refuses(self[each])])
        raise UserError(f"unknown {self.kind} {name!r}; {hint}")

    def unfit(self, entry: Plugin) -> str:
        """Say why something cannot be a plug-in of this kind, by its signature; else ""."""
        what = a_or_an(self.kind)
        lacking = [name for name in self.has if not hasattr(entry, name)]
        if lacking:
            return f"{what} is a class with {' and '.join(self.has)}; this has no {lacking[0]}"
        if self.takes and not any(_can_take(entry, count) for count in self.counts):
            return f"its parameters must be ({', '.join(self.takes)}); this takes {_taken(entry)}"
        return self.refuses(entry)

    def in_order_of(self, room: str) -> None:
        """Order the entries of a package by its ``MODULES``, before all others, regardless of the
        import order."""
        modules = [f"{room}.{name}" for name in vars(sys.modules[room])["MODULES"]]
        entries = list(self.items())
        place = {module: i for i, module in enumerate(modules)}
        self.clear()
        self.update(sorted(entries, key=lambda e: place.get(e[1].__module__, len(place))))

    def discover(self, offers: Mapping[str, Sequence[importlib.metadata.EntryPoint]]) -> None:
        """Register entry points of installed packages; skip one that cannot be imported, with a
        warning."""
        for entry in offers.get(self.group, ()):
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
            return make(entry, chosen)
        return partial(entry, **chosen) if chosen else entry


def declared(entry: Any, name: str, default: Any = None) -> Any:
    """Return what a plug-in declares as an attribute; it may be anybody's class or function."""
    return getattr(entry, name, default)


def unbound(function: Any) -> Any:
    """Return a plug-in without the options that ``build`` has bound to it."""
    return function.func if isinstance(function, partial) else function


def bound_options(function: Any) -> Mapping[str, Any]:
    """Return the options that ``build`` has bound to a plug-in."""
    return function.keywords if isinstance(function, partial) else {}


def offered() -> Mapping[str, Sequence[importlib.metadata.EntryPoint]]:
    """List the entry points of installed packages, by group. Reading takes a quarter of a second
    with hundreds of packages, so a folder of sys.path is read again only when it has changed."""
    folders = []
    for name in sys.path:
        place = name or os.getcwd()
        try:
            folders.append((place, os.stat(place).st_mtime_ns))
        except OSError:
            folders.append((place, 0))
    return _offers_in(tuple(folders))


@lru_cache(maxsize=1)
def _offers_in(
    folders: tuple[tuple[str, int], ...],
) -> dict[str, list[importlib.metadata.EntryPoint]]:
    offers: dict[str, list[importlib.metadata.EntryPoint]] = {}
    packages: set[str] = set()
    for folder, changed in folders:
        for package, entries in _offers_of(folder, changed):
            if package not in packages:  # of two versions the first counts, as in an import
                packages.add(package)
                for entry in entries:
                    offers.setdefault(entry.group, []).append(entry)
    return offers


@lru_cache(maxsize=256)
def _offers_of(folder: str, changed: int) -> list[tuple[str, list[importlib.metadata.EntryPoint]]]:
    """Return the packages of a folder that was ``changed`` then, with their entry points."""
    return [
        # the name that importlib.metadata compares; reading the metadata takes longer
        (declared(package, "_normalized_name") or package.name, list(package.entry_points))
        for package in importlib.metadata.distributions(path=[folder])
    ]


def _can_take(entry: Plugin, count: int) -> bool:
    """Tell whether a function, or the objects of a class, can be called with ``count``
    arguments."""
    if isinstance(entry, type):
        return any("__call__" in vars(cls) for cls in entry.__mro__)
    try:
        parameters = inspect.signature(entry).parameters.values()
    except (TypeError, ValueError):  # built-ins have no signature
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return len(needed) <= count and (many or len(places) >= count)


def _taken(entry: Plugin) -> str:
    try:
        return str(inspect.signature(entry))
    except (TypeError, ValueError):
        return "no parameters that can be read"


def _not_derived(objective: Plugin) -> str:
    """Refuse a class with the methods of an objective that does not derive from Objective."""
    requires = declared(objective, "requires")
    return (
        ""
        if requires is not None
        else "it does not derive from mmrl.objectives.Objective, as it must"
    )


def _asked_elsewhere(stage: Plugin) -> str:
    """Name the option that adds a stage, if ``train.stages`` must not."""
    if option := declared(stage, "option", ""):
        return f"train.{option} asks for it; set that"
    asked_by = declared(stage, "asked_by", "")
    return f"{asked_by} asks for it" if asked_by else ""


def refuse_foreign_code() -> None:
    """Let configurations name only registered entries, in this process and its children (``mmrl
    --safe``)."""
    os.environ[SAFE] = "1"


def is_safe() -> bool:
    """Tell whether configurations may name only registered entries."""
    return os.environ.get(SAFE, "") not in ("", "0")


def import_name(name: str, kind: str = "plug-in") -> Plugin:
    """Import ``module:attribute`` or ``path/to/file.py:attribute``; modules are also looked up in
    the working directory. Raises UserError under ``--safe``, which runs no external code."""
    if is_safe():
        raise UserError(
            f"{kind} {name!r} is code of the configuration's author, which --safe refuses; read "
            f"it, then run without --safe (and MMRL_SAFE), or take a registered {kind}"
        )
    place, _, attribute = name.rpartition(":")
    if place == IN_PYTHON:
        raise UserError(
            f"{kind} {name!r} lives in the Python session that began this run: go on there, with "
            f"the same mmrl.Trainer, or put the {kind} into a file and name it file.py:{attribute}"
        )
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
        raise UserError(
            f"{name!r} is {a_or_an(type(plugin).__name__)}, not {a_or_an(kind)}: nothing to call"
        )
    return plugin


def public_names(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def import_module(place: str) -> Any:
    """Import a module from the working directory or sys.path; ``rewards`` and ``samplers`` are the
    user's if they exist, else mmrl's."""
    look_in(Path.cwd())
    return packages.import_named(place)


def import_file(path: Path) -> Any:
    """Import a .py file as a module, executed once; it may import its neighbours."""
    if not path.is_file():
        places = (
            ""
            if path.is_absolute()
            else (f"; relative paths start at {Path.cwd()}, or at the configuration's folder")
        )
        raise UserError(f"no such file: {path}{places}")
    path = path.resolve()
    look_in(path.parent)
    name = path.stem
    if name in packages.OURS:
        name = packages.USERS + name
    if name in sys.modules and vars(sys.modules[name]).get("__file__") != str(path):
        # another file has the same module name
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
    """Put a user's folder on ``sys.path``, which an installed command lacks."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


POLICIES = Registry("policy", group="mmrl.policies", has=("rollout", "decode"))
OBJECTIVES = Registry("objective", has=("points", "loss"), refuses=_not_derived)
ADVANTAGES = Registry("advantage", takes=("rewards", "rollout"))
REWARDS = Registry("reward", takes=("media", "prompts"), least=1)
DATA = Registry("data source", group="mmrl.data")
OPTIMIZERS = Registry("optimizer", takes=("parameters",))
KERNELS = Registry("SDE type", group="mmrl.sde_types", takes=("x", "v", "t", "s", "eta"))
GRIDS = Registry("timestep schedule", group="mmrl.timestep_schedules", takes=("steps",))
WINDOWS = Registry("noise window", group="mmrl.noise_windows", takes=("steps", "iteration", "rng"))
SOLVERS = Registry("solver", takes=("process",))
# of policy gradients: losses of ratio and advantage
SURROGATES = Registry(
    "surrogate", group="mmrl.surrogates", takes=("logp", "old", "advantage", "mask")
)
# when an objective re-noises a finished sample
TIMES = Registry(
    "timestep sampler", group="mmrl.timestep_samplers", takes=("rng", "name", "draws", "grid")
)
# which states the masked objective evaluates
ESTIMATORS = Registry(
    "estimator", group="mmrl.estimators", takes=("policy", "rollout", "rng", "epoch")
)
# stages change which rows of an iteration are trained on
STAGES = Registry("stage", has=("groups", "begin", "effects"), refuses=_asked_elsewhere)
# metrics of an iteration's samples
MONITORS = Registry("monitor", takes=("sampled",))
# vision-language models used as judges
JUDGES = Registry("judge", has=("ask",))
ARTIFACTS = Registry("artifact")  # artifacts that a world builds and caches: () -> folder
# items, and the published rule that scores samples of them
BENCHMARKS = Registry("benchmark", has=("score",))

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
    "benchmarks": BENCHMARKS,
}

BUILT_IN = (
    "samplers",
    "rewards",
    "mmrl.policies",
    "mmrl.objectives",
    "mmrl.advantages",
    "mmrl.monitoring.monitors",
    "mmrl.train.optimizers",
    "mmrl.data.prompts",
    "mmrl.data.vision",
    "mmrl.data.captions",
    "mmrl.data.pairs",
    "mmrl.zoo.models",
    "mmrl.zoo.objectives",
    "mmrl.zoo.advantages",
    "mmrl.zoo.stages",
    "mmrl.zoo.curricula",
    "mmrl.apps.benchmarks.pictures",
    "mmrl.apps.benchmarks.prompts",
    "mmrl.apps.benchmarks.questions",
    "mmrl.worlds",
)


def load_built_in() -> None:
    """Import every module that registers plug-ins, and those of installed packages. None of the
    built-in ones imports diffusers or transformers."""
    _import_built_in()
    STAGES.in_order_of("mmrl.zoo.stages")
    offers = offered()
    for registry in ALL.values():
        registry.discover(offers)


@cache
def _import_built_in() -> None:
    for name in BUILT_IN:
        room = importlib.import_module(name)
        # not getattr: `rewards` and `samplers` look up missing names in a user's modules
        for module in vars(room).get("MODULES", ()):
            importlib.import_module(f"{name}.{module}")
        for exported in vars(room).get("__all__", ()):
            getattr(room, exported)  # loads its module
    from samplers import tables

    KERNELS.update(tables.KERNELS)
    GRIDS.update(tables.GRIDS)
    WINDOWS.update(tables.WINDOWS)
    SOLVERS.update(tables.SOLVERS)


def locate(path: str) -> str:
    """Return a model path that the loaders accept: ``world:digits/sd3`` is built and cached, ``~``
    is the home folder, anything else passes through."""
    if str(path).startswith("~"):
        return str(Path(path).expanduser())
    if not str(path).startswith("world:"):
        return str(path)
    load_built_in()
    return str(ARTIFACTS.find(str(path).removeprefix("world:"))())
