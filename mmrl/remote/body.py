"""The body of a request to a reward server, JSON or multipart, as the ``Parts`` that
``rewards.wire`` unpacks."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

from rewards.wire import KINDS, BadInput, Parts, parse_json


async def parts_of(request: Request, body: bytearray) -> Parts:
    """What a body holds, by its content type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await run_in_threadpool(json_parts, bytes(body))
    if kind == "multipart/form-data":
        return await multipart_parts(request, bytes(body))
    raise BadInput("content-type", f"{kind[:60]!r}; send application/json or multipart/form-data")


def json_parts(body: bytes) -> Parts:
    fields = parse_json(body, "body")
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
    return Parts(fields.get("prompts"), media, kind, fields.get("rewards"), fields.get("marks"))


async def multipart_parts(request: Request, body: bytes) -> Parts:
    """``prompts``, ``rewards``, ``texts``, ``marks``, ``frames`` are JSON; ``images``, ``videos``,
    ``tensor`` files."""

    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 2**18):
            yield body[start : start + 2**18]
            await asyncio.sleep(0)
        yield b""

    try:
        parser = MultiPartParser(
            request.headers, stream(), max_files=100_000, max_fields=16, max_part_size=len(body)
        )
        form = await parser.parse()
        fields: dict[str, list[bytes]] = {}
        for name, value in form.multi_items():
            content = (
                await value.read()
                if isinstance(value, UploadFile)
                else value.encode("utf-8", "replace")
            )
            fields.setdefault(name, []).append(content)
        await form.close()
    except Exception as error:  # whatever a parser says of bytes that anyone may have sent
        raise BadInput("body", f"is not multipart/form-data ({type(error).__name__})") from error
    plain = {
        n: parse_json(fields[n][0], n)
        for n in ("prompts", "rewards", "texts", "marks", "frames")
        if n in fields
    }
    kind = one_kind(fields)
    media: Any = {"texts": plain.get("texts"), "tensor": fields[kind][0]}.get(kind, fields[kind])
    if kind == "videos":
        count = plain.get("frames")
        if type(count) is not int or count < 1 or len(media) % count:
            raise BadInput(
                "frames", f"expected how many frames a video has, a divisor of {len(media)}"
            )
        media = [media[i : i + count] for i in range(0, len(media), count)]
    return Parts(plain.get("prompts"), media, kind, plain.get("rewards"), plain.get("marks"))


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
