"""Mutated requests to a reward server: no 5xx, no hang, no growth."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from scripts.dev.soak_parts.page import Experiment, Soak
from scripts.dev.soak_parts.serving import Make, raw, storm
from tests.fixtures.reward_servers import good
from tests.fixtures.server_process import server_process
from tests.remote.test_fuzz import headed, mutated, structured

HEADS = [
    b"POST /score HTTP/1.1",
    b"Host: a",
    b"Content-Type: application/json",
    b"Connection: close",
]
PIECES = [
    b"\r\n",
    b"\n",
    b"\x00",
    b": ",
    b" ",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: -1",
    b"Transfer-Encoding: chunked",
    b"Authorization: Bearer \xff",
    b"Expect: 100-continue",
    b"Upgrade: websocket",
    b"X: " + b"y" * 9000,
    b"HTTP/9.9",
    b"GET http://[::1 HTTP/1.1",
]


def deep(draw: random.Random) -> tuple[bytes, str]:
    """Return many values, keys, or nested brackets."""
    count = draw.choice([10, 100, 1000, 20_000, 700_000])
    piece = draw.choice(['{"a":', "[", "{},", '"a":1,', "1,", '["a",', '{"text":{"a":'])
    body = '{"texts": ["a"], "prompts": [' + piece * count + draw.choice(["", "]}", "1]}"])
    return body.encode(), "application/json"


def paths(draw: random.Random) -> tuple[bytes, str]:
    """Return file paths in every field."""
    path = draw.choice(["/etc/passwd", "/dev/zero", "/proc/self/mem", "file:///etc/passwd", "."])
    fields = draw.choices(["image", "images", "mask", "reference", "source", "where", "x"], k=3)
    value = draw.choice([path, [path], {"png": path}, [{"png": path}], {"path": path}])
    body = {"texts": [path], "prompts": [dict.fromkeys(fields, value)]}
    return json.dumps(body).encode(), "application/json"


def head(draw: random.Random) -> bytes:
    """Return a mutated request header, with a body that may be shorter or longer than declared."""
    body = json.dumps(good(1)).encode()
    length = draw.choice([len(body), len(body) // 2, len(body) + 5, 0])
    lines = [*HEADS, b"Content-Length: %d" % length]
    for _ in range(draw.randint(0, 4)):
        lines.insert(draw.randint(0, len(lines)), draw.choice(PIECES))
    content = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    for _ in range(draw.randint(0, 3)):
        content[draw.randrange(min(200, len(content)))] = draw.randrange(256)
    return bytes(content)


def run(soak: Soak) -> Iterator[Experiment]:
    bodies: list[Make] = [structured, mutated, headed, deep, paths]
    with server_process(soak.folder, read_timeout=1.0) as server:
        share = soak.seconds / 2
        tally = storm(server, bodies, share, soak.seed)
        yield tally.experiment("bodies of requests", server)
        tally = raw(server, head, seconds=share, seed=soak.seed)
        yield tally.experiment("heads of requests", server)
