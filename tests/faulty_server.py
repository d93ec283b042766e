"""A reward server in a process of its own that goes wrong on request: ``python -m
tests.faulty_server PORT``.

It serves the real application; a wrapper around it spoils requests. ``GET /mode/NAME/EVERY`` says
how, and which; ``GET /spoiled`` how many were.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import uvicorn

from mmrl.config import Weighted
from mmrl.remote.service import make_app
from tests.reward_servers import numbers

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}


class Faulty:
    """An ASGI application that spoils every ``every``-th answer of another one."""

    def __init__(self, app):
        self.app = app
        self.mode = "none"
        self.every = 1
        self.count = 0
        self.spoiled = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or not scope["path"].startswith(("/mode", "/score", "/spoiled")):
            return await self.app(scope, receive, send)
        if scope["path"].startswith("/spoiled"):
            return await say(send, json.dumps({"spoiled": self.spoiled}).encode())
        if scope["path"].startswith("/mode"):
            _, _, self.mode, every = scope["path"].split("/")
            told = {"spoiled": self.spoiled}
            self.every = int(every)
            self.count = 0
            self.spoiled = 0
            return await say(send, json.dumps(told).encode())
        self.count += 1
        if self.mode == "none" or self.count % self.every:
            return await self.app(scope, receive, send)
        self.spoiled += 1
        answer = bytearray()

        async def keep(message):
            answer.extend(message.get("body", b""))

        await self.app(scope, receive, keep)  # the work is done, what goes wrong is the answer
        return await getattr(self, self.mode)(send, json.loads(bytes(answer)))

    async def slow(self, send, found):
        await asyncio.sleep(600)  # longer than anybody waits for it
        await say(send, json.dumps(found).encode())

    async def shape(self, send, found):
        found["rewards"] = {name: values[:-1] for name, values in found["rewards"].items()}
        await say(send, json.dumps(found).encode())

    async def nested(self, send, found):
        found["rewards"] = {name: [values] for name, values in found["rewards"].items()}
        await say(send, json.dumps(found).encode())

    async def nan(self, send, found):
        found["rewards"] = {
            name: [float("nan")] * len(values) for name, values in found["rewards"].items()
        }
        await say(send, json.dumps(found).encode())

    async def huge(self, send, found):
        found["rewards"] = {
            name: [1e308 * 10] * len(values) for name, values in found["rewards"].items()
        }
        await say(send, json.dumps(found).encode())

    async def text(self, send, found):
        found["rewards"] = {
            name: [str(v) for v in values] for name, values in found["rewards"].items()
        }
        await say(send, json.dumps(found).encode())

    async def error(self, send, found):
        await say(send, b'{"error": "out of memory"}', 500)

    async def oversized(self, send, found):
        await say(send, b" " * 30_000_000 + json.dumps(found).encode())

    async def malformed(self, send, found):
        await say(send, json.dumps(found).encode()[:-7])

    async def cut(self, send, found):
        body = json.dumps(found).encode()
        await send(HEAD | {"headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body[:10], "more_body": True})
        raise ConnectionResetError("cut in the middle")

    async def die(self, send, found):
        await send(HEAD)
        await send({"type": "http.response.body", "body": b'{"rewards": {', "more_body": True})
        os._exit(3)


async def say(send, body, status=200):
    await send(HEAD | {"status": status, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    app = Faulty(make_app({"numbers": Weighted(numbers, 1.0)}))
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical", access_log=False
    )
