"""Runs one thread for each reward of a server. Requests that arrive while it computes form its next
batch.

A reward need not be safe to call from several threads: only its own lane ever calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.core.media.sound import sound_kind
from mmrl.core.types import Media, Prompt, Reward
from mmrl.scoring import Scorer
from mmrl.scoring.returned import does_not_apply
from mmrl.scoring.scorer import together
from mmrl.scoring.worker import Worker
from rewards.base.files import request


class Answer(NamedTuple):
    values: Tensor  # [B] float32, NaN if there is no value
    applies: Tensor  # [B] bool: False if the reward does not apply
    cause: str  # why applicable samples have no score; empty if all have one
    parts: dict[str, list[float]]  # sums and counts of sub-scores of the batch, returned once

    @property
    def failed(self) -> int:
        """Count the samples that could not be scored."""
        return int((self.values.isnan() & self.applies).sum())


@dataclass
class Job:
    """Holds a request's samples for one reward, and the future of its answer; samples are dropped
    when it is done, or cancelled before it has begun."""

    media: Media
    prompts: list[Prompt]
    done: Future[Answer] = field(default_factory=Future)

    def drop(self, done: Future[Answer]) -> None:
        self.media = []
        self.prompts = []

    def like(self, job: Job) -> bool:
        """Tell whether two jobs can be one batch: pictures of one size and sounds of one length, or
        texts."""
        if not isinstance(self.media, Tensor) or not isinstance(job.media, Tensor):
            return not isinstance(self.media, Tensor) and not isinstance(job.media, Tensor)
        if sound_kind(self.media) != sound_kind(job.media):
            return False
        return self.media.shape[1:] == job.media.shape[1:] and self.media.dtype == job.media.dtype


class Lane:
    """Scores requests for one reward in one thread, in their order.

    Args:
        name, reward: as in a ``Scorer``, with the same rules for failures: NaN and a cause, never a
            number.
        max_batch: samples per call of the reward; larger requests are split.

    ``counts``: since the start; ``seconds``: spent inside the reward.
    """

    def __init__(self, name: str, reward: Reward, max_batch: int = 64):
        self.name = name
        self.max_batch = max_batch
        self.scorer = Scorer({name: reward}, max_failures=1.0)
        self.counts = {"samples": 0, "failures": 0, "batches": 0, "seconds": 0.0}
        self._jobs: deque[Job] = deque()
        self._worker = Worker(f"reward {name}")

    def submit(self, media: Media, prompts: list[Prompt]) -> Future[Answer]:
        job = Job(media, prompts)
        job.done.add_done_callback(job.drop)
        self._jobs.append(job)
        self._worker.submit(self._run)
        return job.done

    def _run(self) -> None:
        """Score the first waiting request, and later ones that fit into its batch."""
        batch: list[Job] = []
        while self._jobs and self._fits(self._jobs[0], batch):
            job = self._jobs.popleft()
            if job.done.set_running_or_notify_cancel():
                batch.append(job)
        if batch:
            self._answer(batch)

    def _fits(self, job: Job, batch: Sequence[Job]) -> bool:
        rows = sum(len(each.prompts) for each in (*batch, job))
        return not batch or (rows <= self.max_batch and job.like(batch[0]))

    def _answer(self, batch: Sequence[Job]) -> None:
        """Score together; if the batch fails, score each separately, so that one request cannot
        fail another."""
        try:
            media = batch[0].media if len(batch) == 1 else together([job.media for job in batch])
            answer = self._score(media, [prompt for job in batch for prompt in job.prompts])
        except Exception as error:  # the waiting request reports it
            if len(batch) == 1:
                batch[0].done.set_exception(error)
            else:
                for job in batch:
                    self._answer([job])
            return
        sizes = [len(job.prompts) for job in batch]
        split = zip(batch, answer.values.split(sizes), answer.applies.split(sizes), strict=True)
        for number, (job, values, applies) in enumerate(split):
            alone = Answer(values, applies, answer.cause, {} if number else answer.parts)
            job.done.set_result(alone if alone.failed else alone._replace(cause=""))

    def _score(self, media: Media, prompts: list[Prompt]) -> Answer:
        size = self.max_batch
        parts = []
        sums: dict[str, list[float]] = {}
        for start in range(0, len(prompts), size):
            part = media[start : start + size], prompts[start : start + size]
            with request(*part):
                stream = self.scorer.stream(len(part[1]), beside=False)
                stream.put(*part)
                parts.append(stream.values()[self.name])
            for name, (total, count) in self.scorer.rewards[self.name].sub_scores.taken().items():
                before = sums.get(name, [0.0, 0.0])
                sums[name] = [before[0] + total, before[1] + count]
            self.counts["batches"] += 1
        values = torch.cat(parts)
        answer = Answer(values, ~does_not_apply(values), "", sums)
        self.counts["samples"] += len(values)
        self.counts["failures"] += answer.failed
        self.counts["seconds"] = self.scorer.seconds[self.name]
        cause = self.scorer.failures[self.name].cause if answer.failed else ""
        return answer._replace(cause=cause)
