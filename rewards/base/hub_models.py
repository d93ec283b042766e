"""Names the hub models that a reward will load, before it is built, so that rewards needed only at
the end of a run are checked at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.core.registry import options

# options of rewards that hold a model or a file of one
OPTIONS = {"model", "path", "weights", "base", "processor", "clip", "detector", "head"}
PLACES = ("world:", "local-dir:", "~", ".", "/")  # prefixes of what is not on the hub


def hub_models(entry: Callable[..., Any], chosen: Mapping[str, Any]) -> list[str]:
    """List the repositories that a reward of mmrl needs with these options; those of other packages
    are unknown."""
    ours = (getattr(entry, "__module__", None) or "").startswith("rewards.")
    if not ours or "url" in chosen:  # a server has its own model names
        return []
    defaults = {
        name: parameter.default
        for name, parameter in options(entry).items()
        if isinstance(parameter.default, str)
    }
    return list(dict.fromkeys(_repositories({**defaults, **chosen})))


def _repositories(chosen: Mapping[str, Any]) -> Iterator[str]:
    for name, value in chosen.items():
        if hasattr(value, "entry"):  # a judge, checked but not yet built
            yield from hub_models(value.entry, value.options)
        elif name in OPTIONS and isinstance(value, str) and not value.startswith(PLACES):
            tag = chosen.get("pretrained")
            yield from _repository(value, tag if isinstance(tag, str) else None)


def _repository(value: str, tag: str | None) -> Iterator[str]:
    """Yield the repository of an option: ``owner/name``, a file below it, or that of an open_clip
    model, by its name and ``tag`` or as ``name/tag``."""
    if value.startswith("hf-hub:"):
        yield value.removeprefix("hf-hub:")
        return
    first, _, rest = value.partition("/")
    if tag is None and rest and _is_open_clip(first):
        tag, value = rest, first
    if tag is not None:
        yield from _of_open_clip(value, tag)
    elif rest and not Path(value).exists():
        yield "/".join(value.split("/")[:2])


def _is_open_clip(name: str) -> bool:
    try:
        import open_clip
    except ImportError:  # the reward raises when it is built
        return False
    return name in open_clip.list_models()


def _of_open_clip(name: str, tag: str) -> Iterator[str]:
    from rewards.base.clip import hub_id

    if _is_open_clip(name) and (repository := hub_id(name, tag)):
        yield repository
