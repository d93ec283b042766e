"""Lets a subclass add options as fields, and keep the constructor of its base.

``@dataclass class Mine(PolicyGradient): extra: float = 2.0`` would write a constructor that has the
field but not the base's options; without ``@dataclass`` the field would not be an option. A base
that calls ``keep_constructor`` from ``__init_subclass__`` avoids both: ``Mine(extra=3.0,
clip_range=0.1)`` sets up the base, then the field.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import MISSING, Field
from typing import Any, ClassVar, get_origin

WRITTEN = "_adds_options"  # marks the constructors generated here


def keep_constructor(cls: type) -> None:
    """Give a class that adds annotated fields, and has no constructor itself, one that takes them
    and all options of its base. A dataclass keeps an existing constructor.

    Skips bases that are dataclasses, whose own rules apply, or that have no constructor.
    """
    base = next(c for c in cls.__mro__ if "__init__" in vars(c))
    is_dataclass = "__dataclass_params__" in vars(base) and not is_kept(base)
    if base in (cls, object) or is_dataclass or not added_fields(cls):
        return

    def __init__(self: Any, *arguments: Any, **chosen: Any) -> None:
        names = [p.name for p in parameters_of(cls)]
        if len(arguments) > len(names):
            raise TypeError(f"{cls.__name__}() takes {len(names)} positional arguments")
        chosen = {**dict(zip(names, arguments)), **chosen}
        values = {p.name: chosen.pop(p.name, _default(p)) for p in parameters_of(cls)}
        if absent := [name for name, value in values.items() if value is inspect.Parameter.empty]:
            raise TypeError(f"{cls.__name__}() misses the option {absent[0]!r}")
        super(cls, self).__init__(**chosen)  # type: ignore[arg-type]
        for name, value in values.items():
            object.__setattr__(self, name, value)
        outermost = next(c for c in type(self).__mro__ if "__init__" in vars(c))
        if outermost is cls and hasattr(cls, "__post_init__"):
            self.__post_init__()

    setattr(__init__, WRITTEN, True)
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = __init__  # type: ignore[misc]


def is_kept(cls: type) -> bool:
    """Tell whether a class has a constructor that ``keep_constructor`` wrote."""
    return hasattr(vars(cls).get("__init__"), WRITTEN)


def parameters_of(cls: type) -> list[inspect.Parameter]:
    """Return the options that the fields of such a class add, annotations unresolved. A field
    without a value is an option only in a dataclass: elsewhere it annotates an attribute."""
    needed = "__dataclass_params__" in vars(cls)
    parameters = []
    for name, annotation in added_fields(cls).items():
        default = vars(cls).get(name, inspect.Parameter.empty)
        if isinstance(default, Field):  # of a class that is not a dataclass
            default = _of_field(default)
        if name in getattr(cls, "__dataclass_fields__", {}):
            default = _of_field(cls.__dataclass_fields__[name])  # type: ignore[attr-defined]
        if needed or default is not inspect.Parameter.empty:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return parameters


def added_fields(cls: type) -> dict[str, Any]:
    """Return the annotations of a class for which its bases have no attribute, without class
    constants."""
    try:
        annotations = inspect.get_annotations(cls)
    except NameError:  # of a name defined below
        return {}
    return {
        name: annotation
        for name, annotation in annotations.items()
        if not _is_constant(annotation)
        and not name.startswith("_")
        and not any(hasattr(base, name) for base in cls.__mro__[1:])
    }


def _is_constant(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.replace("typing.", "").startswith("ClassVar")
    return annotation is ClassVar or get_origin(annotation) is ClassVar


def _of_field(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _default(parameter: inspect.Parameter) -> Any:
    """Return the default of an option; mutable defaults are copied."""
    value = parameter.default
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value
