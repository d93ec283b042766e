"""Serves a policy as a teacher over HTTP: ``POST /teach``, ``GET /health``, ``/info`` and
``/metrics``.

A question and its answer are messages of ``mmrl.core.messages``; ``mmrl.policies.teaching`` defines
their content. One question is answered at a time, with exactly its rows in one pass, so that the
numbers equal those of a local call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from fastapi import FastAPI, Response

from mmrl.apps.serve.requests import Endpoint, Listening, Refusal, application, shortened
from mmrl.core.messages import BadMessage, pack, unpack
from mmrl.core.version import __version__
from mmrl.policies.base import Policy
from mmrl.policies.teaching import BadQuestion, answer, signature
from mmrl.scoring.worker import Worker
from rewards.servers.tokens import Tokens
from rewards.servers.wire import BadInput

TEACHER_VARIABLE = "MMRL_TEACHER_TOKEN"
LIMITS = ("max_request_mib", "max_answer_mib")
log = logging.getLogger("mmrl.apps.serve.requests")


@dataclass(frozen=True, kw_only=True)
class TeachOptions(Listening):
    """Holds ``serve:`` of a configuration for ``mmrl serve-teacher``."""

    port: Annotated[int, Ge(0), Le(65535)] = 8124  # 0: any free port, which is printed
    max_request_mib: Annotated[float, Gt(0)] = 1024.0  # a question
    max_answer_mib: Annotated[float, Gt(0)] = 4096.0  # log-probs of all tokens of its rows
    concurrency: Annotated[int, Ge(1)] = 4  # questions in memory at once; others wait unread
    read_timeout: Annotated[float, Gt(0)] = 600.0  # seconds for a question to arrive


class TeachingService(Endpoint):
    """Holds the teacher and answers questions one after another."""

    kind = "teacher"
    options: TeachOptions

    def __init__(self, policy: Policy, options: TeachOptions):
        super().__init__(options, Tokens(options.token, options.token_file, TEACHER_VARIABLE))
        self.policy = policy
        self.broken = ""  # why the device no longer works
        self.rows = 0
        self.seconds = 0.0
        self.worker = Worker("teacher")

    async def handle(self, media_type: str, body: bytearray) -> Response:
        """Query the policy. Raises Refusal and BadInput."""
        if self.broken:
            raise Refusal(503, self.problem())
        content = await asyncio.wrap_future(self.worker.submit(self.answer, body))
        return Response(content, media_type="application/octet-stream")

    def answer(self, body: bytearray) -> bytes:
        """Answer a raw question, in the teacher's thread."""
        try:
            message = unpack(body)
            body.clear()
            began = time.perf_counter()
            shown = answer(self.policy, message)
            self.seconds += time.perf_counter() - began
        except (BadMessage, BadQuestion) as error:
            raise BadInput("body", str(error)) from error
        except torch.OutOfMemoryError as error:
            raise Refusal(413, f"out of memory: {shortened(str(error))}") from error
        except torch.AcceleratorError as error:
            self.broken = shortened(str(error))
            raise
        except Exception as error:  # a model's errors for values that do not fit it
            log.warning("the teacher refused a question: %s: %s", type(error).__name__, error)
            message = f"{type(error).__name__}: {error}"
            raise Refusal(422, f"the teacher cannot read it: {shortened(message)}") from error
        size = sum(tensor.nbytes for tensor in shown.values())
        if size > self.options.max_answer_mib * 2**20:
            raise Refusal(
                413,
                f"the answer has {size / 2**20:.0f} MiB, more than max_answer_mib "
                f"{self.options.max_answer_mib:g}; ask for fewer rows at once",
            )
        self.rows += len(next(iter(shown.values())))
        return pack(shown)

    def problem(self) -> str:
        if not self.broken:
            return ""
        return f"the device has failed, start the server again: {self.broken}"

    def metrics(self) -> list[str]:
        lines = super().metrics()
        for what, value in (("rows", self.rows), ("seconds", self.seconds)):
            lines += [f"# TYPE mmrl_teacher_{what}_total counter"]
            lines += [f"mmrl_teacher_{what}_total {value}"]
        return lines

    def info(self) -> dict[str, Any]:
        options = asdict(self.options)
        return {
            "version": __version__,
            "teacher": signature(self.policy),
            "limits": {key: options[key] for key in LIMITS},
        }


def make_teacher_app(policy: Policy, options: TeachOptions | None = None) -> FastAPI:
    """Return the ASGI application that serves this policy as a teacher."""
    return application(TeachingService(policy, options or TeachOptions()), "mmrl teacher", "/teach")
