"""Scores pictures by GenEval: objects, their count, colour and position (Ghosh et al. 2023,
arXiv:2310.11513).

It works on a detector's output; ``published`` is the benchmark's verdict, ``strict`` and
``partial`` are the forms that Flow-GRPO trains on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as nnf
from annotated_types import Ge, Interval
from torch import Tensor

from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.clip import load_named
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import Precision
from rewards.base.media import to_uint8
from rewards.base.prompt import field_of
from rewards.card import card
from rewards.images.detector import OBJECTS as OBJECTS
from rewards.images.detector import Detection as Detection
from rewards.images.detector import Detector

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOR_TEXTS = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
GREY = 0x99 / 255  # background of an object when its colour is classified
# share of both sizes by which objects may overlap along an axis
NEAR = 0.1
ByName = dict[str, list[Detection]]
Colors = Callable[[list[Detection], str], list[str]]
Share = Annotated[float, Interval(ge=0, le=1)]


@card(
    media="image",
    needs="include",
    high=1,
    source="facebook/mask2former-swin-small-coco-instance, CLIP ViT-L-14/openai; prompts: "
    "GenEval's metadata",
    licence="MIT",
    scaling="partial: mean of terms, may fall below 0; strict: 0 or 1, exact counts; published: "
    "0 or 1, the benchmark",
)
@REWARDS.register("geneval")
class GenEval(FrameReward):
    """Judge a picture as GenEval does, by a detector and CLIP for colours.

    A prompt is a line of GenEval's metadata: ``include``, a list of ``{"class", "count", "color",
    "position"}`` where ``position`` is ``[relation, index of the entry it relates to]``, optionally
    ``exclude`` and ``tag``.

    ``published`` needs at least ``count`` objects, judges the most confident ones, and allows none
    of ``exclude``. ``strict`` needs exactly ``count`` and ignores ``exclude``. ``partial`` is the
    mean over
    terms: 1 - |found - wanted| / wanted for counts and for colours (below 0 for too many), 0 for
    attributes of a wrong count, and for a position 1, or 1/2 when wrong, as in the published code.

    Args:
        detector: Mask2Former or an object detection model of transformers with COCO's names, or
            OWL-ViT, queried for them; hub id or folder.
        clip: ``name/tag`` of open_clip or a local folder, for colours.
        form: see above.
        threshold: objects below this score do not count.
        counting_threshold: the same for prompts whose ``tag`` is ``counting``.
        most: maximum number of objects of one class.
        dtype: of the detector.

    Raises:
        UserError: a model that cannot be loaded; a class that the detector does not know.
    """

    name = "geneval"

    def __init__(
        self,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "ViT-L-14/openai",
        form: Literal["partial", "strict", "published"] = "partial",
        threshold: Share = 0.3,
        counting_threshold: Share = 0.9,
        most: Annotated[int, Ge(1)] = 16,
        batch_size: BatchSize = 8,
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.detector = Detector(detector, self.device, dtype)
        self.clip = load_named(clip, self.device)
        self.form = form
        self.thresholds = (threshold, counting_threshold)
        self.most = most
        self.classifiers: dict[str, Tensor] = {}

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] in 0..1 -> [B] float32 on the CPU, at most 1."""
        if isinstance(media, Tensor) and media.ndim == 5:
            raise UserError(
                "reward 'geneval' judges images, not videos; `per_frame` with it "
                "judges their frames"
            )
        return super().__call__(media, prompts)

    def conditions(self, prompts: list[Prompt]) -> list[Prompt]:
        for prompt in prompts:
            self.check(prompt)
        return prompts

    def score(self, pictures: Tensor, prompts: list[Prompt]) -> Tensor:
        rows = zip(pictures, self.detector(pictures), prompts, strict=True)
        return torch.tensor([self.judge(*row) for row in rows])

    def judge(self, picture: Tensor, objects: list[Detection], prompt: Prompt) -> float:
        by_name = detections_by_name(
            objects, self.thresholds[prompt.get("tag") == "counting"], self.most
        )

        def colors(some: list[Detection], name: str) -> list[str]:
            return self.colors(picture, some, name)

        if self.form == "published":
            return float(published(by_name, prompt, colors))
        exact, partial = training(by_name, prompt, colors)
        return float(exact) if self.form == "strict" else partial

    def colors(self, picture: Tensor, objects: list[Detection], name: str) -> list[str]:
        """Name the colour of each object by CLIP, with the rest of its box grey."""
        if name not in self.classifiers:
            texts = [
                text.format(color=color, name=name) for color in COLORS for text in COLOR_TEXTS
            ]
            rows = self.clip.embed_texts(texts).unflatten(0, (len(COLORS), -1)).mean(1)
            self.classifiers[name] = nnf.normalize(rows, dim=-1)  # [10, E]
        picture = to_uint8(picture).float() / 255
        crops = torch.cat(
            [
                self.clip.embed_images(cut(picture, detection)[None], exact=True)
                for detection in objects
            ]
        )
        return [COLORS[i] for i in (crops @ self.classifiers[name].T).argmax(1).tolist()]

    def check(self, prompt: Prompt) -> None:
        known = set(self.detector.names.values())
        for entry in [*field_of(prompt, "include", "geneval", list), *prompt.get("exclude", [])]:
            if entry["class"] not in known:
                hint = suggest(entry["class"], known)
                raise UserError(
                    f"reward 'geneval': the detector knows no class {entry['class']!r}; {hint}"
                )


def detections_by_name(objects: list[Detection], threshold: float, most: int) -> ByName:
    """Group objects by name, best first, above the threshold and at most ``most`` of a name."""
    by_name: ByName = {}
    for detection in objects:
        if detection.score > threshold and len(by_name.setdefault(detection.name, [])) < most:
            by_name[detection.name].append(detection)
    return by_name


def published(by_name: ByName, prompt: Prompt, colors: Colors) -> bool:
    """Return the benchmark's verdict: at least ``count``, judged on the most confident ones;
    nothing excluded."""
    correct = True
    groups: list[list[Detection] | None] = []
    for entry in prompt["include"]:
        matches = by_name.get(entry["class"], [])[: entry["count"]]
        fits = len(matches) == entry["count"]
        if fits and "color" in entry:
            fits = colors(matches, entry["class"]).count(entry["color"]) == entry["count"]
        if fits and "position" in entry:
            fits = placed(matches, groups, *entry["position"])
        correct &= fits
        groups.append(matches if fits else None)
    return correct and all(
        len(by_name.get(e["class"], [])) < e["count"] for e in prompt.get("exclude", [])
    )


def training(by_name: ByName, prompt: Prompt, colors: Colors) -> tuple[bool, float]:
    """Return Flow-GRPO's two forms: whether everything is exact, and the mean of the terms."""
    correct = True
    terms = []
    groups: list[list[Detection] | None] = []
    for entry in prompt["include"]:
        matches = by_name.get(entry["class"], [])
        count = entry["count"]
        fits = len(matches) == count
        terms.append(1 - abs(count - len(matches)) / count)
        if not fits and ("color" in entry or "position" in entry):
            terms.append(0.0)
        if fits and "color" in entry:
            right = colors(matches, entry["class"]).count(entry["color"])
            terms.append(1 - abs(count - right) / count)
            fits = right == count
        if fits and "position" in entry:
            fits = placed(matches, groups, *entry["position"])
            if groups[entry["position"][1]] is None:
                terms.append(0.0)
            else:
                terms += [1.0] if fits else [0.0, 1.0]  # the published code adds a 1 in either case
        correct &= fits
        groups.append(matches if fits else None)
    return correct, sum(terms) / len(terms)


def placed(
    matches: list[Detection], groups: list[list[Detection] | None], relation: str, target: int
) -> bool:
    """Tell whether each object has the relation to each one of an earlier entry that was right."""
    anchors = groups[target]
    return anchors is not None and all(
        relation in relations(a.box, b.box) for a in matches for b in anchors
    )


def relations(a: Tensor, b: Tensor) -> set[str]:
    """Name the relations in which box a stands to b: centres' offset, less 0.1 of both sizes, over
    the centres' distance, beyond 1/2."""
    offset = (a[:2] + a[2:] - b[:2] - b[2:]) / 2
    sizes = (a[2:] - a[:2] + b[2:] - b[:2]).abs()
    beyond = (offset.abs() - NEAR * sizes).clamp(min=0) * offset.sign()
    if (beyond.abs() < 1e-3).all():
        return set()
    x, y = (beyond / offset.norm()).tolist()
    named = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in named.items() if holds}


def cut(picture: Tensor, detection: Detection) -> Tensor:
    """Crop the object's box from [3, H, W], at least one pixel; with a mask, grey outside it."""
    if detection.mask is not None:
        picture = torch.where(detection.mask, picture, torch.full_like(picture, GREY))
    left, top, right, bottom = (round(float(edge)) for edge in detection.box)
    left = min(left, picture.shape[2] - 1)
    top = min(top, picture.shape[1] - 1)
    return picture[:, top : max(bottom, top + 1), left : max(right, left + 1)]
