"""Handles for every reward what it should not do itself: device, precision, batch size, offloading,
cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.handling import Handling
from mmrl.core.libraries import torch_dtype
from mmrl.core.types import Media, Prompt, Reward
from mmrl.scoring.attempt import TimedOut, as_values
from mmrl.scoring.cache import Cache, open_cache
from mmrl.scoring.returned import SubScores, awaited, parted
from mmrl.scoring.worker import Worker
from rewards.base.precision import lowered
from rewards.card import Card, card_of

Part = tuple[Media, list[Prompt]]
DEPTH = 6  # how deep inside a reward's attributes its networks may be
PLAIN = (str, bytes, int, float, bool, type(None), Tensor, type)


class Handled:
    """Wraps a reward ``(media, prompts) -> [B]`` with its handling.

    Args:
        reward: the callable; its networks are found in its attributes.
        handling: device, precision, batch size and the other options of ``Handling``.
        name: for messages.
        identity: everything that its values depend on besides sample and prompt, for a cache on
            disk.
    """

    def __init__(self, reward: Reward, handling: Handling, name: str, identity: str | None = None):
        self.reward = reward
        self.handling = handling
        self.name = name
        self.sub_scores = SubScores()
        self.cache: Cache | None = open_cache(
            handling.cache, handling.cache_entries, identity, name
        )
        self.clock = None if handling.timeout is None else Worker(f"reward {name}, timed")
        # where each network was when it was first found
        self.homes: dict[int, torch.device] = {}
        self.device = None if handling.device is None else checked(handling.device, name)
        if self.device is not None:
            for module in networks(reward):
                module.to(self.device)

    @classmethod
    def of(cls, reward: Reward, handling: Handling | None, name: str) -> Handled:
        """Wrap ``reward``, unless it is handled already and no option is set."""
        if isinstance(reward, Handled) and handling is None:
            return reward
        return cls(reward, handling or Handling(), name)

    def __getattr__(self, name: str) -> Any:
        """Forward to the reward's attributes, such as the record of its servers or the cost of its
        judge."""
        if name == "reward":
            raise AttributeError(name)
        return getattr(self.reward, name)

    @property
    def card(self) -> Card:
        return card_of(self.reward)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Any:
        """Return the reward's values; a tensor [B] or [B, K] with a cache or a batch size."""
        size = self.handling.batch_size or (1 if self.is_single() else None)
        if self.cache is None and size is None:
            return self.ask([(media, prompts)])[0]
        units = self.units(prompts)
        keys = (
            [None] * len(units)
            if self.cache is None
            else [self.cache.key(media, prompts, unit) for unit in units]
        )
        cached = {} if self.cache is None else self.cache.get(keys)
        missing = [i for i, key in enumerate(keys) if key not in cached]
        values: dict[int, Tensor] = {i: cached[key] for i, key in enumerate(keys) if key in cached}
        parts = list(packed(missing, units, size or len(prompts)))
        row_lists = [[row for i in part for row in units[i]] for part in parts]
        answers = self.ask([taken(media, prompts, rows) for rows in row_lists])
        for part, rows, values_of_part in zip(parts, row_lists, answers, strict=True):
            answer = as_values(values_of_part, len(rows), self.name, self.card.of)
            fresh = dict(zip(part, answer.split([len(units[i]) for i in part]), strict=True))
            values |= fresh
            if self.cache is not None:
                self.cache.put(
                    {
                        key: value
                        for i, value in fresh.items()
                        if (key := keys[i]) and value.isfinite().all()
                    }
                )
        return self.ordered(values, units, len(prompts))

    def is_single(self) -> bool:
        """Tell whether the reward is an async function of one sample at a time."""
        return bool(getattr(self.reward, "is_single", False))

    def ask(self, parts: Sequence[Part]) -> list[Any]:
        """Call the reward itself, for each part of samples and prompts. With ``timeout`` in one
        thread: a call that hangs is left behind there, and the reward is never called concurrently.

        Raises:
            TimedOut: no answer within ``timeout`` seconds.
        """
        if is_async(self.reward):
            answers: list[Any] = self.ask_once(self.together, parts)
            return answers
        return [self.ask_once(self.values, *part) for part in parts]

    def ask_once(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.clock is None:
            return call(*arguments)
        future = self.clock.submit(call, *arguments)
        done, _ = wait([future], self.handling.timeout)
        if not done:
            busy = future.cancel()  # cancelled before it began: the thread is busy
            still = "is busy with an earlier call and has given" if busy else "has given"
            raise TimedOut(f"it {still} no answer within {self.handling.timeout:g} s")
        return future.result()

    def together(self, parts: Sequence[Part]) -> list[Any]:
        """Await the answers for several parts together."""
        answers = awaited([self.placed(*part) for part in parts], self.handling.concurrency)
        return [self.alone(answer) for answer in answers]

    def values(self, media: Media, prompts: list[Prompt]) -> Any:
        (answer,) = awaited([self.placed(media, prompts)], self.handling.concurrency)
        return self.alone(answer)

    def alone(self, answer: Any) -> Any:
        """Split off an answer's sub-scores, which are kept for the log, and return the rest."""
        values, scores = parted(answer, self.name)
        self.sub_scores.add(scores)
        return values

    def placed(self, media: Media, prompts: list[Prompt], *extra: Any) -> Any:
        """Call the reward on its device and in its precision, never in the policy's autocast.
        ``extra``: further arguments of a reward of a whole iteration."""
        if self.device is not None and isinstance(media, Tensor):
            media = media.to(self.device)
        place = (
            media.device.type
            if isinstance(media, Tensor)
            else "cuda"
            if torch.cuda.is_available()
            else "cpu"
        )
        dtype = (
            None if self.handling.dtype in (None, "float32") else torch_dtype(self.handling.dtype)
        )
        with (
            torch.no_grad(),
            lowered(place, dtype) if dtype else torch.autocast(place, enabled=False),
        ):
            return self.reward(media, prompts, *extra)

    def units(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the units that are scored and cached together: single rows, or groups for a reward
        of groups."""
        if self.card.of != "group":
            return [[row] for row in range(len(prompts))]
        rows_of_group: dict[Any, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of_group.setdefault(prompt.get("group", 0), []).append(row)
        return list(rows_of_group.values())

    def ordered(self, values: dict[int, Tensor], units: list[list[int]], count: int) -> Tensor:
        steps = {value.shape[1:] for value in values.values()}
        if len(steps) > 1:
            raise UserError(
                f"reward {self.name!r} returned different numbers of steps: "
                f"{sorted(map(list, steps))}"
            )
        scores = torch.full((count, *next(iter(steps), ())), torch.nan)
        for i, value in values.items():
            scores[units[i]] = value
        return scores

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep the networks on their device inside; with ``offload``, move them to the CPU
        afterwards."""
        if not self.handling.offload:
            yield
            return
        inside = [(module, home(module)) for module in networks(self.reward)]
        for module, where in inside:
            module.to(self.homes.setdefault(id(module), where))
        try:
            yield
        finally:
            for module, _ in inside:
                module.to("cpu")
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # so that the policy may use it now


def is_async(reward: Any) -> bool:
    """Tell whether a reward (function or object) returns something to be awaited."""
    method = vars(type(reward)).get("__call__")
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(method)


def home(module: nn.Module) -> torch.device:
    first = next((tensor for tensor in [*module.parameters(), *module.buffers()]), torch.empty(0))
    return first.device


def checked(device: str, name: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"reward {name!r}: device {device!r} cannot be used: {reason}") from error


def networks(reward: Any) -> list[nn.Module]:
    """Return the outermost modules of a reward: itself, in its attributes, or bound."""
    modules: list[nn.Module] = []
    visited: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or id(value) in visited or depth > DEPTH:
            return
        visited.add(id(value))
        if isinstance(value, nn.Module):
            modules.append(value)
            return
        for inner in held(value):
            look(inner, depth + 1)

    look(reward, 0)
    return modules


def held(value: Any) -> Iterator[Any]:
    """Yield what a container, a bound function or an object holds."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif hasattr(value, "__dict__") and not isinstance(value, ModuleType):
        yield from vars(value).values()
    if hasattr(value, "__self__"):
        yield value.__self__


def packed(missing: list[int], units: list[list[int]], size: int) -> Iterator[list[int]]:
    """Pack units into parts of at most ``size`` rows; a larger unit is a part by itself."""
    part: list[int] = []
    rows = 0
    for i in missing:
        if part and rows + len(units[i]) > size:
            yield part
            part = []
            rows = 0
        part.append(i)
        rows += len(units[i])
    if part:
        yield part


def taken(media: Media, prompts: list[Prompt], rows: list[int]) -> tuple[Media, list[Prompt]]:
    if rows == list(range(len(prompts))):
        return media, prompts
    first = rows[0]
    last = rows[-1]
    if isinstance(media, Tensor):
        whole = rows == list(range(first, last + 1))
        return (media[first : last + 1] if whole else media[rows]), [prompts[row] for row in rows]
    return [media[row] for row in rows], [prompts[row] for row in rows]
