"""Admits requests to a server: token, size, memory and time are checked before anything is read,
and every mistake has an answer."""

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
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from mmrl.core.errors import UserError
from mmrl.remote.memory import Memory, NoRoom, Share
from rewards.servers.tokens import Tokens
from rewards.servers.wire import BadInput, check_token

LONGEST = 2000  # characters of what a model or a reward says of a request
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Holds the options of ``serve:`` that all servers have."""

    host: str = "127.0.0.1"  # 0.0.0.0 listens on all networks of the machine and needs a token
    port: Annotated[int, Ge(0), Le(65535)] = 8123  # 0: any free port, which is printed
    token: str | None = None  # null: the value of the server's environment variable
    token_file: Path | None = None  # a valid token on every line; read again when it changes
    certificate: Path | None = None  # of the server, for https; with it
    private_key: Path | None = None
    max_request_mib: Annotated[float, Gt(0)] = 88.0  # size of a request's body
    max_memory_mib: Annotated[float, Gt(0)] = 4096.0  # half of it: requests that have arrived
    max_connections: Annotated[int, Ge(1)] = 1024  # at once; further ones are closed
    max_waiting: Annotated[int, Ge(1)] = 64  # requests at once; further ones get 503
    header_timeout: Annotated[float, Gt(0)] = 10.0  # seconds for the headers of a request to arrive
    read_timeout: Annotated[float, Gt(0)] = 60.0  # seconds for the body to arrive
    timeout: Annotated[float, Gt(0)] = 600.0  # seconds for the answer

    def __post_init__(self) -> None:
        check_token(self.token)
        check_https(self.certificate, self.private_key)


def check_https(certificate: Path | None, private_key: Path | None) -> None:
    """Raise UserError unless both files are there and https can be served with them, or none."""
    if (certificate is None) != (private_key is None):
        raise UserError("serve.certificate and serve.private_key belong together")
    if certificate is not None and private_key is not None:
        check_certificate(certificate, private_key)


def check_certificate(certificate: Path, private_key: Path) -> None:
    """Raise UserError unless https can be served with these."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"serve.certificate {certificate} and serve.private_key {private_key} cannot be used: "
            f"{error}"
        ) from error


class Refusal(Exception):
    """Carries an answer other than 200, and what it says."""

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
    """Return JSON in ASCII, which can be sent whatever characters of a request it repeats."""
    text = json.dumps(content, allow_nan=False)
    return Response(text, status, dict(headers or {}), "application/json")


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


class Doorkeeper(ABC):
    """Answers requests with ``handle``, after they have shown a token and there is room."""

    kind: ClassVar[str]  # in the names of its counters

    def __init__(self, options: Listening, tokens: Tokens):
        self.limits_of_requests = options
        self.tokens = tokens
        self.requests: Counter[int] = Counter()
        self.inside = 0
        self.bodies = Memory(int(options.max_memory_mib * 2**19))

    @abstractmethod
    async def handle(self, request: Request) -> Response:
        """Answer an admitted request. Raises Refusal and BadInput."""

    @abstractmethod
    def problem(self) -> str:
        """Return why it can answer no more requests; nothing while it can."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return what a client should know."""

    @abstractmethod
    def close(self) -> None:
        """End its threads."""

    def metrics(self) -> list[str]:
        """Return the lines of its counters in Prometheus's text format."""
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
        """Answer a request, also a bad one, and count it by its status."""
        try:
            response = await self._admitted(request)
        except BadInput as error:
            response = Refusal(400, str(error), error.field).reply()
        except Refusal as error:
            response = error.reply()
        except Exception as error:
            log.exception("a request could not be answered")
            message = f"{type(error).__name__} on the server, see its log"
            response = reply({"error": message, "field": None}, 500)
        self.requests[response.status_code] += 1
        return response

    async def _admitted(self, request: Request) -> Response:
        self.authenticate(request)
        if self.inside >= self.limits_of_requests.max_waiting:
            raise Refusal(
                503,
                f"{self.inside} requests are being answered already",
                headers={"Retry-After": "1"},
            )
        self.inside += 1
        try:
            return await self.handle(request)
        except NoRoom as error:
            message = "other requests hold the memory that this one needs"
            raise Refusal(503, message, headers={"Retry-After": "1"}) from error
        finally:
            self.inside -= 1

    async def body(self, request: Request, share: Share) -> bytearray:
        """Read the body; a request that announces too much is refused before it is read, any other
        as soon as it exceeds the limit. Raises NoRoom."""
        options = self.limits_of_requests
        most = int(options.max_request_mib * 2**20)
        too_large = Refusal(
            413,
            f"a request may have {options.max_request_mib:g} MiB; send fewer samples in one",
        )
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
            raise too_large
        known = "content-length" in request.headers and announced.isdecimal()
        share.take(int(announced) if known else most)
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
