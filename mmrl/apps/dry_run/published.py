"""Holds the architectures of published models: their config files, without weights.

``published.json`` holds, for every hub id in ``configs/``, the values by which a model differs from
its class's defaults, the classes of its text encoders, and parameters counted from these on the
meta device. ``encodings`` of a model without a family describe the return values of its pipeline's
prompt encoding methods: a list for a tuple, {"shape": [...]} for a tensor of a row in the type of
the weights ("rows" among its sizes says where rows are counted, else they come first), {"plain":
[...]} for one of all rows, {"mask": [...]} for one of ones (long), {"lengths": n} for the bounds of
rows of n tokens, {"rows": ...} for a list with an entry for each row, other tables for tables, null
for None. Texts are as long as a pipeline pads them to; where it pads to the longest, 256 tokens.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.core.libraries import library_class

FILE = Path(__file__).with_name("published.json")
ENCODINGS = "encodings.json"  # file in a folder: return values of the pipeline's prompt encoding


@cache
def table() -> dict[str, Any]:
    """Read the table: ``models`` by hub id, ``encoders`` by name, ``others``: models that are not
    in a diffusers folder."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mmrl-published-")


@cache
def folder(name: str) -> Path | None:
    """Write a diffusers folder of config files for a hub id; None if it is not in the table."""
    known = table()["models"].get(name)
    if known is None:
        return None
    place = Path(_made().name) / name.replace("/", "--")
    for part, config in known["parts"].items():
        file = f"{part}_config.json" if part in ("scheduler", "guider") else "config.json"
        (place / part).mkdir(parents=True, exist_ok=True)
        (place / part / file).write_text(json.dumps(config))
    index = {"_class_name": known["pipeline"], **known.get("index", {})}
    index |= {part: _entry(config["_class_name"]) for part, config in known["parts"].items()}
    if "encodings" in known:  # instead of text encoders and tokenizers, which it lacks
        (place / ENCODINGS).write_text(json.dumps(known["encodings"]))
        index = dict.fromkeys(parts_of(known["pipeline"]), [None, None]) | index
    (place / "model_index.json").write_text(json.dumps(index))
    return place


def _entry(class_name: str) -> list[str]:
    """Write the entry of a part in an index: (library, class); a dot separates them where the
    library is a pipeline's own module."""
    library, _, name = class_name.rpartition(".")
    return [library or "diffusers", name]


def parts_of(pipeline: str) -> list[str]:
    """Name the parts of a pipeline's class."""

    cls = library_class("diffusers", pipeline)
    return [name for name in inspect.signature(cls.__init__).parameters if name in _taken(cls)]


def _taken(cls: Any) -> set[str]:
    parts, _ = cls._get_signature_keys(cls)
    return set(parts)


def encoders(name: str) -> int | None:
    """Count the parameters of a model's text and image encoders."""
    known = table()["models"].get(name)
    return (
        None
        if known is None
        else sum(table()["encoders"][encoder]["parameters"] for encoder in known["encoders"])
    )


def on_meta(name: str | type, config: dict[str, Any]) -> nn.Module:
    """Build a part of a diffusers model by its class or name, without memory for its weights."""

    cls: Any = library_class("diffusers", name) if isinstance(name, str) else name
    with torch.device("meta"):
        net: nn.Module = cls.from_config(
            {key: value for key, value in config.items() if key != "_class_name"}
        )
    return net


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def encoder_on_meta(spec: dict[str, Any]) -> nn.Module:
    """Build a text encoder of transformers from class names and config values."""

    config = library_class("transformers", spec["config_class"])(**spec["config"])
    with torch.device("meta"):
        encoder: nn.Module = library_class("transformers", spec["class"])(config)
    return encoder
