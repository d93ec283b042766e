"""Converts a configuration to typed values, with the constructor's signature as the schema.

``resolve`` looks up a name and converts its options without building anything, so that a whole
configuration can be checked first; ``construct`` then calls the constructors, innermost first.
Nothing is guessed: text never becomes a number, 4.5 never becomes 4, and every error names the
place and what was expected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from traceback import extract_tb
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mmrl.config.overrides import WRITTEN_IN
from mmrl.config.values import SCALARS, Place, expected, show
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, a_or_an, suggest
from mmrl.core.registry import (
    LATER,
    NAMES_OF_THE_FIELD,
    STAGES,
    Plugin,
    Registry,
    load_built_in,
    make,
    options,
)

PACKAGE = Path(__file__).parents[1]
OURS = (PACKAGE, PACKAGE.parent / "rewards", PACKAGE.parent / "samplers")

# registries of stand-ins by kind, used until heavy modules are imported
REGISTRIES: ContextVar[Mapping[str, Registry] | None] = ContextVar("REGISTRIES", default=None)
MOST_NAMES = 13  # up to this number of options a message lists all, even after a suggestion
BAD = object()  # returned by a conversion that has reported a problem


def in_use(registry: Registry) -> Registry:
    """Return the registry, or its stand-in."""
    return (REGISTRIES.get() or {}).get(registry.kind, registry)


def unseen() -> None:
    """Placeholder for a plug-in whose code has not run yet."""


@dataclass(frozen=True)
class Resolved:
    """Holds a constructor with its converted options; options may hold further ones."""

    entry: Plugin
    options: dict[str, Any]
    place: Place
    later: bool = False  # its owner gets a function that builds it


def resolve(
    spec: Any, registry: Registry, place: Place, problems: list[str], supplied: Collection[str] = ()
) -> Any:
    """Return ``name`` or ``{name: {options}}`` as a ``Resolved``; ``supplied`` options come from
    code, not from the user."""
    name, chosen = _name_and_options(spec, registry, place, problems)
    if name is BAD:
        return BAD
    return resolve_named(
        name,
        chosen,
        registry,
        place / name if isinstance(spec, Mapping) else place,
        problems,
        supplied,
    )


def resolve_named(
    name: str,
    chosen: Any,
    registry: Registry,
    where: Place,
    problems: list[str],
    supplied: Collection[str] = (),
) -> Any:
    """Resolve the entry called ``name`` with its options; ``where`` is their place."""
    try:
        entry = registry.find(name)
    except UserError as error:
        problems.append(where.say(str(error)))
        return BAD
    except (Exception, SystemExit) as error:  # importing a user's own module can raise anything
        problems.append(
            where.say(f"cannot import {registry.kind} {name!r}: {type(error).__name__}: {error}")
        )
        return BAD
    if entry is unseen:
        return BAD
    if why := registry.unfit(entry):
        problems.append(where.say(f"{name!r} does not fit: {why}"))
        return BAD
    return resolve_call(entry, chosen, where, problems, name, supplied)


def _name_and_options(
    spec: Any, registry: Registry, place: Place, problems: list[str]
) -> tuple[Any, Any]:
    if isinstance(spec, str) and spec:
        return spec, {}
    if isinstance(spec, Mapping) and len(spec) == 1:
        name, chosen = next(iter(spec.items()))
        if not isinstance(name, str) or not name:
            problems.append(
                (place / name).say(
                    f"expected the name of {a_or_an(registry.kind)}, got {show(name)}"
                )
            )
        elif isinstance(chosen, Mapping) or chosen is None:
            return name, chosen or {}
        else:
            takes = ", ".join(_names_of(registry, name)) or "none"
            problems.append(
                (place / name).say(
                    f"expected options, {{option: value}}, got {show(chosen)} "
                    f"({name} takes: {takes})"
                )
            )
    elif isinstance(spec, Mapping) and spec:
        names = ", ".join(map(str, spec))
        problems.append(place.say(f"expected one {registry.kind}, got {len(spec)}: {names}"))
    else:
        problems.append(
            place.say(
                f"expected {a_or_an(registry.kind)}, name or {{name: {{options}}}}, "
                f"got {show(spec)}"
            )
        )
    return BAD, {}


def _names_of(registry: Registry, name: str) -> list[str]:
    return list(options(registry[name])) if name in registry else []


def _elsewhere(place: Place, key: Any, value: Any) -> str:
    """Say how to read a file of prompts, if one is given to a data source that generates its
    own."""
    if key != "path" or place.path[:1] != ("data",):
        return ""
    return f"; prompts of a file: data={{prompts: {{path: {value}}}}}"


def _called_here(name: str, known: Collection[str]) -> str:
    """Suggest the name of an unknown option; "" if none is near."""
    own_name = NAMES_OF_THE_FIELD.get(("option", name))
    if own_name in known:
        return f"it is called {own_name!r} here"
    close = suggest(name, known)
    return close if close.startswith("did") else ""


def _as_stage(place: Place, key: Any, value: Any) -> str:
    """Say how to name a stage that is given as an option of ``train``."""
    stages = in_use(STAGES)
    if place.path != ("train",) or not (value is None or isinstance(value, Mapping)):
        return ""
    if stages is STAGES:
        load_built_in()
    if key not in stages or stages.refuses(stages[key]):
        return ""
    chosen = f"{{{key}: {show(value)}}}" if value else key
    return f"; it is a stage: train.stages: [{chosen}]"


def resolve_call(
    entry: Plugin,
    chosen: Any,
    place: Place,
    problems: list[str],
    name: str = "",
    supplied: Collection[str] = (),
) -> Any:
    """Check and convert ``chosen`` against the signature of ``entry``: unknown, missing and
    ill-typed options."""
    if not isinstance(chosen, Mapping):
        problems.append(place.say(f"expected a mapping, {{option: value}}, got {show(chosen)}"))
        return BAD
    try:
        known = {key: p for key, p in options(entry).items() if key not in supplied}
    except (TypeError, ValueError, NameError, AttributeError) as error:
        problems.append(
            place.say(f"cannot read the options of {name or entry!r} from its signature: {error}")
        )
        return BAD
    before = len(problems)
    name = name or str(place.path[-1] if place.path else entry.__name__)
    takes = f" ({name} takes: {', '.join(known) or 'no options'})"
    short = takes if len(known) <= MOST_NAMES else ""  # if the message says what to write
    converted = {}
    for key, value in chosen.items():
        if key not in known:
            close = _called_here(str(key), known)
            hint = f"; {close}{short}" if close else takes
            hint = _as_stage(place, key, value) or hint + _elsewhere(place, key, value)
            problems.append((place / key).say(f"unknown option{hint}"))
        # the default None may always be written out
        elif value is not None or known[key].default is not None:
            converted[key] = convert(value, kind_of(known[key]), place / key, problems)
        else:
            converted[key] = None
    missing = [key for key, p in known.items() if p.default is p.empty and key not in chosen]
    if missing:
        problems.append(place.say(f"missing {', '.join(missing)}, which {name} needs{short}"))
    return Resolved(entry, converted, place) if len(problems) == before else BAD


def kind_of(parameter: inspect.Parameter) -> Any:
    """Return the annotation, or without one the type of the default (a whole number stands for any
    number)."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    return {bool: bool, int: int | float, float: float, str: str}.get(type(parameter.default), Any)


def construct(value: Any, **context: Any) -> Any:
    """Build what ``resolve`` prepared; ``context`` goes to the outermost constructor. Raises
    UserError with its place."""
    if isinstance(value, dict):
        return {key: construct(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(construct(item) for item in value)
    if not isinstance(value, Resolved):
        return value
    if value.later:
        return partial(construct, replace(value, later=False))
    chosen = {**construct(value.options), **context}
    if not inspect.isclass(value.entry):
        return partial(value.entry, **chosen) if chosen else value.entry
    try:
        return make(value.entry, chosen)
    except (UserError, ValueError) as error:
        overridden = [
            p
            for key in value.options
            if (p := value.place / key).source().startswith(f"{WRITTEN_IN.get()}: ")
        ]
        source = (overridden[0] if len(overridden) == 1 else value.place).source()
        raise UserError(value.place.say(str(error), source)) from error
    except Exception as error:  # a user's own class can raise anything
        file = inspect.getsourcefile(value.entry) or ""
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == file]
        if not lines or any(Path(file).is_relative_to(folder) for folder in OURS):
            raise
        why = f"{type(error).__name__}: {error} ({file}:{lines[-1]})"
        raise UserError(
            value.place.say(f"{value.entry.__name__} could not be built: {why}")
        ) from error


# Conversions: (value, annotation, place, problems) -> converted value, or BAD after appending to
# problems.


def convert(value: Any, kind: Any, place: Place, problems: list[str]) -> Any:
    """Convert ``value`` to the annotation ``kind``."""
    origin = get_origin(kind)
    if kind is Any or kind is object:
        return value
    if origin is Annotated:
        return _annotated(value, kind, place, problems)
    if origin in (Union, UnionType):
        return _union(value, get_args(kind), place, problems)
    if origin is Literal:
        return _literal(value, get_args(kind), place, problems)
    if (origin or kind) in _CONTAINERS:
        return _CONTAINERS[origin or kind](value, get_args(kind), place, problems)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        return resolve_call(kind, value, place, problems)
    if kind in SCALARS:
        try:
            return SCALARS[kind](value, place)
        except ValueError as error:
            reason = str(error) or f"expected {expected(kind)}, got {show(value)}"
            problems.append(place.say(reason))
            return BAD
    return (
        refuse(value, kind, place, problems)
        if is_dataclass(kind)
        else _other(value, kind, place, problems)
    )


def refuse(
    value: Any, kind: Any, place: Place, problems: list[str], words: Sequence[Any] = ()
) -> Any:
    close = suggest(value, words) if isinstance(value, str) else ""
    hint = f"; {close}" if close.startswith("did") else ""
    problems.append(place.say(f"expected {expected(kind)}, got {show(value)}{hint}"))
    return BAD


def _list(value: Any, inner: tuple[Any, ...], place: Place, problems: list[str]) -> Any:
    if not isinstance(value, (list, tuple)):
        return refuse(value, list, place, problems)
    kind = inner[0] if inner else Any
    return [convert(item, kind, place / i, problems) for i, item in enumerate(value)]


def _tuple(value: Any, inner: tuple[Any, ...], place: Place, problems: list[str]) -> Any:
    if not isinstance(value, (list, tuple)):
        return refuse(value, list, place, problems)
    if not inner or inner[-1] is ...:
        return tuple(_list(value, inner[:1], place, problems))
    if len(value) != len(inner):
        problems.append(place.say(f"expected {len(inner)} values, got {len(value)}: {show(value)}"))
        return BAD
    return tuple(
        convert(item, kind, place / i, problems) for i, (item, kind) in enumerate(zip(value, inner))
    )


def _mapping(value: Any, inner: tuple[Any, ...], place: Place, problems: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return refuse(value, dict, place, problems)
    key_kind, kind = inner or (Any, Any)
    keys = [convert(key, key_kind, place / key, problems) for key in value]
    return dict(
        zip(keys, [convert(item, kind, place / key, problems) for key, item in value.items()])
    )


def _annotated(value: Any, kind: Any, place: Place, problems: list[str]) -> Any:
    """Convert by ``Annotated``: with a registry it is a plug-in; other metadata are pydantic's
    constraints."""
    base, *metadata = get_args(kind)
    for registry in metadata:
        if isinstance(registry, Registry):
            plug_in = resolve(value, in_use(registry), place, problems)
            later = LATER in metadata and isinstance(plug_in, Resolved)
            return replace(plug_in, later=True) if later else plug_in
    converted = convert(value, base, place, problems)
    constrained = any(not isinstance(item, Effects) for item in metadata)
    return (
        _other(converted, kind, place, problems)
        if constrained and isinstance(converted, (int, float, str))
        else converted
    )


def _literal(value: Any, choices: tuple[Any, ...], place: Place, problems: list[str]) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    return refuse(value, Literal[choices], place, problems, choices)


def _union(value: Any, choices: tuple[Any, ...], place: Place, problems: list[str]) -> Any:
    attempts = []
    # the value's own type first
    for choice in sorted(choices, key=lambda choice: type(value) is not choice):
        trial: list[str] = []
        converted = convert(value, choice, place, trial)
        if not trial:
            return converted
        attempts.append((choice, trial))
    alike = [trial for choice, trial in attempts if _alike(value, choice)]
    if len(alike) == 1:
        problems.extend(alike[0])
        return BAD
    words = [
        word for choice in choices if get_origin(choice) is Literal for word in get_args(choice)
    ]
    return refuse(value, choices, place, problems, words)


def _alike(value: Any, choice: Any) -> bool:
    """Tell whether this is the alternative the user meant, by the shape of the value."""
    base, *metadata = get_args(choice) if get_origin(choice) is Annotated else (choice,)
    plug_in = any(isinstance(item, Registry) for item in metadata)
    origin = get_origin(base) or base
    if isinstance(value, Mapping):
        return plug_in or is_dataclass(base) or _CONTAINERS.get(origin) is _mapping
    if isinstance(value, (list, tuple)):
        return _CONTAINERS.get(origin) in (_list, _tuple)
    if isinstance(value, str):
        return plug_in
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and origin in (int, float)
        and not plug_in
    )


def _other(value: Any, kind: Any, place: Place, problems: list[str]) -> Any:
    """Convert everything else (enumerations, dates, constrained numbers) with pydantic."""
    from pydantic import PydanticUserError, ValidationError

    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should be", "expected a value", 1)
        problems.append(place.say(f"{reason}, got {show(value)}"))
    except PydanticUserError:
        problems.append(place.say(f"cannot be set in a configuration: it is a {expected(kind)}"))
    return BAD


def _adapter(kind: Any) -> Any:
    """Return pydantic's reader of an annotation; making one takes longer than to use it."""
    from pydantic import TypeAdapter

    try:
        hash(kind)
    except TypeError:  # metadata of a user's own
        return TypeAdapter(kind)
    return _kept_adapter(kind)


@lru_cache(maxsize=1024)
def _kept_adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


_CONTAINERS: dict[Any, Callable[[Any, tuple[Any, ...], Place, list[str]], Any]] = {
    list: _list,
    Sequence: _list,
    Iterable: _list,
    Collection: _list,
    tuple: _tuple,
    dict: _mapping,
    Mapping: _mapping,
}
