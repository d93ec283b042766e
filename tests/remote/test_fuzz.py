"""Requests that no honest client would send: none makes the server answer 500, none ends it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

from mmrl.apps.serve.service import ServeOptions, make_app
from mmrl.config import Weighted
from tests.fixtures.reward_servers import b64, good, mean, mutated, numbers, picky, png

PNG = png()
LEAVES = [
    None,
    True,
    False,
    0,
    -1,
    1e308,
    "",
    "a",
    "\ud800",
    "numbers",
    [],
    {},
    [[]],
    [{}],
    2**70,
    "x" * 3000,
    b64(PNG),
]
FIELDS = [
    *("images", "videos", "texts", "tensor", "prompts", "rewards", "ids", "marks", "more", ""),
    *("sound", "sampling_rate"),
]


def anything(draw: random.Random, depth: int = 0):
    if depth > 3 or draw.random() < 0.5:
        return draw.choice(LEAVES)
    if draw.random() < 0.5:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {
        str(draw.choice(FIELDS + ["n"])): anything(draw, depth + 1)
        for _ in range(draw.randrange(4))
    }


def structured(draw: random.Random) -> tuple[bytes, str]:
    """Valid JSON of the wrong shape: fields of a good request replaced, left out, or added."""
    body = good(draw.randrange(3))
    for _ in range(draw.randint(1, 3)):
        body[draw.choice(FIELDS)] = anything(draw)
    if draw.random() < 0.3:
        body.pop(draw.choice(list(body)))
    whole = body if draw.random() < 0.9 else anything(draw)
    return json.dumps(whole).encode(), "application/json"


def headed(draw: random.Random) -> tuple[bytes, str]:
    """A good body under a media type that it does not have."""
    kinds = [
        "",
        "text/plain",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "application/json; charset=x",
        "multipart/form-data; boundary=" + "b" * 300,
        "\x7f",
        "application/octet-stream",
    ]
    return json.dumps(good(1)).encode() * draw.randrange(3), draw.choice(kinds)


def pictured(draw: random.Random) -> tuple[bytes, str]:
    """Pictures that are broken inside."""
    png = bytearray(PNG)
    for _ in range(draw.randint(1, 20)):
        png[draw.randrange(len(png))] = draw.randrange(256)
    cut = bytes(png[: draw.randrange(len(png))]) if draw.random() < 0.5 else bytes(png)
    return json.dumps(
        {"images": [b64(cut)], "prompts": [{"n": 1, "text": "a"}]}
    ).encode(), "application/json"


async def answer(
    app, body: bytes, kind: str, path: str = "/score", method: str = "POST"
) -> tuple[int, bytes]:
    """Status and content, by the application's own interface: what it raises comes up here."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "root_path": "",
        "headers": [
            (b"content-type", kind.encode("latin-1")),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def storm(count: int) -> Counter:
    rewards = {"mean": mean, "numbers": numbers, "picky": picky}
    weighted = {name: Weighted(reward, 1.0) for name, reward in rewards.items()}
    app = make_app(weighted, ServeOptions(max_request_mib=1.0))
    draw = random.Random(6)
    statuses = Counter()
    for _ in range(count):
        body, kind = draw.choice([structured, mutated, headed, pictured])(draw)
        status, answered = await answer(app, body, kind)
        assert status < 500, (status, answered[:300], body[:300], kind)
        json.loads(answered)
        statuses[status] += 1
    assert await answer(app, b"", "", "/health", "GET") == (200, b'{"status": "ok"}')
    assert (await answer(app, json.dumps(good(2)).encode(), "application/json"))[0] == 200
    _, metrics = await answer(app, b"", "", "/metrics", "GET")
    for status, many in statuses.items():
        counted = many + (status == 200)
        assert f'mmrl_reward_requests_total{{status="{status}"}} {counted}\n' in metrics.decode()
    return statuses


def test_some_requests_and_no_server_error():
    assert {200, 400} <= set(asyncio.run(storm(300)))
