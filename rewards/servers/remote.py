"""Computes rewards by ``mmrl serve-reward`` in another process, environment or machine."""

from __future__ import annotations

import logging
import math
import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt
from rewards.card import PICTURES, Sums, card
from rewards.servers.pool import BoundedClient, Failed, Server, Servers, addresses, post
from rewards.servers.tokens import Tokens
from rewards.servers.tries import RetrySeconds, Tries
from rewards.servers.wire import Format, Read, check_texts, pack, read_answer
from rewards.servers.wire_prompts import enclosed, has_pictures

log = logging.getLogger(__name__)
INFO_SECONDS = 5.0  # timeout of a request for /info


@dataclass(frozen=True)
class Info:
    """Holds a server's /info: the picture fields of the requested rewards, and the limits of a
    request."""

    pictures: frozenset[str] = frozenset()
    max_samples: float = math.inf
    max_megapixels: float = math.inf  # of pictures and videos
    max_bytes: float = math.inf

    @classmethod
    def read(cls, info: Any, names: list[str] | None) -> Info:
        """Read ``GET /info``. Raises KeyError, TypeError, ValueError or AttributeError for another
        form."""
        rewards = info["rewards"]
        fields = [rewards[name]["pictures"] for name in names or rewards]
        limits = {key: float(value) for key, value in info.get("limits", {}).items()}
        return cls(
            frozenset(str(field) for listed in fields for field in listed),
            limits.get("max_samples", math.inf),
            limits.get("max_megapixels", math.inf),
            limits.get("max_request_mib", math.inf) * 2**20,
        )

    def fitting(self, media: Media, most: int) -> int:
        """Return how many samples fit into one request, at least 1: the server itself refuses a
        single sample that is too large."""
        pixels = media[0].numel() / 3 / 1e6 if isinstance(media, Tensor) and len(media) else 0
        fits = self.max_megapixels / pixels if pixels else math.inf
        return max(1, int(min(most, self.max_samples, fits)))


@dataclass
class Call:
    """Tracks one batch; ``given_up`` is set when no server is left, so that other requests stop
    early."""

    info: Info
    given_up: threading.Event = field(default_factory=threading.Event)


@REWARDS.register("remote")
@card(source="on the [servers](remote-rewards.md)", licence="as there", scaling="as there")
class Remote:
    """Call reward servers (``mmrl serve-reward``): one reward by name, or their weighted sum.

    The batch is split into requests that are sent in parallel, each to the server with the fewest
    outstanding. A failed request is retried, on another server if possible. Samples whose requests
    all failed are NaN. A server that does not answer is logged once, with the cause, and gets no
    requests for ``cooldown`` seconds. Every sample must be judged by itself: a reward that compares
    the samples of a group cannot be served this way.

    PNG and WebP round pictures to 8 bits, so that the values equal those of the reward on rounded
    pictures; ``tensor`` sends floats. With PNG and WebP, a sample with a pixel that is not finite
    is NaN.

    Args:
        url: address, or several of servers that serve the same.
        token: the servers' token; None: the environment variable MMRL_REWARD_TOKEN, which is safer,
            since a run saves its configuration.
        token_file: a file whose first line is the token; it is read again when it changes.
        certificate: a file of trusted certificates for https, such as the server's own; None: the
            machine's.
        name: one of the servers' rewards; None: their sum with the weights of the servers'
            configuration.
        format: ``png``, ``webp`` (lossless) or ``tensor`` (safetensors).
        timeout: seconds for one request.
        retries: repetitions of a request that failed.
        retry_seconds: how long to wait for servers that are full or down; then samples have no
            value, until one answers again.
        batch_size: maximum samples in one request; fewer if a server takes fewer.
        concurrency: requests at once for each server.
        backoff: seconds before the first repetition, doubled for each further one, with jitter.
        cooldown: seconds without requests to a dead server while another is alive.
        fields: keys of the prompts to send; None: all, but pictures (``image``, ``images``) only if
            a requested reward uses them. Pictures are sent, also those of fields such as
            ``reference`` and ``mask``; files are read here.
        largest: values larger in magnitude count as a broken answer.
        on_failure: ``nan`` leaves samples without a value out, ``stop`` raises.
        recheck: share of the requests that are repeated with the samples in another order. If the
            same values come back for other samples, the server mixes them up, and the request
            counts as failed; other values are logged once: the reward is random, or does not judge
            every sample by itself.

    Attributes:
        servers: the record of every server: requests, failures, the last cause.

    Raises:
        UserError: a server refuses the token, the samples or the name; with ``stop``, a sample has
            no value.
    """

    def __init__(
        self,
        url: str | list[str],
        token: str | None = None,
        name: str | None = None,
        format: Format = "png",
        timeout: Annotated[float, Gt(0)] = 60.0,
        retries: Annotated[int, Ge(0)] = 2,
        batch_size: Annotated[int, Ge(1)] = 16,
        concurrency: Annotated[int, Ge(1)] = 4,
        backoff: Annotated[float, Ge(0)] = 0.25,
        cooldown: Annotated[float, Ge(0)] = 30.0,
        fields: list[str] | None = None,
        token_file: Path | None = None,
        certificate: Path | None = None,
        largest: Annotated[float, Gt(0)] = 1e6,
        on_failure: Literal["nan", "stop"] = "nan",
        recheck: Annotated[float, Ge(0), Le(1)] = 0.0,
        retry_seconds: RetrySeconds = 120.0,
    ):
        urls = addresses(url, "reward 'remote'")
        self._pool = Servers(urls, cooldown, retry_seconds=retry_seconds)
        self.tokens = Tokens(token, token_file)
        self.largest = largest
        self.names = None if name is None else [name]
        self.format = format
        self.timeout = timeout
        self.retries = retries
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.backoff = backoff
        self.fields = fields
        self.stop = on_failure == "stop"
        self.recheck = recheck
        self._unsteady = False  # whether differing values have been logged
        self._jitter = random.Random()  # not the global one, which belongs to the run
        self._info: Info | None = None  # not known yet
        count = concurrency * len(urls)
        self._client = BoundedClient(self.tokens.current, count, timeout, certificate)

    @property
    def servers(self) -> list[Server]:
        return self._pool.all

    def __call__(self, media: Media, prompts: list[Prompt]) -> Any:
        """Score images [B, 3, H, W], videos [B, F, 3, H, W] in 0..1, or B texts -> [B] float32 on
        the CPU, or a list with None where the reward does not apply; with sums of sub-scores if it
        has any."""
        rows = sendable(media, self.format)
        values = torch.full((len(prompts),), torch.nan)  # [B]
        applies = torch.ones(len(prompts), dtype=torch.bool)
        parts: dict[str, Sums] = {}
        self._pool.wake()
        call = Call(self._know())
        prompts = self._prompts(prompts, call.info.pictures)
        size = call.info.fitting(media, self.batch_size)
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        pool = ThreadPoolExecutor(
            min(len(chunks), self.concurrency * len(self.servers)) or 1, "remote reward"
        )
        try:
            sent = [
                pool.submit(self._ask, call, take(media, chunk), [prompts[i] for i in chunk])
                for chunk in chunks
            ]
            for chunk, answer in zip(chunks, sent, strict=True):
                read = answer.result()
                values[chunk], applies[chunk] = read.values, read.applies
                for key, sums in read.parts.items():
                    parts[key] = parts.get(key, Sums()).plus(sums)
        finally:
            call.given_up.set()  # after an error, waiting requests must not retry
            pool.shutdown(wait=False, cancel_futures=True)
        self._check(values, [row for row in rows if applies[row]])
        known = (
            values
            if applies.all()
            else [float(value) if applied else None for value, applied in zip(values, applies)]
        )
        return (known, parts) if parts else known

    def _prompts(self, prompts: list[Prompt], pictures: frozenset[str]) -> list[Prompt]:
        """Return the fields of prompts to send: ``fields``, or all; pictures as PNG, only to
        rewards that use them."""
        if self.fields is not None:
            prompts = [
                {key: prompt[key] for key in self.fields if key in prompt} for prompt in prompts
            ]
        if not any(map(has_pictures, prompts)):
            return prompts
        fields = pictures | set(PICTURES if self.fields is not None else ())
        try:
            return [enclosed(prompt, fields) for prompt in prompts]
        except (OSError, ValueError) as error:
            raise UserError(
                f"reward 'remote' cannot read a picture of a prompt: {error}"
            ) from error

    def _know(self) -> Info:
        """Return the /info of the first server that answers; nothing if none does."""
        for server in self.servers if self._info is None else ():
            try:
                response = self._client.get(
                    f"{server.url}/info",
                    timeout=min(self.timeout, INFO_SECONDS),
                    extensions={"longest": 2**20},
                )
                if response.status_code == 200:
                    self._info = Info.read(response.json(), self.names)
                    break
            except (Failed, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # the requests themselves will report the failure
        return self._info or Info()

    def causes(self) -> str:
        """Return why samples have no value, as far as servers are the cause."""
        return self._pool.causes()

    def _check(self, values: Tensor, rows: list[int]) -> None:
        """Apply ``on_failure``: null from a server and no answer at all both mean a sample without
        a value."""
        missing = int(values[rows].isnan().sum())
        if missing and self.stop:
            causes = self._pool.causes() or "the servers could not score them"
            raise UserError(
                f"reward 'remote' has no value for {missing} of {len(values)} samples: {causes}"
            )

    def _ask(self, call: Call, media: Media, prompts: list[Prompt]) -> Read:
        """Return the values of one request, NaN if no server could give one."""
        nothing = Read.nothing(len(prompts))
        if call.given_up.is_set():
            return nothing
        ids = fresh_ids(len(prompts))
        content = pack(media, prompts, self.format, self.names, ids)
        if len(content) > call.info.max_bytes and len(prompts) > 1:
            halves = range(len(prompts) // 2), range(len(prompts) // 2, len(prompts))
            parts = [(take(media, [*half]), [prompts[i] for i in half]) for half in halves]
            first, second = (self._ask(call, *part) for part in parts)
            return first.joined(second)
        tries = Tries(self._pool, self.retries, self.backoff, call.given_up)
        for server in tries:
            started = time.monotonic()
            try:
                return self._request(server, content, ids, media, prompts)
            except Failed as error:
                tries.failed(server, error, started)
        if not self._pool.alive():
            call.given_up.set()
        return nothing

    def _check_order(
        self, server: Server, media: Media, prompts: list[Prompt], values: Tensor
    ) -> None:
        """Send the samples again, in reverse order. Raises Failed if the values are those of other
        samples."""
        order = list(reversed(range(len(prompts))))
        ids = fresh_ids(len(prompts))
        shuffled = [prompts[i] for i in order]
        content = pack(take(media, order), shuffled, self.format, self.names, ids)
        again = self._exchange(server, content, ids).values[
            order
        ]  # in the order of the first request
        if torch.allclose(values, again, rtol=1e-3, atol=1e-3, equal_nan=True):
            return
        alike = torch.allclose(values.sort()[0], again.sort()[0], 1e-3, 1e-3, equal_nan=True)
        if alike and len(values.unique()) > 2:  # two values may coincide by chance
            raise Failed("mixes samples up: sent in another order, they have each other's values")
        if not self._unsteady:
            self._unsteady = True
            log.warning(
                "reward 'remote': %s gives other values to the same samples sent again, by up to "
                "%.3g: it is random, or does not judge every sample by itself",
                server.url,
                float((values - again).abs().nan_to_num(0.0).max()),
            )

    def _request(
        self, server: Server, content: bytes, ids: list[str], media: Media, prompts: list[Prompt]
    ) -> Read:
        with self._pool.asked(server):
            read = self._exchange(server, content, ids)
            if self._jitter.random() < self.recheck:
                self._check_order(server, media, prompts, read.values)
            return read

    def _exchange(self, server: Server, content: bytes, ids: list[str]) -> Read:
        answer = post(self._client, server.url, content, len(ids), self.timeout)
        try:
            return read_answer(answer, self.names, ids, self.largest)
        except ValueError as error:
            raise Failed(f"malformed answer: {error}") from error


def fresh_ids(count: int) -> list[str]:
    """Return sample ids that no answer to another request can contain."""
    request = secrets.token_hex(8)
    return [f"{request}-{i}" for i in range(count)]


def sendable(media: Media, format: str) -> list[int]:
    """Return the rows whose pixels are finite, which PNG and WebP can hold; every row for other
    formats."""
    if not isinstance(media, Tensor):
        return list(range(len(check_texts(media))))
    finite = (
        media.isfinite().flatten(1).all(1)
        if format != "tensor"
        else torch.ones(len(media), dtype=torch.bool)
    )
    return finite.nonzero().flatten().tolist()


def take(media: Media, rows: list[int]) -> Tensor | list[str]:
    return media[rows] if isinstance(media, Tensor) else [media[row] for row in rows]
