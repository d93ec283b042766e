"""Serves rewards over HTTP as an ASGI application: ``POST /score``, ``GET /health``, ``/info`` and
``/metrics``.

``mmrl.apps.serve.server`` runs it; the formats are described in docs/remote-rewards.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import isclass, isroutine
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from fastapi import FastAPI, Response
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from mmrl.apps.serve.body import parts_of
from mmrl.apps.serve.lanes import Answer, Lane
from mmrl.apps.serve.requests import Endpoint, Listening, Refusal, application, reply, shortened
from mmrl.config import Weighted
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import describe
from mmrl.core.types import Prompt
from mmrl.core.version import __version__
from mmrl.scoring import Handled
from rewards.card import PICTURES, card_of
from rewards.servers.tokens import Tokens
from rewards.servers.wire import BadInput, Limits, unpack


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Listening):
    """Holds ``serve:`` of a configuration for ``mmrl serve-reward``."""

    max_samples: Annotated[int, Ge(1)] = 1024  # samples in one request
    max_megapixels: Annotated[float, Gt(0)] = 64.0  # decoded pictures of one request
    max_values: Annotated[int, Ge(1)] = 2_000_000  # commas and brackets of one request
    max_batch: Annotated[int, Ge(1)] = 64  # samples per call of a reward
    formats: list[Literal["png", "webp", "tensor"]] = field(
        default_factory=lambda: ["png", "webp", "tensor"]
    )

    def limits(self, pictures: Sequence[str]) -> Limits:
        """Return the limits of a request with prompt pictures in these fields."""
        pixels = self.max_megapixels * 1e6
        return Limits(self.max_samples, pixels, self.formats, tuple(pictures), self.max_values)


class Service(Endpoint):
    """Holds the rewards, their lanes, and counters."""

    kind = "reward"
    options: ServeOptions

    def __init__(self, rewards: Mapping[str, Weighted], options: ServeOptions):
        super().__init__(options, Tokens(options.token, options.token_file))
        self.weights = {name: reward.weight for name, reward in rewards.items()}
        self.about = {name: describe_reward(reward.reward) for name, reward in rewards.items()}
        for name, reward in rewards.items():
            if (of := card_of(reward.reward).of) != "sample":
                raise UserError(
                    f"reward {name!r} judges {of}s, and requests hold single samples: "
                    f"it cannot be served"
                )
        self.cards = {name: card_in_short(reward.reward) for name, reward in rewards.items()}
        self.lanes = {
            name: Lane(name, reward.reward, options.max_batch) for name, reward in rewards.items()
        }

    async def handle(self, media_type: str, body: bytearray) -> Response:
        """Decode, score. Raises Refusal and BadInput."""
        names, media, prompts, ids = await run_in_threadpool(self.read, media_type, body)
        jobs = [self.lanes[name].submit(media, prompts) for name in names]
        del media, prompts  # a finished job keeps none
        answer = self.answer(dict(zip(names, await self.answers(jobs), strict=True)))
        return reply(answer if ids is None else {"ids": ids, **answer})

    def read(
        self, media_type: str, body: bytearray
    ) -> tuple[list[str], Tensor | list[str], list[Prompt], list[str] | None]:
        """Decode a request, clearing its body: requested rewards, samples, prompts, ids."""
        parts = parts_of(media_type, body, self.options.max_values)
        names = self.names(parts.rewards)
        fields = [field for name in names for field in self.cards[name]["pictures"]]
        media, prompts = unpack(parts, self.options.limits(fields))
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
        """Wait for the results of the lanes."""
        futures = [asyncio.wrap_future(job) for job in jobs]
        try:
            return await asyncio.gather(*futures)
        except UserError as error:  # the reward's error about these samples and prompts
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

    def metrics(self) -> list[str]:
        lines = super().metrics()
        for what in ("samples", "failures", "batches", "seconds"):
            lines.append(f"# TYPE mmrl_reward_{what}_total counter")
            for name, lane in self.lanes.items():
                label = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                lines.append(f'mmrl_reward_{what}_total{{reward="{label}"}} {lane.counts[what]}')
        return lines


def card_in_short(reward: Any) -> dict[str, Any]:
    """Return a reward's entry in /info: media, required fields, picture fields."""
    card = card_of(reward)  # of the reward inside its handling
    needed = [field for field in card.needs if field in PICTURES]
    pictures = list(dict.fromkeys([*needed, *card.pictures]))
    return {"media": list(card.media), "needs": list(card.needs), "pictures": pictures}


def describe_reward(reward: Any) -> str:
    """Return the first docstring line of a function, a function with options bound, or an object's
    class."""
    reward = reward.reward if isinstance(reward, Handled) else reward
    function = reward.func if isinstance(reward, partial) else reward
    return describe(function if isroutine(function) or isclass(function) else type(function))


def make_app(rewards: Mapping[str, Weighted], options: ServeOptions | None = None) -> FastAPI:
    """Return the ASGI application that serves these rewards."""
    return application(Service(rewards, options or ServeOptions()), "mmrl rewards", "/score")
