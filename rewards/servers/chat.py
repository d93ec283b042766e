"""Implements parts of the OpenAI-compatible protocol: keys, rate limits, pictures as data URLs,
choices and errors."""

from __future__ import annotations

import base64
import io
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from mmrl.core.errors import UserError
from mmrl.core.thoughts import closes
from rewards.judges.question import Question, Unreadable, token_choices
from rewards.servers.wire import check_token

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

KEY = "MMRL_JUDGE_KEY"
QUALITY = 95  # of JPEG and WebP
Encoding = Literal["jpeg", "webp", "png"]


class Refused(Exception):
    """Signals that the server will not answer this one question; asking again would not help."""


class Pace:
    """Limits the rate of requests: at most ``rate`` a minute, and none before a server's
    Retry-After is over."""

    def __init__(self, rate: float | None):
        self.gap = 60.0 / rate if rate else 0.0
        self._next = self._held = 0.0
        self._lock = threading.Lock()

    def hold(self, seconds: float) -> None:
        with self._lock:
            self._held = max(self._held, time.monotonic() + seconds)

    def wait(self, given_up: threading.Event) -> None:
        """Wait for this request's turn, or until it is cancelled."""
        with self._lock:
            turn = max(time.monotonic(), self._next)
            self._next = turn + self.gap
        while (left := max(turn, self._held) - time.monotonic()) > 0 and not given_up.wait(left):
            pass


def key_from(variable: str) -> str | None:
    """Read the API key; None if the default variable is not set, since many servers need none.
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
    else from its text. Raises Unreadable."""
    if question.choices and (shares := _first_choice(choice, question)):
        return shares
    if choice.message.content is None and (reasons := reasoning_of(choice)):
        return _among_reasons(choice, reasons, question)
    return question.value(choice.message.content or "")


def reasoning_of(choice: Choice) -> str:
    """Return what a server's reasoning parser removed from the answer (``reasoning`` since vLLM
    0.12)."""
    extra = choice.message.model_extra or {}
    reasons = extra.get("reasoning_content") or extra.get("reasoning")
    return reasons if isinstance(reasons, str) else ""


def _among_reasons(choice: Choice, reasons: str, question: Question) -> Any:
    """Read an answer that the server classified as reasoning: only JSON or a choice. Raises
    Unreadable for anything more, since an answer among reasons is a draft."""
    bare = reasons.strip().removeprefix("```json").strip("`").strip()
    whole = bare.startswith("{") and bare.endswith("}") if question.schema else bare
    if choice.finish_reason != "length" and whole and (question.schema or bare in question.choices):
        return question.value(bare)
    cut = "; it was cut off at its most tokens" if choice.finish_reason == "length" else ""
    raise Unreadable(
        f"its content is null and everything is in reasoning_content{cut}: the server lacks the "
        "--reasoning-parser of its model, or `tokens` of the reward is too small for its reasons"
    )


def _first_choice(choice: Choice, question: Question) -> dict[str, float] | None:
    """Return probabilities at the first token, after any reasoning, that matches one of the
    choices."""
    try:
        tokens = (choice.logprobs.content if choice.logprobs else None) or []
        ends = [i for i, token in enumerate(tokens) if closes(token.token)]
        for token in tokens[ends[-1] + 1 if ends else 0 :]:
            if token_choices({token.token: 1.0}, question.choices):
                listed = {token.token: math.exp(token.logprob)}
                listed |= {each.token: math.exp(each.logprob) for each in token.top_logprobs or []}
                return token_choices(listed, question.choices)
    # no log-probabilities, or of another form
    except (TypeError, AttributeError, OverflowError):
        pass
    return None


def data_url(picture: Any, max_side: int | None = None, encoding: Encoding = "jpeg") -> str:
    """Encode a picture as ``data:image/jpeg;base64,...``."""
    picture = picture.convert("RGB")
    if max_side and max(picture.size) > max_side:
        from PIL import Image

        picture = picture.copy()
        picture.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    options: dict[str, Any] = {
        "jpeg": {"quality": QUALITY},
        "webp": {"quality": QUALITY},
        "png": {"compress_level": 1},
    }
    buffer = io.BytesIO()
    picture.save(buffer, format=encoding.upper(), **options[encoding])
    return f"data:image/{encoding};base64," + base64.b64encode(buffer.getvalue()).decode()
