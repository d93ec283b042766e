"""Implements pieces of the OpenAI-compatible protocol: keys, waits, pictures as data URLs, choices
and errors read back."""

from __future__ import annotations

import base64
import io
import math
import os
import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from mmrl.core.errors import UserError
from rewards._ask import Question, token_choices
from rewards.servers import Failed
from rewards.wire import check_token

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

KEY = "MMRL_JUDGE_KEY"


class Refused(Exception):
    """Signals that the server will not answer this one question; asking again would not help."""


class Busy(Failed):
    """Signals that the request should be sent later: after ``wait`` seconds if the server said
    so."""

    def __init__(self, cause: str, wait: float | None):
        super().__init__(cause)
        self.wait = wait


class Pace:
    """Says when the next request may leave: at most ``rate`` a minute, and none before a server's
    Retry-After is over."""

    def __init__(self, rate: float | None):
        self.gap = 60.0 / rate if rate else 0.0
        self._next = self._held = 0.0
        self._lock = threading.Lock()

    def hold(self, seconds: float) -> None:
        with self._lock:
            self._held = max(self._held, time.monotonic() + seconds)

    def wait(self, given_up: threading.Event) -> None:
        """Wait until this request's turn, or until it is no longer wanted."""
        with self._lock:
            turn = max(time.monotonic(), self._next)
            self._next = turn + self.gap
        while (left := max(turn, self._held) - time.monotonic()) > 0 and not given_up.wait(left):
            pass


def key_from(variable: str) -> str | None:
    """Read the API key; None where the usual variable is not set, since many servers want none.
    Raises UserError."""
    key = os.environ.get(variable)
    if not key and variable != KEY:
        raise UserError(
            f"the environment variable {variable} (`key_env`) is not set; it holds "
            f"the judge's API key"
        )
    try:
        return check_token(key or None)
    except UserError as error:
        raise UserError(f"the API key in {variable} has characters that no key has") from error


def read_choice(choice: Choice, question: Question) -> Any:
    """Return the value of an answer: probabilities from its log-probabilities if there are any,
    else from its text."""
    if question.choices and (shares := _first_choice(choice, question)):
        return shares
    return question.value(choice.message.content or "")


def _first_choice(choice: Choice, question: Question) -> dict[str, float] | None:
    """Return probabilities at the first token, after any thinking aloud, that was chosen as one of
    the choices."""
    try:
        tokens = (choice.logprobs.content if choice.logprobs else None) or []
        ends = [i for i, token in enumerate(tokens) if "</think>" in token.token]
        for token in tokens[ends[-1] + 1 if ends else 0 :]:
            if token_choices({token.token: 1.0}, question.choices):
                listed = {token.token: math.exp(token.logprob)}
                listed |= {each.token: math.exp(each.logprob) for each in token.top_logprobs or []}
                return token_choices(listed, question.choices)
    # no log-probabilities, or of another form
    except (TypeError, AttributeError, OverflowError):
        pass
    return None


def data_url(picture: Any, max_side: int | None = None) -> str:
    """Encode a picture as ``data:image/png;base64,...``."""
    picture = picture.convert("RGB")
    if max_side and max(picture.size) > max_side:
        from PIL import Image

        picture = picture.copy()
        picture.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header: a number, or the difference to its date."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
