"""Probes rewards of images and videos: real pictures against noise, blanks, other captions, copies,
JPEG.

Real pictures are those of the prompts (``image`` in a .jsonl file), or drawn if the prompts are the
digits world's. A reward of videos only gets pans over them, or clips if the prompts are those of
moving digits, and has further probes (``mmrl.apps.check_reward.clips``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.apps.check_reward import Line, Offence, Subject, clips
from mmrl.apps.check_reward.places import where
from mmrl.apps.check_reward.texts import in_range, mean
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.scoring.attempt import as_values
from rewards.base.prompt import from_pil
from rewards.card import card_of
from rewards.judges.samples import prompt_pictures
from samplers.noise import Rng

if TYPE_CHECKING:
    pass

# tolerated rounding difference of two scores of one picture, relative to the spread
SAME = 1e-4
QUALITY = 90  # quality of the JPEG
GAIN = 0.05  # how much higher a JPEG may score, in units of real minus blank


def audit(subject: Subject) -> list[Line]:
    """Run all probes of a reward of images."""
    about = card_of(subject.reward)
    if about.of == "group":
        raise UserError(
            f"reward {subject.name!r} compares whole groups: check-reward has probes "
            f"for single samples"
        )
    prompts = subject.prompts
    moving = "image" not in about.media
    media = clips.real(prompts, subject.seed) if moving else None
    if media is None:
        media = real(prompts, subject.seed)
        media = clips.panned(media) if moving else media
    best = score(subject, media, prompts)
    noise = (
        Rng.of(subject.seed, "audit noise")
        .uniform(torch.arange(len(media)), media.shape[1:])
        .float()
    )
    blank = media.mean(dim=tuple(range(1, media.ndim)), keepdim=True).expand_as(media)
    lines = [_numbers(prompts, best), _apart(subject, media, prompts, best)]
    shown = {"noise": noise, "blank": blank} | (clips.tried(media, subject.seed) if moving else {})
    tried = {probe: score(subject, pictures, prompts) for probe, pictures in shown.items()}
    less = [_less(probe, prompts, scores, best) for probe, scores in tried.items()]
    lines += _either(less) if moving else less
    pairs = _others(prompts) if about.needs else []
    if pairs:
        rows = [i for i, _ in pairs]
        swapped = [prompts[j] for _, j in pairs]
        scores = score(subject, media[rows], swapped)
        lines.append(
            _less("another prompt", [prompts[i] for i in rows], scores, [best[i] for i in rows])
        )
    lines.append(_twins(subject, media, prompts, best))
    lines.append(_jpeg(subject, media, prompts, best, tried["blank"]))
    return [*lines, in_range(subject, [line.scores for line in lines])]


def real(prompts: Sequence[Prompt], seed: int) -> Tensor:
    """Return the prompts' own pictures [B, 3, H, W] in 0..1, resized to the first's size, or
    drawings of digits.

    Raises:
        UserError: prompts without pictures that are not the digits world's.
    """
    if all("objects" in prompt for prompt in prompts):
        from mmrl.worlds.render import render

        return render(list(prompts), Rng.of(seed, "audit pictures"), "judge").images
    pictures = [prompt_pictures(prompt) for prompt in prompts]
    bare = [prompt for prompt, images in zip(prompts, pictures) if not images]
    if bare:
        raise UserError(
            f"check-reward needs a real picture for every prompt, and {where(bare[0])} "
            f"has none; give the data a "
            'field "image" with its path, in a .jsonl file: {"text": "a red cube", '
            '"image": "cube.png"}'
        )
    size = pictures[0][0].size
    return torch.stack([from_pil(images[0].resize(size)) for images in pictures])


def score(subject: Subject, media: Tensor, prompts: Sequence[Prompt]) -> list[float]:
    """Return the scores of media as numbers. Raises UserError if the reward raises."""
    values = subject.ask(media.contiguous(), prompts, f"{len(media)} pictures")
    scores = as_values(values, len(media), subject.name, card_of(subject.reward).of)
    return (scores.nanmean(1) if scores.ndim == 2 else scores).tolist()


def _numbers(prompts: Sequence[Prompt], scores: list[float]) -> Line:
    bad = [i for i, value in enumerate(scores) if not math.isfinite(value)]
    return Line(
        "real picture",
        "is a number",
        scores,
        _rows(bad, prompts, scores, "real picture", [""] * len(bad)),
    )


def _less(
    probe: str, prompts: Sequence[Prompt], scores: list[float], best: Sequence[float]
) -> Line:
    """Require a mean below that of the real pictures; otherwise the rows that score higher are
    offences."""
    # equal up to rounding is not less
    bad = []
    room = SAME * extent(best)
    if not mean(scores) < mean(best) - room:
        bad = [i for i, (a, b) in enumerate(zip(scores, best)) if not a < b - room]
    notes = [f"the real picture {best[i]:.4g}" for i in bad]
    return Line(
        probe,
        f"less on average than {mean(best):.4g}",
        scores,
        _rows(bad, prompts, scores, probe, notes),
    )


def _either(lines: Sequence[Line]) -> list[Line]:
    """Turn failures of a video reward that follow from rewarding motion, or steadiness, into
    remarks."""
    excused = clips.excused({line.probe for line in lines if line.offences})
    return [
        replace(
            line,
            rule=f"{line.rule}; not of a reward that wants {clips.wants(line.probe)}",
            offences=[],
        )
        if line.probe in excused and line.offences
        else line
        for line in lines
    ]


def _apart(subject: Subject, media: Tensor, prompts: Sequence[Prompt], best: list[float]) -> Line:
    count = min(len(prompts), 16)
    alone = [score(subject, media[i : i + 1], prompts[i : i + 1])[0] for i in range(count)]
    bad = [i for i in range(count) if not _equal(alone[i], best[i], best)]
    notes = [f"in the batch it was {best[i]:.6g}" for i in bad]
    offences = _rows(bad, prompts, alone, "real picture", notes)
    return Line("real picture, one by one", "the same as in the batch", alone, offences)


def _twins(subject: Subject, media: Tensor, prompts: Sequence[Prompt], best: list[float]) -> Line:
    """Score every picture twice in one batch: a copy must earn the same as its twin, and not change
    it."""
    count = min(len(prompts), 16)
    double = [prompt for prompt in prompts[:count] for _ in range(2)]
    scores = score(subject, media[:count].repeat_interleave(2, 0), double)
    bad = [i for i in range(2 * count) if not _equal(scores[i], best[i // 2], best)]
    notes = [f"without a copy it was {best[i // 2]:.6g}" for i in bad]
    return Line(
        "duplicates",
        "the same as without them",
        scores,
        _rows(bad, double, scores, "duplicate", notes),
    )


def _jpeg(
    subject: Subject,
    media: Tensor,
    prompts: Sequence[Prompt],
    best: list[float],
    blank: Sequence[float],
) -> Line:
    scores = score(subject, recompressed(media), prompts)
    gain = GAIN if "image" in card_of(subject.reward).media else clips.GAIN
    room = gain * abs(mean(best) - mean(blank))
    bad = []
    if not mean(scores) <= mean(best) + room + SAME:
        bad = [i for i, (a, b) in enumerate(zip(scores, best)) if not a <= b + room]
    notes = [f"the original {best[i]:.4g}" for i in bad]
    rule = f"not more than {mean(best):.4g} on average"
    return Line(
        f"JPEG, quality {QUALITY}", rule, scores, _rows(bad, prompts, scores, "JPEG", notes)
    )


def recompressed(media: Tensor) -> Tensor:
    """Return the same pictures after a JPEG."""
    from PIL import Image

    pictures = []
    for picture in media.reshape(-1, *media.shape[-3:]):
        pixels = (picture * 255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
        with Image.open(buffer) as file:
            pictures.append(from_pil(file))
    return torch.stack(pictures).view(media.shape)


def _others(prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
    """Pair rows with different prompts: (row, row whose prompt it gets instead)."""
    turned = [(i, (i + 1 + len(prompts) // 2) % len(prompts)) for i in range(len(prompts))]
    return [(i, j) for i, j in turned if prompts[i].get("text") != prompts[j].get("text")]


def _equal(a: float, b: float, scale: Sequence[float]) -> bool:
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= SAME * extent(scale)


def extent(scores: Sequence[float]) -> float:
    """Return the magnitude and range of scores; 1 if there are none."""
    known = [s for s in scores if math.isfinite(s)]
    return max(max(known) - min(known) + abs(mean(known)), 1e-12) if known else 1.0


def _rows(
    bad: Sequence[int],
    prompts: Sequence[Prompt],
    scores: Sequence[float],
    what: str,
    notes: Sequence[str],
) -> list[Offence]:
    return [
        Offence(where(prompts[i]), what, scores[i], note)
        for i, note in zip(bad, notes, strict=True)
    ]
