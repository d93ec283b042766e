"""Serves rewards over HTTP as an ASGI application: ``POST /score``, ``GET /health``, ``/info`` and
``/metrics``.

``mmrl.remote.server`` runs it; the formats are described in docs/remote-rewards.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from fastapi import FastAPI, Request, Response
from torch import Tensor

from mmrl.config import Weighted
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import describe
from mmrl.core.types import Prompt
from mmrl.core.version import __version__
from mmrl.remote.application import application
from mmrl.remote.body import parts_of
from mmrl.remote.lanes import Answer, Lane
from mmrl.remote.memory import Memory, Share
from mmrl.remote.requests import Doorkeeper, Listening, Refusal, reply, shortened
from mmrl.scoring import Handled
from rewards.card import PICTURES, card_of
from rewards.servers.tokens import Tokens
from rewards.servers.wire import BYTES_A_PIXEL, BadInput, Limits, unpack


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Listening):
    """Holds ``serve:`` of a configuration for ``mmrl serve-reward``."""

    max_samples: Annotated[int, Ge(1)] = 1024  # samples in one request
    max_megapixels: Annotated[float, Gt(0)] = 64.0  # decoded pictures of one request
    max_values: Annotated[int, Ge(1)] = 2_000_000  # commas and brackets of one request
    # all requests together: half for what has arrived, half for what is decoded of it
    max_memory_mib: Annotated[float, Gt(0)] = 4096.0
    max_decoding: Annotated[int, Ge(1)] = 2  # requests that are decoded at once
    max_batch: Annotated[int, Ge(1)] = 64  # samples a reward sees at once
    # milliseconds that a request waits for others to share its batch
    wait_ms: Annotated[float, Ge(0)] = 4.0
    formats: list[Literal["png", "webp", "tensor"]] = field(
        default_factory=lambda: ["png", "webp", "tensor"]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = max(self.max_request_mib, self.max_megapixels * 1e6 * BYTES_A_PIXEL / 2**20)
        if 2 * largest > self.max_memory_mib:
            raise UserError(
                f"serve.max_memory_mib {self.max_memory_mib:g} is less than one request may need: "
                f"{2 * largest:.0f} for max_request_mib {self.max_request_mib:g} and "
                f"max_megapixels {self.max_megapixels:g}"
            )

    def limits(self, pictures: Sequence[str]) -> Limits:
        """Return what one request may hold, whose prompts have pictures in these fields."""
        pixels = self.max_megapixels * 1e6
        return Limits(self.max_samples, pixels, self.formats, tuple(pictures), self.max_values)


class Service(Doorkeeper):
    """Holds the rewards, their lanes, and what has been counted."""

    kind = "reward"

    def __init__(self, rewards: Mapping[str, Weighted], options: ServeOptions):
        super().__init__(options, Tokens(options.token, options.token_file))
        self.options: ServeOptions = options
        self.weights = {name: reward.weight for name, reward in rewards.items()}
        self.about = {name: describe_reward(reward.reward) for name, reward in rewards.items()}
        for name, reward in rewards.items():
            if (of := card_of(reward.reward).of) != "sample":
                raise UserError(
                    f"reward {name!r} judges {of}s, and requests hold single samples: "
                    f"it cannot be served"
                )
        self.cards = {name: card_in_short(reward.reward) for name, reward in rewards.items()}
        wait = options.wait_ms / 1000
        self.lanes = {
            name: Lane(name, reward.reward, options.max_batch, wait)
            for name, reward in rewards.items()
        }
        self.decoded = Memory(int(options.max_memory_mib * 2**19))
        # few threads, also since each keeps some of the memory that it has once used
        self.decoders = ThreadPoolExecutor(options.max_decoding, "decoder")

    def close(self) -> None:
        self.decoders.shutdown(wait=False, cancel_futures=True)
        for lane in self.lanes.values():
            lane.close()

    async def handle(self, request: Request) -> Response:
        """Read, decode, score. Raises Refusal and BadInput."""
        with self.decoded.share() as share:
            names, media, prompts, ids = await self.read(request, share)
            jobs = [self.lanes[name].submit(media, prompts) for name in names]
            share.until(jobs)
        del media, prompts
        answer = self.answer(dict(zip(names, await self.answers(jobs), strict=True)))
        return reply(answer if ids is None else {"ids": ids, **answer})

    async def read(
        self, request: Request, share: Share
    ) -> tuple[list[str], Tensor | list[str], list[Prompt], list[str] | None]:
        """Read and decode a request: the rewards that it asks for, samples, prompts, ids. Few are
        decoded at once, and none before there is memory for its pictures."""
        run = partial(asyncio.get_running_loop().run_in_executor, self.decoders)
        with self.bodies.share() as arrived:
            body = await self.body(request, arrived)
            kind = request.headers.get("content-type", "")
            parts = await run(parts_of, kind, body, self.options.max_values)
            names = self.names(parts.rewards)
            fields = [field for name in names for field in self.cards[name]["pictures"]]
            limits = self.options.limits(fields)
            admit = partial(share.take, timeout=self.options.timeout)
            media, prompts = await run(unpack, parts, limits, admit)
            return names, media, prompts, parts.ids

    def names(self, requested: Any) -> list[str]:
        """Return the rewards to compute: those requested, or all."""
        if requested is None:
            return list(self.lanes)
        if (
            not isinstance(requested, list)
            or not requested
            or not all(isinstance(name, str) for name in requested)
        ):
            raise BadInput("rewards", "expected a list of names")
        for name in requested:
            if name not in self.lanes:
                raise BadInput(
                    "rewards",
                    f"{name[:100]!r} is not served here; {suggest(name[:100], self.lanes)}",
                )
        return list(dict.fromkeys(requested))

    async def answers(self, jobs: Sequence[Future[Answer]]) -> list[Answer]:
        """Wait for what the lanes say."""
        futures = [asyncio.wrap_future(job) for job in jobs]
        try:
            async with asyncio.timeout(self.options.timeout):
                return await asyncio.gather(*futures)
        except TimeoutError as error:
            raise Refusal(504, f"not scored within {self.options.timeout:g} s") from error
        except UserError as error:  # what the reward says of these samples and prompts
            raise Refusal(422, shortened(str(error))) from error
        finally:
            for future in futures:
                future.cancel()  # jobs without a waiting request need not start

    def answer(self, answers: Mapping[str, Answer]) -> dict[str, Any]:
        failed = {name: answer.failed for name, answer in answers.items()}
        apart = {n: (~answer.applies).nonzero().flatten().tolist() for n, answer in answers.items()}
        return {
            "rewards": {
                n: [None if v != v else v for v in answer.values.tolist()]
                for n, answer in answers.items()
            },
            "weights": {name: self.weights[name] for name in answers},
            "does_not_apply": {name: rows for name, rows in apart.items() if rows},
            "sub_scores": {n: answer.parts for n, answer in answers.items() if answer.parts},
            "failures": {
                n: {"count": failed[n], "cause": shortened(answer.cause)}
                for n, answer in answers.items()
                if failed[n]
            },
        }

    def info(self) -> dict[str, Any]:
        options = asdict(self.options)
        keys = ("max_request_mib", "max_samples", "max_megapixels", "max_values")
        limits = {key: options[key] for key in keys}
        rewards = {
            name: {"weight": self.weights[name], "about": self.about[name], **self.cards[name]}
            for name in self.lanes
        }
        return {
            "version": __version__,
            "rewards": rewards,
            "formats": options["formats"],
            "limits": limits,
        }

    def problem(self) -> str:
        stuck = [name for name, lane in self.lanes.items() if not lane.alive]
        return f"no longer scored: {', '.join(stuck)}" if stuck else ""

    def metrics(self) -> list[str]:
        lines = super().metrics()
        for what in ("samples", "failures", "batches", "seconds"):
            lines.append(f"# TYPE mmrl_reward_{what}_total counter")
            for name, lane in self.lanes.items():
                label = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                value = {
                    "samples": lane.samples,
                    "failures": lane.failures,
                    "batches": lane.batches,
                }.get(what)
                lines.append(
                    f'mmrl_reward_{what}_total{{reward="{label}"}} '
                    f"{lane.seconds if value is None else value}"
                )
        return lines


def card_in_short(reward: Any) -> dict[str, Any]:
    """Return what a client should know of a reward: media, fields it needs, fields that it takes
    for pictures."""
    card = card_of(reward)  # of what is inside its handling
    needed = [field for field in card.needs if field in PICTURES]
    pictures = list(dict.fromkeys([*needed, *card.pictures]))
    return {"media": list(card.media), "needs": list(card.needs), "pictures": pictures}


def describe_reward(reward: Any) -> str:
    """Return the first docstring line of a function, a function with options bound, or an object's
    class."""
    reward = reward.reward if isinstance(reward, Handled) else reward
    function = getattr(reward, "func", reward)
    return describe(function if hasattr(function, "__name__") else type(function))


def make_app(rewards: Mapping[str, Weighted], options: ServeOptions | None = None) -> FastAPI:
    """Return the ASGI application that serves these rewards."""
    return application(Service(rewards, options or ServeOptions()), "mmrl rewards", "/score")
