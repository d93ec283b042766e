"""Reward servers on this machine for tests: real ones in a thread, and ones that misbehave on
purpose."""

from __future__ import annotations

import base64
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from PIL import Image

from mmrl.config import Weighted
from mmrl.core.errors import UserError
from mmrl.remote.server import ServeOptions, bind, server
from tests.tiny_rewards import pictures
from tests.waiting import HANG, until


@contextmanager
def serving(
    rewards: Mapping[str, Callable], weights: Mapping[str, float] = {}, **options: Any
) -> Iterator[str]:
    """The address of a server of these rewards; it has stopped afterwards."""
    chosen = ServeOptions(**{"port": 0, "wait_ms": 0.0} | options)
    weighted = {name: Weighted(reward, weights.get(name, 1.0)) for name, reward in rewards.items()}
    with bind(chosen) as sock:
        one = server(weighted, chosen)
        thread = threading.Thread(target=one.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        until(lambda: one.started or not thread.is_alive())
        assert thread.is_alive(), "the server did not start"
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            one.should_exit = True
            thread.join(HANG)
            assert not thread.is_alive()


@contextmanager
def answering(reply: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of something that is no reward server: ``reply`` gets every connection and does
    as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(0.05)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, _ = sock.accept()
                except TimeoutError:
                    continue
                threads.append(
                    threading.Thread(target=_handle, args=(reply, connection, stop), daemon=True)
                )
                threads[-1].start()

        threads = [threading.Thread(target=accept, daemon=True)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            stop.set()
            for thread in threads:
                thread.join(5)


def _handle(
    reply: Callable[[socket.socket], None], connection: socket.socket, stop: threading.Event
) -> None:
    with connection:
        connection.settimeout(HANG)
        try:
            reply(connection)
            if reply is silence:
                stop.wait(HANG)
        except OSError:
            pass  # the client has hung up


def silence(connection: socket.socket) -> None:
    """Never says anything."""


def saying(status: str, body: str) -> Callable[[socket.socket], None]:
    """Reads the request and answers it with this."""

    def reply(connection: socket.socket) -> None:
        read_request(connection)
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\nConnection: "
            f"close\r\n\r\n"
        )
        connection.sendall((head + body).encode())

    return reply


def dripping(connection: socket.socket) -> None:
    """A byte of an endless answer now and then: no single read takes long."""
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(200):
        connection.sendall(b" ")
        time.sleep(0.05)


def hanging_up(connection: socket.socket) -> None:
    """Reads the request and closes."""
    read_request(connection)


def read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or b"\r\n\r\n"
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [
        line.split(b":", 1)
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    ]
    length = int(lines[0][1]) if lines else 0
    got = len(body)
    while got < length and (more := connection.recv(65536)):
        got += len(more)


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


# rewards and requests


def mean(media, prompts):
    """Mean of the picture."""
    return media.flatten(1).mean(1)


def words(media, prompts):
    return [float(len(text.split())) for text in media]


def numbers(media, prompts):
    """What each prompt says; the batch it came in does not matter."""
    return [float(prompt["n"]) for prompt in prompts]


def picky(media, prompts):
    """No value for prompts that say so; an exception for others."""
    if any(prompt.get("broken") for prompt in prompts):
        raise RuntimeError("a broken prompt")
    return [float("nan") if prompt.get("odd") else 1.0 for prompt in prompts]


def refusing(media, prompts):
    raise UserError("reward 'refusing' needs images of the moon")


def eighth(media):
    """The nearest 8-bit picture."""
    return (media * 255).round() / 255


def png(picture=None):
    buffer = io.BytesIO()
    Image.fromarray((eighth(pictures(1))[0] * 255).byte().permute(1, 2, 0).numpy()).save(
        buffer, "PNG"
    )
    return buffer.getvalue() if picture is None else picture


def b64(data):
    return base64.b64encode(data).decode()


def good(count=2, **changes):
    return {
        "images": [b64(png())] * count,
        "prompts": [{"text": "a", "n": i} for i in range(count)],
        **changes,
    }
