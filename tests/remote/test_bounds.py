"""The server's memory, time and log are bounded whatever is sent: a separate process is watched."""

from __future__ import annotations

import json
import logging
import socket
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image

from rewards.servers.wire import BadInput, Limits, Parts, size_of, unpack
from tests.fixtures import waiting
from tests.fixtures.reward_servers import b64, good, png, serving
from tests.fixtures.server_process import server_process, slowest_health

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
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with server_process(tmp_path_factory.mktemp("server"), **OPTIONS) as process:
        waiting.post(f"{process.url}/score", json=good(1))  # libraries are loaded
        yield process


def texts(prompts: bytes) -> bytes:
    return b'{"texts": ["a"], "prompts": [' + prompts + b"]}"


LARGE = 3 * MIB
BOMBS = {
    "empty objects": (texts(b"{}," * (LARGE // 3) + b"{}"), "more than 50000 values"),
    "keys": (texts(b"{%s}" % b",".join(b'"%d":1' % i for i in range(200_000))), "50000 values"),
    "some keys": (texts(b"{%s}" % b",".join(b'"%d":1' % i for i in range(1001))), "at most 1000"),
    "depth": (texts(b'{"a":' * 40 + b"1" + b"}" * 40), "nested more than 32 deep"),
    "great depth": (texts(b"[" * 40_000 + b"]" * 40_000), "body: is not JSON"),
    "a picture": (json.dumps({"images": [b64(plain_png(4000, 4000))], "prompts": [{}]}), "pixels"),
    "pictures": (
        json.dumps({"images": [b64(plain_png(700, 700))] * 5, "prompts": [{}] * 5}),
        "images[4]: 700 x 700 pixels are more",
    ),
    "frames": (
        json.dumps({"videos": [[b64(plain_png(700, 700))] * 5], "prompts": [{}]}),
        "videos[0][4]: 700 x 700 pixels are more",
    ),
    "a prompt's picture": (
        json.dumps({"texts": ["a"], "prompts": [{"image": {"png": b64(plain_png(4000, 4000))}}]}),
        "prompts[0].image: 4000 x 4000 pixels are more",
    ),
    "no picture": (json.dumps({"images": ["A" * LARGE], "prompts": [{}]}), "cannot be read"),
}


def test_what_would_take_memory_is_refused_before_it_does(server):
    score = f"{server.url}/score"
    for bomb, (body, says) in BOMBS.items():
        server.reset()
        before = server.memory("VmRSS")
        answer = httpx.post(score, content=body, headers=JSON, timeout=waiting.HANG)
        assert answer.status_code == 400 and says in answer.json()["error"], bomb
        assert server.memory() - before < 24 * MIB, bomb


def test_pictures_take_no_more_than_is_counted_for_them(server):
    """Two megapixels as floats are 24 MB; while they are decoded and joined, as much again."""
    body = json.dumps({"images": [b64(plain_png(1414, 1414))], "prompts": [{}]})

    def send(_):
        score = f"{server.url}/score"
        return httpx.post(score, content=body, headers=JSON, timeout=waiting.HANG).status_code

    server.reset()
    before = server.memory("VmRSS")
    with slowest_health(server.url) as slowest, ThreadPoolExecutor(12) as pool:
        assert set(pool.map(send, range(24))) == {200}  # they wait for each other
    assert server.memory() - before < 100 * MIB
    assert slowest[0] < waiting.HANG


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
    for i in range(60):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"\x00 no HTTP at all %d\r\n\r\n" % i)
            sock.recv(1000)
    for i in range(60):
        prompt = {f"{'k' * 900}{n}": i for n in range(200)}
        waiting.post(f"{server.url}/score", json={"texts": ["a"], "prompts": [prompt]})
    assert server.log.stat().st_size - before < 20_000


# --------------------------------------------------------------------------------------------------
# the parts


def test_long_causes_and_prompts_are_cut(caplog):
    def loud(media, prompts):
        raise KeyError("x" * 10**6)

    with caplog.at_level(logging.WARNING), serving({"loud": loud}) as address:
        long = {"y" * 10**5: 1, "text": "z" * 10**5}
        answer = waiting.post(f"{address}/score", json={"texts": ["a"], "prompts": [long]})
        assert answer.status_code == 200 and len(answer.content) < 5000
        bare = {"y" * 10**5: 1}
        waiting.post(f"{address}/score", json={"texts": ["a"], "prompts": [bare]})
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
