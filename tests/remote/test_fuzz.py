"""Requests that no honest client would send: none makes the server answer 500, none ends it, and
its memory, time and log are bounded, which is seen on a separate process."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image

from mmrl.apps.serve.service import ServeOptions, make_app
from mmrl.config import Weighted
from rewards.servers.wire import BadInput, Limits, Parts, size_of, unpack
from tests.fixtures import waiting
from tests.fixtures.reward_servers import b64, good, mean, mutated, numbers, picky, png, serving
from tests.fixtures.server_process import server_process

PNG = png()
LEAVES = [None, True, False, 0, -1, 1e308, 2**70, "", "a", "\ud800", "numbers", "x" * 3000]
LEAVES += [b64(PNG), [], {}, [[]], [{}]]
FIELDS = "images videos texts tensor prompts rewards ids marks more sound sampling_rate".split()
KINDS = ["", "text/plain", "multipart/form-data", "application/json; charset=x", "\x7f"]
KINDS += ["application/octet-stream", "multipart/form-data; boundary="]
KINDS += ["multipart/form-data; boundary=" + "b" * 300]


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
    return json.dumps(good(1)).encode() * draw.randrange(3), draw.choice(KINDS)


def pictured(draw: random.Random) -> tuple[bytes, str]:
    """Pictures that are broken inside."""
    png = bytearray(PNG)
    for _ in range(draw.randint(1, 20)):
        png[draw.randrange(len(png))] = draw.randrange(256)
    cut = bytes(png[: draw.randrange(len(png))]) if draw.random() < 0.5 else bytes(png)
    body = {"images": [b64(cut)], "prompts": [{"n": 1, "text": "a"}]}
    return json.dumps(body).encode(), "application/json"


async def answer(
    app, body: bytes, kind: str, path: str = "/score", method: str = "POST"
) -> tuple[int, bytes]:
    """Status and content, by the application's own interface: what it raises comes up here."""
    headers = {"content-type": kind.encode("latin-1")}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        reply = await client.request(method, path, content=body, headers=headers)
    return reply.status_code, reply.content


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


# bounds


MIB = 2**20
JSON = {"content-type": "application/json"}
# small bounds: a request of 4 MiB, 2 megapixels
OPTIONS = {
    "max_request_mib": 4,
    "max_megapixels": 2,
    "max_values": 50_000,
    "concurrency": 1,
    "max_connections": 40,
}


def plain_png(width: int, height: int) -> bytes:
    """A black picture, small as a file however large it is."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG", compress_level=9)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with server_process(tmp_path_factory.mktemp("server"), **OPTIONS) as process:
        waiting.post(f"{process.url}/score", json=good(1))  # libraries are loaded
        yield process


def texts(prompts: bytes) -> bytes:
    return b'{"texts": ["a"], "prompts": [' + prompts + b"]}"


LARGE = 3 * MIB
MANY = texts(b"{%s}" % b",".join(b'"%d":1' % i for i in range(200_000)))
SOME = texts(b"{%s}" % b",".join(b'"%d":1' % i for i in range(1001)))
WIDE, SQUARE = b64(plain_png(4000, 4000)), b64(plain_png(700, 700))
BOMBS = [
    (texts(b"{}," * (LARGE // 3) + b"{}"), "more than 50000 values"),
    (MANY, "50000 values"),
    (SOME, "at most 1000"),
    (texts(b'{"a":' * 40 + b"1" + b"}" * 40), "nested more than 32 deep"),
    (texts(b"[" * 40_000 + b"]" * 40_000), "body: is not JSON"),
    ({"images": [WIDE], "prompts": [{}]}, "4000 x 4000 pixels are more"),
    ({"images": [SQUARE] * 5, "prompts": [{}] * 5}, "images[4]: 700 x 700 pixels are more"),
    ({"videos": [[SQUARE] * 5], "prompts": [{}]}, "videos[0][4]: 700 x 700 pixels are more"),
    (
        {"texts": ["a"], "prompts": [{"image": {"png": WIDE}}]},
        "prompts[0].image: 4000 x 4000 pixels are more",
    ),
    ({"images": ["A" * LARGE], "prompts": [{}]}, "cannot be read"),
]


def test_what_would_take_memory_is_refused_before_it_does(server, subtests):
    for bomb, says in BOMBS:
        body = bomb if isinstance(bomb, bytes) else json.dumps(bomb).encode()
        with subtests.test(says=says):
            server.reset()
            before = server.memory("VmRSS")
            answer = waiting.post(f"{server.url}/score", content=body, headers=JSON)
            assert answer.status_code == 400 and says in answer.json()["error"]
            assert server.memory() - before < 24 * MIB


def test_pictures_take_no_more_than_is_counted_for_them(server):
    """Two megapixels as floats are 24 MB; while they are decoded and joined, as much again."""
    body = json.dumps({"images": [b64(plain_png(1414, 1414))], "prompts": [{}]})

    def send(_):
        return waiting.post(f"{server.url}/score", content=body, headers=JSON).status_code

    server.reset()
    before = server.memory("VmRSS")
    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(send, range(16))) == {200}  # they wait for each other
    assert server.memory() - before < 100 * MIB


def test_connections_beyond_the_limit_are_told_to_come_back_and_room_is_made(server):
    host, port = server.url.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(80)]
    assert waiting.get(f"{server.url}/health").status_code == 503
    for sock in sockets:
        sock.close()
    waiting.until(lambda: waiting.get(f"{server.url}/health").status_code == 200)


def test_the_log_stays_small(server):
    host, port = server.url.removeprefix("http://").split(":")
    before = server.log.stat().st_size
    for i in range(20):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"\x00 no HTTP at all %d\r\n\r\n" % i)
            sock.recv(1000)
        prompt = {f"{'k' * 900}{n}": i for n in range(200)}
        waiting.post(f"{server.url}/score", json={"texts": ["a"], "prompts": [prompt]})
    assert server.log.stat().st_size - before < 7_000


def test_long_causes_and_prompts_are_cut(caplog):
    def loud(media, prompts):
        raise KeyError("x" * 10**6)

    with serving({"loud": loud}) as address:
        for prompt in ({"y" * 10**5: 1, "text": "z" * 10**5}, {"y" * 10**5: 1}):
            answer = waiting.post(f"{address}/score", json={"texts": ["a"], "prompts": [prompt]})
            assert answer.status_code == 200 and len(answer.content) < 5000
    assert sum(len(record.getMessage()) for record in caplog.records) < 10_000


@pytest.mark.parametrize(
    ("kind", "lossless", "mode"),
    [("PNG", True, "RGBA"), ("WEBP", True, "RGB"), ("WEBP", False, "RGB"), ("WEBP", False, "RGBA")],
)
def test_sizes_are_those_of_the_header(kind, lossless, mode, tmp_path):
    for size in ((1, 1), (7, 300), (301, 2)):
        Image.new(mode, size).save(tmp_path / "a", kind, lossless=lossless)
        assert size_of((tmp_path / "a").read_bytes()) == size
    frames = [Image.new(mode, (20, 10), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "b", kind, save_all=True, append_images=frames[1:])
    assert size_of((tmp_path / "b").read_bytes()) == (20, 10)


def test_a_header_that_is_cut_or_lies_is_no_picture():
    whole = png()
    for content in (whole[:20], b"", b"RIFF", b"RIFF0000WEBPVP8X", whole[:8] + b"x" * 30):
        with pytest.raises(BadInput, match=r"images\[0\]: cannot be read"):
            unpack(Parts([{}], [content], "images"), Limits())
