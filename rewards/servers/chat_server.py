"""Asks a judge behind an OpenAI-compatible server (vLLM, SGLang, ...) by chat completions with
pictures."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from mmrl.core.errors import UserError
from mmrl.core.registry import JUDGES
from rewards.judges.question import AGAIN, Question, Unreadable, Usage, asked_schema
from rewards.servers.chat import (
    KEY,
    Encoding,
    Pace,
    Refused,
    data_url,
    key_from,
    read_choice,
    reasoning_of,
)
from rewards.servers.pool import BoundedClient, Failed, Server, Servers, addresses, later
from rewards.servers.tries import RetrySeconds, Tries
from rewards.servers.wire import message_of

if TYPE_CHECKING:
    import openai
    from openai.types.chat.chat_completion import Choice

log = logging.getLogger(__name__)
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
OPTIONAL = {
    "response_format": ("response_format", "json_schema", "guided", "structured"),
    "logprobs": ("logprobs",),
}


Message = dict[str, Any]  # role and content, as the protocol has them
MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


@JUDGES.register("server")
class ChatServer:
    """Ask an OpenAI-compatible server by chat completions with pictures as data URLs, many at once.

    A request that gets no answer, 429 or 5xx is retried with exponential backoff, or after
    ``Retry-After``; at another server if there are several. For an answer in the wrong form, the
    judge is asked again, with the reason. What then has no value is None. JSON schemas and
    log-probabilities are used if the server supports them.

    Args:
        url: up to and including ``/v1``; or several, of servers with the same model.
        model: its name on the server; None: the server's only one.
        key_env: environment variable with the API key. A key is never part of a configuration.
        timeout: seconds for one request, answer included.
        retries: repetitions of a request that failed.
        retry_seconds: how long to wait for servers that are full or down; then samples have no
            value, until one answers again.
        asked_again: retries for an answer that cannot be parsed.
        concurrency: requests at once for each server.
        rate: maximum of requests a minute; None: limited by concurrency only.
        backoff: seconds before the first repetition, doubled for each further one, with jitter.
        longest_wait: maximum seconds of a Retry-After or backoff.
        cooldown: seconds without requests to a dead server while another is alive.
        max_side: pictures are downscaled to at most this many pixels a side; None: unchanged.
        format: how pictures are sent: ``jpeg`` or ``webp`` of quality 95, or ``png``, without loss
            and about four times as large.
        extra: more fields of the request's body, such as ``{seed: 0}``; null removes a field.
        price_in, price_out: per million tokens, for the counter ``cost``.

    Attributes:
        usage: counters since the start. servers: the record of every server.

    Raises:
        UserError: 401, 403, 404, or a batch in which the server refuses every single request.
    """

    def __init__(
        self,
        url: str | list[str],
        model: str | None = None,
        key_env: str = KEY,
        timeout: Annotated[float, Gt(0)] = 120.0,
        retries: Annotated[int, Ge(0)] = 3,
        asked_again: Annotated[int, Ge(0)] = 1,
        concurrency: Annotated[int, Ge(1)] = 16,
        rate: Annotated[float, Gt(0)] | None = None,
        backoff: Annotated[float, Ge(0)] = 0.5,
        longest_wait: Annotated[float, Ge(0)] = 60.0,
        cooldown: Annotated[float, Ge(0)] = 30.0,
        max_side: Annotated[int, Ge(16)] | None = 1024,
        extra: dict[str, Any] | None = None,
        price_in: Annotated[float, Ge(0)] = 0.0,
        price_out: Annotated[float, Ge(0)] = 0.0,
        retry_seconds: RetrySeconds = 120.0,
        format: Encoding = "jpeg",
    ):
        urls = addresses(url, "a judge")
        self._pool = Servers(urls, cooldown, "judge server", retry_seconds)
        self._key = key_from(key_env)
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self.asked_again = asked_again
        self.concurrency = concurrency
        self.backoff = backoff
        self.longest_wait = longest_wait
        self.max_side = max_side
        self.format: Encoding = format
        self.extra = dict(extra or {})
        self.prices = price_in / 1e6, price_out / 1e6
        self.usage = Usage()
        self.supported = dict.fromkeys(OPTIONAL, True)  # until a server refuses it
        self._pace = Pace(rate)
        self._http = BoundedClient(lambda: self._key, concurrency * len(urls), timeout)
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    @property
    def servers(self) -> list[Server]:
        return self._pool.all

    # ----------------------------------------------------------------------------------------------
    # a batch

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """Return the value of every question; None if there is none."""
        self._pool.wake()
        try:
            self._know_model()
        except Failed as error:
            self.usage.cause = self._clean(str(error))
            self.usage.add(unanswered=len(questions))
            return [None] * len(questions)
        given_up = threading.Event()
        refusals: list[str] = []
        pool = ThreadPoolExecutor(
            min(len(questions), self.concurrency * len(self.servers)) or 1, "judge"
        )
        try:
            sent = [
                pool.submit(self._answer, question, given_up, refusals) for question in questions
            ]
            values = [answer.result() for answer in sent]
        finally:
            given_up.set()  # after an error, waiting requests must not retry
            pool.shutdown(wait=False, cancel_futures=True)
        if questions and len(refusals) == len(questions) and not self.usage.numbers()["answers"]:
            raise UserError(f"the judge refuses every question: {refusals[0]}")
        unanswered = sum(value is None for value in values)
        if unanswered and not self._pool.alive():
            self.usage.cause = self._clean(self._pool.causes())
        self.usage.add(answers=len(values) - unanswered, unanswered=unanswered)
        return values

    def _answer(self, question: Question, given_up: threading.Event, refusals: list[str]) -> Any:
        try:
            messages: list[Message] = [{"role": "user", "content": self._content(question)}]
            for turn in range(self.asked_again + 1):
                choice = self._send(question, messages, given_up)
                if choice is None:
                    return None
                try:
                    return read_choice(choice, question)
                except Unreadable as problem:
                    self._tell("unreadable", f"an answer of the judge cannot be read: {problem}")
                    if turn < self.asked_again:
                        self.usage.add(asked_again=1)
                        messages += [
                            {
                                "role": "assistant",
                                "content": choice.message.content or reasoning_of(choice),
                            },
                            {"role": "user", "content": AGAIN.format(problem=problem)},
                        ]
            self.usage.add(unreadable=1)
        except Refused as error:
            self.usage.add(refused=1)
            refusals.append(str(error))
            self._tell(
                "refused", f"the judge refuses a question, which stays without a value: {error}"
            )
        return None

    def _send(
        self, question: Question, messages: list[Message], given_up: threading.Event
    ) -> Choice | None:
        """Return the choice of a whole answer; None if no server gives one. Raises Refused,
        UserError."""
        tries = Tries(self._pool, self.retries, self.backoff, given_up, self.longest_wait)
        for server in tries:
            started = time.monotonic()
            try:
                return self._request(server, question, messages, given_up)
            except Failed as error:
                if error.wait is not None:  # for all requests
                    self._pace.hold(min(error.wait, self.longest_wait))
                if tries.failed(server, error, started):
                    self.usage.add(retries=1)
        if not self._pool.alive():
            given_up.set()
        return None

    # ----------------------------------------------------------------------------------------------
    # a request

    def _request(
        self, server: Server, question: Question, messages: list[Message], given_up: threading.Event
    ) -> Choice:
        with self._pool.asked(server):
            return self._complete(server, question, messages, given_up)

    def _complete(
        self, server: Server, question: Question, messages: list[Message], given_up: threading.Event
    ) -> Choice:
        """Return the first choice of a chat completion. Raises Failed, Refused, UserError."""
        import openai
        from openai.types.chat import ChatCompletion

        self._pace.wait(given_up)
        self.usage.add(requests=1)
        body = self._body(question, messages)
        self.usage.add(bytes_sent=len(json.dumps(body)))
        try:
            completion = self._client(server).post(
                "/chat/completions", body=body, cast_to=ChatCompletion
            )
            choice = completion.choices[0]
            if not isinstance(choice.message.content, str | None):
                raise TypeError("content is not text")
            tokens = [
                int(getattr(completion.usage, key, 0) or 0)
                for key in ("prompt_tokens", "completion_tokens")
            ]
        except openai.APIStatusError as error:
            if self._can_do_without(error, body):
                return self._complete(server, question, messages, given_up)
            raise self._failure(error) from error
        except MALFORMED as error:
            raise Failed(f"malformed answer ({type(error).__name__}: {error})") from error
        cost = sum(number * price for number, price in zip(tokens, self.prices))
        self.usage.add(tokens_in=tokens[0], tokens_out=tokens[1], cost=cost)
        return choice

    def _failure(self, error: openai.APIStatusError) -> Exception:
        status = error.status_code
        cause = self._cause(error)
        if status in RETRIED or status >= 500:
            return later(status, error.response.headers.get("Retry-After"), cause)
        if status in (401, 403):
            return UserError(
                f"the judge refused the key in the environment variable of `key_env` ({cause})"
            )
        if status == 404:
            return UserError(
                f"the judge knows no such address or model; `url` ends in /v1 mostly ({cause})"
            )
        return Refused(cause)

    def _body(self, question: Question, messages: list[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": question.tokens,
        }
        if question.choices and self.supported["logprobs"]:
            body |= {"logprobs": True, "top_logprobs": 20}
        if question.schema is not None and self.supported["response_format"]:
            schema = {
                "name": "answer",
                "schema": asked_schema(question.schema),
                "strict": True,
            }
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {key: value for key, value in (body | self.extra).items() if value is not None}

    def _can_do_without(self, error: openai.APIStatusError, body: dict[str, Any]) -> bool:
        """Tell whether the server refuses an optional feature, which is then no longer used."""
        if error.status_code not in (400, 404, 415, 422, 501):
            return False
        cause = self._cause(error)
        for name, words in OPTIONAL.items():
            if name in body and any(word in cause.lower() for word in words):
                self.supported[name] = False
                self._tell(
                    name, f"the judge does without {name}, which its server refuses: {cause}"
                )
                return True
        return False

    def _content(self, question: Question) -> list[dict[str, Any]]:
        return [self._part(part) for part in (*question.parts, question.wording()) if part != ""]

    def _part(self, part: Any) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        url = data_url(part, self.max_side, self.format)
        return {"type": "image_url", "image_url": {"url": url}}

    def _know_model(self) -> None:
        """Find the name of the servers' only model. Raises Failed, UserError."""
        if self.model is not None:
            return
        tries = Tries(self._pool, self.retries, self.backoff, threading.Event(), self.longest_wait)
        for server in tries:
            started = time.monotonic()
            try:
                with self._pool.asked(server):
                    self.model = self._only_model(server)
                return
            except Failed as error:
                tries.failed(server, error, started)
        raise Failed(self._pool.causes())

    def _only_model(self, server: Server) -> str:
        import openai

        try:
            names = [model.id for model in self._client(server).models.list()]
        except openai.APIStatusError as error:
            if isinstance(failure := self._failure(error), Failed):
                raise failure from error
            raise unlisted(self._cause(error)) from error
        except MALFORMED as error:
            raise unlisted(error) from error
        if len(names) != 1:
            raise UserError(
                f"the judge's server has {len(names)} models; name one in `model`: "
                f"{', '.join(names)}"
            )
        return names[0]

    def _client(self, server: Server) -> openai.OpenAI:
        """Return the client of one server. It does not retry itself: retries go to other servers
        and are paced for all of them."""
        import openai

        http: Any = self._http  # typed for httpx2's client, but accepts one of httpx
        return openai.OpenAI(
            base_url=server.url,
            api_key=self._key or "none",  # BoundedClient sends the key, if there is one
            http_client=http,
            timeout=self.timeout,
            max_retries=0,
        )

    def _cause(self, error: openai.APIStatusError) -> str:
        return self._clean(f"{error.status_code}, {message_of(error.response.content)}")

    def _clean(self, text: str) -> str:
        """Remove the key from a server's message: servers echo a wrong one."""
        return text.replace(self._key, "***") if self._key else text

    def _tell(self, kind: str, message: str) -> None:
        """Log once for every kind."""
        self.usage.cause = message
        with self._lock:
            news = kind not in self._logged
            self._logged.add(kind)
        if news:
            log.warning("%s (shown once)", message)


def unlisted(cause: object) -> UserError:
    """Return what is wrong with a server that does not list its models."""
    return UserError(f"the judge's server does not list its models; name one in `model` ({cause})")
