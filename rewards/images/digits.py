"""Defines ``digits``, which checks identity, colour, size, place, relation and count of digits."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, locate
from mmrl.core.types import Prompt
from rewards.base.precision import own_precision
from rewards.card import card
from rewards.images.digit_reader import Detections, Reader

Asked = list[dict[str, Any]]
_AXIS = {"above": (1, 1.0), "below": (1, -1.0), "left of": (0, 1.0), "right of": (0, -1.0)}
_FADE = 3.0  # pixels outside the place at which the credit has fallen to 1/e
_CLEAR = 4.0  # pixels by which a digit must be further up (down, left, right) than the other


of_digits = card(
    media="image",
    needs="objects",
    low=0,
    high=1,
    differentiable=True,
    source="trained here on scikit-learn's scans",
    licence="BSD-3-Clause (the scans)",
)


@REWARDS.register("digits")
@of_digits
class Digits:
    """Check that the picture holds the requested digits: colour, size, place, relation and count, 0
    to 1.

    A reader (detector and classifier, ``digit_reader.py``) finds at most five digits with
    confidence c, digit probabilities, colour and size probabilities and a centre. Like GenEval
    (Ghosh et al. 2023) the reward checks each object of the prompt by a detector, but gives partial
    credit:

    * Requested objects are assigned to detections one to one, with the largest sum. Its score is
      ``c * p(digit) * mean(attributes)``: without the right digit nothing counts.
    * Only requested attributes count: ``p(colour)``, ``p(size)``, and place: 1 with the centre in
    the region, else ``exp(-distance / 3 px)``. Without any, the attributes are 1.
    * A relation ("above") is one more term: ``sigmoid((gap - 4 px) / 1 px) * min(object scores)``,
      where gap is how much further up the first centre is than the second.
    * Reward = ``mean(objects and relation) / (1 + |n - sum of confidences|)`` with n the number of
      digits asked for.

    ``strict``: every probability becomes 1 if it is the largest (confidence, place and relation: if
    above 0.5) and 0 otherwise, and the reward is 1 only if every term is 1 and the count is right,
    as in GenEval.

    Called with images [B, 3, H, W] in 0..1 (any float type and device) and B prompts that have
    ``objects``, and optionally ``relation`` and ``count``. Returns float32 [B] on the images'
    device.
    """

    def __init__(self, path: str = "world:digits/reader", strict: bool = False):
        self.reader = Reader.load(locate(path))
        self.strict = strict

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        if not isinstance(media, Tensor) or media.dim() != 4 or len(media) != len(prompts):
            raise UserError(
                f"reward 'digits' wants one image [3, H, W] for each of {len(prompts)} prompts"
            )
        objects = [_objects(prompt) for prompt in prompts]
        with own_precision(media.device.type):  # independent of the policy's precision
            detections = self.reader.to(media.device).detect(media)
        detections = _harden(detections) if self.strict else detections
        terms = torch.stack(
            [self._match(detections, b, objects[b], prompts[b]) for b in range(len(prompts))]
        )
        count = torch.tensor([p.get("count") or len(a) for p, a in zip(prompts, objects)])
        # without a host sync
        count = count.to(media.device, non_blocking=media.device.type != "cpu")
        reward = terms / (1 + (detections.confidence.sum(1) - count).abs())
        return (reward == 1).float() if self.strict else reward

    def _match(self, detections: Detections, b: int, objects: Asked, prompt: Prompt) -> Tensor:
        """Return the mean of the terms of one row (scalar) under the best assignment of detections
        to objects."""
        score = torch.stack([self._object(detections, b, item) for item in objects], 1)  # [M, N]
        ways = _ways(len(score), len(objects), score.device)
        each = score[ways, torch.arange(len(objects), device=score.device)]  # [ways, N]
        # [1], on the device: no host sync
        best = each.sum(1).argmax(0, keepdim=True)
        terms = each[best][0]
        relation = prompt.get("relation")
        if relation:
            axis, sign = _AXIS[relation]
            first, second = detections.center[b, ways[best][0], axis][:2]
            holds = (sign * (second - first) - _CLEAR).sigmoid()
            terms = torch.cat(
                [terms, ((holds > 0.5).float() if self.strict else holds)[None] * terms.min()]
            )
        return terms.mean()

    def _object(self, detections: Detections, b: int, item: dict[str, Any]) -> Tensor:
        """Return the score [M] of every detection of row b as the object."""
        config = self.reader.config
        parts = (
            [detections.color[b, :, config["colors"].index(item["color"])]]
            if item.get("color")
            else []
        )
        parts += (
            [detections.size[b, :, config["sizes"].index(item["size"])]] if item.get("size") else []
        )
        if item.get("place"):
            low, high = _corners(
                tuple(config["places"][item["place"]]),
                detections.center.dtype,
                detections.center.device,
            )
            # [M, 2]
            outside = (low - detections.center[b]).clamp(min=0) + (
                detections.center[b] - high
            ).clamp(min=0)
            near = (-outside.norm(dim=-1) / _FADE).exp()
            parts.append((near > 0.5).float() if self.strict else near)
        attributes = torch.stack(parts).mean(0) if parts else 1.0
        return detections.confidence[b] * detections.digit[b, :, item["digit"]] * attributes


@REWARDS.register("digits_judge")
@of_digits
class DigitsJudge(Digits):
    """Judge ``digits`` independently, by other scans and another network: for evaluation only."""

    def __init__(self, path: str = "world:digits/judge", strict: bool = False):
        super().__init__(path, strict)


def _objects(prompt: Prompt) -> Asked:
    objects: Asked | None = prompt.get("objects")
    if not objects or not all(isinstance(item, dict) and "digit" in item for item in objects):
        raise UserError(
            f"reward 'digits' needs \"objects\" (a list of "
            f'{{"digit": 7, "color": "red"}}) in every prompt; '
            f"{prompt.get('text', prompt)!r} has none. Use data: {{digits: {{}}}} or another reward"
        )
    return objects


@lru_cache(maxsize=64)
def _ways(detections: int, objects: int, device: torch.device) -> Tensor:
    """List all assignments [ways, N] of M detections to N objects."""
    with torch.inference_mode(False):
        return torch.tensor(list(permutations(range(detections), objects)), device=device)


@lru_cache(maxsize=64)
def _corners(
    region: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return x and y, [2] each, of a region's low and high corner, cached per device."""
    with torch.inference_mode(False):
        corners = torch.tensor(region, dtype=dtype, device=device).view(2, 2)
    return corners[0], corners[1]


def _harden(detections: Detections) -> Detections:
    """Round probabilities to 0 and 1."""
    digit, color, size = (
        (p == p.amax(-1, keepdim=True)).float()
        for p in (detections.digit, detections.color, detections.size)
    )
    confidence = (detections.confidence > 0.5).float()
    return Detections(confidence, digit, color, size, detections.center)
