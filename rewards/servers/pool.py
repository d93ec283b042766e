"""Pools reward servers: chooses the next one, records failures, reports them."""

from __future__ import annotations

import logging
import math
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from mmrl.core.errors import UserError
from rewards.servers.transport import deadline, transport
from rewards.servers.wire import message_of

log = logging.getLogger(__name__)
RETRIED = (408, 429, 500, 502, 503, 504)
AWAY = (429, 502, 503, 504)  # full, or its proxy finds no backend
ANSWER = (2**20, 4096)  # maximum bytes of an answer: in all, plus per sample
LONGEST = 4 * 2**20  # maximum bytes of any other answer
HEADERS = {"accept", "accept-encoding", "connection", "content-length", "content-type", "host"}


class Failed(Exception):
    """Signals a request that another server, or a later try, may answer.

    ``dead``: no answer; ``silent``: it timed out; ``away``: the server is full or down, and may be
    back later, after ``wait`` seconds if it said so.
    """

    def __init__(
        self,
        cause: str,
        dead: bool = False,
        silent: bool = False,
        away: bool = False,
        wait: float | None = None,
    ):
        super().__init__(cause)
        self.dead = dead
        self.silent = silent
        self.away = away
        self.wait = wait


@dataclass
class Server:
    """Holds one address and its record. ``dead``: no answer at all; ``silent``: it timed out."""

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


class Words(NamedTuple):
    """Holds the words of messages about a kind of server, and the remedies for refusals."""

    request: str  # what it may refuse
    token: str  # remedy for a refused token
    size: str  # what is too large, and the remedy
    retried: tuple[int, ...] = RETRIED  # status codes that say "later" or "broken"


WORDS = Words(
    "a request",
    "set `token` or MMRL_REWARD_TOKEN",
    "a request too large; lower `batch_size`",
)


class Servers:
    """Chooses the server with the fewest outstanding requests; a dead server gets no requests for
    ``cooldown`` seconds while others are alive. If none is available, a request is given up
    ``retry_seconds`` after the last answer."""

    def __init__(
        self,
        urls: Sequence[str],
        cooldown: float = 30.0,
        kind: str = "reward server",
        retry_seconds: float = 0.0,
    ):
        self.all = [Server(check_url(url, kind)) for url in urls]
        self.cooldown = cooldown
        self.kind = kind
        self.retry_seconds = retry_seconds
        self._away: float | None = None  # since when no server is available
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Revive, before a batch, every dead server whose cooldown is over, or all if none is
        alive."""
        with self._lock:
            nobody = all(server.dead for server in self.all)
            for server in self.all:
                if nobody or time.monotonic() - server.since > self.cooldown:
                    server.dead = server.silent = False

    def take(self, tried: Sequence[Server]) -> Server | None:
        """Take the next server: alive and not tried for this request, else alive, else one that
        fails quickly."""
        with self._lock:
            ranks = [
                [server for server in self.all if not server.dead and server not in tried],
                [server for server in self.all if not server.dead],
                [server for server in self.all if not server.silent],
            ]
            chosen = min(
                next((rank for rank in ranks if rank), []),
                key=lambda server: server.outstanding,
                default=None,
            )
            if chosen:
                chosen.outstanding += 1
                chosen.requests += 1
            return chosen

    def alive(self) -> bool:
        return any(not server.dead for server in self.all)

    def answered(self, server: Server) -> None:
        with self._lock:
            server.outstanding -= 1
            server.answered = time.monotonic()
            self._away = None
            recovered = server.dead
            if recovered:
                server.dead = False
                server.silent = False
                server.warned = ""
        if recovered:
            log.warning("%s %s answers again", self.kind, server.url)

    def failed(self, server: Server, error: Failed, started: float) -> None:
        """Record the failure of a request sent at ``started``; the first of a kind is logged with
        address and cause.

        A server that has answered others in the meantime is not dead: only this request is slow or
        was lost.
        """
        with self._lock:
            server.outstanding -= 1
            server.failures += 1
            server.cause = str(error)
            if error.away and self._away is None:
                self._away = time.monotonic()
            if error.dead and server.answered < started:
                server.since = server.since if server.dead else time.monotonic()
                server.dead = True
                server.silent = server.silent or error.silent
            news = server.warned != server.cause
            server.warned = server.cause
            living = [each.url for each in self.all if not each.dead and each is not server]
        if news:
            goes = f"its share goes to {', '.join(living)}" if living else "no other server is left"
            if not living and error.away and (seconds := self.patience()) > 0:
                goes = f"waiting for it, up to {seconds:.0f} s (`retry_seconds`)"
            log.warning("%s %s failed: %s; %s", self.kind, server.url, error, goes)

    def patience(self) -> float:
        """Return how many more seconds to wait for servers that are down."""
        since = self._away
        return 0.0 if since is None else since + self.retry_seconds - time.monotonic()

    def gave_up(self, server: Server) -> None:
        """Record that the request was refused, which is not the server's fault."""
        with self._lock:
            server.outstanding -= 1

    @contextmanager
    def asked(self, server: Server) -> Iterator[None]:
        """Record how a request to a server from ``take`` ends; on ``Failed``, the caller calls
        ``failed``."""
        try:
            yield
        except Failed:
            raise
        except BaseException:
            self.gave_up(server)
            raise
        self.answered(server)

    def causes(self) -> str:
        return "; ".join(f"{server.url}: {server.cause}" for server in self.all if server.cause)


def addresses(url: str | list[str], who: str) -> list[str]:
    """Return one or several addresses as a list. Raises UserError if there is none."""
    urls = [url] if isinstance(url, str) else list(url)
    if not urls:
        raise UserError(f"{who} needs the address of at least one server in `url`")
    return urls


def check_url(url: str, kind: str = "reward server") -> str:
    """Return an http(s) address without a trailing slash. Raises UserError."""
    try:
        httpx.URL(url)  # what httpx refuses here would fail at every request
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


class BoundedClient(httpx.Client):
    """Sends minimal requests, and reads whole answers within limits.

    Connections are kept open between calls. There are no proxies, and no header but ``HEADERS`` and
    the token: headers from the environment (OPENAI_CUSTOM_HEADERS, a proxy's password) are not
    sent. A request's ``timeout`` bounds its total time; its extension ``longest`` bounds the
    answer, which must not be compressed. ``certificate``: a file of trusted certificates for https,
    None: the machine's.

    Raises:
        Failed: no complete answer in time, or one that is too long or compressed.
        UserError: the certificate cannot be read.
    """

    def __init__(
        self,
        token: Callable[[], str | None],
        connections: int,
        timeout: float,
        certificate: Path | None = None,
    ):
        self.token = token
        limits = httpx.Limits(max_keepalive_connections=connections, keepalive_expiry=2.0)
        super().__init__(
            timeout=timeout,
            transport=transport(limits, trusted(certificate)),
            trust_env=False,
            follow_redirects=False,
        )

    def send(self, request: httpx.Request, *, stream: bool = False, **_: Any) -> httpx.Response:
        for name in set(request.headers) - HEADERS:
            del request.headers[name]
        request.headers["Accept-Encoding"] = "identity"  # decompression is unbounded
        if token := self.token():
            request.headers["Authorization"] = f"Bearer {token}"
        timeout = request.extensions["timeout"]["read"]
        longest = request.extensions.get("longest", LONGEST)
        content = bytearray()
        try:
            with (
                deadline(timeout) as until,
                closing(super().send(request, stream=True)) as response,
            ):
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.strip().lower() != "identity":
                    raise Failed(f"an answer in {encoding[:40]!a}, which was not asked for")
                for chunk in response.iter_raw():
                    content += chunk
                    if time.monotonic() > until:
                        cause = f"no complete answer within {timeout:g} s"
                        raise Failed(cause, dead=True, silent=True)
                    if len(content) > longest:
                        raise Failed(f"an answer of more than {longest} bytes")
        except httpx.TimeoutException as error:
            raise Failed(f"no answer within {timeout:g} s", dead=True, silent=True) from error
        except httpx.HTTPError as error:
            away = isinstance(error, httpx.ConnectError) and "SSL" not in str(error)
            raise Failed(unreachable(error), dead=True, away=away) from error
        headers = {
            "Content-Type": "application/json",
            "Retry-After": response.headers.get("Retry-After", ""),
        }
        return httpx.Response(
            response.status_code, headers=headers, content=bytes(content), request=request
        )


@cache
def trusted(certificate: Path | None) -> ssl.SSLContext:
    """Return the trusted certificates for https, cached since loading the machine's is slow. Raises
    UserError."""
    if certificate is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=Path(certificate).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"certificate {certificate} cannot be read: {error}") from error


def post(client: BoundedClient, url: str, content: bytes, count: int, timeout: float) -> bytes:
    """Return the body of a 200 answer to ``POST url/score``, within ``timeout`` seconds in all.

    Raises:
        Failed: no answer, or one that says "later" or "broken".
        UserError: an answer that says the request, the token or the address is wrong; a retry would
            not help.
    """
    longest = ANSWER[0] + ANSWER[1] * count
    response = client.post(
        f"{url}/score",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=timeout,
        extensions={"longest": longest},
    )
    return body(response, f"reward server {url}", WORDS)


def later(status: int, header: str | None, message: str) -> Failed:
    """Return the failure for an answer that says "later" or "broken"; ``header``: its
    Retry-After."""
    return Failed(message, away=status in AWAY, wait=retry_after(header or ""))


def unreachable(error: httpx.HTTPError) -> str:
    """Return why there is no answer: the operating system's message, without its number."""
    words = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    return f"{type(error).__name__}: {words[:1].lower() + words[1:]}"


def retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header: a number, or the time until its date."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def body(response: httpx.Response, who: str, words: Words) -> bytes:
    """Return the body of a 200 answer of the server ``who``.

    Raises:
        Failed: an answer that says "later" or "broken".
        UserError: one that says the request, the token or the address is wrong.
    """
    if response.status_code == 200:
        return response.content
    message = f"{response.status_code}, {message_of(response.content)}"
    if response.status_code in words.retried:
        raise later(response.status_code, response.headers.get("Retry-After"), message)
    if response.status_code in (401, 403):
        raise UserError(f"{who} refused the token; {words.token} ({message})")
    if response.status_code == 413:
        raise UserError(f"{who} finds {words.size} ({message})")
    raise UserError(f"{who} refused {words.request}: {message}")
