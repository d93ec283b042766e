"""Gives all reads and writes of a request one deadline: a server that trickles bytes, also in
headers, cannot block a client."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx


class OfThread(threading.local):
    """Holds a thread's deadline: a request is made by the thread that waits for it."""

    moment: float | None = None


_of_thread = OfThread()


@contextmanager
def deadline(seconds: float) -> Iterator[float]:
    """End this thread's sends and receives inside after ``seconds``; yields the deadline."""
    _of_thread.moment = time.monotonic() + seconds
    try:
        yield _of_thread.moment
    finally:
        _of_thread.moment = None


def left(timeout: float | None, error: type[Exception]) -> float | None:
    """Return the seconds that one step may take. Raises ``error`` if there are none."""
    moment = _of_thread.moment
    if moment is None:
        return timeout
    seconds = moment - time.monotonic()
    if seconds <= 0:
        raise error("the time of the request is over")
    return seconds if timeout is None else min(timeout, seconds)


class Stream(httpcore.NetworkStream):
    """Wraps a connection."""

    def __init__(self, inner: httpcore.NetworkStream):
        self.inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.inner.read(max_bytes, left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.inner.write(buffer, left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self.inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        seconds = left(timeout, httpcore.ConnectTimeout)
        return Stream(self.inner.start_tls(ssl_context, server_hostname, seconds))

    def get_extra_info(self, info: str) -> Any:
        return self.inner.get_extra_info(info)


class Backend(httpcore.NetworkBackend):
    """Opens connections whose steps end at the deadline."""

    def __init__(self, inner: httpcore.NetworkBackend):
        self.inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        seconds = left(timeout, httpcore.ConnectTimeout)
        return Stream(self.inner.connect_tcp(host, port, seconds, local_address, socket_options))


def transport(limits: httpx.Limits, verify: ssl.SSLContext) -> httpx.HTTPTransport:
    """Return httpx's transport with deadlines, without anything from the environment."""
    channel = httpx.HTTPTransport(verify=verify, trust_env=False, limits=limits)
    pool: Any = channel._pool  # httpx has no option for what httpcore calls the network backend
    pool._network_backend = Backend(pool._network_backend)
    return channel
