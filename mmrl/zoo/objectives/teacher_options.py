"""Defines the options of a teacher that another process serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from mmrl.core.numbers import Count


@dataclass(frozen=True)
class RemoteOptions:
    """Says how a teacher elsewhere is asked.

    url: address of ``mmrl serve-teacher``, or several that serve the same teacher. token_file: a
    file whose first line is the token; null: the environment variable MMRL_TEACHER_TOKEN.
    certificate: a file of certificates that https is checked by; null: those of the machine.
    timeout: seconds for one answer. retries: further tries of a question, elsewhere if possible.
    backoff: seconds before a second try at the same server, doubled each time, with jitter.
    retry_seconds: how long servers that are full or not there are waited for.
    max_rows: rows of one question; null: those of a pass. max_answer_mib: the longest answer that
    is read. precision: of the answers on the way; bfloat16 halves them. top_k: of every token's
    distribution an answer holds the teacher's so many likeliest tokens, and the mass of all others
    together: the divergence of these categories, which is at most that over all tokens; null: all.
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
