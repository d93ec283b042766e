"""Runs one thread for each reward of a server, which scores requests that arrive together as one
batch.

A reward need not be safe to call from several threads: only its own lane ever calls it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.core.sound import sound_kind
from mmrl.core.types import Media, Prompt, Reward
from mmrl.scoring import Scorer
from mmrl.scoring.returned import does_not_apply
from mmrl.scoring.scorer import together
from rewards.base.files import request


class Answer(NamedTuple):
    values: Tensor  # [B] float32, NaN where there is no value
    applies: Tensor  # [B] bool: False where there is none because the reward does not apply
    cause: str  # why others of those have no score; empty if all have one
    parts: dict[str, list[float]]  # sums and counts of sub-scores of the batch, given once

    @property
    def failed(self) -> int:
        """Count the samples that could not be scored."""
        return int((self.values.isnan() & self.applies).sum())


@dataclass
class Job:
    """Holds a request's samples for one reward, and where its answer goes; no samples any more when
    it is done, or nobody waits for it and it has not begun."""

    media: Media
    prompts: list[Prompt]
    done: Future[Answer] = field(default_factory=Future)

    def drop(self, done: Future[Answer]) -> None:
        self.media = []
        self.prompts = []

    def like(self, job: Job) -> bool:
        """Tell whether the two can be one batch: pictures of one size and sounds of one length, or
        texts."""
        if not isinstance(self.media, Tensor) or not isinstance(job.media, Tensor):
            return not isinstance(self.media, Tensor) and not isinstance(job.media, Tensor)
        if sound_kind(self.media) != sound_kind(job.media):
            return False
        return self.media.shape[1:] == job.media.shape[1:] and self.media.dtype == job.media.dtype


class Lane:
    """Scores requests for one reward with one thread and one queue.

    Args:
        name, reward: as in a ``Scorer``, whose rules for failures hold here: NaN and a cause, never
            a number.
        max_batch: samples the reward sees at once; larger requests are cut.
        wait: seconds that a request waits for others to join it.

    Attributes:
        samples, failures, batches: counted since the start; ``seconds`` were spent inside the
            reward.
    """

    def __init__(self, name: str, reward: Reward, max_batch: int = 64, wait: float = 0.004):
        self.name = name
        self.max_batch = max_batch
        self.wait = wait
        self.scorer = Scorer({name: reward}, max_failures=1.0)
        self.samples = self.failures = self.batches = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"reward {name}", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return self.scorer.seconds[self.name]

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    @property
    def alive(self) -> bool:
        """Tell whether the thread lives: a reward can end it, as ``sys.exit`` would."""
        return self._thread.is_alive()

    def submit(self, media: Media, prompts: list[Prompt]) -> Future[Answer]:
        job = Job(media, prompts)
        job.done.add_done_callback(job.drop)
        self._jobs.put(job)
        return job.done

    def close(self, timeout: float = 10.0) -> None:
        """Finish what was submitted and end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        job = self._jobs.get()
        while job is not None:
            batch, job = self._gather(job)
            self._answer([each for each in batch if each.done.set_running_or_notify_cancel()])
            del batch  # samples are not kept while the lane waits
            job = self._jobs.get() if job is None else job

    def _gather(self, first: Job) -> tuple[list[Job], Job | None]:
        """Collect the jobs of one batch, and one that came in between but does not fit."""
        batch = [first]
        rows = len(first.prompts)
        until = time.monotonic() + self.wait
        while rows < self.max_batch:
            try:
                job = self._jobs.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # the end comes after this batch
                break
            rows += len(job.prompts)
            if rows > self.max_batch or not job.like(first):
                return batch, job
            batch.append(job)
        return batch, None

    def _answer(self, batch: Sequence[Job]) -> None:
        """Score together; if the batch as a whole fails, each by itself, so that no request pays
        for another."""
        if len(batch) > 1:
            try:
                media = together([job.media for job in batch])
                answer = self._score(media, [p for job in batch for p in job.prompts])
            except Exception:  # scoring them apart shows which request fails
                for job in batch:
                    self._answer([job])
                return
            sizes = [len(job.prompts) for job in batch]
            split = zip(batch, answer.values.split(sizes), answer.applies.split(sizes), strict=True)
            for number, (job, values, applies) in enumerate(split):
                alone = Answer(values, applies, answer.cause, {} if number else answer.parts)
                job.done.set_result(alone if alone.failed else alone._replace(cause=""))
        for job in batch if len(batch) == 1 else ():
            try:
                job.done.set_result(self._score(job.media, job.prompts))
            except Exception as error:  # the waiting request reports it
                job.done.set_exception(error)

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
            self.batches += 1
        values = torch.cat(parts)
        answer = Answer(values, ~does_not_apply(values), "", sums)
        self.samples += len(values)
        self.failures += answer.failed
        cause = self.scorer.failures[self.name].cause if answer.failed else ""
        return answer._replace(cause=cause)
