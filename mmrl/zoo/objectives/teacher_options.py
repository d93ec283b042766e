"""Defines the options of a teacher served by another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from mmrl.core.numbers import Count


@dataclass(frozen=True)
class RemoteOptions:
    """Says how to query a remote teacher.

    url: address of ``mmrl serve-teacher``, or several that serve the same teacher. token_file: a
    file whose first line is the token; null: the environment variable MMRL_TEACHER_TOKEN.
    certificate: a file of certificates to verify https with; null: those of the machine. timeout:
    seconds for one response. retries: of a request, at another server if possible. backoff: seconds
    before a retry at the same server, doubled each time, with jitter. retry_seconds: how long to
    wait for servers that are full or unreachable. max_rows: rows of one request; null: those of a
    pass. max_answer_mib: the largest response that is read. precision: of the responses in transit;
    bfloat16 halves them. top_k: for every token, send only the teacher's k likeliest tokens and the
    total mass of the others: the divergence over these categories is at most that over all tokens;
    null: all.
    """

    url: str | list[str]
    token_file: Path | None = None
    certificate: Path | None = None
    timeout: Annotated[float, Gt(0)] = 600.0
    retries: Annotated[int, Ge(0)] = 4
    backoff: Annotated[float, Ge(0)] = 1.0
    retry_seconds: Annotated[float, Ge(0)] = 120.0
    max_rows: Annotated[int, Ge(1)] | None = None
    max_answer_mib: Annotated[float, Gt(0)] = 4096.0
    precision: Literal["exact", "bfloat16"] = "exact"
    top_k: Count | None = None
