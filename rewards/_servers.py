"""Several reward servers as one: who is asked next, who has failed, and what is said about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mmrl.core.errors import UserError
from rewards.wire import Part, message_of

log = logging.getLogger(__name__)
RETRIED = (408, 429, 500, 502, 503, 504)
ANSWER = (2**20, 4096)  # most bytes of an answer: so many, and so many for each sample


class Failed(Exception):
    """A request that another server, or a later try, may answer. ``silent``: it cost a whole
    time-out."""

    def __init__(self, cause: str, dead: bool = False, silent: bool = False):
        super().__init__(cause)
        self.dead = dead
        self.silent = silent


@dataclass
class Server:
    """One address and its record. ``dead``: it did not answer at all; ``silent``: it let a time-out
    pass."""

    url: str
    outstanding: int = 0
    requests: int = 0
    failures: int = 0
    dead: bool = False
    silent: bool = False
    since: float = 0.0  # when it was found dead
    answered: float = 0.0  # when it last gave an answer
    cause: str = ""
    warned: str = ""  # the cause that has been logged


class Servers:
    """Least outstanding first; a dead one is left alone for ``cooldown`` seconds while others
    live."""

    def __init__(self, urls: Sequence[str], cooldown: float = 30.0, kind: str = "reward server"):
        self.all = [Server(check_url(url, kind)) for url in urls]
        self.cooldown = cooldown
        self.kind = kind
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Before a batch: try again whoever has rested, or everybody if nobody lives."""
        with self._lock:
            nobody = all(one.dead for one in self.all)
            for one in self.all:
                if nobody or time.monotonic() - one.since > self.cooldown:
                    one.dead = one.silent = False

    def take(self, tried: Sequence[Server]) -> Server | None:
        """The next to ask: alive and not tried for this request, else alive, else one that at least
        fails quickly."""
        with self._lock:
            ranks = [
                [one for one in self.all if not one.dead and one not in tried],
                [one for one in self.all if not one.dead],
                [one for one in self.all if not one.silent],
            ]
            chosen = min(
                next((rank for rank in ranks if rank), []),
                key=lambda one: one.outstanding,
                default=None,
            )
            if chosen:
                chosen.outstanding += 1
                chosen.requests += 1
            return chosen

    def alive(self) -> bool:
        return any(not one.dead for one in self.all)

    def answered(self, one: Server) -> None:
        with self._lock:
            one.outstanding -= 1
            one.answered = time.monotonic()
            recovered = one.dead
            if recovered:
                one.dead = False
                one.silent = False
                one.warned = ""
        if recovered:
            log.info("%s %s answers again", self.kind, one.url)

    def failed(self, one: Server, error: Failed, started: float) -> None:
        """Record the failure of a request sent at ``started``; the first of a kind is logged with
        address and cause.

        A server that has answered others in the meantime is not dead: that one request is slow or
        was lost.
        """
        with self._lock:
            one.outstanding -= 1
            one.failures += 1
            one.cause = str(error)
            if error.dead and one.answered < started:
                one.since = one.since if one.dead else time.monotonic()
                one.dead = True
                one.silent = one.silent or error.silent
            news = one.warned != one.cause
            one.warned = one.cause
            others = [other.url for other in self.all if not other.dead and other is not one]
        if news:
            goes = f"its share goes to {', '.join(others)}" if others else "no other server is left"
            log.warning("%s %s failed: %s; %s", self.kind, one.url, error, goes)

    def gave_up(self, one: Server) -> None:
        """The request was refused, which is no fault of the server's."""
        with self._lock:
            one.outstanding -= 1

    def causes(self) -> str:
        return "; ".join(f"{one.url}: {one.cause}" for one in self.all if one.cause)


def check_url(url: str, kind: str = "reward server") -> str:
    """An http(s) address without a trailing slash. Raises UserError."""
    import httpx

    try:
        httpx.URL(url)  # what it refuses would fail at every request
        parts = urlsplit(url)
        valid = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and (parts.port is None or parts.port > 0)
        )
    except (ValueError, httpx.InvalidURL):
        valid = False
    if not valid or parts.query or parts.fragment or parts.username or parts.password:
        raise UserError(
            f"url {url!r} is not the address of a {kind}, such as http://127.0.0.1:8123"
        )
    return url.rstrip("/")


def exchange(client: Any, request: Any, timeout: float, most: int) -> tuple[Any, bytes]:
    """The response to an httpx request and its body of at most ``most`` bytes, within ``timeout``
    seconds altogether.

    Raises:
        Failed: no answer, no whole one in time, or one that is too long.
    """
    import httpx

    until = time.monotonic() + timeout
    content = bytearray()
    response = None
    try:
        response = client.send(request, stream=True)
        for chunk in response.iter_bytes():
            content += chunk
            if time.monotonic() > until:
                raise Failed(f"no complete answer within {timeout:g} s", dead=True, silent=True)
            if len(content) > most:
                raise Failed(f"an answer of more than {most} bytes")
    except httpx.TimeoutException as error:
        raise Failed(f"no answer within {timeout:g} s", dead=True, silent=True) from error
    except httpx.HTTPError as error:
        raise Failed(f"{type(error).__name__}: {error}", dead=True) from error
    finally:
        if response is not None:
            response.close()
    return response, bytes(content)


def post(client: Any, url: str, parts: Sequence[Part], count: int, timeout: float) -> bytes:
    """The body of a 200 answer to ``POST url/score``, within ``timeout`` seconds altogether.

    Raises: Failed: no answer, or one that says "later" or "broken". UserError: an answer that says
        the request, the token or the address is wrong; repeating it would not help.
    """
    request = client.build_request("POST", f"{url}/score", files=list(parts), timeout=timeout)
    response, content = exchange(client, request, timeout, ANSWER[0] + ANSWER[1] * count)
    if response.status_code == 200:
        return content
    said = f"{response.status_code}, {message_of(content)}"
    if response.status_code in RETRIED:
        raise Failed(said)
    if response.status_code in (401, 403):
        raise UserError(
            f"reward server {url} refused the token; set `token` or MMRL_REWARD_TOKEN ({said})"
        )
    if response.status_code == 413:
        raise UserError(
            f"reward server {url} finds a request too large; lower `batch_size` ({said})"
        )
    raise UserError(f"reward server {url} refused a request: {said}")
