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
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from mmrl.core.errors import UserError
from mmrl.remote.memory import Memory, NoRoom, Share
from rewards.tokens import Tokens
from rewards.wire import BadInput

LONGEST = 2000  # characters of what a model or a reward says of a request
log = logging.getLogger(__name__)


class Listening(Protocol):
    """Names the options that all servers have."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def certificate(self) -> Path | None: ...
    @property
    def private_key(self) -> Path | None: ...
    @property
    def max_request_mib(self) -> float: ...
    @property
    def max_memory_mib(self) -> float: ...
    @property
    def max_connections(self) -> int: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def header_timeout(self) -> float: ...
    @property
    def read_timeout(self) -> float: ...


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

    def __init__(self, options: Listening, tokens: Tokens):
        self.limits_of_requests = options
        self.tokens = tokens
        self.requests: Counter[int] = Counter()
        self.inside = 0
        self.bodies = Memory(int(options.max_memory_mib * 2**19))

    @abstractmethod
    async def handle(self, request: Request) -> Response:
        """Answer an admitted request. Raises Refusal and BadInput."""

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
                f"{self.inside} requests are being scored already",
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
