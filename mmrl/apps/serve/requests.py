"""Answers the requests of a server: token, number, size and time are checked before a body is read,
and every error has an answer.

Slow clients and connection floods are left to the proxy in front of it (docs/security.md).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mmrl.core.errors import UserError
from rewards.servers.tokens import Tokens
from rewards.servers.wire import BadInput, check_token

LONGEST = 2000  # maximum characters of an error of a model or a reward
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Holds the common options of ``serve:``."""

    host: str = "127.0.0.1"  # 0.0.0.0 listens on all networks and needs a token
    port: Annotated[int, Ge(0), Le(65535)] = 8123  # 0: any free port, which is printed
    token: str | None = None  # null: the value of the server's environment variable
    token_file: Path | None = None  # a valid token per line; read again when it changes
    certificate: Path | None = None  # of the server, for https; with it
    private_key: Path | None = None
    max_request_mib: Annotated[float, Gt(0)] = 88.0  # size of a request's body
    concurrency: Annotated[int, Ge(1)] = 8  # requests read and answered at once; others wait unread
    max_waiting: Annotated[int, Ge(1)] = 64  # requests at once; further ones get 503
    max_connections: Annotated[int, Ge(1)] = 1024  # at once; requests of further ones get 503
    read_timeout: Annotated[float, Gt(0)] = 60.0  # seconds for the body to arrive
    timeout: Annotated[float, Gt(0)] = 600.0  # seconds for the answer

    def __post_init__(self) -> None:
        check_token(self.token)
        check_https(self.certificate, self.private_key)


def check_https(certificate: Path | None, private_key: Path | None) -> None:
    """Raise UserError unless both files exist and are valid for https, or none is given."""
    if (certificate is None) != (private_key is None):
        raise UserError("serve.certificate and serve.private_key belong together")
    if certificate is not None and private_key is not None:
        check_certificate(certificate, private_key)


def check_certificate(certificate: Path, private_key: Path) -> None:
    """Raise UserError unless these are valid for https."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"serve.certificate {certificate} and serve.private_key {private_key} cannot be used: "
            f"{error}"
        ) from error


class Refusal(Exception):
    """Carries an error status and its message."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.field = field
        self.headers = dict(headers or {})

    def reply(self) -> Response:
        return reply({"error": str(self), "field": self.field}, self.status, self.headers)


def reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON in ASCII, which is safe for any characters echoed from a request."""
    text = json.dumps(content, allow_nan=False)
    return Response(text, status, dict(headers or {}), "application/json")


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


class Endpoint(ABC):
    """Answers requests with ``handle``: those with a valid token, of bounded size, few at once."""

    kind: ClassVar[str]  # prefix of its counters
    options: Listening

    def __init__(self, options: Listening, tokens: Tokens):
        self.options = options
        self.tokens = tokens
        self.requests: Counter[int] = Counter()
        self.inside = 0
        self.room = asyncio.Semaphore(options.concurrency)

    @abstractmethod
    async def handle(self, media_type: str, body: bytearray) -> Response:
        """Answer an admitted request. Raises Refusal and BadInput."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return the content of /info."""

    def problem(self) -> str:
        """Return why it can no longer answer requests; empty while it can."""
        return ""

    def metrics(self) -> list[str]:
        """Return its counters in Prometheus's text format."""
        counted = f"mmrl_{self.kind}_requests"
        return [
            f"# TYPE {counted}_total counter",
            *(f'{counted}_total{{status="{s}"}} {n}' for s, n in sorted(self.requests.items())),
            f"# TYPE {counted}_inside gauge",
            f"{counted}_inside {self.inside}",
        ]

    def authenticate(self, request: Request) -> None:
        header = request.headers.get("authorization", "").encode("utf-8", "replace")
        tokens = self.tokens.valid()
        right = [hmac.compare_digest(header, f"Bearer {token}".encode()) for token in tokens]
        if tokens and not any(right):
            message = "the token is missing or wrong: send `Authorization: Bearer TOKEN`"
            raise Refusal(401, message, headers={"WWW-Authenticate": "Bearer"})

    async def respond(self, request: Request) -> Response:
        """Answer any request, and count it by status."""
        try:
            response = await self._admitted(request)
        except BadInput as error:
            response = Refusal(400, str(error), error.field).reply()
        except Refusal as error:
            response = error.reply()
        except Exception as error:
            log.exception("a request could not be answered")
            message = f"{type(error).__name__} on the server, see its log"
            response = Refusal(500, message).reply()
        self.requests[response.status_code] += 1
        return response

    async def _admitted(self, request: Request) -> Response:
        self.authenticate(request)
        options = self.options
        if self.inside >= options.max_waiting:
            message = f"{self.inside} requests are being answered already"
            raise Refusal(503, message, headers={"Retry-After": "1"})
        self.inside += 1
        try:
            async with asyncio.timeout(options.timeout), self.room:
                body = await self._body(request)
                return await self.handle(request.headers.get("content-type", ""), body)
        except TimeoutError as error:
            raise Refusal(504, f"no answer within {options.timeout:g} s") from error
        finally:
            self.inside -= 1

    async def _body(self, request: Request) -> bytearray:
        """Read the body; one with too large a Content-Length is refused before reading, any other
        as soon as it exceeds the limit."""
        options = self.options
        most = int(options.max_request_mib * 2**20)
        too_large = Refusal(
            413,
            f"a request may have {options.max_request_mib:g} MiB; send fewer samples in one",
        )
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(options.read_timeout):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > most:
                        raise too_large
                    body += chunk
        except TimeoutError as error:
            raise Refusal(
                408, f"the request did not arrive within {options.read_timeout:g} s"
            ) from error
        except ClientDisconnect as error:
            raise Refusal(400, "the connection closed before the request was complete") from error
        return body


def application(service: Endpoint, title: str, path: str) -> FastAPI:
    """Return the ASGI application that answers ``POST path`` by this service, and ``GET /health``,
    ``/info`` and ``/metrics``."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None)
    app.post(path)(service.respond)

    @app.get("/health")
    async def health() -> Response:
        problem = service.problem()
        return reply({"status": problem or "ok"}, 503 if problem else 200)

    @app.get("/info")
    async def info(request: Request) -> Response:
        service.authenticate(request)
        return reply(service.info())

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.authenticate(request)
        text = "\n".join(service.metrics()) + "\n"
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error.reply()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return Refusal(error.status_code, str(error.detail), headers=error.headers).reply()

    return app
