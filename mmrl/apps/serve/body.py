"""Reads the body of a request to a reward server as the ``Parts`` that ``rewards.servers.wire``
unpacks."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from rewards.servers.wire import KINDS, BadInput, Parts, parse_json


def parts_of(media_type: str, body: bytearray, values: float) -> Parts:
    """Read a JSON body of a limited number of values, and clear it. Raises BadInput."""
    media_type = media_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadInput("content-type", f"{media_type[:60]!r}; send application/json")
    fields = parse_json(body, "body", values)
    body.clear()
    if not isinstance(fields, dict):
        raise BadInput("body", "expected an object")
    kind = one_kind(fields)
    media = fields[kind]
    if kind == "tensor":
        media = from_base64(media, kind)
    if kind == "images" and isinstance(media, list):
        media = [from_base64(item, f"images[{i}]") for i, item in enumerate(media)]
    if (
        kind == "videos"
        and isinstance(media, list)
        and all(isinstance(video, list) for video in media)
    ):
        media = [
            [from_base64(frame, f"videos[{i}][{f}]") for f, frame in enumerate(v)]
            for i, v in enumerate(media)
        ]
    return Parts(
        fields.get("prompts"),
        media,
        kind,
        fields.get("rewards"),
        fields.get("marks"),
        fields.get("ids"),
        from_base64(fields["sound"], "sound") if "sound" in fields else None,
        fields.get("sampling_rate"),
    )


def one_kind(fields: Mapping[str, Any]) -> str:
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        raise BadInput(
            "body", f"expected one of {', '.join(KINDS)}; got {' and '.join(kinds) or 'none'}"
        )
    return kinds[0]


def from_base64(value: Any, name: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise BadInput(name, "is not base64") from error
