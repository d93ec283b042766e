"""Queries teachers in other processes or on other machines: client of ``mmrl serve-teacher``."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, cast

import httpx
import torch

from mmrl.core.distributions import Dist, Sendable
from mmrl.core.errors import UserError
from mmrl.core.messages import BadMessage, pack, unpack
from mmrl.core.top_tokens import completed
from mmrl.core.types import Point
from mmrl.policies.teaching import question
from mmrl.zoo.objectives.teacher_options import RemoteOptions
from rewards.servers.pool import RETRIED, BoundedClient, Failed, Server, Servers, Words, body
from rewards.servers.tokens import Tokens
from rewards.servers.tries import Tries

VARIABLE = "MMRL_TEACHER_TOKEN"


WORDS = Words(
    "a question",
    f"set {VARIABLE} or token_file",
    "a question or its answer too large; lower max_rows of remote, or raise the server's limits",
    tuple(status for status in RETRIED if status != 500),
)


class RemoteTeacher:
    """Queries the servers of one teacher. ``signature``: from the first that responds."""

    def __init__(self, options: RemoteOptions, place: str):
        """``place``: of the options in the configuration, for messages."""
        urls = [options.url] if isinstance(options.url, str) else list(options.url)
        if not urls:
            raise UserError(f"{place}.url: name the address of at least one server")
        self.options = options
        self.place = place
        self.servers = Servers(urls, kind="teacher", retry_seconds=options.retry_seconds)
        tokens = Tokens(None, options.token_file, VARIABLE)
        self.client = BoundedClient(tokens.current, len(urls), options.timeout, options.certificate)
        self.longest = int(options.max_answer_mib * 2**20)

    def signature(self) -> dict[str, Any]:
        """Return the server's description of what teacher and policy must have in common."""

        def ask(server: Server) -> Any:
            response = self.client.get(f"{server.url}/info", extensions={"longest": 2**20})
            return self._signature(server, _body(server, response))

        described: dict[str, Any] = self._tried(ask)
        return described

    def _signature(self, server: Server, content: bytes) -> dict[str, Any]:
        try:
            described = json.loads(content)["teacher"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self.place}.url: {server.url} serves no teacher; start it with `mmrl "
                f"serve-teacher`"
            ) from error
        if not isinstance(described, dict):
            raise UserError(f"{self.place}.url: {server.url} serves no teacher")
        return described

    def reference(self, point: Point, dist: Dist) -> Dist:
        """Return the teacher's distribution at a point, with what a divergence from the policy's,
        ``dist``, needs. Raises KeyError or ValueError where it is of another kind."""
        sendable = cast(Sendable, dist)
        student = sendable.shown(sendable.asks()) if self.options.top_k else {}
        widths = {name: tensor.shape[-1] for name, tensor in student.items()}
        parts: dict[str, list[torch.Tensor]] = {}
        for rows in point.split(self.options.max_rows or len(point)):
            for name, tensor in self._asked(rows, sendable, widths).items():
                parts.setdefault(name, []).append(tensor)
        shown = {name: torch.cat(tensors) for name, tensors in parts.items()}
        reference: Dist = sendable.reference(completed(shown, student) if student else shown)
        return reference

    def _asked(
        self, point: Point, dist: Sendable, widths: dict[str, int]
    ) -> dict[str, torch.Tensor]:
        """Send one request. ``widths``: of the student's vocabularies, for top-k responses."""
        message = question(point, dist, self.options.precision != "exact")
        if self.options.top_k is not None:
            message |= {"top_k": self.options.top_k, "widths": widths}
        try:
            content = pack(message)
        except TypeError as error:
            raise UserError(
                f"{self.place}: the policy's states hold a {error}, which cannot travel; use a "
                f"local teacher"
            ) from error

        def ask(server: Server) -> dict[str, torch.Tensor]:
            response = self.client.post(
                f"{server.url}/teach",
                content=content,
                headers={"Content-Type": "application/octet-stream"},
                timeout=self.options.timeout,
                extensions={"longest": self.longest},
            )
            return self._shown(_body(server, response), point.state.device)

        shown: dict[str, torch.Tensor] = self._tried(ask)
        return shown

    def _shown(self, content: bytes, device: torch.device) -> dict[str, torch.Tensor]:
        try:
            shown = unpack(content)
        except BadMessage as error:
            raise Failed(f"an answer that {error}") from error
        if not isinstance(shown, dict):
            raise Failed("an answer without tensors")
        if not all(isinstance(value, torch.Tensor) for value in shown.values()):
            raise Failed("an answer with something else than tensors")
        full = torch.promote_types
        return {
            name: x.to(device, full(x.dtype, torch.float32) if x.is_floating_point() else x.dtype)
            for name, x in shown.items()
        }

    def _tried(self, ask: Any) -> Any:
        """Try one server after another, until one responds. Raises UserError if none does."""
        self.servers.wake()
        tries = Tries(self.servers, self.options.retries, self.options.backoff, threading.Event())
        while tries.left >= 0:
            server: Server = self.servers.take(tries.tried) or self._revived()
            started = time.monotonic()
            try:
                with self.servers.asked(server):
                    return ask(server)
            except Failed as error:
                tries.failed(server, error, started)
        raise UserError(
            f"{self.place}.url: no teacher answers ({self.servers.causes()}); start it with "
            f"`mmrl serve-teacher`, then `mmrl train --resume`"
        )

    def _revived(self) -> Server:
        """Retry all servers when none is left: training cannot continue without one."""
        for server in self.servers.all:
            server.dead = server.silent = False
        revived = self.servers.take([])
        assert revived is not None
        return revived


def _body(server: Server, response: httpx.Response) -> bytes:
    """Return the body of a response. Raises Failed where a retry may help, else UserError."""
    return body(response, f"teacher {server.url}", WORDS)
