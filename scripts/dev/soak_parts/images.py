"""Mutated pictures in requests to a reward server: no 5xx, no hang, no growth."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from collections.abc import Iterator
from functools import cache

from PIL import Image

from scripts.dev.soak_parts.page import Experiment, Soak
from scripts.dev.soak_parts.serving import storm
from tests.fixtures.reward_servers import b64
from tests.fixtures.server_process import server_process

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@cache
def whole(kind: str, mode: str, size: tuple[int, int]) -> bytes:
    """Return a noise picture of these colours and this size."""
    draw = random.Random(0)
    noise = bytes(draw.randrange(256) for _ in range(3 * size[0] * size[1]))
    picture = Image.frombytes("RGB", size, noise)
    picture = picture.convert("L").convert(mode) if mode == "I;16" else picture.convert(mode)
    buffer = io.BytesIO()
    if kind == "APNG":
        picture.save(buffer, "PNG", save_all=True, append_images=[picture.rotate(90)])
    else:
        picture.save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    """Return the chunks of a PNG: kind and content."""
    parts = []
    place = len(SIGNATURE)
    while place + 8 <= len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        parts.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    return parts


def joined(parts: list[tuple[bytes, bytes]]) -> bytes:
    """Return a PNG with valid checksums, so that decoders read its content."""
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )


def inside(draw: random.Random) -> bytes:
    """Return a PNG with chunks changed, duplicated, removed or swapped, with valid checksums."""
    parts = chunks(whole(draw.choice(["PNG", "APNG"]), draw.choice(MODES), (9, 7)))
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(parts))
        kind, body = parts[place]
        change = draw.randrange(5)
        if change == 0 and body:
            at = draw.randrange(len(body))
            parts[place] = kind, body[:at] + bytes([draw.randrange(256)]) + body[at + 1 :]
        elif change == 1:
            parts.insert(draw.randrange(len(parts)), parts[place])
        elif change == 2 and len(parts) > 1:
            parts.pop(place)
        elif change == 3:
            bomb = zlib.compress(bytes(draw.choice([10**3, 10**6, 3 * 10**7])), 9)
            parts.insert(1, (draw.choice([b"zTXt", b"iCCP", b"IDAT"]), b"a\0\0" + bomb))
        else:
            sizes = [0, 1, 9, 300, 7900, 65_535, 2**31 - 1, 2**32 - 1]
            header = struct.pack(">II", draw.choice(sizes), draw.choice(sizes)) + body[8:13]
            parts[place] = (b"IHDR", header) if kind == b"IHDR" else parts[place]
    return joined(parts)


def outside(draw: random.Random) -> bytes:
    """Return a file with bytes changed, removed or duplicated."""
    kind = draw.choice(["PNG", "WEBP", "APNG"])
    mode = draw.choice(["RGB", "RGBA"] if kind == "WEBP" else MODES)
    content = bytearray(whole(kind, mode, draw.choice([(1, 1), (9, 7), (64, 64)])))
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(content))
        change = draw.randrange(3)
        if change == 0:
            content[at] = draw.randrange(256)
        elif change == 1 and len(content) > 40:
            del content[at : at + draw.randint(1, 30)]
        else:
            content[at:at] = content[at : at + draw.randint(1, 30)]
    return bytes(content)


def request(draw: random.Random) -> tuple[bytes, str]:
    """Return a request with such pictures as samples, frames, or in a prompt."""
    pictures = [b64(draw.choice([inside, outside])(draw)) for _ in range(draw.randint(1, 2))]
    forms = [
        {"images": pictures, "prompts": [{}] * len(pictures)},
        {"videos": [pictures], "prompts": [{}]},
        {"texts": ["a"], "prompts": [{"images": [{"png": picture} for picture in pictures]}]},
    ]
    return json.dumps(draw.choice(forms)).encode(), "application/json"


def run(soak: Soak) -> Iterator[Experiment]:
    with server_process(soak.folder) as server:
        tally = storm(server, [request], soak.seconds, soak.seed)
        yield tally.experiment("pictures", server)
