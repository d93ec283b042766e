"""Records a few rollouts of a text policy for the report: picture, answers, boxes, rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.media.clips import is_frames
from mmrl.core.media.pictures import PictureError, rgb_picture
from mmrl.core.types import Completion, Prompt, Reward, Rewards, Rollout
from mmrl.data.vision.source import in_messages
from mmrl.monitoring.log import ROLLOUTS as FILE
from mmrl.monitoring.report.pictures import data_uri, strip
from mmrl.rollout.collect import Sampled
from rewards.card import method_of

GROUPS = 4  # prompts of an iteration that are kept
LONGEST = 4000  # characters of a text that are kept


class Gallery:
    """Appends the answers to an iteration's first prompts to ``rollouts.jsonl`` of a run folder, in
    the first iteration and in every ``every``-th."""

    def __init__(
        self,
        folder: Path,
        rewards: Mapping[str, Reward],
        every: int = 1,
        show: Callable[[int, Sequence[Mapping[str, Any]]], None] | None = None,
    ):
        self.path = folder / FILE
        self.rewards = rewards
        self.every = every
        self.show = show  # called with the lines, for the trackers

    def see(self, sampled: Sampled) -> dict[str, float]:
        """Record an iteration, as a monitor; only texts are recorded."""
        iteration = sampled.iteration + 1
        if isinstance(sampled.media, list) and (iteration == 1 or iteration % self.every == 0):
            self.add(iteration, sampled.media, sampled.rollout, sampled.shaped)
        return {}

    def add(self, iteration: int, media: list[str], rollout: Rollout, rewards: Rewards) -> None:
        """Write one line for each prompt. Advantages have no NaN here, as rows without one have
        left training."""
        written = torch.tensor(
            [isinstance(item, str) for item in media], device=rollout.group.device
        )
        lines: list[dict[str, Any]] = []
        with self.path.open("a", encoding="utf-8") as file:
            for group in rollout.group[written].unique()[:GROUPS].tolist():
                rows = (rollout.group == group).nonzero()[:, 0].tolist()
                prompt = rollout.prompts[group]
                texts = [media[row] for row in rows]
                numbers = {
                    name: [_number(v) for v in value[rows]] for name, value in rewards.items()
                }
                advantage = [_number(v) for v in rollout.advantages()[rows].float().mean(1)]
                line = {
                    "iteration": iteration,
                    **shown(prompt),
                    "answers": self._answers(texts, prompt),
                }
                for i, answer in enumerate(line["answers"]):
                    answer |= {
                        "rewards": {n: v[i] for n, v in numbers.items()},
                        "advantage": advantage[i],
                    }
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
                lines.append(line)
        if self.show is not None:
            self.show(iteration, lines)

    def _answers(self, texts: Sequence[str], prompt: Prompt) -> list[dict[str, Any]]:
        prompts = [prompt] * len(texts)
        known = {
            name: status(texts, prompts)
            for name, reward in self.rewards.items()
            if (status := method_of(reward, "status"))
        }
        return [
            {
                "text": str(text)[:LONGEST],
                "tokens": text.tokens if isinstance(text, Completion) else None,
                "finished": text.finished if isinstance(text, Completion) else None,
                "status": {name: states[i] for name, states in known.items()},
                "boxes": said_boxes(text, prompt) if "boxes" in prompt else [],
            }
            for i, text in enumerate(texts)
        ]


def shown(prompt: Prompt) -> dict[str, Any]:
    """Collect question, ground truth and picture of a prompt; boxes as shares of the picture's
    width and height."""
    images = _images(prompt)
    right = {
        key: prompt[key]
        for key in ("answer", "spans", "choices", "point", "points")
        if key in prompt
    }
    return {
        "prompt": str(prompt.get("text") or prompt.get("messages") or "")[:LONGEST],
        "right": str(right.get("answer", right or ""))[:LONGEST],
        "picture": data_uri(strip(images)) if images else None,
        "size": strip(images).size if images else None,
        "boxes": _right_boxes(prompt) if len(images) == 1 else [],
    }


def said_boxes(text: str, prompt: Prompt) -> list[list[float]]:
    """Read the boxes in a text, as shares of the picture; empty if there are none, or its size is
    unknown."""
    from rewards.answers.coords import Unscorable
    from rewards.answers.shapes import boxes
    from rewards.answers.verifiable import in_truth

    parsed = boxes(text)
    try:
        rows, _ = in_truth(parsed.value or [], prompt)
        return _shares(rows.tolist(), prompt)
    except Unscorable:
        return []


def _right_boxes(prompt: Prompt) -> list[list[float]]:
    from rewards.answers.coords import Unscorable
    from rewards.answers.verifiable import true_boxes

    try:
        return _shares(true_boxes(prompt).tolist(), prompt) if "boxes" in prompt else []
    except Unscorable:
        return []


def _shares(rows: list[list[float]], prompt: Prompt) -> list[list[float]]:
    """Convert boxes in the space of the ground truths to shares of width and height, clamped to two
    pictures around it."""
    from rewards.answers.coords import extent, truth_space

    size = extent(prompt, truth_space(prompt))
    if size is None:
        return []
    return [
        [round(min(2.0, max(-1.0, v / size[i % 2])), 4) for i, v in enumerate(row)] for row in rows
    ]


def _images(prompt: Prompt) -> list[Any]:
    """Open the pictures of a prompt as PIL images; of a video four frames; files that cannot be
    opened are left out."""
    if (video := prompt.get("video")) is not None:
        listed = is_frames(video) or isinstance(video, np.ndarray)
        sources = [video[round(i)] for i in _spread(len(video), 4)] if listed else []
    else:
        sources = prompt.get("images") or prompt.get("image") or in_messages(prompt)
    opened = []
    for item in sources if isinstance(sources, (list, tuple)) else [sources]:
        try:
            opened.append(rgb_picture(item))
        except PictureError:
            continue
    return opened


def _spread(total: int, most: int) -> list[float]:
    count = min(total, most)
    return [i * (total - 1) / max(1, count - 1) for i in range(count)]


def _number(value: Tensor) -> float | None:
    return round(float(value), 4) if value.isfinite() else None
